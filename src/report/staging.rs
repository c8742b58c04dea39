//! The directories that a run builds beside the report and the outputs, as a run writes them down, so that one that was
//! killed can be cleaned up after by a start that writes its report somewhere else.
//!
//! They lie in a workspace, where anybody may have put something in their place since. So they are known by device and
//! inode and not by name alone, and one that a run still holds is left alone.

use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FlockOperation, Mode, OFlags, fstat, openat};
use rustix::io::Errno;

use super::dir;
use crate::artifact::beneath::DIRECTORY;
use crate::lock::Lock;

/// A directory being built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Staging {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Staging {
    pub(super) const fn new(path: PathBuf, device: u64, inode: u64) -> Self {
        Self { path, device, inode }
    }

    /// Where it is, absolute.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Several of them as one file's content.
    #[must_use]
    pub fn record(all: &[Self]) -> Vec<u8> {
        let mut record = Vec::new();
        for one in all {
            record.extend_from_slice(format!("{} {} ", one.device, one.inode).as_bytes());
            record.extend_from_slice(one.path.as_os_str().as_bytes());
            record.push(0);
        }
        record
    }

    /// What [`Staging::record`] wrote. A record that was cut short gives those that are whole.
    #[must_use]
    pub fn recorded(record: &[u8]) -> Vec<Self> {
        let mut lines: Vec<&[u8]> = record.split(|&b| b == 0).collect();
        lines.pop();
        let one = |line: &[u8]| {
            let mut parts = line.splitn(3, |&b| b == b' ');
            let mut number = || std::str::from_utf8(parts.next()?).ok()?.parse().ok();
            let (device, inode) = (number()?, number()?);
            let path = PathBuf::from(OsStr::from_bytes(parts.next()?));
            path.is_absolute().then_some(Self { path, device, inode })
        };
        lines.into_iter().filter_map(one).collect()
    }

    /// Removes the directory with everything in it, if it is still there; says whether it was.
    ///
    /// # Errors
    /// If it is there and can't be removed.
    pub fn remove(&self) -> io::Result<bool> {
        let (Some(above), Some(name)) = (self.path.parent(), self.path.file_name()) else { return Ok(false) };
        if !dir::is_staging_name(name) {
            return Ok(false);
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent = match openat(CWD, above, flags, Mode::empty()) {
            Ok(parent) => parent,
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(false),
            Err(e) => return Err(e.into()),
        };
        let held = match openat(&parent, name, DIRECTORY, Mode::empty()) {
            Ok(held) => held,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(false),
            Err(e) => return Err(e.into()),
        };
        let stat = fstat(&held)?;
        if (stat.st_dev, stat.st_ino) != (self.device, self.inode) {
            return Ok(false);
        }
        let _lock = match Lock::of(held, FlockOperation::NonBlockingLockExclusive) {
            Ok(lock) => lock,
            Err(Errno::WOULDBLOCK) => return Ok(false),
            Err(e) => return Err(e.into()),
        };
        dir::remove(parent.as_fd(), name, 0)?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    const NAME: &str = ".report.plimsoll-0123456789abcdef";

    fn made(path: &Path) -> Staging {
        fs::create_dir_all(path.join("steps/01-x")).unwrap();
        fs::write(path.join("steps/01-x/stdout.log"), "x").unwrap();
        let meta = fs::metadata(path).unwrap();
        Staging::new(path.to_owned(), meta.dev(), meta.ino())
    }

    #[test]
    fn what_is_recorded_is_removed_once() {
        let dir = tempfile::tempdir().unwrap();
        let one = made(&dir.path().join(NAME));
        let spaced = made(&dir.path().join("a b").join(NAME));
        let record = Staging::record(&[one.clone(), spaced.clone()]);
        assert_eq!(Staging::recorded(&record), [one.clone(), spaced.clone()]);
        assert_eq!(Staging::recorded(&record[..record.len() - 1]), std::slice::from_ref(&one), "cut short");
        assert!(one.remove().unwrap() && spaced.remove().unwrap());
        assert!(!one.path().exists() && !spaced.path().exists());
        assert!(!one.remove().unwrap());
    }

    #[test]
    fn something_else_in_its_place_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let precious = made(&dir.path().join("precious"));
        assert!(!precious.remove().unwrap(), "a name that is not one of ours");
        let path = dir.path().join(NAME);
        let staging = made(&path);
        fs::rename(&path, dir.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("precious"), &path).unwrap();
        assert!(!staging.remove().unwrap(), "a link");
        fs::remove_file(&path).unwrap();
        made(&path);
        assert!(!staging.remove().unwrap(), "another directory of that name");
        fs::remove_dir_all(&path).unwrap();
        fs::write(&path, "").unwrap();
        assert!(!staging.remove().unwrap(), "a file");
        assert!(dir.path().join("precious/steps/01-x/stdout.log").exists());
        assert!(dir.path().join("elsewhere/steps/01-x/stdout.log").exists());
    }

    #[test]
    fn one_that_a_run_holds_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let staging = made(&dir.path().join(NAME));
        let held = fs::File::open(staging.path()).unwrap();
        let held = Lock::of(held, FlockOperation::LockExclusive).unwrap();
        assert!(!staging.remove().unwrap());
        drop(held);
        assert!(staging.remove().unwrap());
    }
}
