//! The launcher's part that is particular to Firecracker: the VMM's root directory, and the jail around the VMM.
//!
//! The root directory lies on a tmpfs that only the launcher's mount namespace has, with the machine's files bound into
//! it read-only. As root the official jailer is started on it. As a plain user, who cannot use the jailer, a child of
//! the launcher makes it its root, gives up every capability and becomes the VMM; `/dev/kvm` is bound from the host, and
//! the user's own groups still count for it.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use rustix::fs::CWD;
use rustix::mount::{
    MountFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount, mount_bind, move_mount, open_tree, unmount,
};
use rustix::process::{Resource, Rlimit, pivot_root, setrlimit};
use rustix::thread::UnshareFlags;
use serde::{Deserialize, Serialize};

use super::config::{API, IMAGES};
use crate::backend::jail::drop_privilege;
use crate::backend::launcher::{Failure, Launcher, Main, Stage, failed};
use crate::backend::sys::{self, Forked};

/// Name of the VMM's executable; the jailer wants it to hold `firecracker`.
const NAME: &str = "firecracker";
/// Largest file that the VMM may write, bytes. It has no need to write any.
const FILE_SIZE: u64 = 1024 * 1024;
/// Descriptors that the VMM may have open.
const FILES: u64 = 256;

/// What the VMM is told on its command line; everything else goes over the API.
const ARGUMENTS: [&str; 4] = ["--api-sock", API, "--level", "Warn"];

/// What to start.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Work {
    /// An empty directory that the tmpfs is mounted on.
    pub base: PathBuf,
    /// The machine's id.
    pub id: String,
    /// Host uid and gid of the VMM, where the launcher is root.
    pub user: u32,
    /// Files for the VMM: name below [`IMAGES`], and where they are.
    pub files: Vec<(String, PathBuf)>,
    /// Version of the control groups that the boundary's are, and their directory relative to the hierarchy's root.
    pub cgroup: Option<(u8, String)>,
}

/// Where the VMM's root directory is, as the launcher sees it.
#[must_use]
pub fn root(base: &Path, id: &str) -> PathBuf {
    base.join("jail").join(NAME).join(id).join("root")
}

/// Starts the VMM. `descriptors` are its executable and, as root, the jailer's.
///
/// # Errors
/// What failed; the launcher ends everything.
pub fn raise(launcher: &mut Launcher, work: &Work, descriptors: Vec<OwnedFd>, until: Instant) -> Result<(), Failure> {
    let rootless = launcher.rootless();
    let files = |what: &str| failed::<io::Error>(Stage::Files, what.to_owned());
    let mut descriptors = descriptors.into_iter();
    let vmm = descriptors.next().ok_or(io::ErrorKind::InvalidData.into()).map_err(files("take the VMM"))?;
    // Device nodes are the jailer's to make.
    mount("tmpfs", &work.base, "tmpfs", MountFlags::NOSUID, Some(c"mode=0711,size=64m"))
        .map_err(failed(Stage::Files, format!("mount a tmpfs on {}", work.base.display())))?;
    let root = root(&work.base, &work.id);
    for directory in ["", "run", "dev", &IMAGES[1..]] {
        let path = root.join(directory);
        fs::create_dir_all(&path).map_err(files("make the VMM's root directory"))?;
        fs::set_permissions(&path, Permissions::from_mode(0o755)).map_err(files("open the VMM's root directory"))?;
    }
    for (name, source) in &work.files {
        let at = root.join(&IMAGES[1..]).join(name);
        bind(source, &at).map_err(failed(Stage::Files, format!("show {} to the VMM", source.display())))?;
    }
    if rootless {
        copy(&vmm, &root.join(NAME)).map_err(files("copy the VMM's executable"))?;
        File::create(root.join("dev/kvm")).map_err(files("make the place for /dev/kvm"))?;
        mount_bind("/dev/kvm", root.join("dev/kvm")).map_err(failed(Stage::Files, "show /dev/kvm to the VMM"))?;
        return start(launcher, &root);
    }
    chown(root.join("run"), Some(work.user), Some(work.user)).map_err(files("hand the VMM its directory"))?;
    let executable = work.base.join(NAME);
    copy(&vmm, &executable).map_err(files("copy the VMM's executable"))?;
    let jailer = descriptors.next().ok_or(io::ErrorKind::InvalidData.into()).map_err(files("take the jailer"))?;
    let mut command = launcher.command(&jailer, "jailer").map_err(failed(Stage::Engine, "jailer"))?;
    command.stdout(launcher.log().map_err(failed(Stage::Engine, "jailer"))?);
    command.args(["--id", &work.id]).arg("--exec-file").arg(&executable);
    command.args(["--uid", &work.user.to_string(), "--gid", &work.user.to_string()]);
    command.arg("--chroot-base-dir").arg(work.base.join("jail"));
    // The launcher stands in fresh ones; named here so that the jailer joins these and no others.
    command.args(["--new-pid-ns", "--netns", "/proc/self/ns/net"]);
    command.args(["--resource-limit", &format!("fsize={FILE_SIZE}"), "--resource-limit", &format!("no-file={FILES}")]);
    if let Some((version, parent)) = &work.cgroup {
        command.args(["--cgroup-version", &version.to_string()]);
        if *version == 2 {
            command.args(["--parent-cgroup", parent]);
        }
    }
    command.arg("--").args(ARGUMENTS);
    launcher.main_is(Main::File(root.join(format!("{NAME}.pid"))));
    launcher.run(command, "jailer", until)
}

