//! Copies of what is kept, checked while they are made, so that what is shown to a boundary is what was unpacked: a byte that
//! flipped on the disk, a file that came, went or changed its kind is seen before anything of it runs, and what changes later
//! changes no copy.
//!
//! Main functions: [`digest`], and [`copy`], which gives the digest of the copy. It is the [`TreeDigest`] of names, kinds,
//! execute bits, contents and link targets, which is all that unpacking keeps of an image. Each byte is read once: what is
//! hashed is what is written, or, where the file system shares blocks between files (ioctl_ficlone(2)), the copy itself.
//! Several threads do it, since every run does. A file with several names is one in the copy too.
//!
//! Nothing in a copy can be written by anybody without changing a mode first.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::fs::ioctl_ficlone;

use super::cache::CacheError;
use crate::artifact::Digest;
use crate::artifact::digest::{Hasher, TreeDigest};

/// Most threads that read.
const MAX_THREADS: usize = 8;
/// Bytes that are read at once.
const CHUNK: usize = 256 << 10;

/// Why there is no digest.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// What is kept can't be read, or holds what unpacking never makes.
    #[error("failed to read it")]
    Kept(#[source] io::Error),
    /// The copy can't be written.
    #[error("failed to write the copy")]
    Copy(#[source] io::Error),
}

impl Fault {
    /// As an error about the cache.
    #[must_use]
    pub fn of(self, path: &Path) -> CacheError {
        let (action, source) = match self {
            Fault::Kept(source) => ("read", source),
            Fault::Copy(source) => ("copy an image to", source),
        };
        CacheError::Io { action, path: path.to_owned(), source }
    }
}

/// The digest of a tree, and the bytes of its files.
///
/// # Errors
/// If something in it can't be read, or is of a kind that unpacking never makes.
pub fn digest(root: &Path) -> Result<(Digest, u64), Fault> {
    walk(root, None)
}

/// Copies a tree to `into`, which is not there yet; gives the copy's digest, and the bytes of its files.
///
/// # Errors
/// As [`Fault`] says. What was copied stays.
pub fn copy(root: &Path, into: &Path) -> Result<(Digest, u64), Fault> {
    walk(root, Some(into))
}

/// Copies a file to `into`, which is not there yet; gives the digest of the copy's content, and its bytes.
///
/// # Errors
/// As [`Fault`] says. What was copied stays.
pub fn copy_file(file: &Path, into: &Path) -> Result<(Digest, u64), Fault> {
    Reader::new(&AtomicBool::new(true)).read(file, Some((into, 0o444)))
}

/// A file under its first name.
struct Member {
    path: PathBuf,
    executable: bool,
}

impl Member {
    const fn mode(&self) -> u32 {
        if self.executable { 0o555 } else { 0o444 }
    }
}

fn walk(root: &Path, into: Option<&Path>) -> Result<(Digest, u64), Fault> {
    let mut tree = TreeDigest::default();
    let (mut directories, mut files, mut links) = (Vec::new(), Vec::new(), Vec::new());
    let mut named = HashMap::new();
    let mut todo = vec![PathBuf::new()];
    while let Some(directory) = todo.pop() {
        if let Some(into) = into {
            DirBuilder::new().mode(0o700).create(into.join(&directory)).map_err(Fault::Copy)?;
        }
        for entry in fs::read_dir(root.join(&directory)).map_err(Fault::Kept)? {
            let entry = entry.map_err(Fault::Kept)?;
            let path = directory.join(entry.file_name());
            let meta = entry.metadata().map_err(Fault::Kept)?;
            if meta.is_dir() {
                tree.directory(text(&path)?);
                todo.push(path);
            } else if meta.is_symlink() {
                let target = fs::read_link(entry.path()).map_err(Fault::Kept)?;
                tree.symlink(text(&path)?, text(&target)?);
                if let Some(into) = into {
                    std::os::unix::fs::symlink(&target, into.join(&path)).map_err(Fault::Copy)?;
                }
            } else if meta.is_file() {
                text(&path)?;
                match named.get(&(meta.dev(), meta.ino())) {
                    Some(&first) => links.push((path, first)),
                    None => {
                        if meta.nlink() > 1 {
                            named.insert((meta.dev(), meta.ino()), files.len());
                        }
                        files.push(Member { path, executable: meta.mode() & 0o111 != 0 });
                    }
                }
            } else {
                return Err(foreign(&path));
            }
        }
        directories.push(directory);
    }
    let read = read_all(root, into, &files)?;
    let mut bytes = 0;
    for (file, (digest, size)) in files.iter().zip(&read) {
        tree.file(text(&file.path)?, file.executable, *size, *digest);
        bytes += size;
    }
    for (path, first) in links {
        let (file, (digest, size)) = (&files[first], read[first]);
        tree.file(text(&path)?, file.executable, size, digest);
        if let Some(into) = into {
            fs::hard_link(into.join(&file.path), into.join(path)).map_err(Fault::Copy)?;
        }
    }
    if let Some(into) = into {
        for directory in directories {
            fs::set_permissions(into.join(directory), Permissions::from_mode(0o555)).map_err(Fault::Copy)?;
        }
    }
    Ok((tree.finish(), bytes))
}

/// Reads all files, by several threads; gives digest and size of each.
fn read_all(root: &Path, into: Option<&Path>, files: &[Member]) -> Result<Vec<(Digest, u64)>, Fault> {
    let (next, clones) = (AtomicUsize::new(0), AtomicBool::new(true));
    let done = Mutex::new(vec![None; files.len()]);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
    let panicked = || Fault::Kept(io::Error::other("a reader panicked"));
    let work = || -> Result<(), Fault> {
        let mut reader = Reader::new(&clones);
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(file) = files.get(number) else { return Ok(()) };
            let copy = into.map(|into| into.join(&file.path));
            let read = reader.read(&root.join(&file.path), copy.as_deref().map(|copy| (copy, file.mode())))?;
            done.lock().map_err(|_| panicked())?[number] = Some(read);
        }
    };
    std::thread::scope(|scope| {
        let readers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut outcome = work();
        for reader in readers {
            outcome = outcome.and(reader.join().unwrap_or_else(|_| Err(panicked())));
        }
        outcome
    })?;
    done.into_inner().ok().and_then(|done| done.into_iter().collect()).ok_or_else(panicked)
}

