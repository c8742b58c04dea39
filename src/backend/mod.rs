//! Backends: the engines that a boundary is built with.
//!
//! The set is closed, so a [`Sandbox`] is an enum. Each backend answers the calls of [`crate::gate`], which is the only
//! caller:
//!
//! * [`Sandbox::prepare`] builds the whole boundary, with nothing of the guest's in it running or parsed: an agent (or
//!   the WebAssembly worker) waits on the [`Channel`].
//! * [`Sandbox::observe`] looks at it from the host, once the agent has answered a challenge, and again at the end.
//! * [`Sandbox::dispatch`] takes an [`Admission`] and sends the one message that starts the guest's code.
//! * [`Sandbox::usage`] reads what the host measured, before anything is torn down.
//! * [`Sandbox::teardown`] ends everything and looks at what is left. `Drop` only kills.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use plimsoll_guest::{Dispatch, Filesystem, LimitHit};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::env::{Env, Var};
use crate::evidence::{Admission, Observation};

use self::channel::Cancel;
use self::firecracker::Firecracker;
use self::gvisor::Gvisor;
use self::wasm::Wasm;

pub mod cgroup;
pub mod channel;
pub mod executable;
#[cfg(test)]
pub mod fake;
pub mod family;
pub mod firecracker;
pub mod fix;
pub mod gvisor;
pub mod jail;
pub mod launcher;
pub mod output;
pub mod process;
pub mod survey;
pub mod sys;
pub mod traces;
pub mod wasm;

pub use channel::{Answer, Channel, Ended, Outcome};
pub use launcher::control::Standby;
pub use output::Output;

pub use crate::spec::Backend;

/// The guest agent, a static executable (see `build.rs`).
#[cfg(target_os = "linux")]
pub static AGENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/plimsoll-guest"));

/// What a boundary is built to. Made from a validated step, the policy and the host's probes; holds no guest bytes.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Fresh name of this boundary: `[a-z0-9-]`, at most 32 characters.
    pub id: String,
    /// A private directory (0700) for this boundary, removed by the caller after teardown.
    pub scratch: PathBuf,
    /// Limits to enforce.
    pub bounds: Bounds,
    /// The unpacked artifact, shown at `/workspace`; the host's copy never changes.
    pub workspace: Option<PathBuf>,
    /// Root file system, where the backend has one.
    pub rootfs: Option<PathBuf>,
    /// Further read-only mounts: host path and where it appears.
    pub mounts: Vec<(PathBuf, String)>,
    /// What a microVM is made of, where one is to be.
    pub machine: Option<MachineParts>,
    /// The WebAssembly program, if that is what runs: its bytes, which nobody parses before dispatch.
    pub module: Option<wasm::ModuleFile>,
    /// What a WebAssembly program sees of the workspace.
    pub filesystem: Filesystem,
    /// Same result on every run (WebAssembly).
    pub deterministic: bool,
    /// Engine executables and digests.
    pub engines: Engines,
}

/// Files that a microVM is made of. All are only read; each image is a squashfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineParts {
    /// The kernel, an uncompressed ELF file (x86-64) or `Image` (aarch64).
    pub kernel: PathBuf,
    /// The initramfs, with the guest agent as `/init` and the modules that the kernel needs.
    pub initramfs: PathBuf,
    /// The kernel's release, for the report.
    pub kernel_release: String,
    /// SHA-256 of the kernel, lowercase hex.
    pub kernel_sha256: String,
    /// The root file system.
    pub rootfs: PathBuf,
    /// The artifact.
    pub workspace: Option<PathBuf>,
    /// Further read-only mounts.
    pub mounts: Vec<MachineMount>,
}

/// A read-only mount of a microVM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineMount {
    /// Image that holds it.
    pub image: PathBuf,
    /// Absolute path inside.
    pub at: String,
    /// The name of the one file in the image, where what is shown is a file.
    pub file: Option<String>,
}

