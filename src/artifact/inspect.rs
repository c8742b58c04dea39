//! Looks through an unpacked tree from outside of the jail.
//!
//! The helper parses hostile bytes, so what it says it made is hearsay. [`tree`] walks what is really there and refuses
//! whatever [`super::destination`] wouldn't have written: other kinds of files, set-id bits, links that leave, more than
//! the budget, another number of files than reported.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, Mode};

use super::beneath::{DIRECTORY, confined};
use super::budget::{Budget, Meter};
use super::path::MemberPath;
use super::rejection::{Error, Rejection, Rule};
use super::tree::{Kind, NodeId, Purpose, ROOT, Tree};

/// Refuses a directory that holds anything.
///
/// # Errors
/// [`io::ErrorKind::DirectoryNotEmpty`]
pub fn is_empty(directory: BorrowedFd<'_>) -> Result<(), Error> {
    if names(directory)?.is_empty() {
        return Ok(());
    }
    Err(Error::failed("unpack into a directory that isn't empty", io::Error::from(io::ErrorKind::DirectoryNotEmpty)))
}

/// Walks a tree that a helper has unpacked and refuses what doesn't belong there.
pub fn tree(root: BorrowedFd<'_>, purpose: Purpose, budget: &Budget, files: u64) -> Result<(), Error> {
    // The ratio is between archive and tree; it was the helper's to keep.
    let meter = Meter::new(budget, u64::MAX);
    let mut tree = Tree::new(purpose);
    let mut inodes = HashSet::new();
    let mut found = 0;
    let root = open(root, c".").map_err(|e| Error::failed("open the unpacked tree", e))?;
    let mut levels = vec![(root, ROOT, MemberPath::root(), Vec::new())];
    levels[0].3 = names(levels[0].0.as_fd())?;
    while let Some((fd, node, path, todo)) = levels.last_mut() {
        let Some(name) = todo.pop() else {
            levels.pop();
            continue;
        };
        let path = path.join(&name, budget)?;
        let (fd, node) = (fd.as_fd(), *node);
        let below = member(fd, &name, &meter, &mut inodes, &mut found)
            .and_then(|kind| insert(&mut tree, node, &path, kind))
            .map_err(|e| e.at(&name))?;
        if let Some(below) = below {
            let fd = confined(fd, &*name, DIRECTORY, Mode::empty())
                .map_err(|e| Error::failed("open a directory of the unpacked tree", e))?;
            let names = names(fd.as_fd())?;
            levels.push((fd, below, path, names));
        }
    }
    tree.check_symlinks()?;
    if found != files {
        let message = format!("the unpacked tree holds {found} files, the helper reported {files}");
        return Err(Error::failed("trust the unpacking helper", io::Error::other(message)));
    }
    Ok(())
}

fn insert(tree: &mut Tree, directory: NodeId, path: &MemberPath, kind: Kind) -> Result<Option<NodeId>, Error> {
    let Some((_, name)) = path.split() else { return Ok(None) };
    tree.find(directory, name)?;
    let is_directory = kind == Kind::Directory;
    let node = tree.insert(directory, name, kind);
    Ok(is_directory.then_some(node))
}

fn member(
    at: BorrowedFd<'_>,
    name: &[u8],
    meter: &Meter,
    inodes: &mut HashSet<u64>,
    files: &mut u64,
) -> Result<Kind, Error> {
    let stat = rustix::fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW)
        .map_err(|e| Error::failed("examine the unpacked tree", e))?;
    meter.member()?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Symlink => {
            let target = rustix::fs::readlinkat(at, name, Vec::new())
                .map_err(|e| Error::failed("read a link of the unpacked tree", e))?;
            match target.into_string() {
                Ok(target) => Ok(Kind::Symlink(target)),
                Err(_) => Err(Rejection::new(Rule::Symlink, "the link's target is not UTF-8").into()),
            }
        }
        kind @ (FileType::Directory | FileType::RegularFile) => {
            if stat.st_mode & 0o6000 != 0 && kind == FileType::RegularFile {
                return Err(Rejection::new(Rule::Kind, "it has a set-id bit").into());
            }
            if kind == FileType::Directory {
                return Ok(Kind::Directory);
            }
            *files += 1;
            if stat.st_nlink == 1 || inodes.insert(stat.st_ino) {
                meter.file(u64::try_from(stat.st_size).unwrap_or(0))?;
            }
            Ok(Kind::File)
        }
        _ => Err(Rejection::new(Rule::Kind, "it is a device, FIFO or socket").into()),
    }
}

fn open(at: BorrowedFd<'_>, name: &std::ffi::CStr) -> rustix::io::Result<OwnedFd> {
    confined(at, name, DIRECTORY, Mode::empty())
}

fn names(directory: BorrowedFd<'_>) -> Result<Vec<Vec<u8>>, Error> {
    let fault = |e: rustix::io::Errno| Error::failed("list a directory", e);
    let mut names = Vec::new();
    for entry in open(directory, c".").and_then(Dir::new).map_err(fault)? {
        let entry = entry.map_err(fault)?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push(entry.file_name().to_bytes().to_vec());
        }
    }
    Ok(names)
}