/// Reads one file after the other.
struct Reader<'r> {
    /// Whether the file system shares blocks between files, as far as was seen.
    clones: &'r AtomicBool,
    buffer: Vec<u8>,
}

impl<'r> Reader<'r> {
    fn new(clones: &'r AtomicBool) -> Self {
        Self { clones, buffer: vec![0; CHUNK] }
    }

    /// Digest and size of a file, or of the copy that is made of it, with that mode.
    fn read(&mut self, path: &Path, copy: Option<(&Path, u32)>) -> Result<(Digest, u64), Fault> {
        let file = File::options().read(true).custom_flags(libc::O_NOFOLLOW).open(path).map_err(Fault::Kept)?;
        let Some((path, mode)) = copy else { return self.hash(&file, None) };
        let make = || {
            let copy = File::options().read(true).write(true).create_new(true).mode(mode).open(path)?;
            copy.set_permissions(Permissions::from_mode(mode))?;
            Ok(copy)
        };
        let copy = make().map_err(Fault::Copy)?;
        if self.clones.load(Ordering::Relaxed) {
            match ioctl_ficlone(&copy, &file) {
                Ok(()) => return self.hash(&copy, None),
                Err(_) => self.clones.store(false, Ordering::Relaxed),
            }
        }
        self.hash(&file, Some(&copy))
    }

    /// Digest and size of what is read, and written to `copy`.
    fn hash(&mut self, mut from: &File, copy: Option<&File>) -> Result<(Digest, u64), Fault> {
        let (mut hasher, mut size) = (Hasher::default(), 0);
        loop {
            let bytes = match from.read(&mut self.buffer) {
                Ok(0) => return Ok((hasher.finish(), size)),
                Ok(read) => &self.buffer[..read],
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => return Err(Fault::Kept(e)),
            };
            hasher.update(bytes);
            size += bytes.len() as u64;
            if let Some(mut copy) = copy {
                copy.write_all(bytes).map_err(Fault::Copy)?;
            }
        }
    }
}

fn text(path: &Path) -> Result<&str, Fault> {
    path.to_str().ok_or_else(|| foreign(path))
}

