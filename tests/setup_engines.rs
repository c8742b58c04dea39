//! `plimsoll setup`, against releases on this machine: by directory, file and server, whole, damaged and foreign.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{available, plimsoll};
use sha2::{Digest as _, Sha256, Sha512};

const ARCH: &str = std::env::consts::ARCH;

/// The smallest thing that looks like a program for this machine.
fn program(tail: &str) -> Vec<u8> {
    let mut elf = b"\x7fELF\x02\x01\x01".to_vec();
    elf.resize(18, 0);
    elf.extend_from_slice(if ARCH == "aarch64" { &[0xb7, 0] } else { &[0x3e, 0] });
    elf.extend_from_slice(tail.as_bytes());
    elf
}

/// A release of gVisor in a directory.
fn gvisor(dir: &Path) -> Vec<u8> {
    let runsc = program("runsc");
    fs::write(dir.join("runsc"), &runsc).unwrap();
    fs::write(dir.join("runsc.sha512"), format!("{}  runsc\n", hex::encode(Sha512::digest(&runsc)))).unwrap();
    runsc
}

/// A release of Firecracker in a directory; the name of its archive.
fn firecracker(dir: &Path, version: &str) -> PathBuf {
    let mut tar = tar::Builder::new(flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast()));
    for name in ["firecracker", "jailer", "seccompiler-bin"] {
        let content = program(name);
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o755);
        header.set_size(content.len() as u64);
        let path = format!("release-v{version}-{ARCH}/{name}-v{version}-{ARCH}");
        tar.append_data(&mut header, path, content.as_slice()).unwrap();
    }
    let archive = tar.into_inner().unwrap().finish().unwrap();
    let path = dir.join(format!("firecracker-v{version}-{ARCH}.tgz"));
    fs::write(&path, &archive).unwrap();
    let name = path.file_name().unwrap().to_str().unwrap();
    let sums = format!("{}  {name}\n", hex::encode(Sha256::digest(&archive)));
    fs::write(dir.join(format!("{name}.sha256.txt")), sums).unwrap();
    path
}

/// Serves a directory's files; ends with the test program.
fn serve(dir: PathBuf) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/releases", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut asked = vec![0; 4096];
            let n = stream.read(&mut asked).unwrap_or(0);
            let text = String::from_utf8_lossy(&asked[..n]).into_owned();
            let name =
                text.split_whitespace().nth(1).and_then(|path| path.strip_prefix("/releases/")).unwrap_or("none");
            let (status, body) = match fs::read(dir.join(name)) {
                Ok(body) => (200, body),
                Err(_) => (404, Vec::new()),
            };
            let head = format!("HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
        }
    });
    address
}

struct Dirs {
    release: tempfile::TempDir,
    root: tempfile::TempDir,
}

impl Dirs {
    fn new() -> Self {
        Dirs { release: tempfile::tempdir().unwrap(), root: tempfile::tempdir().unwrap() }
    }

    fn setup(&self, what: &str, from: &str, more: &[&str]) -> common::Ran {
        let mut arguments = vec!["setup", what, "--from", from, "--root", self.root.path().to_str().unwrap()];
        arguments.extend(more);
        plimsoll(arguments).run()
    }

    fn from(&self) -> &str {
        self.release.path().to_str().unwrap()
    }

    fn installed(&self, name: &str) -> PathBuf {
        self.root.path().join("usr/local/bin").join(name)
    }
}