/// Limits, each in the unit the host enforces it in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Bytes of memory for the guest's code.
    pub memory_bytes: u64,
    /// Thousandths of a CPU.
    pub cpu_millis: u64,
    /// Processes and threads of the guest's code.
    pub pids: u64,
    /// Bytes that the workspace may grow by.
    pub disk_bytes: u64,
    /// Bytes kept per output stream.
    pub output_bytes: u64,
    /// Time from dispatch to the kill.
    pub deadline: Duration,
}

/// Where engines are and which digests the operator trusts.
#[derive(Debug, Clone, Default)]
pub struct Engines {
    /// `runsc` from a flag or the environment; otherwise it is looked for in `PATH`.
    pub runsc: Option<PathBuf>,
    /// `firecracker` from a flag or the environment; otherwise it is looked for in `PATH`.
    pub firecracker: Option<PathBuf>,
    /// `jailer` from the environment; otherwise it is looked for beside `firecracker`, then in `PATH`.
    pub jailer: Option<PathBuf>,
    /// How long a microVM may take to boot.
    pub boot_patience: Option<Duration>,
    /// gVisor platform, if one was asked for: `systrap`, `ptrace`, `kvm`.
    pub platform: Option<String>,
    /// SHA-256 digests (lowercase hex) from the operator's policy.
    pub trusted: BTreeSet<String>,
    /// The operator's policy refuses versions with known vulnerabilities.
    pub refuse_vulnerable: bool,
}

impl Engines {
    /// The executables that the environment names.
    #[must_use]
    pub fn of_environment(env: &Env) -> Self {
        Self {
            runsc: env.path(Var::Runsc),
            firecracker: env.path(Var::Firecracker),
            jailer: env.path(Var::Jailer),
            boot_patience: env.number(Var::BootTimeout).filter(|&s| s > 0).map(Duration::from_secs),
            ..Self::default()
        }
    }
}

/// When an observation is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// After the challenge was answered, before dispatch.
    Before,
    /// After the result, or before a kill at the deadline.
    After,
}

/// What the engine is, for the report. Labels, not evidence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EngineRecord {
    /// Backend's name.
    pub name: String,
    /// Version the engine prints or was built with.
    pub engine_version: String,
    /// Executables used.
    pub binaries: Vec<BinaryRecord>,
    /// Settings worth knowing later, such as the gVisor platform.
    pub settings: std::collections::BTreeMap<String, String>,
}

/// One executable of an engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BinaryRecord {
    /// Path it was opened by.
    pub path: String,
    /// Version it prints.
    pub version: String,
    /// SHA-256, lowercase hex.
    pub sha256: String,
}

/// What the host measured of a boundary.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time of the whole boundary, milliseconds.
    pub cpu_ms: Option<u64>,
    /// Peak memory of the whole boundary, bytes.
    pub peak_memory_bytes: Option<u64>,
    /// Memory that the boundary itself costs, bytes: resident before dispatch.
    pub boundary_memory_bytes: Option<u64>,
}

/// Why a boundary could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// This host cannot run the backend.
    #[error("{backend} is not available on this host: {blocker}")]
    Unavailable {
        /// The backend.
        backend: Backend,
        /// What stands in the way.
        blocker: String,
        /// What to do about it, one line.
        help: String,
    },
    /// The host has what it takes, and yet cannot run a guest; that was found out by waiting for one.
    #[error("{backend} is not available on this host: {blocker}")]
    Unfit {
        /// The backend.
        backend: Backend,
        /// What stands in the way.
        blocker: String,
        /// What to do about it, one line.
        help: String,
    },
    /// The image cannot be used.
    #[error("image {reference} cannot be used: {reason}")]
    Image {
        /// As the step names it.
        reference: String,
        /// Why.
        reason: String,
    },
    /// Anything else.
    #[error("failed to {action}")]
    Io {
        /// What was being done, with its path.
        action: String,
        /// Why it failed.
        #[source]
        source: std::io::Error,
    },
}

impl PrepareError {
    /// An I/O failure while doing `action`, for `map_err`.
    pub fn io(action: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }
}

/// A prepared boundary of one of the backends.
#[derive(Debug)]
pub enum Sandbox {
    /// WebAssembly.
    Wasm(Box<Wasm>),
    /// gVisor.
    Gvisor(Box<Gvisor>),
    /// A Firecracker microVM.
    Firecracker(Box<Firecracker>),
    /// Scripted, for the gate's tests.
    #[cfg(test)]
    Fake(Box<fake::Fake>),
}

