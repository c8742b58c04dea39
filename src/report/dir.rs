//! A directory that a run replaces as a whole: claimed before anything else, built beside, swapped by rename.
//!
//! The workspace it lies in comes with a pull request, so what is found under the name may be anything: a link, somebody
//! else's directory, a directory with files we never wrote. All of that is refused. Every look and every removal goes through
//! directory descriptors and follows no link.
//!
//! The directory being built is a hidden sibling, `.<name>.plimsoll-<random>`, held by a lock (`flock`) for as long as its run lives;
//! one that nobody holds was left by a killed run and is removed at the next claim.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, FlockOperation, Gid, Mode, OFlags, RenameFlags, ResolveFlags, StatxAttributes,
    StatxFlags, Uid, chownat, fstat, mkdirat, openat, openat2, renameat_with, statat, statx, unlinkat,
};
use rustix::io::Errno;

use super::staging::Staging;
use crate::artifact::beneath::{DIRECTORY, entry_kind};
use crate::lock::Lock;

/// Nesting that removal and giving away go into; what plimsoll writes is far flatter.
const MAX_DEPTH: usize = 64;
/// What is between the name of a directory and the random part of the name of the one being built for it.
const INFIX: &str = ".plimsoll-";
pub(super) const MARKER: &str = ".gitignore";

/// What kind of directory it is.
#[derive(Debug)]
pub(super) struct Kind {
    /// For messages: `report directory`.
    pub what: &'static str,
    /// The flag that names another one.
    pub flag: &'static str,
    /// Content of its `.gitignore`, which marks it as ours.
    pub marker: &'static str,
    /// Whether an entry of that name at the top may be ours; the flag says whether it is a directory.
    pub ours: fn(&OsStr, bool) -> bool,
    /// A name further down that is not ours, where more is known than the top.
    pub stranger_below: fn(BorrowedFd<'_>) -> Option<OsString>,
}

/// Who the files are to belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

impl Owner {
    /// This process's effective ids.
    #[must_use]
    pub fn of_process() -> Self {
        Self { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() }
    }
}

/// Why a directory can't be had.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// The path has no last component.
    #[error("{0} names no directory that could be replaced")]
    Unusable(PathBuf),
    /// Something else than a directory of ours has the name.
    #[error("the {what} {path} {reason}; it is left alone")]
    Refused {
        /// `report directory` or `outputs directory`.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// What is wrong: `is a symbolic link`.
        reason: String,
        /// What to do.
        help: String,
    },
    /// Another run is writing to it.
    #[error("another run is writing to the {what} {path}")]
    Busy {
        /// `report directory` or `outputs directory`.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// What to do.
        help: String,
    },
    /// Input or output failed.
    #[error("failed to {action} {path}")]
    Io {
        /// What was being done.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

impl ClaimError {
    /// What the user can do about it.
    #[must_use]
    pub fn help(&self) -> &str {
        match self {
            Self::Refused { help, .. } | Self::Busy { help, .. } => help,
            Self::Unusable(_) => "name a directory of its own, as in `--report-dir plimsoll-report`",
            Self::Io { .. } => {
                "it has to be where this user can write, with room: --report-dir and --outputs-dir name other places"
            }
        }
    }
}

/// A claimed name, and the directory being built for it.
#[derive(Debug)]
pub(super) struct Slot {
    path: PathBuf,
    parent: OwnedFd,
    name: OsString,
    /// Device and inode of the old directory.
    old: Option<(u64, u64)>,
    staging: PathBuf,
    staging_name: OsString,
    /// Holds the lock.
    staging_fd: Lock<OwnedFd>,
    owner: Owner,
    finished: bool,
}

impl Slot {
    /// Claims `path`: an old directory of ours is emptied at once, `first` before all else; a fresh one is begun beside it.
    pub(super) fn claim(
        path: &Path,
        kind: &'static Kind,
        first: Option<&str>,
        owner: Owner,
    ) -> Result<Self, ClaimError> {
        let unusable = || ClaimError::Unusable(path.to_path_buf());
        let path = std::path::absolute(path).map_err(|_| unusable())?;
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else { return Err(unusable()) };
        let io = |action: &'static str, path: &Path| {
            let path = path.to_path_buf();
            move |source: Errno| ClaimError::Io { action, path, source: source.into() }
        };
        std::fs::create_dir_all(above).map_err(|source| ClaimError::Io {
            action: "create",
            path: above.to_path_buf(),
            source,
        })?;
        // Whoever names the path may lead it through links; from here on it is this directory.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent = openat(CWD, above, flags, Mode::empty()).map_err(io("open", above))?;

        let old = match openat(&parent, name, DIRECTORY, Mode::empty()) {
            Ok(old) => Some(old),
            Err(Errno::NOENT) => None,
            Err(e) => {
                let reason = match statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink => "is a symbolic link",
                    Ok(stat) if FileType::from_raw_mode(stat.st_mode) != FileType::Directory => "is not a directory",
                    _ => return Err(io("open", &path)(e)),
                };
                return Err(refused(kind, &path, reason.to_owned()));
            }
        };
        if let Some(old) = &old {
            inspect(old.as_fd(), kind, &path, owner)?;
        }
        remove_stale(parent.as_fd(), name, kind, &path, owner)?;
        let old = match old {
            None => None,
            Some(old) => {
                if let Some(first) = first {
                    unlink_if_there(old.as_fd(), OsStr::new(first)).map_err(io("invalidate", &path.join(first)))?;
                }
                empty(old.as_fd(), 0, &[OsStr::new(MARKER)]).map_err(io("empty", &path))?;
                let stat = fstat(&old).map_err(io("look at", &path))?;
                Some((stat.st_dev, stat.st_ino))
            }
        };

        let mut random = [0u8; 8];
        getrandom::fill(&mut random).map_err(|_| io("name", &path)(Errno::IO))?;
        let mut staging_name = prefix(name);
        staging_name.push(hex::encode(random));
        let staging = above.join(&staging_name);
        let mode = Mode::from_raw_mode(0o755);
        mkdirat(&parent, &staging_name, mode).map_err(io("create", &staging))?;
        let staging_fd = openat(&parent, &staging_name, DIRECTORY, Mode::empty()).map_err(io("open", &staging))?;
        let staging_fd =
            Lock::of(staging_fd, FlockOperation::NonBlockingLockExclusive).map_err(io("lock", &staging))?;
        let name = name.to_owned();
        let slot = Self { path, parent, name, old, staging, staging_name, staging_fd, owner, finished: false };
        std::fs::write(slot.staging.join(MARKER), kind.marker).map_err(|source| ClaimError::Io {
            action: "write",
            path: slot.staging.join(MARKER),
            source,
        })?;
        Ok(slot)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn staging(&self) -> &Path {
        &self.staging
    }

    pub(super) fn staging_fd(&self) -> BorrowedFd<'_> {
        self.staging_fd.as_fd()
    }

