//! Looking, opening and removing beneath a directory fd, whatever lies there: hostile trees, and what helpers left.
//!
//! [`confined`] follows no link at all, [`rooted`] follows links as if the directory were the root. Neither leads out.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, DirEntry, FileType, Mode, OFlags, RenameFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::path::Arg;

/// How anything is opened where no link is followed.
pub const CONFINED: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

/// How a directory is opened.
pub const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// `openat2` beneath a directory fd, without following any link.
pub fn confined<P: Arg + Copy>(at: BorrowedFd<'_>, name: P, flags: OFlags, mode: Mode) -> rustix::io::Result<OwnedFd> {
    resolved(at, name, flags, mode, CONFINED)
}

/// `openat2` beneath a directory fd, following links as if that were the root directory.
///
/// # Errors
/// As openat2(2).
pub fn rooted<P: Arg + Copy>(at: BorrowedFd<'_>, name: P, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    resolved(at, name, flags, Mode::empty(), ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS)
}

fn resolved<P: Arg + Copy>(
    at: BorrowedFd<'_>,
    name: P,
    flags: OFlags,
    mode: Mode,
    resolve: ResolveFlags,
) -> rustix::io::Result<OwnedFd> {
    loop {
        match rustix::fs::openat2(at, name, flags, mode, resolve) {
            // The kernel gives up when a rename happens elsewhere in the tree at the same time (openat2(2)).
            Err(Errno::AGAIN | Errno::INTR) => {}
            done => return done,
        }
    }
}

/// Removes everything below a directory, following no link, and leaves the directory.
///
/// Subdirectories are lifted into the root before their parent is removed, so that a tree of any depth takes two
/// fds: a hijacked helper must not be able to make leftovers that can't be removed. Nobody else may write there.
///
/// # Errors
/// The first entry that couldn't be removed; its neighbours are removed all the same.
pub fn empty(root: BorrowedFd<'_>) -> io::Result<()> {
    let mut lifted = 0_u64;
    loop {
        let mut first = Ok(());
        let directories = remove_files(root, &mut first)?;
        if directories.is_empty() {
            return first;
        }
        for name in directories {
            if let Err(e) = lift(root, &name, &mut lifted, &mut first) {
                keep(&mut first, e);
            }
        }
        first?;
    }
}

/// Removes one directory of the root and lifts the directories in it into the root.
fn lift(root: BorrowedFd<'_>, name: &CStr, lifted: &mut u64, first: &mut io::Result<()>) -> io::Result<()> {
    let fd = permitted(root, name, || confined(root, name, DIRECTORY, Mode::empty()))?;
    // A mode without write permission keeps its owner from emptying it, unless that is root.
    let _ = rustix::fs::fchmod(&fd, Mode::RWXU);
    for below in remove_files(fd.as_fd(), first)? {
        loop {
            *lifted += 1;
            let to = format!(".lifted-{lifted}");
            match permitted(fd.as_fd(), &below, || {
                rustix::fs::renameat_with(&fd, &*below, root, &*to, RenameFlags::NOREPLACE)
            }) {
                Err(Errno::EXIST) => {}
                done => break done?,
            }
        }
    }
    Ok(rustix::fs::unlinkat(root, name, AtFlags::REMOVEDIR)?)
}

/// Tries once more with the owner's permissions on a subdirectory.
fn permitted<T>(at: BorrowedFd<'_>, name: &CStr, act: impl Fn() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    match act() {
        Err(Errno::ACCESS) => {
            rustix::fs::chmodat(at, name, Mode::RWXU, AtFlags::empty())?;
            act()
        }
        done => done,
    }
}

/// What an entry of a directory is, asked of the file system where the listing does not say.
///
/// # Errors
/// As statat(2).
pub fn entry_kind(directory: BorrowedFd<'_>, entry: &DirEntry) -> rustix::io::Result<FileType> {
    match entry.file_type() {
        FileType::Unknown => {
            let stat = rustix::fs::statat(directory, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW)?;
            Ok(FileType::from_raw_mode(stat.st_mode))
        }
        kind => Ok(kind),
    }
}

/// Unlinks what is no directory and returns the names of the directories.
fn remove_files(fd: BorrowedFd<'_>, first: &mut io::Result<()>) -> io::Result<Vec<CString>> {
    let mut directories = Vec::new();
    for entry in Dir::new(confined(fd, ".", DIRECTORY, Mode::empty())?)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        if entry_kind(fd, &entry)? == FileType::Directory {
            directories.push(name.to_owned());
        } else if let Err(e) = rustix::fs::unlinkat(fd, name, AtFlags::empty()) {
            keep(first, e.into());
        }
    }
    Ok(directories)
}

fn keep(first: &mut io::Result<()>, error: io::Error) {
    if first.is_ok() {
        *first = Err(error);
    }
}
