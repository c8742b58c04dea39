//! What the program finds: `/workspace`, `/tmp`, `/run` and its script.
//!
//! The host provides the directory that the agent's executable lies in, under a fresh name below `/`. Beside the
//! executable there is `scratch`, an empty directory, and `lower`, the read-only artifact, if there is one. One
//! `tmpfs` on `scratch`, sized by the disk limit, takes everything that the program writes: the overlay's upper layer,
//! `/tmp`, `/var/tmp`, `/run` and `/dev/shm`. In a microVM the agent makes the same directory itself, and the `tmpfs` lies
//! over the whole root.

use std::ffi::CString;
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::statvfs;
use rustix::mount::{MountFlags, mount, mount_bind};

use super::group::Group;
use super::machine;
use crate::wire::Dispatch;

/// Where the artifact appears.
pub const WORKSPACE: &str = "/workspace";
/// Where the script is; its name shows in a shell's own error messages.
const STEP: &str = "/run/plimsoll";
/// What no mount of the program's allows.
const RESTRICTED: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);

/// The agent's own corner of the boundary's tree.
#[derive(Debug)]
pub struct Corner {
    path: PathBuf,
    machine: bool,
    /// What could be made before anything was dispatched.
    staged: Option<Result<Place, PlaceError>>,
}

impl Corner {
    /// The directory that a container's agent was started from.
    ///
    /// # Errors
    /// If it cannot be found.
    pub fn of_container() -> io::Result<Self> {
        let exe = std::env::current_exe()?;
        Ok(Self { path: exe.parent().unwrap_or(Path::new("/")).to_owned(), machine: false, staged: None })
    }

    /// The one that [`super::machine`] made in a microVM; its scratch space is mounted.
    #[must_use]
    pub const fn of_machine(path: PathBuf) -> Self {
        Self { path, machine: true, staged: None }
    }

    /// Makes what takes a while and depends on nothing that is dispatched. What fails is told at dispatch.
    pub fn stage(&mut self) {
        if self.machine && self.staged.is_none() {
            self.staged = Some(Place::of_machine(&self.path));
        }
    }
}

/// What the program finds, once it is assembled.
#[derive(Debug)]
pub struct Place {
    scratch: PathBuf,
    /// The whole tree can be written.
    machine: bool,
    /// The program's control group, in a machine of its own.
    group: Option<Group>,
}

/// What failed, in words, and why.
#[derive(Debug)]
pub struct PlaceError {
    what: String,
    why: io::Error,
}

impl std::fmt::Display for PlaceError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot {}: {}", self.what, self.why)
    }
}

fn failed<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> PlaceError {
    let what = what.into();
    move |why| PlaceError { what, why: why.into() }
}

impl Place {
    /// Assembles everything. Called once, at dispatch.
    pub fn assemble(corner: &mut Corner, dispatch: &Dispatch) -> Result<Self, PlaceError> {
        let place = if corner.machine {
            machine::wake(dispatch).map_err(failed("wake the machine"))?;
            machine::mount_drives(&corner.path, &dispatch.drives).map_err(failed("mount the drives"))?;
            let mut place = corner.staged.take().unwrap_or_else(|| Self::of_machine(&corner.path))?;
            if let Some(group) = &mut place.group {
                group.bound(dispatch.limits.pids).map_err(failed("bound the control group"))?;
            }
            place
        } else {
            Self::of_container(&corner.path, dispatch.limits.disk_bytes)?
        };
        place.workspace(&corner.path.join("lower"))?;
        Ok(place)
    }

    /// Everything but the workspace in a microVM, where the space for writing is mounted.
    fn of_machine(corner: &Path) -> Result<Self, PlaceError> {
        let group = Group::make(corner).map_err(failed("make a control group"))?;
        let place = Self { scratch: corner.join("scratch"), machine: true, group: Some(group) };
        place.directories()?;
        Ok(place)
    }