/// Shows one file of the host's, read-only.
fn bind(source: &Path, at: &Path) -> io::Result<()> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let tree = open_tree(CWD, source, flags)?;
    sys::restrict_mount(&tree, true)?;
    File::create_new(at)?;
    Ok(move_mount(tree.as_fd(), "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

/// Copies an open executable, from its beginning.
fn copy(from: &OwnedFd, to: &Path) -> io::Result<()> {
    // By procfs, for a position of its own: the descriptor's is shared with the runner's.
    let mut from = File::open(format!("/proc/self/fd/{}", from.as_raw_fd()))?;
    io::copy(&mut from, &mut File::create_new(to)?)?;
    fs::set_permissions(to, Permissions::from_mode(0o555))
}

/// The plain user's way: a child that confines itself and becomes the VMM.
fn start(launcher: &mut Launcher, root: &Path) -> Result<(), Failure> {
    let engine = |what: &str| failed::<io::Error>(Stage::Engine, what.to_owned());
    let out = launcher.log().map_err(engine("jail"))?;
    match sys::fork().map_err(engine("fork"))? {
        Forked::Parent(pid) => {
            launcher.main_is(Main::Child(pid.as_raw_nonzero().get().unsigned_abs()));
            Ok(())
        }
        Forked::Child => {
            let become_vmm = || -> io::Result<()> {
                confine(root)?;
                let mut command = Command::new(format!("/{NAME}"));
                command.env_clear().args(ARGUMENTS);
                Err(command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out.try_clone()?).exec())
            };
            if let Err(why) = become_vmm() {
                let _ = writeln!(&out, "the VMM could not be jailed: {why}");
            }
            sys::exit_now(70)
        }
    }
}

/// Makes `root` the root directory, and gives up everything that the VMM has no use for.
fn confine(root: &Path) -> io::Result<()> {
    sys::unshare(UnshareFlags::NEWNS)?;
    rustix::mount::mount_bind_recursive(root, root)?;
    std::env::set_current_dir(root)?;
    File::create_new("dev/null")?;
    mount_bind("/dev/null", "dev/null")?;
    pivot_root(".", ".")?;
    unmount(".", UnmountFlags::DETACH)?;
    std::env::set_current_dir("/")?;
    for (resource, value) in [(Resource::Fsize, FILE_SIZE), (Resource::Nofile, FILES), (Resource::Core, 0)] {
        setrlimit(resource, Rlimit { current: Some(value), maximum: Some(value) })?;
    }
    Ok(drop_privilege()?)
}
