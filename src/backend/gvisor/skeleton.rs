//! The boundary's root directory, assembled by the launcher in its own mount namespace.
//!
//! Everything lies on one small tmpfs: the root with the agent in it, the bundle, the engine's state. Host directories
//! are cloned, restricted as a whole tree (read-only, no set-uid programs, no devices) while nothing can reach them yet,
//! and then moved to their place, which is looked up without following links.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, open, openat2};
use rustix::mount::{MountFlags, MoveMountFlags, OpenTreeFlags, mount, move_mount, open_tree};
use serde::{Deserialize, Serialize};

use crate::backend::{AGENT, sys};
use crate::image::{Entry, Rootfs};

/// What to assemble.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Skeleton {
    /// An empty directory that the tmpfs is mounted on.
    pub base: PathBuf,
    /// The root's content.
    pub rootfs: Rootfs,
    /// Name, directly below `/`, of the agent's own corner. Fresh for every boundary.
    pub corner: String,
    /// The artifact.
    pub workspace: Option<PathBuf>,
}

/// Where things are once the skeleton is built.
#[derive(Debug)]
pub struct Places {
    /// The engine's state.
    pub state: PathBuf,
    /// The bundle.
    pub bundle: PathBuf,
    /// Where the engine writes the sentry's pid.
    pub pid_file: PathBuf,
}

impl Skeleton {
    /// The boundary's root directory on the host, visible only in the launcher's mount namespace.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.base.join("root")
    }

    /// Path of the agent inside.
    #[must_use]
    pub fn agent(&self) -> String {
        format!("/{}/agent", self.corner)
    }

    /// Mount points inside that lead to the host, or to the skeleton itself; all read-only.
    #[must_use]
    pub fn planned(&self) -> Vec<String> {
        let mut planned = self.rootfs.bound();
        planned.push("/".to_owned());
        if self.workspace.is_some() {
            planned.push(format!("/{}/lower", self.corner));
        }
        planned
    }
}

type Failure = (String, io::Error);

fn failed<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Failure {
    let what = what.into();
    move |why| (what, why.into())
}

/// Assembles it, in a mount namespace of this process's own whose mounts are private.
///
/// # Errors
/// What was being done, and why it failed.
pub fn build(skeleton: &Skeleton, config: &str) -> Result<Places, Failure> {
    let base = &skeleton.base;
    let options = Some(c"mode=0711,size=128m");
    mount("tmpfs", base, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, options)
        .map_err(failed(format!("mount a tmpfs on {}", base.display())))?;
    let places =
        Places { state: base.join("state"), bundle: base.join("bundle"), pid_file: base.join("state/sentry.pid") };
    let root = skeleton.root();
    for directory in [&places.state, &places.bundle, &root] {
        make_directory(directory, 0o755)?;
    }
    write(&places.bundle.join("config.json"), config.as_bytes(), 0o644)?;
    let inside = Inside::open(&root)?;
    for entry in &skeleton.rootfs.entries {
        match entry {
            Entry::Directory(at) => make_directory(&below(&root, at), 0o755)?,
            Entry::Link { at, target } => std::os::unix::fs::symlink(target, below(&root, at))
                .map_err(failed(format!("make the link {}", at.display())))?,
            Entry::File { at, content } => write(&below(&root, at), content, 0o644)?,
            Entry::Bind { at, source } => inside.bind(source, at)?,
        }
    }
    let corner = Path::new("/").join(&skeleton.corner);
    make_directory(&below(&root, &corner), 0o711)?;
    make_directory(&below(&root, &corner.join("scratch")), 0o700)?;
    write(&below(&root, &corner.join("agent")), AGENT, 0o500)?;
    if let Some(workspace) = &skeleton.workspace {
        inside.bind(workspace, &corner.join("lower"))?;
    }
    // The root itself, with all that is mounted in it.
    let tree = clone(&root)?;
    move_mount(&tree, "", CWD, &root, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(failed("put the finished root in its place"))?;
    Ok(places)
}

/// `root/at`, where `at` is absolute inside.
fn below(root: &Path, at: &Path) -> PathBuf {
    root.join(at.strip_prefix("/").unwrap_or(at))
}

fn make_directory(path: &Path, mode: u32) -> Result<(), Failure> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        made => made.map_err(failed(format!("make the directory {}", path.display()))),
    }
}

fn write(path: &Path, content: &[u8], mode: u32) -> Result<(), Failure> {
    fs::write(path, content)
        .and_then(|()| fs::set_permissions(path, Permissions::from_mode(mode)))
        .map_err(failed(format!("write {}", path.display())))
}

/// A detached copy of a mount with everything below it, restricted.
fn clone(source: &Path) -> Result<OwnedFd, Failure> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    let tree = open_tree(CWD, source, flags).map_err(failed(format!("clone the mount of {}", source.display())))?;
    sys::restrict_mount(&tree, true).map_err(failed(format!("make {} read-only", source.display())))?;
    Ok(tree)
}

/// The root under construction.
struct Inside(OwnedFd);

impl Inside {
    fn open(root: &Path) -> Result<Self, Failure> {
        open(root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map(Self)
            .map_err(failed(format!("open {}", root.display())))
    }

    /// Shows the host's `source` at `at`. A place that is not there yet is made, which works on the skeleton alone: what
    /// is bound already is read-only.
    fn bind(&self, source: &Path, at: &Path) -> Result<(), Failure> {
        let what = || format!("show {} at {}", source.display(), at.display());
        let tree = clone(source)?;
        let inner = at.strip_prefix("/").unwrap_or(at);
        let look = || {
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
            openat2(&self.0, inner, OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty(), resolve)
        };
        let place = match look() {
            Err(rustix::io::Errno::NOENT) => {
                if source.is_dir() {
                    rustix::fs::mkdirat(&self.0, inner, Mode::from_raw_mode(0o755)).map_err(failed(what()))?;
                } else {
                    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                    rustix::fs::openat(&self.0, inner, flags, Mode::from_raw_mode(0o644)).map_err(failed(what()))?;
                }
                look()
            }
            found => found,
        }
        .map_err(failed(what()))?;
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(tree.as_fd(), "", place.as_fd(), "", flags).map_err(failed(what()))
    }
}
