//! Writes members into the destination directory, confined by the kernel.
//!
//! Main type: [`Destination`]. It holds one directory fd and opens everything else relative to a directory fd of
//! its own, one checked component at a time, by `openat2` with `RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS |
//! RESOLVE_NO_MAGICLINKS` (openat2(2)). No path string is ever joined and opened. Files are created with `O_EXCL`,
//! and symbolic links are made last, after all of them were checked, so that while anything is written there is no
//! link in the destination to follow.
//!
//! It trusts that the directory is empty at the start and that nobody else writes there meanwhile (were it
//! otherwise, `openat2` still keeps everything inside).
//!
//! What is kept of a member: its name, content, and whether it is executable. Directories get 0777 and files a+rw (a+rwx
//! when executable), because the code that will use them has another uid and the boundary puts an overlay above.
//! Owners, times, extended attributes and set-id bits are dropped.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;

use super::beneath::{DIRECTORY, confined};
use super::budget::Meter;
use super::path::MemberPath;
use super::rejection::{Error, Rejection, Rule};
use super::tree::{Kind, NodeId, Purpose, ROOT, Tree};

/// Longest symbolic link target, bytes: `PATH_MAX` less its NUL.
const TARGET_MAX: usize = 4095;

/// The directory that an artifact is unpacked into.
pub struct Destination<'m> {
    /// The open directories from the root to where the last member went; most members have the same parent as the
    /// one before, so this saves the walk.
    levels: Vec<(NodeId, OwnedFd)>,
    tree: Tree,
    meter: &'m Meter,
    files: u64,
}

/// What the members of a tar go to.
pub trait Members {
    /// The name of a member or of a hard link's target, where this kind of tree allows other spellings of it.
    fn spelled<'n>(&self, name: &'n [u8]) -> &'n [u8];
    /// See [`Destination::directory`].
    fn directory(&mut self, path: &MemberPath) -> Result<(), Error>;
    /// See [`Destination::file`].
    fn file(&mut self, path: &MemberPath, executable: bool, size: u64) -> Result<FileWriter, Error>;
    /// See [`Destination::hardlink`].
    fn hardlink(&mut self, path: &MemberPath, target: &MemberPath) -> Result<(), Error>;
    /// See [`Destination::symlink`].
    fn symlink(&mut self, path: &MemberPath, target: &[u8]) -> Result<(), Error>;
    /// See [`Destination::special`].
    fn special(&mut self, what: &str) -> Result<(), Error>;
}

impl Members for Destination<'_> {
    fn spelled<'n>(&self, name: &'n [u8]) -> &'n [u8] {
        name
    }

    fn directory(&mut self, path: &MemberPath) -> Result<(), Error> {
        Destination::directory(self, path)
    }

    fn file(&mut self, path: &MemberPath, executable: bool, size: u64) -> Result<FileWriter, Error> {
        Destination::file(self, path, executable, size)
    }

    fn hardlink(&mut self, path: &MemberPath, target: &MemberPath) -> Result<(), Error> {
        Destination::hardlink(self, path, target)
    }

    fn symlink(&mut self, path: &MemberPath, target: &[u8]) -> Result<(), Error> {
        Destination::symlink(self, path, target)
    }

    fn special(&mut self, what: &str) -> Result<(), Error> {
        Destination::special(self, what)
    }
}

/// A regular file while it is written. Dropped without [`FileWriter::finish`], it stays short, so the caller must
/// give up on the whole artifact.
pub struct FileWriter {
    /// None when nothing is to be kept.
    fd: Option<OwnedFd>,
    left: u64,
    /// Set while the last thing written was a hole, which doesn't extend the file by itself.
    ends_in_hole: bool,
    size: u64,
}

