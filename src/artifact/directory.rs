//! Copies a directory artifact.
//!
//! Main function: [`copy`]. Nothing in the directory is parsed, so this runs in the runner's own process: the jailed
//! helper has another uid and couldn't read what only the caller may. Everything is opened relative to directory fds
//! and without following links, so a link can't lead the copy out of the directory, whoever changes it meanwhile.
//!
//! Left out:
//! - `.git`, as any component at any depth, whatever its case: checkout leaves a token in `.git/config`, worktrees and
//!   submodules have a file of that name, and file systems that ignore case take `.GIT` for it.
//! - the destination itself and what the caller excludes (report and output directories), by device and inode.
//!
//! Sockets, FIFOs and devices are refused by name, and so are links that leave the directory. A file that grows
//! meanwhile is copied as long as it was; one that shrinks is refused.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::beneath::{DIRECTORY, confined};
use super::budget::{Budget, Meter};
use super::destination::Destination;
use super::digest::{Digest, Hasher, TreeDigest};
use super::format::Format;
use super::path::MemberPath;
use super::rejection::{Error, Rejection, Rule};
use super::stream::CHUNK;
use super::tree::Purpose;
use super::unpack::{Summary, mismatch, undo};

/// A directory's identity, whatever names it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// Of an open file or directory.
    pub fn of(fd: impl AsFd) -> Result<Self, Error> {
        let stat = rustix::fs::fstat(fd).map_err(|e| Error::failed("examine a directory", e))?;
        Ok(Self::from(&stat))
    }
}

impl From<&Stat> for FileId {
    fn from(stat: &Stat) -> Self {
        FileId { device: stat.st_dev, inode: stat.st_ino }
    }
}

/// Copies the directory `source` into the empty directory `destination`, without `exclude`.
///
/// # Errors
/// As [`super::unpack::unpack`]. An `expected` digest is of the tree; it can only be compared once the tree is read,
/// so the copy is made first, and removed if it is the wrong one.
pub fn copy(
    source: BorrowedFd<'_>,
    destination: OwnedFd,
    budget: &Budget,
    expected: Option<Digest>,
    exclude: &[FileId],
) -> Result<Summary, Error> {
    let kept = destination.try_clone().map_err(|e| Error::failed("duplicate the destination", e))?;
    let mut exclude = exclude.to_vec();
    exclude.push(FileId::of(&destination)?);
    // No ratio: nothing is compressed.
    let meter = Meter::new(budget, u64::MAX);
    let writer = Destination::new(destination, Purpose::Artifact, &meter)?;
    let mut walk = Walk { writer, digest: TreeDigest::default(), buffer: vec![0; CHUNK], exclude, budget };
    let copied = walk.all(source).and_then(|()| {
        let files = walk.writer.files();
        walk.writer.finish()?;
        let sha256 = walk.digest.finish();
        match expected {
            Some(expected) if expected != sha256 => Err(mismatch(expected, sha256).into()),
            _ => Ok(Summary { format: Format::Directory, inner: None, sha256, files, bytes: meter.bytes() }),
        }
    });
    copied.map_err(|error| undo(kept, error))
}

struct Walk<'a> {
    writer: Destination<'a>,
    digest: TreeDigest,
    buffer: Vec<u8>,
    exclude: Vec<FileId>,
    budget: &'a Budget,
}

/// A directory that is being read: its fd, its path and the names still to do.
struct Level {
    fd: OwnedFd,
    path: MemberPath,
    names: std::vec::IntoIter<Vec<u8>>,
}