#[test]
fn gvisor_comes_from_a_directory_a_file_and_a_server_and_is_recorded() {
    let release = Dirs::new();
    let runsc = gvisor(release.release.path());
    let file = release.release.path().join("runsc");
    for from in [release.from().to_owned(), file.to_str().unwrap().to_owned(), serve(release.release.path().to_owned())]
    {
        let dirs = Dirs::new();
        dirs.setup("gvisor", &from, &["--dry-run"]).exits(0).prints("would be written");
        assert!(!dirs.installed("runsc").exists(), "{from}");
        dirs.setup("gvisor", &from, &[]).exits(0).prints("SHA-512 as").prints("an identified engine");
        assert_eq!(fs::read(dirs.installed("runsc")).unwrap(), runsc);
        let record = fs::read_to_string(dirs.root.path().join("etc/plimsoll/engines.json")).unwrap();
        assert!(record.contains(&hex::encode(Sha256::digest(&runsc))), "{record}");
        dirs.setup("gvisor", &from, &[]).exits(0).prints("is there already");
    }
}

#[test]
fn what_cannot_be_verified_is_not_installed() {
    let dirs = Dirs::new();
    gvisor(dirs.release.path());
    let file = dirs.release.path().join("runsc");
    // Damaged after its release.
    let mut damaged = fs::read(&file).unwrap();
    *damaged.last_mut().unwrap() ^= 1;
    fs::write(&file, damaged).unwrap();
    dirs.setup("gvisor", dirs.from(), &[]).exits(13).says("nothing was installed");
    // No checksum, and another than the user says.
    fs::remove_file(dirs.release.path().join("runsc.sha512")).unwrap();
    dirs.setup("gvisor", dirs.from(), &[]).exits(13).says("nothing says what the digest");
    dirs.setup("gvisor", dirs.from(), &["--sha256", &"0".repeat(64)]).exits(13).says("--sha256 says");
    // A page where a program should be, with its own checksum.
    fs::write(&file, "<html>not found</html>").unwrap();
    let sum = hex::encode(Sha256::digest(b"<html>not found</html>"));
    dirs.setup("gvisor", dirs.from(), &["--sha256", &sum]).exits(13).says("no program for this machine");
    dirs.setup("gvisor", &serve(dirs.root.path().to_owned()), &[]).exits(13).says("404");
    dirs.setup("gvisor", "/no/such/place", &[]).exits(13).says("`--from` takes");
    assert!(!dirs.installed("runsc").exists());
    assert!(!dirs.root.path().join("etc").exists());
}

#[test]
fn firecracker_and_its_jailer_come_out_of_one_archive() {
    let dirs = Dirs::new();
    let archive = firecracker(dirs.release.path(), "1.16.0");
    dirs.setup("firecracker", &serve(dirs.release.path().to_owned()), &[]).exits(0).prints("SHA-256 as");
    for name in ["firecracker", "jailer"] {
        assert_eq!(fs::read(dirs.installed(name)).unwrap(), program(name));
    }
    assert!(!dirs.installed("seccompiler-bin").exists());
    // Too old, even when it is all right otherwise.
    firecracker(dirs.release.path(), "1.12.1");
    dirs.setup("firecracker", dirs.from(), &["--release", "1.12.1"]).exits(2).says("older than 1.16");
    // A damaged archive leaves what is there.
    let mut bytes = fs::read(&archive).unwrap();
    bytes[30] ^= 1;
    fs::write(&archive, bytes).unwrap();
    dirs.setup("firecracker", dirs.from(), &[]).exits(13);
    assert_eq!(fs::read(dirs.installed("jailer")).unwrap(), program("jailer"));
}

#[test]
fn python_is_the_package_that_is_pinned_and_no_other() {
    let dirs = Dirs::new();
    let package = dirs.release.path().join("python-wasi-3.12.0.tgz");
    fs::write(&package, "another").unwrap();
    dirs.setup("wasm-python", dirs.from(), &[]).exits(13).says("SHA-512");
    assert!(!dirs.root.path().join("usr").exists());
    // The real one, where a mirror of it is at hand.
    let Some(real) = std::env::var_os("PLIMSOLL_TEST_PYTHON_WASI") else {
        available("wasm-python-package", Err("PLIMSOLL_TEST_PYTHON_WASI names no python-wasi-3.12.0.tgz".to_owned()));
        return;
    };
    fs::copy(real, &package).unwrap();
    dirs.setup("wasm-python", dirs.from(), &[]).exits(0).prints("as this release of plimsoll says");
    let module = fs::read(dirs.root.path().join("usr/local/share/plimsoll/wasm/python.wasm")).unwrap();
    assert!(module.starts_with(b"\0asm"));
}

