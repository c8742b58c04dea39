//! Images read by others: the kernel, where it may be asked to mount one, and squashfs-tools.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;

use super::*;
use crate::artifact::Digest;

/// Path, kind, permissions, and content or target of everything in a tree.
fn listing(root: &Path) -> Vec<(PathBuf, char, u32, String)> {
    let mut found = Vec::new();
    let mut todo = vec![root.to_owned()];
    while let Some(directory) = todo.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let meta = fs::symlink_metadata(&path).unwrap();
            let (kind, content) = if meta.is_symlink() {
                ('l', fs::read_link(&path).unwrap().to_string_lossy().into_owned())
            } else if meta.is_dir() {
                todo.push(path.clone());
                ('d', String::new())
            } else if meta.is_file() {
                let mut file = File::open(&path).unwrap();
                ('f', format!("{} {}", meta.len(), Digest::of_reader(&mut file).unwrap()))
            } else {
                continue;
            };
            let mode = if kind == 'l' { 0o777 } else { meta.mode() & 0o1777 };
            found.push((path.strip_prefix(root).unwrap().to_owned(), kind, mode, content));
        }
    }
    found.sort();
    found
}

fn write(path: &Path, content: &[u8], mode: u32) {
    fs::write(path, content).unwrap();
    fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

/// A tree with something of everything.
fn tree(root: &Path) {
    fs::create_dir_all(root.join("bin/empty")).unwrap();
    fs::create_dir_all(root.join("many")).unwrap();
    fs::create_dir_all(root.join(vec!["deep"; 60].join("/"))).unwrap();
    write(&root.join("bin/tool"), b"#!/bin/sh\n", 0o755);
    write(&root.join("bin/none"), b"", 0o644);
    fs::hard_link(root.join("bin/tool"), root.join("bin/again")).unwrap();
    symlink("../../outside/the/tree", root.join("bin/climbs")).unwrap();
    symlink("/etc/passwd", root.join("bin/absolute")).unwrap();
    write(&root.join(OsStr::from_bytes(b"caf\xe9")), b"no text", 0o600);
    write(&root.join(OsStr::from_bytes(&[b'n'; 255])), b"longest name", 0o644);
    for length in [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 20 * BLOCK + 7] {
        let content: Vec<u8> = (0..length).map(|n| (n / 3 % 251) as u8 + 1).collect();
        write(&root.join(format!("size-{length}")), &content, 0o644);
    }
    // Enough entries for several metadata blocks of inodes and of names, and names whose first bytes are not ASCII.
    for n in 0..2500 {
        write(
            &root.join(format!("many/{}file with a rather long name {n:05}", ["", "é"][n % 2])),
            &[n as u8; 9],
            0o666,
        );
    }
    let holes = File::create(root.join("holes")).unwrap();
    holes.set_len(50 * BLOCK as u64 + 5).unwrap();
    holes.write_all_at(b"middle", 20 * BLOCK as u64 + 100).unwrap();
    fs::set_permissions(root.join("many"), PermissionsExt::from_mode(0o1777)).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, root.join("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
}

struct Mounted(PathBuf);

impl Mounted {
    /// Where this host lets us mount; otherwise why it does not.
    fn new(image: &Path, at: PathBuf) -> Result<Self, String> {
        fs::create_dir(&at).unwrap();
        let mount = Command::new("mount").args(["-t", "squashfs", "-o", "ro,loop"]).args([image, &at]).output();
        match mount {
            Ok(output) if output.status.success() => Ok(Mounted(at)),
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            Err(e) => Err(e.to_string()),
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        assert!(Command::new("umount").arg(&self.0).status().unwrap().success());
    }
}

#[test]
fn the_kernel_reads_what_was_packed() {
    let dir = tempfile::tempdir().unwrap();
    let (source, image) = (dir.path().join("tree"), dir.path().join("image"));
    tree(&source);
    let packed = pack(&source, &image).unwrap();
    assert_eq!((packed.left_out, packed.unreadable, packed.bytes % 4096), (1, 0, 0));
    assert_eq!(packed.bytes, fs::metadata(&image).unwrap().len());
    let mounted = match Mounted::new(&image, dir.path().join("mounted")) {
        Ok(mounted) => mounted,
        Err(why) => return eprintln!("skipped: no squashfs can be mounted ({why})"),
    };
    let (expected, found) = (listing(&source), listing(&mounted.0));
    assert_eq!(expected.len(), found.len());
    for (expected, found) in expected.iter().zip(&found) {
        assert_eq!(expected, found);
    }
    assert_eq!(packed.files, found.iter().filter(|f| f.1 == 'f').count() as u64);
    let meta = fs::metadata(mounted.0.join("bin")).unwrap();
    assert_eq!((meta.uid(), meta.gid(), meta.nlink(), meta.mtime()), (0, 0, 3, 315_619_200));
    // By name, which takes another way than listing: the first and last, and names that are not there.
    for name in ["many/file with a rather long name 00000", "many/éfile with a rather long name 02499"] {
        assert!(mounted.0.join(name).exists(), "{name}");
    }
    for name in ["many/0", "many/file with a rather long name 01x", "many/zzz", "many/\u{10ffff}"] {
        assert!(!mounted.0.join(name).exists(), "{name}");
    }
}

#[test]
fn squashfs_tools_read_what_was_packed() {
    let dir = tempfile::tempdir().unwrap();
    let (source, image, out) = (dir.path().join("tree"), dir.path().join("image"), dir.path().join("out"));
    tree(&source);
    pack(&source, &image).unwrap();
    let unpacked = Command::new("unsquashfs")
        .args(["-quiet", "-no-progress", "-strict-errors", "-d"])
        .args([&out, &image])
        .output();
    match unpacked {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(e) => return eprintln!("skipped: unsquashfs can't be run ({e})"),
    }
    let expected = listing(&source);
    assert!(expected == listing(&out));
}

#[test]
fn the_same_tree_gives_the_same_bytes_wherever_and_whenever_it_was_made() {
    let dir = tempfile::tempdir().unwrap();
    let images: Vec<_> = ["a", "b"]
        .map(|name| {
            let source = dir.path().join(name);
            tree(&source);
            let image = dir.path().join(format!("{name}.image"));
            pack(&source, &image).unwrap();
            fs::read(image).unwrap()
        })
        .into();
    assert!(images[0] == images[1]);
}

#[test]
fn a_sealed_tree_packs_like_an_open_one() {
    let dir = tempfile::tempdir().unwrap();
    let image = |name: &str, modes: [u32; 3], also: u16| {
        let source = dir.path().join(name);
        fs::create_dir_all(source.join("d")).unwrap();
        write(&source.join("d/tool"), b"x", modes[1]);
        write(&source.join("d/file"), b"y", modes[2]);
        for directory in [source.join("d"), source.clone()] {
            fs::set_permissions(directory, PermissionsExt::from_mode(modes[0])).unwrap();
        }
        let image = dir.path().join(format!("{name}.image"));
        pack_with(&source, &image, also).unwrap();
        fs::read(image).unwrap()
    };
    let open = image("open", [0o777, 0o777, 0o666], 0);
    assert!(open == image("sealed", [0o555, 0o555, 0o444], 0o222));
    assert!(open != image("kept", [0o555, 0o555, 0o444], 0));
}

#[test]
fn hard_links_and_zeros_take_no_room() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("tree");
    fs::create_dir(&source).unwrap();
    write(&source.join("big"), &vec![7; 4 << 20], 0o644);
    for n in 0..10 {
        fs::hard_link(source.join("big"), source.join(format!("link{n}"))).unwrap();
    }
    File::create(source.join("zeros")).unwrap().set_len(6 << 30).unwrap();
    let packed = pack(&source, &dir.path().join("image")).unwrap();
    assert!(packed.bytes < 5 << 20, "{packed:?}");
    match Mounted::new(&dir.path().join("image"), dir.path().join("mounted")) {
        Ok(mounted) => {
            let zeros = File::open(mounted.0.join("zeros")).unwrap();
            assert_eq!(zeros.metadata().unwrap().len(), 6 << 30);
            let mut end = [1; 9];
            zeros.read_exact_at(&mut end, (6 << 30) - 9).unwrap();
            assert_eq!(end, [0; 9]);
            assert!(fs::read(mounted.0.join("link9")).unwrap() == vec![7; 4 << 20]);
        }
        Err(why) => eprintln!("skipped: no squashfs can be mounted ({why})"),
    }
}

#[test]
fn one_file_and_nothing_at_all_are_images_too() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("file"), b"content", 0o640);
    fs::create_dir(dir.path().join("empty")).unwrap();
    for (name, expected) in [("file", 1), ("empty", 0)] {
        let image = dir.path().join(format!("{name}.image"));
        assert_eq!(pack(&dir.path().join(name), &image).unwrap().files, expected);
        match Mounted::new(&image, dir.path().join(format!("{name}.mounted"))) {
            Ok(mounted) => assert_eq!(listing(&mounted.0).len() as u64, expected),
            Err(why) => eprintln!("skipped: no squashfs can be mounted ({why})"),
        }
    }
}

#[test]
fn what_can_not_be_packed_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    assert!(matches!(pack(&dir.path().join("missing"), &image), Err(PackError::Io { .. })));
    rustix::fs::mknodat(rustix::fs::CWD, dir.path().join("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    assert!(matches!(pack(&dir.path().join("fifo"), &image), Err(PackError::Kind(_))));
    let mut deep = dir.path().join("tree");
    for _ in 0..MAX_DEPTH + 1 {
        deep.push("d");
    }
    fs::create_dir_all(&deep).unwrap();
    assert!(matches!(pack(&dir.path().join("tree"), &image), Err(PackError::Deep(_))));
    assert!(!image.exists());
    fs::write(&image, "there already").unwrap();
    assert!(pack(dir.path(), &image).is_err());
    assert_eq!(fs::read(&image).unwrap(), b"there already", "nothing is overwritten");
}

#[test]
fn set_id_bits_are_not_kept_since_everything_becomes_roots() {
    assert_eq!([0o104_755, 0o102_755, 0o041_777, 0o100_640].map(permissions), [0o755, 0o755, 0o1777, 0o640]);
}