impl Walk<'_> {
    fn all(&mut self, root: BorrowedFd<'_>) -> Result<(), Error> {
        let root = open_directory(root, c".").map_err(|e| Error::failed("open the directory", e))?;
        let mut levels = vec![Level::open(root, MemberPath::root())?];
        while let Some(level) = levels.last_mut() {
            let Some(name) = level.names.next() else {
                levels.pop();
                continue;
            };
            let path = level.path.join(&name, self.budget)?;
            let shown = path.as_str().as_bytes().to_vec();
            if let Some(below) = self.member(level.fd.as_fd(), &name, path).map_err(|e| e.at(&shown))? {
                levels.push(below);
            }
        }
        Ok(())
    }

    /// Copies one member; a directory is returned, to be walked.
    fn member(&mut self, at: BorrowedFd<'_>, name: &[u8], path: MemberPath) -> Result<Option<Level>, Error> {
        if name.eq_ignore_ascii_case(b".git") {
            return Ok(None);
        }
        let stat = match rustix::fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(e) => return Err(unreadable(e)),
        };
        if self.exclude.contains(&FileId::from(&stat)) {
            return Ok(None);
        }
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let fd = open(at, name, OFlags::DIRECTORY)?;
                self.writer.directory(&path)?;
                self.digest.directory(path.as_str());
                return Level::open(fd, path).map(Some);
            }
            FileType::RegularFile => self.file(at, name, &path)?,
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(at, name, Vec::new()).map_err(unreadable)?;
                self.writer.symlink(&path, target.to_bytes())?;
                // The writer accepts UTF-8 only.
                self.digest.symlink(path.as_str(), &target.to_string_lossy());
            }
            FileType::Socket => return Err(Rejection::new(Rule::Kind, "it is a socket, which is never copied").into()),
            FileType::Fifo => return Err(Rejection::new(Rule::Kind, "it is a FIFO, which is never copied").into()),
            _ => return Err(Rejection::new(Rule::Kind, "it is a device, which is never copied").into()),
        }
        Ok(None)
    }

    fn file(&mut self, at: BorrowedFd<'_>, name: &[u8], path: &MemberPath) -> Result<(), Error> {
        // It may have become a FIFO since it was examined: without NONBLOCK the open would wait for a writer.
        let fd = open(at, name, OFlags::NONBLOCK)?;
        let stat = rustix::fs::fstat(&fd).map_err(|e| Error::failed("examine a file", e))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Rejection::new(Rule::Changed, "it became something else while it was copied").into());
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let executable = stat.st_mode & 0o111 != 0;
        let mut file = self.writer.file(path, executable, size)?;
        let mut hasher = Hasher::default();
        let mut left = size;
        while left > 0 {
            let want = self.buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let read = match rustix::io::read(&fd, &mut self.buffer[..want]) {
                Ok(0) => return Err(Rejection::new(Rule::Changed, "it became shorter while it was copied").into()),
                Ok(read) => read,
                Err(Errno::INTR) => continue,
                Err(e) => return Err(Error::failed(format!("read `{}`", path.as_str()), e)),
            };
            hasher.update(&self.buffer[..read]);
            file.write(&self.buffer[..read])?;
            left -= read as u64;
        }
        file.finish()?;
        self.digest.file(path.as_str(), executable, size, hasher.finish());
        Ok(())
    }
}

impl Level {
    fn open(fd: OwnedFd, path: MemberPath) -> Result<Self, Error> {
        let mut names = Vec::new();
        let list = open_directory(fd.as_fd(), c".").and_then(Dir::new).map_err(unreadable)?;
        for entry in list {
            let entry = entry.map_err(unreadable)?;
            let name = entry.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                names.push(name.to_vec());
            }
        }
        // So that the same directory gives the same refusal on every run.
        names.sort();
        Ok(Level { fd, path, names: names.into_iter() })
    }
}

fn open_directory(at: BorrowedFd<'_>, name: &std::ffi::CStr) -> rustix::io::Result<OwnedFd> {
    confined(at, name, DIRECTORY, Mode::empty())
}

fn open(at: BorrowedFd<'_>, name: &[u8], flags: OFlags) -> Result<OwnedFd, Error> {
    let flags = flags | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    confined(at, name, flags, Mode::empty()).map_err(unreadable)
}

fn unreadable(error: Errno) -> Error {
    match error {
        Errno::ACCESS | Errno::PERM => Rejection::new(Rule::Unreadable, "this user may not read it").into(),
        Errno::NOENT | Errno::LOOP | Errno::NOTDIR => {
            Rejection::new(Rule::Changed, "it changed while the directory was copied").into()
        }
        error => Error::failed("read the directory", error),
    }
}