    /// The directory being built, to be written down.
    pub(super) fn being_built(&self) -> io::Result<Staging> {
        let stat = fstat(&*self.staging_fd)?;
        Ok(Staging::new(self.staging.clone(), stat.st_dev, stat.st_ino))
    }

    /// Whether anything but the marker is in the directory being built.
    pub(super) fn has_content(&self) -> io::Result<bool> {
        Ok(entries(self.staging_fd.as_fd())?.iter().any(|(name, _)| name != MARKER))
    }

    /// Puts the new directory in the place of the old one, and removes the old one.
    pub(super) fn swap(mut self) -> io::Result<()> {
        give_away(self.staging_fd.as_fd(), self.owner)?;
        let (from, to) = (&self.staging_name, &self.name);
        match self.old {
            None => renameat_with(&self.parent, from, &self.parent, to, RenameFlags::NOREPLACE)?,
            Some(expected) => {
                let id =
                    |name: &OsStr| statat(&self.parent, name, AtFlags::SYMLINK_NOFOLLOW).map(|s| (s.st_dev, s.st_ino));
                let changed = || io::Error::other(format!("{} was replaced while the run lasted", self.path.display()));
                if id(to)? != expected {
                    return Err(changed());
                }
                match renameat_with(&self.parent, from, &self.parent, to, RenameFlags::EXCHANGE) {
                    Ok(()) => {
                        if id(from)? != expected {
                            renameat_with(&self.parent, from, &self.parent, to, RenameFlags::EXCHANGE)?;
                            return Err(changed());
                        }
                        remove(self.parent.as_fd(), from, 0)?;
                    }
                    // Not every file system exchanges. The old directory holds nothing but its marker by now.
                    Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                        remove(self.parent.as_fd(), to, 0)?;
                        renameat_with(&self.parent, from, &self.parent, to, RenameFlags::NOREPLACE).or_else(
                            |e| match e {
                                Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP => {
                                    rustix::fs::renameat(&self.parent, from, &self.parent, to)
                                }
                                e => Err(e),
                            },
                        )?;
                    }
                    Err(e) => return Err(e.into()),
                }
            }
        }
        self.finished = true;
        Ok(())
    }

    /// Leaves no directory under the name: nothing new was made, and the old one is empty.
    pub(super) fn withdraw(mut self) -> io::Result<()> {
        self.finished = true;
        remove(self.parent.as_fd(), &self.staging_name, 0)?;
        if let Some(expected) = self.old
            && let Ok(stat) = statat(&self.parent, &self.name, AtFlags::SYMLINK_NOFOLLOW)
            && (stat.st_dev, stat.st_ino) == expected
        {
            remove(self.parent.as_fd(), &self.name, 0)?;
        }
        Ok(())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if !self.finished {
            let _ = remove(self.parent.as_fd(), &self.staging_name, 0);
        }
    }
}