impl Sandbox {
    /// Builds the boundary; when it returns, an agent waits in it and nothing of the guest's has been touched. A launcher
    /// that stands by is used where the backend has one.
    ///
    /// # Errors
    /// As [`PrepareError`] says; nothing is left behind.
    pub async fn prepare(backend: Backend, plan: &Plan, standby: Option<Standby>) -> Result<Self, PrepareError> {
        match backend {
            Backend::Wasm => Wasm::prepare(plan).await.map(|s| Self::Wasm(Box::new(s))),
            Backend::Gvisor => Gvisor::prepare(plan, standby).await.map(|s| Self::Gvisor(Box::new(s))),
            Backend::Firecracker => Firecracker::prepare(plan, standby).await.map(|s| Self::Firecracker(Box::new(s))),
        }
    }

    /// The channel into the boundary.
    pub fn channel(&mut self) -> &mut Channel {
        match self {
            Self::Wasm(s) => s.channel(),
            Self::Gvisor(s) => s.channel(),
            Self::Firecracker(s) => s.channel(),
            #[cfg(test)]
            Self::Fake(s) => s.channel(),
        }
    }

    /// Looks at the boundary from the host. Before dispatch, `answered` is the time that the challenge took; after the
    /// run, the observations are the differences from the first look (none is good).
    ///
    /// # Errors
    /// If the boundary ended or cannot be found.
    pub fn observe(&mut self, phase: Phase, answered: Option<Duration>) -> std::io::Result<Vec<Observation>> {
        match self {
            Self::Wasm(s) => s.observe(phase, answered),
            Self::Gvisor(s) => s.observe(phase, answered),
            Self::Firecracker(s) => s.observe(phase, answered),
            #[cfg(test)]
            Self::Fake(s) => s.observe(phase),
        }
    }

    /// Sends the one message that starts the guest's code, and listens until it ends, the deadline passes or the run
    /// is cancelled. Output is written as it comes.
    pub async fn dispatch(
        &mut self,
        admission: Admission,
        dispatch: Dispatch,
        output: &mut Output,
        deadline: Duration,
        cancel: &mut Cancel,
    ) -> Outcome {
        match self {
            Self::Wasm(s) => s.dispatch(admission, dispatch, output, deadline, cancel).await,
            Self::Gvisor(s) => s.dispatch(admission, dispatch, output, deadline, cancel).await,
            Self::Firecracker(s) => s.dispatch(admission, dispatch, output, deadline, cancel).await,
            #[cfg(test)]
            Self::Fake(s) => s.dispatch(admission, dispatch, output, deadline, cancel).await,
        }
    }

    /// What the host measured so far.
    pub fn usage(&mut self) -> Usage {
        match self {
            Self::Wasm(s) => s.usage(),
            Self::Gvisor(s) => s.usage(),
            Self::Firecracker(s) => s.usage(),
            #[cfg(test)]
            Self::Fake(s) => s.usage(),
        }
    }

    /// A limit that the host itself saw being hit. It counts for more than what a guest says.
    #[must_use]
    pub fn limit_hit(&self) -> Option<LimitHit> {
        match self {
            Self::Gvisor(s) => s.limit_hit(),
            Self::Firecracker(s) => s.limit_hit(),
            _ => None,
        }
    }

    /// What the engine is.
    #[must_use]
    pub fn engine(&self) -> EngineRecord {
        match self {
            Self::Wasm(s) => s.engine(),
            Self::Gvisor(s) => s.engine(),
            Self::Firecracker(s) => s.engine(),
            #[cfg(test)]
            Self::Fake(s) => s.engine(),
        }
    }

    /// Ends every process of the boundary, removes what it made, and says what it looked for and found.
    pub async fn teardown(self) -> Vec<Observation> {
        match self {
            Self::Wasm(s) => s.teardown().await,
            Self::Gvisor(s) => s.teardown().await,
            Self::Firecracker(s) => s.teardown().await,
            #[cfg(test)]
            Self::Fake(s) => s.teardown().await,
        }
    }
}