#[test]
fn a_profile_is_written_for_a_machine_that_is_being_built() {
    let root = tempfile::tempdir().unwrap();
    let at = root.path().to_str().unwrap();
    plimsoll(["setup", "userns", "--root", at, "--program", "/usr/bin/plimsoll"]).run().exits(0).prints("written");
    let profile = fs::read_to_string(root.path().join("etc/apparmor.d/plimsoll")).unwrap();
    assert!(profile.contains("/usr/bin/plimsoll flags=(unconfined)"), "{profile}");
}

/// An archive of these files and, where they have a target, links.
fn packed(to: &Path, members: &[(&str, &str, Option<&Path>)]) -> String {
    let mut tar = tar::Builder::new(flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast()));
    for (name, content, target) in members {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        match target {
            Some(target) => {
                header.set_entry_type(tar::EntryType::Symlink);
                tar.append_link(&mut header, name, target).unwrap();
            }
            None => tar.append_data(&mut header, name, content.as_bytes()).unwrap(),
        }
    }
    let archive = tar.into_inner().unwrap().finish().unwrap();
    fs::write(to, &archive).unwrap();
    hex::encode(Sha256::digest(&archive))
}

const KERNEL: (&str, &str, Option<&Path>) = ("boot/vmlinuz-6.12.1-cloud", "kernel", None);
const LIST: (&str, &str, Option<&Path>) = ("lib/modules/6.12.1-cloud/modules.dep", "", None);
const MODULE: (&str, &str, Option<&Path>) = ("lib/modules/6.12.1-cloud/kernel/fs/squashfs/squashfs.ko", "module", None);

fn is_root() -> bool {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: a kernel for all runs of a host takes root");
        return false;
    }
    true
}

#[test]
fn a_guest_kernel_comes_in_an_archive_from_a_file_and_a_server() {
    if !is_root() {
        return;
    }
    let release = Dirs::new();
    let file = release.release.path().join("kernel.tar.gz");
    let digest = packed(&file, &[KERNEL, LIST, MODULE]);
    let served = format!("{}/kernel.tar.gz", serve(release.release.path().to_owned()));
    for from in [file.to_str().unwrap(), &served] {
        let dirs = Dirs::new();
        let copy = dirs.root.path().join("var/lib/plimsoll/guest-kernel");
        let absent = || assert!(!copy.exists(), "{from}");
        // Nothing says what it should be, or it is something else.
        let unpinned = dirs.setup("guest-kernel", from, &[]).exits(13);
        unpinned.says("nothing says what the digest").says("checksum file beside it");
        dirs.setup("guest-kernel", from, &["--sha256", &"0".repeat(64)]).exits(13).says("nothing was installed");
        absent();
        let pinned = ["--sha256", digest.as_str()];
        dirs.setup("guest-kernel", from, &[pinned[0], pinned[1], "--dry-run"]).exits(0).prints("would be written");
        absent();
        dirs.setup("guest-kernel", from, &pinned).exits(0).prints("SHA-256 as --sha256 says");
        assert_eq!(fs::read(copy.join("boot/vmlinuz-6.12.1-cloud")).unwrap(), b"kernel");
        assert!(copy.join("lib/modules/6.12.1-cloud/kernel/fs/squashfs/squashfs.ko").is_file());
        dirs.setup("guest-kernel", from, &[pinned[0], pinned[1], "--release", "6.1"]).says("there is no kernel");
    }
    // As the two other setups do it: a checksum file beside it.
    fs::write(release.release.path().join("kernel.tar.gz.sha256"), format!("{digest}  kernel.tar.gz\n")).unwrap();
    for from in [file.to_str().unwrap(), &served] {
        Dirs::new().setup("guest-kernel", from, &[]).exits(0).prints("written").prints("kernel.tar.gz.sha256 says");
    }
}