fn refused(kind: &Kind, path: &Path, reason: String) -> ClaimError {
    let help = format!("remove it, or name another directory with {}", kind.flag);
    ClaimError::Refused { what: kind.what, path: path.to_path_buf(), reason, help }
}

/// Refuses a directory that isn't ours to empty.
fn inspect(dir: BorrowedFd<'_>, kind: &Kind, path: &Path, owner: Owner) -> Result<(), ClaimError> {
    let io = |source: Errno| ClaimError::Io { action: "look at", path: path.to_path_buf(), source: source.into() };
    let stat = fstat(dir).map_err(io)?;
    if stat.st_uid != owner.uid && stat.st_uid != rustix::process::geteuid().as_raw() {
        return Err(refused(kind, path, format!("belongs to another user (uid {})", stat.st_uid)));
    }
    let mount = statx(dir, "", AtFlags::EMPTY_PATH, StatxFlags::empty()).map_err(io)?;
    if mount.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        let reason = "is a mount point, which cannot be replaced as a whole".to_owned();
        let help = format!("name a directory below it with {}", kind.flag);
        return Err(ClaimError::Refused { what: kind.what, path: path.to_path_buf(), reason, help });
    }
    let all = entries(dir).map_err(io)?;
    if all.is_empty() {
        return Ok(());
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let marker = openat(dir, MARKER, flags, Mode::empty()).ok().and_then(|fd| {
        let mut head = vec![0u8; kind.marker.len() + 1];
        let n = rustix::io::read(&fd, &mut head).ok()?;
        head.truncate(n);
        Some(head)
    });
    if marker.as_deref() != Some(kind.marker.as_bytes()) {
        return Err(refused(kind, path, format!("has files, and no {MARKER} of plimsoll's")));
    }
    let stranger = all.iter().find(|(name, directory)| name != MARKER && !(kind.ours)(name, *directory));
    let stranger = stranger.map(|(name, _)| name.clone()).or_else(|| (kind.stranger_below)(dir));
    match stranger {
        Some(name) => {
            let shown = crate::text::Untrusted::new(name.as_bytes()).for_terminal(80);
            Err(refused(kind, path, format!("has `{shown}` in it, which plimsoll did not write")))
        }
        None => Ok(()),
    }
}

/// A name below `steps` that is no log file of a step.
pub(super) fn stranger_in_steps(dir: BorrowedFd<'_>) -> Option<OsString> {
    let steps = openat(dir, "steps", DIRECTORY, Mode::empty()).ok()?;
    for (step, directory) in entries(steps.as_fd()).ok()? {
        if !directory || !super::write::is_step_directory(&step) {
            return Some(step);
        }
        let logs = openat(&steps, &step, DIRECTORY, Mode::empty()).ok()?;
        let known = |name: &OsString, directory: bool| !directory && (name == "stdout.log" || name == "stderr.log");
        if let Some((name, _)) = entries(logs.as_fd()).ok()?.into_iter().find(|(name, dir)| !known(name, *dir)) {
            return Some(name);
        }
    }
    None
}