impl<'m> Destination<'m> {
    /// Takes an empty directory.
    pub fn new(root: OwnedFd, purpose: Purpose, meter: &'m Meter) -> Result<Self, Error> {
        let here = confined(root.as_fd(), ".", DIRECTORY, Mode::empty())
            .map_err(|e| Error::failed("open the destination", e))?;
        let list = Dir::new(here).map_err(|e| Error::failed("list the destination", e))?;
        for entry in list {
            let entry = entry.map_err(|e| Error::failed("list the destination", e))?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                let source = io::Error::from(io::ErrorKind::DirectoryNotEmpty);
                return Err(Error::failed("unpack into a directory that isn't empty", source));
            }
        }
        Ok(Destination { levels: vec![(ROOT, root)], tree: Tree::new(purpose), meter, files: 0 })
    }

    /// A device or FIFO: left out of a root file system, refused otherwise.
    pub fn special(&mut self, what: &str) -> Result<(), Error> {
        self.meter.member()?;
        match self.tree.purpose() {
            Purpose::RootFs => Ok(()),
            Purpose::Artifact => {
                Err(Rejection::new(Rule::Kind, format!("it is {what}, which is never unpacked")).into())
            }
        }
    }

    /// Regular files so far (hard links included).
    pub fn files(&self) -> u64 {
        self.files
    }

    /// Makes a directory, if it isn't there yet.
    pub fn directory(&mut self, path: &MemberPath) -> Result<(), Error> {
        let known = self.tree_len();
        self.enter(path.components()).map_err(|e| e.at(path.as_str().as_bytes()))?;
        if self.tree_len() == known {
            // Every member counts, also one that changes nothing: else a million of them were free.
            self.meter.member()?;
        }
        Ok(())
    }

    /// Creates a regular file of exactly `size` bytes, to be written and then finished. A file that an earlier member
    /// put there is replaced.
    ///
    /// # Errors
    /// Names the member: through a link, over something of another kind, over budget, or colliding.
    pub fn file(&mut self, path: &MemberPath, executable: bool, size: u64) -> Result<FileWriter, Error> {
        self.create(path, executable, size).map_err(|e| e.at(path.as_str().as_bytes()))
    }

    fn create(&mut self, path: &MemberPath, executable: bool, size: u64) -> Result<FileWriter, Error> {
        self.meter.member()?;
        self.meter.file(size)?;
        let (parent, name) = self.leaf(path, &Kind::File)?;
        let writer = FileWriter::create(parent, name, executable, size)?;
        self.files += 1;
        Ok(writer)
    }

    /// Makes a hard link to a regular file that is already there.
    pub fn hardlink(&mut self, path: &MemberPath, target: &MemberPath) -> Result<(), Error> {
        self.link(path, target).map_err(|e| e.at(path.as_str().as_bytes()))
    }

    fn link(&mut self, path: &MemberPath, target: &MemberPath) -> Result<(), Error> {
        self.meter.member()?;
        let refuse = |message: String| Err(Error::Rejected(Rejection::new(Rule::Hardlink, message)));
        let shown = super::rejection::shown(target.as_str().as_bytes());
        let Some((directories, target_name)) = target.split() else {
            return refuse("it is a hard link to the root".to_owned());
        };
        let mut at = ROOT;
        for component in target.components() {
            match self.tree.find(at, component)? {
                Some(node) => at = node,
                None => return refuse(format!("it is a hard link to `{shown}`, which no member before it is")),
            }
            if matches!(self.tree.kind(at), Kind::Symlink(_)) {
                return refuse(format!("it is a hard link through the symbolic link in `{shown}`"));
            }
        }
        if *self.tree.kind(at) != Kind::File {
            return refuse(format!("it is a hard link to `{shown}`, a {}", self.tree.kind(at).noun()));
        }
        if path.as_str() == target.as_str() {
            return refuse("it is a hard link to itself".to_owned());
        }
        // One walk from the root for the target; the parents on the stack are the new link's.
        let from = self.open_directory(directories)?;
        let (parent, name) = self.leaf(path, &Kind::File)?;
        rustix::fs::linkat(&from, target_name, parent, name, AtFlags::empty())
            .map_err(|e| Error::failed("make a hard link", e))?;
        self.files += 1;
        Ok(())
    }

    /// Notes a symbolic link, to be checked and made by [`Destination::finish`].
    pub fn symlink(&mut self, path: &MemberPath, target: &[u8]) -> Result<(), Error> {
        self.note(path, target).map_err(|e| e.at(path.as_str().as_bytes()))
    }

    fn note(&mut self, path: &MemberPath, target: &[u8]) -> Result<(), Error> {
        self.meter.member()?;
        let target = link_target(target)?;
        // Absolute ones are refused by the check at the end too; here the rest need not be unpacked first.
        if target.starts_with('/') && self.tree.purpose() == Purpose::Artifact {
            return Err(Rejection::new(Rule::Symlink, "the link's target is absolute").into());
        }
        let kind = Kind::Symlink(target.to_owned());
        let (directory, name) = self.parent(path)?;
        match self.tree.find(directory, name)? {
            None => _ = self.tree.insert(directory, name, kind),
            Some(node) if matches!(self.tree.kind(node), Kind::Symlink(_)) => self.tree.replace(node, kind),
            Some(node) => return Err(differs(self.tree.kind(node), &kind).into()),
        }
        Ok(())
    }

    /// Checks every symbolic link against the whole tree and makes them. Call it last.
    pub fn finish(mut self) -> Result<Tree, Error> {
        self.tree.check_symlinks()?;
        let links: Vec<(NodeId, NodeId)> = self.tree.symlinks().map(|(parent, link, _)| (parent, link)).collect();
        for (parent, link) in links {
            let directory = self.tree.path(parent);
            self.enter(directory.split('/').filter(|c| !c.is_empty()))?;
            let Kind::Symlink(target) = self.tree.kind(link) else { continue };
            rustix::fs::symlinkat(target.as_str(), self.here(), self.tree.name(link))
                .map_err(|e| Error::failed("make a symbolic link", e))?;
        }
        Ok(self.tree)
    }

    fn tree_len(&self) -> usize {
        self.tree.len()
    }

    /// The innermost open directory.
    fn here(&self) -> BorrowedFd<'_> {
        // `levels` begins with the root and `enter` never removes it.
        self.levels[self.levels.len() - 1].1.as_fd()
    }

    /// Opens the parent of a member and says its node and the member's own name.
    fn parent<'p>(&mut self, path: &'p MemberPath) -> Result<(NodeId, &'p str), Error> {
        let Some((directories, name)) = path.split() else {
            return Err(Rejection::new(Rule::Path, "only a directory may be the root").into());
        };
        let directory = self.enter(directories.split('/').filter(|c| !c.is_empty()))?;
        Ok((directory, name))
    }

    /// Readies the place for a new file: its parent is open, and a file of that name is gone.
    fn leaf<'p>(&mut self, path: &'p MemberPath, kind: &Kind) -> Result<(BorrowedFd<'_>, &'p str), Error> {
        let (directory, name) = self.parent(path)?;
        match self.tree.find(directory, name)? {
            None => _ = self.tree.insert(directory, name, kind.clone()),
            Some(node) if self.tree.kind(node) == kind => {
                // `tar -r` appends a newer copy: the last one counts, and a hard link keeps the older content.
                rustix::fs::unlinkat(self.here(), name, AtFlags::empty())
                    .map_err(|e| Error::failed("replace a file", e))?;
                self.files -= 1;
            }
            Some(node) => return Err(differs(self.tree.kind(node), kind).into()),
        }
        Ok((self.here(), name))
    }

    /// Makes these directories the open ones, creating what is missing.
    fn enter<'c>(&mut self, components: impl Iterator<Item = &'c str>) -> Result<NodeId, Error> {
        let mut at = ROOT;
        let mut depth = 0;
        for component in components {
            let found = self.tree.find(at, component)?;
            depth += 1;
            match found {
                Some(node) if *self.tree.kind(node) != Kind::Directory => {
                    let message = format!(
                        "its path goes through the {} `{}`",
                        self.tree.kind(node).noun(),
                        super::rejection::shown(self.tree.path(node).as_bytes())
                    );
                    return Err(Rejection::new(Rule::ThroughLink, message).into());
                }
                Some(node) if self.levels.get(depth).is_some_and(|(open, _)| *open == node) => at = node,
                Some(node) => {
                    self.levels.truncate(depth);
                    let fd = confined(self.here(), component, DIRECTORY, Mode::empty())
                        .map_err(|e| Error::failed("open a directory", e))?;
                    self.levels.push((node, fd));
                    at = node;
                }
                None => {
                    self.levels.truncate(depth);
                    self.meter.member()?;
                    let mode = Mode::from_raw_mode(0o777);
                    rustix::fs::mkdirat(self.here(), component, mode)
                        .map_err(|e| Error::failed("make a directory", e))?;
                    let fd = confined(self.here(), component, DIRECTORY, Mode::empty())
                        .map_err(|e| Error::failed("open a directory", e))?;
                    rustix::fs::fchmod(&fd, mode).map_err(|e| Error::failed("set a directory's mode", e))?;
                    at = self.tree.insert(at, component, Kind::Directory);
                    self.levels.push((at, fd));
                }
            }
        }
        self.levels.truncate(depth + 1);
        Ok(at)
    }

    /// A directory of the tree by its path, walked from the root; leaves the open ones alone.
    fn open_directory(&self, path: &str) -> Result<OwnedFd, Error> {
        let root = self.levels[0].1.as_fd();
        let open = |at: BorrowedFd<'_>, name: &str| {
            confined(at, name, DIRECTORY, Mode::empty()).map_err(|e| Error::failed("open a directory", e))
        };
        let mut fd = open(root, ".")?;
        for component in path.split('/').filter(|c| !c.is_empty()) {
            fd = open(fd.as_fd(), component)?;
        }
        Ok(fd)
    }
}

