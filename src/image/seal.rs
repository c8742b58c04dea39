//! The digest of a tree that is kept, so that what is shown to a boundary is what was unpacked: a byte that flipped on the disk,
//! a file that came, went or changed its kind is seen before anything of it runs.
//!
//! Main function: [`digest`]. It is the [`TreeDigest`] of names, kinds, execute bits, contents and link targets, which is all
//! that unpacking keeps of an image. Files are read by several threads, since every run does it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::artifact::Digest;
use crate::artifact::digest::TreeDigest;

/// Most threads that read.
const MAX_THREADS: usize = 8;

/// The digest of a tree, and the bytes of its files.
///
/// # Errors
/// If something in it can't be read, or is of a kind that unpacking never makes.
pub fn digest(root: &Path) -> io::Result<(Digest, u64)> {
    let mut tree = TreeDigest::default();
    let mut files = Vec::new();
    let mut todo = vec![PathBuf::new()];
    while let Some(directory) = todo.pop() {
        for entry in fs::read_dir(root.join(&directory))? {
            let entry = entry?;
            let path = directory.join(entry.file_name());
            let name = path.to_str().ok_or_else(|| invalid(&path))?;
            let meta = entry.metadata()?;
            if meta.is_dir() {
                tree.directory(name);
                todo.push(path);
            } else if meta.is_symlink() {
                let target = fs::read_link(entry.path())?;
                tree.symlink(name, target.to_str().ok_or_else(|| invalid(&target))?);
            } else if meta.is_file() {
                files.push((path, meta.permissions().mode() & 0o111 != 0));
            } else {
                return Err(invalid(&path));
            }
        }
    }
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(files.len())));
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
    let work = || -> io::Result<()> {
        let mut own = Vec::new();
        while let Some((path, executable)) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            let file = File::options().read(true).custom_flags(libc::O_NOFOLLOW).open(root.join(path))?;
            let size = file.metadata()?.len();
            own.push((path, *executable, size, Digest::of_reader(file)?));
        }
        done.lock().map_err(|_| io::Error::other("a reader panicked"))?.extend(own);
        Ok(())
    };
    std::thread::scope(|scope| {
        let readers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut outcome = work();
        for reader in readers {
            outcome = outcome.and(reader.join().unwrap_or_else(|_| Err(io::Error::other("a reader panicked"))));
        }
        outcome
    })?;
    let mut bytes = 0;
    for (path, executable, size, digest) in done.into_inner().unwrap_or_default() {
        tree.file(&path.to_string_lossy(), executable, size, digest);
        bytes += size;
    }
    Ok((tree.finish(), bytes))
}

fn invalid(path: &Path) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{} is none of ours", path.display()))
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
        assert!(digest(dir.path()).is_err());
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