/// Removes what killed runs left beside `name`; fails if one of them still lives.
fn remove_stale(
    parent: BorrowedFd<'_>,
    name: &OsStr,
    kind: &Kind,
    path: &Path,
    owner: Owner,
) -> Result<(), ClaimError> {
    let io =
        |source: Errno| ClaimError::Io { action: "clean up beside", path: path.to_path_buf(), source: source.into() };
    let prefix = prefix(name);
    let ours = |found: &OsStr| found.as_bytes().starts_with(prefix.as_bytes()) && is_staging_name(found);
    for (found, directory) in entries(parent).map_err(io)? {
        if !directory || !ours(&found) {
            continue;
        }
        let Ok(fd) = openat(parent, &found, DIRECTORY, Mode::empty()) else { continue };
        let stat = fstat(&fd).map_err(io)?;
        if stat.st_uid != owner.uid && stat.st_uid != rustix::process::geteuid().as_raw() {
            continue;
        }
        match Lock::of(fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(_lock) => remove(parent, &found, 0).map_err(io)?,
            Err(Errno::WOULDBLOCK) => {
                let help = format!("give each run its own directory with {}", kind.flag);
                return Err(ClaimError::Busy { what: kind.what, path: path.to_path_buf(), help });
            }
            Err(e) => return Err(io(e)),
        }
    }
    Ok(())
}

fn prefix(name: &OsStr) -> OsString {
    let mut prefix = OsString::from(".");
    prefix.push(name);
    prefix.push(INFIX);
    prefix
}

/// Whether a name is that of a directory being built.
pub(super) fn is_staging_name(name: &OsStr) -> bool {
    let bytes = name.as_bytes();
    let Some(split) = bytes.len().checked_sub(16) else { return false };
    let (rest, random) = bytes.split_at(split);
    rest.starts_with(b".") && rest.ends_with(INFIX.as_bytes()) && random.iter().all(u8::is_ascii_hexdigit)
}

/// Names in a directory, and whether each is a directory itself. Links are none.
pub(super) fn entries(dir: BorrowedFd<'_>) -> rustix::io::Result<Vec<(OsString, bool)>> {
    let mut all = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
        if name == "." || name == ".." {
            continue;
        }
        let directory = entry_kind(dir, &entry)? == FileType::Directory;
        all.push((name, directory));
    }
    Ok(all)
}

/// Opens a regular file beneath a directory, through no link.
pub(crate) fn open_beneath(root: BorrowedFd<'_>, path: &str) -> io::Result<(File, u64)> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let fd = openat2(root, path, flags, Mode::empty(), resolve)?;
    let stat = fstat(&fd)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(io::Error::other("is not a regular file"));
    }
    Ok((File::from(fd), u64::try_from(stat.st_size).unwrap_or(0)))
}

fn unlink_if_there(dir: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<()> {
    match unlinkat(dir, name, AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(()),
        Err(Errno::ISDIR) => remove(dir, name, 0),
        other => other,
    }
}

/// Removes everything in a directory but what `keep` names. Links are removed, never followed.
fn empty(dir: BorrowedFd<'_>, depth: usize, keep: &[&OsStr]) -> rustix::io::Result<()> {
    if depth > MAX_DEPTH {
        return Err(Errno::LOOP);
    }
    for (name, directory) in entries(dir)? {
        if keep.contains(&name.as_os_str()) {
            continue;
        }
        if directory {
            remove(dir, &name, depth + 1)?;
        } else {
            unlink_if_there(dir, &name)?;
        }
    }
    Ok(())
}

/// Removes a directory and everything in it.
pub(super) fn remove(parent: BorrowedFd<'_>, name: &OsStr, depth: usize) -> rustix::io::Result<()> {
    let dir = openat(parent, name, DIRECTORY, Mode::empty())?;
    empty(dir.as_fd(), depth, &[])?;
    unlinkat(parent, name, AtFlags::REMOVEDIR)
}

/// Gives a directory and everything in it to its owner, if that is somebody else than this process.
fn give_away(dir: BorrowedFd<'_>, owner: Owner) -> io::Result<()> {
    fn below(dir: BorrowedFd<'_>, uid: Uid, gid: Gid, depth: usize) -> rustix::io::Result<()> {
        if depth > MAX_DEPTH {
            return Err(Errno::LOOP);
        }
        for (name, directory) in entries(dir)? {
            chownat(dir, &name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
            if directory {
                below(openat(dir, &name, DIRECTORY, Mode::empty())?.as_fd(), uid, gid, depth + 1)?;
            }
        }
        Ok(())
    }
    if owner == Owner::of_process() {
        return Ok(());
    }
    let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
    below(dir, uid, gid, 0)?;
    rustix::fs::fchown(dir, Some(uid), Some(gid))?;
    Ok(())
}