impl FileWriter {
    /// Creates a file that isn't there.
    pub(super) fn create(at: BorrowedFd<'_>, name: &str, executable: bool, size: u64) -> Result<Self, Error> {
        let mode = Mode::from_raw_mode(if executable { 0o777 } else { 0o666 });
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = confined(at, name, flags, mode).map_err(|e| Error::failed("create a file", e))?;
        // The umask is the process's, not ours to change in a library.
        rustix::fs::fchmod(&fd, mode).map_err(|e| Error::failed("set a file's mode", e))?;
        Ok(FileWriter { fd: Some(fd), left: size, ends_in_hole: false, size })
    }

    /// For a member that is no file in the tree: what is written goes nowhere.
    pub(super) fn nowhere(size: u64) -> Self {
        FileWriter { fd: None, left: size, ends_in_hole: false, size }
    }

    /// Adds bytes.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        self.take(bytes.len() as u64)?;
        while let (Some(fd), false) = (&self.fd, bytes.is_empty()) {
            match rustix::io::write(fd, bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(Errno::INTR) => {}
                Err(e) => return Err(Error::failed("write a file", e)),
            }
            self.ends_in_hole = false;
        }
        Ok(())
    }

    /// Skips bytes, which then read as zeros.
    pub fn hole(&mut self, bytes: u64) -> Result<(), Error> {
        self.take(bytes)?;
        if let (Some(fd), true) = (&self.fd, bytes > 0) {
            let offset = i64::try_from(bytes).map_err(|_| Rejection::new(Rule::Sparse, "a hole beyond any file"))?;
            rustix::fs::seek(fd, rustix::fs::SeekFrom::Current(offset))
                .map_err(|e| Error::failed("skip a hole in a file", e))?;
            self.ends_in_hole = true;
        }
        Ok(())
    }

    /// Ends the file.
    ///
    /// # Errors
    /// Fewer bytes came than were announced.
    pub fn finish(self) -> Result<(), Error> {
        if self.left > 0 {
            let message = format!("{} of its {} bytes are missing", self.left, self.size);
            return Err(Rejection::new(Rule::Truncated, message).into());
        }
        if let (Some(fd), true) = (&self.fd, self.ends_in_hole) {
            rustix::fs::ftruncate(fd, self.size).map_err(|e| Error::failed("extend a file", e))?;
        }
        Ok(())
    }

    fn take(&mut self, bytes: u64) -> Result<(), Error> {
        let Some(left) = self.left.checked_sub(bytes) else {
            let message = format!("it holds more than the {} bytes that it says", self.size);
            return Err(Rejection::new(Rule::Disagreement, message).into());
        };
        self.left = left;
        Ok(())
    }
}

fn differs(known: &Kind, new: &Kind) -> Rejection {
    let message = format!("a {} of this name came before this {}", known.noun(), new.noun());
    Rejection::new(Rule::Duplicate, message)
}

/// A symbolic link's target as an archive spells it, if it can be one.
pub(super) fn link_target(target: &[u8]) -> Result<&str, Rejection> {
    let refuse = |message: &str| Err(Rejection::new(Rule::Symlink, message));
    if target.len() > TARGET_MAX {
        return refuse("the link's target is longer than 4095 bytes");
    }
    let Ok(target) = std::str::from_utf8(target) else {
        return refuse("the link's target is not UTF-8");
    };
    if target.is_empty() || target.contains('\0') {
        return refuse("the link's target is empty or contains a NUL byte");
    }
    Ok(target)
}