    /// Everything but the workspace in a container.
    fn of_container(corner: &Path, disk_bytes: u64) -> Result<Self, PlaceError> {
        let place = Self { scratch: corner.join("scratch"), machine: false, group: None };
        let options = CString::new(format!("size={disk_bytes},mode=0711"))
            .map_err(|e| PlaceError { what: "size the scratch space".to_owned(), why: e.into() })?;
        mount("tmpfs", &place.scratch, "tmpfs", RESTRICTED, Some(options.as_c_str()))
            .map_err(failed("mount scratch space"))?;
        place.directories()?;
        Ok(place)
    }

    /// The directories that a program may write beside its workspace.
    fn directories(&self) -> Result<(), PlaceError> {
        for (name, at, mode) in [
            ("tmp", "/tmp", 0o1777),
            ("var-tmp", "/var/tmp", 0o1777),
            ("run", "/run", 0o755),
            ("shm", "/dev/shm", 0o1777),
        ] {
            self.bind(name, at, mode)?;
        }
        Ok(())
    }

    fn directory(&self, name: &str, mode: u32) -> Result<PathBuf, PlaceError> {
        let path = self.scratch.join(name);
        DirBuilder::new().mode(mode).create(&path).map_err(failed(format!("create {}", path.display())))?;
        // The mask that the agent was started with does not count.
        fs::set_permissions(&path, Permissions::from_mode(mode)).map_err(failed(format!("open {}", path.display())))?;
        Ok(path)
    }

    fn bind(&self, name: &str, at: &str, mode: u32) -> Result<(), PlaceError> {
        // Devices are the agent's own file system, so what is missing there can be made; as everything in a microVM.
        let there = fs::symlink_metadata(at).is_ok_and(|m| m.is_dir())
            || ((self.machine || at.starts_with("/dev/")) && fs::create_dir(at).is_ok());
        if !there {
            return Ok(());
        }
        let source = self.directory(name, mode)?;
        // A bind keeps what its source's mount forbids, so there is nothing to restrict again.
        mount_bind(&source, at).map_err(failed(format!("mount {at}")))
    }

    fn workspace(&self, lower: &Path) -> Result<(), PlaceError> {
        // Nobody but the overlay itself reaches its layers.
        let layers = self.directory("layers", 0o700)?;
        let (upper, work) = (self.directory("layers/upper", 0o777)?, self.directory("layers/work", 0o700)?);
        let _ = layers;
        if lower.is_dir() {
            let options =
                format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
            let options = CString::new(options)
                .map_err(|e| PlaceError { what: "name the workspace's layers".to_owned(), why: e.into() })?;
            mount("overlay", WORKSPACE, "overlay", RESTRICTED, Some(options.as_c_str()))
        } else {
            mount_bind(&upper, WORKSPACE)
        }
        .map_err(failed("mount /workspace"))
    }

    /// Writes the script where the program's user can read and not change it. The name ends as interpreters expect.
    pub fn script(&self, interpreter: &str, text: &str) -> Result<PathBuf, PlaceError> {
        let name = Path::new(interpreter).file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let ending = match name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.') {
            "python" => "py",
            "pwsh" | "powershell" => "ps1",
            "node" => "js",
            "perl" => "pl",
            "ruby" => "rb",
            _ => "sh",
        };
        let path = Path::new(STEP).join(format!("step.{ending}"));
        let step = || failed(format!("write the script {}", path.display()));
        if !Path::new(STEP).is_dir() {
            DirBuilder::new().mode(0o755).create(STEP).map_err(failed(format!("create {STEP}")))?;
        }
        fs::write(&path, text).map_err(step())?;
        fs::set_permissions(&path, Permissions::from_mode(0o444)).map_err(step())?;
        Ok(path)
    }

    /// The program's control group, if it has one.
    pub const fn group(&self) -> Option<&Group> {
        self.group.as_ref()
    }

    /// Whether the space for writing is used up, as far as the agent can see.
    pub fn full(&self) -> bool {
        statvfs(&self.scratch).is_ok_and(|s| s.f_blocks > 0 && s.f_bavail * s.f_frsize < 4096.max(s.f_frsize))
    }
}