fn foreign(path: &Path) -> Fault {
    Fault::Kept(io::Error::new(ErrorKind::InvalidData, format!("{} is none of ours", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_changes_in_a_tree_changes_its_digest() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("d")).unwrap();
        for n in 0..50 {
            fs::write(at(&format!("d/{n}")), vec![b'x'; n * 100]).unwrap();
        }
        std::os::unix::fs::symlink("d/1", at("link")).unwrap();
        let (whole, bytes) = digest(dir.path()).unwrap();
        assert_eq!((digest(dir.path()).unwrap().0, bytes), (whole, 122_500));
        type Change<'c> = (&'c str, &'c dyn Fn(), &'c dyn Fn());
        let changes: [Change<'_>; 5] = [
            ("a flipped byte", &|| flip(&at("d/7")), &|| flip(&at("d/7"))),
            ("a file more", &|| fs::write(at("d/new"), "").unwrap(), &|| fs::remove_file(at("d/new")).unwrap()),
            ("a directory more", &|| fs::create_dir(at("e")).unwrap(), &|| fs::remove_dir(at("e")).unwrap()),
            ("another target", &|| relink(&at("link"), "d/2"), &|| relink(&at("link"), "d/1")),
            ("an execute bit", &|| chmod(&at("d/3"), 0o755), &|| chmod(&at("d/3"), 0o644)),
        ];
        for (what, change, back) in changes {
            change();
            assert_ne!(digest(dir.path()).unwrap().0, whole, "{what}");
            back();
            assert_eq!(digest(dir.path()).unwrap().0, whole, "{what}, and back");
        }
        rustix::fs::mkfifoat(rustix::fs::CWD, at("fifo"), rustix::fs::Mode::RWXU).unwrap();
        assert!(matches!(digest(dir.path()), Err(Fault::Kept(_))));
    }

    #[test]
    fn a_copy_is_the_same_and_nobody_writes_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let (kept, copied) = (dir.path().join("kept"), dir.path().join("copied"));
        fs::create_dir_all(kept.join("d/empty")).unwrap();
        chmod(&kept.join("d"), 0o777);
        for n in 0..50 {
            fs::write(kept.join(format!("d/{n}")), vec![b'x'; n * CHUNK / 20]).unwrap();
        }
        chmod(&kept.join("d/7"), 0o777);
        fs::hard_link(kept.join("d/7"), kept.join("again")).unwrap();
        std::os::unix::fs::symlink("/no/where", kept.join("link")).unwrap();
        let made = copy(&kept, &copied).unwrap();
        assert_eq!((made, made), (digest(&kept).unwrap(), digest(&copied).unwrap()));
        let mode = |name: &str| fs::metadata(copied.join(name)).unwrap().mode() & 0o7777;
        assert_eq!([mode(""), mode("d"), mode("d/7"), mode("d/8")], [0o555, 0o555, 0o555, 0o444]);
        let inode = |name: &str| fs::metadata(copied.join(name)).unwrap().ino();
        assert_eq!(inode("d/7"), inode("again"));
        assert_ne!(inode("d/7"), fs::metadata(kept.join("d/7")).unwrap().ino());
        flip(&kept.join("d/9"));
        assert_eq!(digest(&copied).unwrap(), made);
        assert_ne!(digest(&kept).unwrap(), made);
        // Whose fault it is decides whether what is kept is thrown away.
        assert!(matches!(copy(&kept, &copied), Err(Fault::Copy(_))));
        assert!(matches!(copy(&kept.join("missing"), &dir.path().join("x")), Err(Fault::Kept(_))));
    }

    #[test]
    fn a_file_with_many_names_is_read_once() {
        let dir = tempfile::tempdir().unwrap();
        let kept = dir.path().join("kept");
        fs::create_dir(&kept).unwrap();
        fs::write(kept.join("0"), vec![b'x'; 4096]).unwrap();
        for n in 1..100 {
            fs::hard_link(kept.join("0"), kept.join(n.to_string())).unwrap();
        }
        assert_eq!(copy(&kept, &dir.path().join("copied")).unwrap().1, 4096);
    }

    fn flip(path: &Path) {
        let mut bytes = fs::read(path).unwrap();
        bytes[3] ^= 1;
        fs::write(path, bytes).unwrap();
    }

    fn relink(path: &Path, target: &str) {
        fs::remove_file(path).unwrap();
        std::os::unix::fs::symlink(target, path).unwrap();
    }

    fn chmod(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
}