#[test]
fn an_archives_links_lead_nowhere_on_this_host() {
    if !is_root() {
        return;
    }
    let dirs = Dirs::new();
    let (secret, hidden) = (dirs.release.path().join("secret"), dirs.release.path().join("hidden"));
    fs::write(&secret, "s3cret").unwrap();
    // A tree beside the archive that looks like what is taken.
    fs::create_dir_all(hidden.join("fs")).unwrap();
    fs::write(hidden.join("fs/a.ko"), "s3cret").unwrap();
    fs::write(hidden.join("modules.dep"), "s3cret").unwrap();
    let climbing = Path::new("../../../../../../../../../..").join(secret.strip_prefix("/").unwrap());
    let from = dirs.release.path().join("kernel.tar.gz");
    let release = "lib/modules/6.12.1-cloud";
    let (builtin, kernel) = (format!("{release}/modules.builtin"), format!("{release}/kernel"));
    let (drivers, boot) = (format!("{release}/kernel/fs/squashfs.ko"), "boot/vmlinuz-6.12.1-cloud");
    let cases: [&[_]; 6] = [
        &[KERNEL, LIST, (&builtin, "", Some(&secret))],
        &[KERNEL, LIST, (&builtin, "", Some(&climbing))],
        &[KERNEL, LIST, (&drivers, "", Some(&secret))],
        &[KERNEL, LIST, (&kernel, "", Some(&hidden))],
        &[KERNEL, (release, "", Some(&hidden))],
        &[LIST, (boot, "", Some(&secret))],
    ];
    for members in cases {
        let digest = packed(&from, members);
        // Whether it is taken or not: nothing but the archive's own content is.
        dirs.setup("guest-kernel", from.to_str().unwrap(), &["--sha256", &digest]);
        let copy = dirs.root.path().join("var/lib/plimsoll/guest-kernel");
        let found = Command::new("grep").args(["-rl", "s3cret"]).arg(dirs.root.path()).output().unwrap().stdout;
        assert!(found.is_empty(), "{}", String::from_utf8_lossy(&found));
        let _ = fs::remove_dir_all(copy);
    }
    // The control: links within the archive are as good as files.
    let real = ("lib/modules/6.12.1-cloud/list", "in", None);
    let digest = packed(&from, &[KERNEL, LIST, real, (&builtin, "", Some(Path::new("list")))]);
    dirs.setup("guest-kernel", from.to_str().unwrap(), &["--sha256", &digest]).exits(0);
    let copied = dirs.root.path().join("var/lib/plimsoll/guest-kernel").join(builtin);
    assert_eq!(fs::read_to_string(copied).unwrap(), "in");
}

#[test]
fn a_kernel_that_no_guest_could_use_is_not_installed() {
    if !is_root() {
        return;
    }
    let dirs = Dirs::new();
    let archive = dirs.release.path().join("kernel.tar.gz");
    let digest = packed(&archive, &[KERNEL]);
    let ran = dirs.setup("guest-kernel", archive.to_str().unwrap(), &["--sha256", &digest]);
    ran.exits(2).says("kernel.tar.gz has no `lib/modules/6.12.1-cloud/modules.dep`");
    // Alone, it is no archive.
    let lone = dirs.release.path().join("vmlinuz-6.12.1-cloud");
    fs::write(&lone, "kernel").unwrap();
    let digest = hex::encode(Sha256::digest(b"kernel"));
    let ran = dirs.setup("guest-kernel", lone.to_str().unwrap(), &["--sha256", &digest]);
    ran.exits(2).says("there is no kernel `boot/vmlinuz-RELEASE` in").says("vmlinuz-6.12.1-cloud");
    assert!(!dirs.root.path().join("var/lib/plimsoll").exists());
}
