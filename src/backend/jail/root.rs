//! The jail's private root: a small tmpfs, read-only once it is built, with the planned mounts in it.
//!
//! Host directories are cloned as detached mounts before anything is private: as root while the process still has the
//! host's rights (the jail's uid may not be able to reach them by path), as a plain user right after unsharing.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, fstat, mkdir, mkdirat, openat, readlinkat, rmdir, statat, symlinkat,
};
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount, mount_change, mount_remount,
    move_mount, open_tree, unmount,
};
use rustix::process::{chdir, pivot_root};

use super::{Access, INSIDE_ID, SetupBind};
use crate::artifact::beneath::DIRECTORY;
use crate::backend::sys;

/// Where the private root is put together. Without `/proc` the runner could not have started us.
const BENCH: &str = "/proc";
/// Where the memory behind a scratch view is mounted, relative to the root; nothing is opened there.
pub const SCRATCH_MOUNT: &str = ".scratch";
/// Where the tree below a scratch view is mounted while the view is made.
const LOWER: &str = ".lower";

/// A host directory or file, cloned as a mount that is attached nowhere.
#[derive(Debug)]
pub(super) struct Cloned {
    tree: OwnedFd,
    directory: bool,
}

/// Clones what a bind names, with everything below it.
pub(super) fn clone(bind: &SetupBind) -> io::Result<Cloned> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    let tree = open_tree(CWD, OsStr::from_bytes(&bind.source), flags)?;
    sys::restrict_mount(&tree, !matches!(bind.access, Access::Own))?;
    let directory = FileType::from_raw_mode(fstat(&tree)?.st_mode).is_dir();
    Ok(Cloned { tree, directory })
}

/// Builds the private root with the planned mounts and moves into it; says how each bind was made.
pub(super) fn build(binds: &[SetupBind], cloned: Vec<Cloned>) -> io::Result<Vec<String>> {
    let options = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    mount("tmpfs", BENCH, "tmpfs", options, Some(c"size=64k,nr_inodes=128,mode=755"))?;
    chdir(BENCH)?;
    let mut made = Vec::new();
    for (bind, cloned) in binds.iter().zip(cloned) {
        let target = bind.target.trim_start_matches('/');
        made.push(match bind.access {
            Access::ReadOnly | Access::Own => {
                make_target(target, cloned.directory)?;
                attach(&cloned.tree, target)?;
                if bind.access == Access::Own { "writable".to_owned() } else { "read-only".to_owned() }
            }
            Access::Scratch { bytes } => scratch(&cloned, target, bytes)?,
        });
    }
    pivot_root(".", ".")?;
    // The old root is stacked on the new one at the same place: this detaches it.
    unmount(".", UnmountFlags::DETACH)?;
    mount_remount("/", options | MountFlags::RDONLY | MountFlags::BIND, c"")?;
    chdir("/")?;
    Ok(made)
}

fn attach(tree: &OwnedFd, target: &str) -> io::Result<()> {
    Ok(move_mount(tree, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

/// Makes the place for a mount below the current directory.
fn make_target(target: &str, directory: bool) -> io::Result<()> {
    let mut path = String::new();
    let parts: Vec<&str> = target.split('/').collect();
    for (i, part) in parts.iter().enumerate() {
        if part.is_empty() || *part == "." || *part == ".." {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a mount point is not a plain absolute path"));
        }
        if i > 0 {
            path.push('/');
        }
        path.push_str(part);
        if i + 1 == parts.len() && !directory {
            File::create_new(&path)?;
        } else if let Err(e) = mkdir(&path, Mode::from_raw_mode(0o755))
            && e != rustix::io::Errno::EXIST
        {
            return Err(e.into());
        }
    }
    Ok(())
}

/// A writable view of a tree: an overlay, or a copy. Both live in a tmpfs of `bytes`.
fn scratch(cloned: &Cloned, target: &str, bytes: u64) -> io::Result<String> {
    make_target(target, true)?;
    mkdir(SCRATCH_MOUNT, Mode::from_raw_mode(0o755))?;
    let inodes = (bytes / 4096).clamp(1024, 1 << 20);
    let options = std::ffi::CString::new(format!("size={bytes},nr_inodes={inodes},mode=755"))?;
    mount("tmpfs", SCRATCH_MOUNT, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, Some(options.as_c_str()))?;
    for name in ["up", "work"] {
        mkdir(format!("{SCRATCH_MOUNT}/{name}"), Mode::from_raw_mode(0o777))?;
    }
    let overlaid = overlay(cloned, target);
    match overlaid {
        Ok(()) => Ok("an overlay in memory".to_owned()),
        Err(why) => {
            copy_directory(&cloned.tree, &openat(CWD, format!("{SCRATCH_MOUNT}/up"), DIRECTORY, Mode::empty())?, 0)?;
            let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
            let up = open_tree(CWD, format!("{SCRATCH_MOUNT}/up"), flags)?;
            attach(&up, target)?;
            Ok(format!("a copy in memory ({why})"))
        }
    }
}

fn overlay(cloned: &Cloned, target: &str) -> io::Result<()> {
    // An overlay copies a file up with its owner, which fails for an owner that the user namespace does not know.
    if fstat(&cloned.tree)?.st_uid != INSIDE_ID {
        return Err(io::Error::other("the tree belongs to another uid"));
    }
    mkdir(LOWER, Mode::from_raw_mode(0o755))?;
    attach(&cloned.tree, LOWER)?;
    let options = format!("lowerdir={LOWER},upperdir={SCRATCH_MOUNT}/up,workdir={SCRATCH_MOUNT}/work,userxattr");
    let options = std::ffi::CString::new(options)?;
    let mounted = mount("overlay", target, "overlay", MountFlags::NOSUID | MountFlags::NODEV, Some(options.as_c_str()));
    // The overlay keeps its own hold of the tree. The detached clone stays readable for a copy through its descriptor.
    unmount(LOWER, UnmountFlags::DETACH)?;
    rmdir(LOWER)?;
    Ok(mounted?)
}

/// Deeper trees than any unpacker of ours makes.
const MAX_DEPTH: u32 = 128;

/// Copies regular files, directories and symbolic links; leaves anything else out.
fn copy_directory(from: &OwnedFd, to: &OwnedFd, depth: u32) -> io::Result<()> {
    if depth > MAX_DEPTH {
        return Err(io::Error::other("the tree is too deep to copy"));
    }
    let listed = openat(from, ".", DIRECTORY, Mode::empty())?;
    for entry in Dir::read_from(&listed)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let stat = statat(&listed, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let mode = Mode::from_raw_mode(stat.st_mode & 0o777);
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                mkdirat(to, name, mode | Mode::RWXU)?;
                let below = openat(&listed, name, DIRECTORY, Mode::empty())?;
                copy_directory(&below, &openat(to, name, DIRECTORY, Mode::empty())?, depth + 1)?;
            }
            FileType::RegularFile => {
                let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let mut source = File::from(openat(&listed, name, OFlags::RDONLY | flags, Mode::empty())?);
                let create = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | flags;
                let mut copy = File::from(openat(to, name, create, mode | Mode::RUSR | Mode::WUSR)?);
                io::copy(&mut source, &mut copy)?;
            }
            FileType::Symlink => symlinkat(&readlinkat(&listed, name, Vec::new())?, to, name)?,
            _ => {}
        }
    }
    Ok(())
}

/// Whether a path inside is a directory.
pub(super) fn is_directory(path: &str) -> bool {
    Path::new(path).is_dir()
}
