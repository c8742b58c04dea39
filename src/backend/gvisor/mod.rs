//! The `gvisor` backend: a container whose kernel is gVisor's sentry, with the guest agent as its only process.
//!
//! ```text
//! prepare   open runsc · make a cgroup · launch: namespaces, skeleton, `create`, `start` · the agent waits
//! observe   the channel's holder is the sentry: its facts, identity, limits
//! dispatch  one message
//! teardown  the launcher ends everything; the cgroup and directories are removed; what is left is looked for
//! ```
//!
//! * [`runsc`] is the engine executable, opened once.
//! * [`launcher`] is a copy of the runner that owns the boundary; [`boundary`] is the runner's side of it; [`skeleton`]
//!   is the root directory that it assembles.
//! * [`bundle`] is the OCI configuration; [`observe`] reads the facts.
//!
//! As root the sentry runs as an unprivileged host user without any descriptor into a host file system
//! (`--directfs=false`) and in a cgroup of ours. A plain user's boundary lies in his own user namespace; the sentry
//! reads the image's files itself there, through mounts that were made read-only before the engine started, and limits
//! take a delegated cgroup. `--rootless` is not used: it keeps a host procfs in the sentry's root.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use plimsoll_guest::{Dispatch, LimitHit};

use super::cgroup::{self, Group, Limits};
use super::channel::{Cancel, Channel, Outcome};
use super::{BackendKind, BinaryRecord, EngineRecord, Output, Phase, Plan, PrepareError, Usage};
use crate::evidence::proc::ProcDir;
use crate::evidence::{Admission, ControlId, Fact, Observation};
use crate::image::Rootfs;

use self::boundary::Launched;
use self::launcher::{Reply, Request, Stage};
use self::observe::{First, Known, Member, Used};
use self::runsc::Runsc;
use self::skeleton::Skeleton;

pub mod boundary;
pub mod bundle;
pub mod launcher;
pub mod observe;
pub mod runsc;
pub mod skeleton;
mod socket;

/// The guest agent, a static executable (see `build.rs`).
pub static AGENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/plimsoll-guest"));

/// How long the engine may take to start a container.
const PATIENCE: Duration = Duration::from_secs(45);
/// Where `base` and the record of a boundary are, below its scratch directory.
const BASE: &str = "gvisor";
/// Names the boundary for [`sweep`].
const RECORD: &str = "gvisor.id";
/// Host tasks that an idle sandbox may have (33 to 35 measured, with two CPUs).
const IDLE_TASKS: u64 = 64;
/// Host tasks that one guest process costs.
const TASKS_PER_PROCESS: u64 = 2;
/// `CAP_SYS_ADMIN`, as a bit of a capability mask (capabilities(7)).
const CAP_SYS_ADMIN: u64 = 1 << 21;

/// A prepared boundary.
#[derive(Debug)]
pub struct Gvisor {
    launched: Launched,
    runsc: Runsc,
    sha256: String,
    version: String,
    platform: String,
    plan: Kept,
    skeleton: Skeleton,
    group: Group,
    family: Vec<Member>,
    first: Option<First>,
    used: Used,
    idle_memory: Option<u64>,
    pid_namespace: bool,
}

/// What is needed of the plan later.
#[derive(Debug)]
struct Kept {
    scratch: PathBuf,
    pids: u64,
    disk_bytes: u64,
    trusted: std::collections::BTreeSet<String>,
}

impl Gvisor {
    /// See [`super::Sandbox::prepare`].
    ///
    /// # Errors
    /// As [`PrepareError`] says; nothing is left behind.
    pub async fn prepare(plan: &Plan) -> Result<Self, PrepareError> {
        let runsc = Runsc::open(&plan.engines)?;
        let skeleton = skeleton(plan)?;
        let mark = Mark::make(&plan.scratch, &plan.id)?;
        // Meanwhile: the engine's 30 MB take a while to hash.
        let hashing = runsc.sha256_task().map_err(PrepareError::io("open the engine again"))?;
        let user_namespace = !may_mount()?;
        let mut attempt = Attempt::new(plan.engines.platform.clone(), user_namespace);
        let (group, launched) = loop {
            let mut group = Group::create(
                &plan.id,
                Limits {
                    memory_bytes: plan.bounds.memory_bytes,
                    cpu_millis: plan.bounds.cpu_millis,
                    tasks: IDLE_TASKS + TASKS_PER_PROCESS * plan.bounds.pids,
                },
            );
            let config = bundle::config(&skeleton.root(), &skeleton.agent())
                .map_err(|e| PrepareError::io("write the bundle's configuration")(io::Error::other(e)))?;
            let request = Request {
                user_namespace,
                pid_namespace: attempt.pid_namespace,
                skeleton: skeleton.clone(),
                config,
                flags: attempt.flags(),
                id: plan.id.clone(),
                patience_ms: u64::try_from(PATIENCE.as_millis()).unwrap_or(u64::MAX),
            };
            let (launched, reply) = boundary::launch(&request, &runsc, &mut group)
                .await
                .map_err(|(what, source)| PrepareError::Io { action: what, source })?;
            match reply {
                Reply::Up => break (group, launched),
                Reply::Failed { stage, what, errno, log } => {
                    drop(launched);
                    let _ = group.remove();
                    attempt.learn(stage, &what, errno, &log)?;
                }
                Reply::Ended { .. } => {
                    return Err(PrepareError::io("start the launcher")(io::ErrorKind::InvalidData.into()));
                }
            }
        };
        mark.keep();
        let sha256 = hashing
            .await
            .unwrap_or_else(|e| Err(io::Error::other(e)))
            .map_err(PrepareError::io(format!("read {}", runsc.path().display())))?;
        let version = runsc.version(&sha256).await;
        let family = observe::family(launched.launcher.pid());
        Ok(Self {
            launched,
            runsc,
            sha256,
            version,
            platform: attempt.platform,
            plan: Kept {
                scratch: plan.scratch.clone(),
                pids: plan.bounds.pids,
                disk_bytes: plan.bounds.disk_bytes,
                trusted: plan.engines.trusted.clone(),
            },
            skeleton,
            group,
            family,
            first: None,
            used: Used::default(),
            idle_memory: None,
            pid_namespace: attempt.pid_namespace,
        })
    }

    /// The channel into the boundary.
    pub fn channel(&mut self) -> &mut Channel {
        &mut self.launched.channel
    }

    /// See [`super::Sandbox::observe`].
    ///
    /// # Errors
    /// If the boundary ended, or a process that the launcher did not start holds its channel.
    pub fn observe(&mut self, phase: Phase, answered: Option<Duration>) -> io::Result<Vec<Observation>> {
        self.family = observe::family(self.launched.launcher.pid());
        let known = Known {
            channel: self.launched.channel.inodes(),
            launcher: self.launched.launcher.pid(),
            planned: self.skeleton.planned(),
            engine: &self.runsc,
            sha256: &self.sha256,
            trusted: &self.plan.trusted,
            group: &self.group,
            disk_bytes: self.plan.disk_bytes,
        };
        let boundary = observe::find(&known, &self.family)?;
        self.used = observe::used(boundary.snapshot.pid, &self.family);
        match (phase, &self.first) {
            (Phase::After, Some(first)) => Ok(observe::changes(first, &boundary, &self.group)),
            _ => {
                let mut seen = observe::before(&known, &boundary, &self.family, answered);
                seen.extend(self.configured());
                self.idle_memory = self.group.current_memory().or(Some(self.used.memory_bytes)).filter(|&b| b > 0);
                self.first =
                    Some(First { limits: observe::limits(&self.group, &boundary), snapshot: boundary.snapshot });
                Ok(seen)
            }
        }
    }

    /// What the agent will set inside, out of the host's sight.
    fn configured(&self) -> Vec<Observation> {
        let (pids, disk) = (self.plan.pids, self.plan.disk_bytes);
        let mut facts = vec![
            Fact::Configured {
                control: ControlId::PidsLimit,
                what: format!("RLIMIT_NPROC of {pids} for the program's user; each process costs the host two tasks"),
            },
            Fact::Configured {
                control: ControlId::DiskLimit,
                what: format!("a tmpfs of {disk} bytes inside takes all that the program writes"),
            },
        ];
        if !self.pid_namespace {
            let what = "procfs cannot be mounted here, so the boundary shares the pid namespace".to_owned();
            facts.push(Fact::Remark { control: ControlId::Namespaces, what });
        }
        facts.into_iter().map(Observation::host).collect()
    }

    /// See [`super::Sandbox::dispatch`].
    pub async fn dispatch(
        &mut self,
        _admission: Admission,
        dispatch: Dispatch,
        output: &mut Output,
        deadline: Duration,
        cancel: &mut Cancel,
    ) -> Outcome {
        self.launched.channel.converse(dispatch, output, deadline, cancel, |_, _| {}).await
    }

    /// See [`super::Sandbox::usage`].
    #[must_use]
    pub fn usage(&mut self) -> Usage {
        let some = |n: u64| Some(n).filter(|&n| n > 0);
        Usage {
            cpu_ms: self
                .group
                .cpu_time()
                .map(|t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX))
                .or(some(self.used.cpu_ms)),
            peak_memory_bytes: self.group.peak_memory().or(some(self.used.peak_memory_bytes)),
            boundary_memory_bytes: self.idle_memory,
        }
    }

    /// A limit that the host saw being hit: the kernel killed a process of the boundary for want of memory.
    #[must_use]
    pub fn limit_hit(&self) -> Option<LimitHit> {
        (self.group.out_of_memory_kills() > 0).then_some(LimitHit::Memory)
    }

    /// See [`super::Sandbox::engine`].
    #[must_use]
    pub fn engine(&self) -> EngineRecord {
        EngineRecord {
            name: BackendKind::Gvisor.name().to_owned(),
            engine_version: self.version.clone(),
            binaries: vec![BinaryRecord {
                path: self.runsc.path().display().to_string(),
                version: self.version.clone(),
                sha256: self.sha256.clone(),
            }],
            settings: BTreeMap::from([
                ("platform".to_owned(), self.platform.clone()),
                ("network".to_owned(), "none".to_owned()),
            ]),
        }
    }

    /// See [`super::Sandbox::teardown`].
    pub async fn teardown(self) -> Vec<Observation> {
        let Self { launched, group, family, plan, .. } = self;
        let directories = group.directories();
        let mut looked_for = vec![
            format!("{} processes and their pid namespace", family.len()),
            format!("{} cgroups", directories.len()),
            format!("mounts and files below {}", plan.scratch.display()),
        ];
        let mut found = Vec::new();
        match launched.end().await {
            Some(Reply::Ended { sentry, left, log }) => {
                if let Some(sentry) = sentry {
                    looked_for.push(match (sentry.code, sentry.signal) {
                        (Some(code), _) => format!("the sentry's end (exit code {code})"),
                        (None, signal) => format!("the sentry's end (signal {})", signal.unwrap_or(0)),
                    });
                }
                found.extend(left.into_iter().map(|pid| format!("process {pid} of the boundary's own numbering")));
                if !log.is_empty() {
                    tracing::debug!(?log, "the engine's last words");
                }
            }
            _ => tracing::debug!("the launcher did not say how the boundary ended"),
        }
        let look = move || {
            let mut found = group.remove();
            found.extend(observe::survivors(&family));
            found.extend(mounts_below(&plan.scratch));
            found.extend(remove_files(&plan.scratch));
            found
        };
        found.extend(tokio::task::spawn_blocking(look).await.unwrap_or_else(|e| vec![format!("unknown: {e}")]));
        vec![Observation::host(Fact::Leftovers { looked_for, found })]
    }
}

/// What is tried, and what the last failure taught.
struct Attempt {
    platform: String,
    platform_is_asked_for: bool,
    user_namespace: bool,
    pid_namespace: bool,
    dropped: Vec<String>,
}

impl Attempt {
    fn new(platform: Option<String>, user_namespace: bool) -> Self {
        Self {
            platform_is_asked_for: platform.is_some(),
            platform: platform.unwrap_or_else(|| "systrap".to_owned()),
            user_namespace,
            pid_namespace: true,
            dropped: Vec::new(),
        }
    }

    /// The engine's flags. Cgroups are ours to make, in every case; the network is named because its default is not
    /// none.
    fn flags(&self) -> Vec<String> {
        let mut flags = vec![
            "network=none".to_owned(),
            format!("platform={}", self.platform),
            "ignore-cgroups=true".to_owned(),
            "overlay2=none".to_owned(),
        ];
        if !self.user_namespace {
            flags.push("directfs=false".to_owned());
        }
        flags.retain(|flag| !self.dropped.iter().any(|d| flag.split('=').next() == Some(d)));
        flags.into_iter().map(|flag| format!("--{flag}")).collect()
    }

    /// Prepares the next attempt, or says why there is none.
    fn learn(&mut self, stage: Stage, what: &str, errno: Option<i32>, log: &str) -> Result<(), PrepareError> {
        let said = log.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or("").trim().to_owned();
        let unavailable = |blocker: String, help: &str| PrepareError::Unavailable {
            backend: BackendKind::Gvisor,
            blocker,
            help: help.to_owned(),
        };
        let denied = matches!(errno, Some(libc::EPERM | libc::EACCES | libc::ENOSPC | libc::EINVAL));
        match stage {
            Stage::Procfs if self.pid_namespace => {
                self.pid_namespace = false;
                return Ok(());
            }
            Stage::Namespaces if denied => {
                return Err(unavailable(format!("namespaces cannot be made: {what}"), NAMESPACES));
            }
            Stage::Skeleton if denied && self.user_namespace => {
                return Err(unavailable(format!("a user namespace does not let its owner mount: {what}"), NAMESPACES));
            }
            Stage::Engine => {}
            Stage::Namespaces | Stage::Procfs | Stage::Skeleton => {
                return Err(PrepareError::io("prepare the boundary's root directory")(io::Error::other(
                    what.to_owned(),
                )));
            }
        }
        // Older releases: without `directfs` they never hold host descriptors, without `overlay2` they overlay nothing.
        if let Some(flag) = runsc::unknown_flag(log)
            && ["directfs", "overlay2"].contains(&flag.as_str())
            && !self.dropped.contains(&flag)
        {
            self.dropped.push(flag);
            return Ok(());
        }
        if !self.platform_is_asked_for && self.platform == "systrap" && log.contains("systrap") {
            self.platform = "ptrace".to_owned();
            return Ok(());
        }
        let why = if said.is_empty() { what.to_owned() } else { format!("{what}: {said}") };
        Err(unavailable(format!("runsc could not start a container on platform {}: {why}", self.platform), PLATFORM))
    }
}

/// What to do where namespaces are refused.
const NAMESPACES: &str = "run `plimsoll doctor`; on Ubuntu `sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`, \
                          in a container allow `unshare` and `mount` (or give it CAP_SYS_ADMIN)";
/// What to do where the engine itself fails.
const PLATFORM: &str = "try another platform (ptrace, or kvm where /dev/kvm works), or another release of runsc";

fn skeleton(plan: &Plan) -> Result<Skeleton, PrepareError> {
    let reference = plan.rootfs.as_ref().map_or("host".to_owned(), |p| p.display().to_string());
    let image = |reason: String| PrepareError::Image { reference: reference.clone(), reason };
    let mut rootfs = match &plan.rootfs {
        None => Rootfs::host(),
        Some(tree) => Rootfs::tree(tree),
    }
    .map_err(|e| image(e.to_string()))?;
    for (source, at) in &plan.mounts {
        rootfs.mount(source, at).map_err(|why| image(format!("the mount {}: {why}", source.display())))?;
    }
    let mut random = [0u8; 8];
    getrandom::fill(&mut random).map_err(|e| PrepareError::io("draw randomness")(io::Error::other(e.to_string())))?;
    Ok(Skeleton {
        base: plan.scratch.join(BASE),
        rootfs,
        corner: format!(".plimsoll-{}", hex::encode(random)),
        workspace: plan.workspace.clone(),
    })
}

/// Whether this process may mount without a user namespace of its own.
fn may_mount() -> Result<bool, PrepareError> {
    let status = ProcDir::own().and_then(|own| own.status()).map_err(PrepareError::io("read /proc/self/status"))?;
    Ok(rustix::process::geteuid().is_root() && status.mask("CapEff").is_some_and(|mask| mask & CAP_SYS_ADMIN != 0))
}

/// What a boundary has on disk: an empty directory to mount on, and its name for [`sweep`]. Removed on drop.
struct Mark {
    scratch: PathBuf,
    kept: bool,
}

impl Mark {
    fn make(scratch: &Path, id: &str) -> Result<Self, PrepareError> {
        let base = scratch.join(BASE);
        let mark = Self { scratch: scratch.to_owned(), kept: false };
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&base)
            .map_err(PrepareError::io(format!("make {}", base.display())))?;
        let record = scratch.join(RECORD);
        std::fs::write(&record, id).map_err(PrepareError::io(format!("write {}", record.display())))?;
        Ok(mark)
    }

    fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if !self.kept {
            let _ = remove_files(&self.scratch);
        }
    }
}

fn mounts_below(scratch: &Path) -> Vec<String> {
    let mounts = ProcDir::own().and_then(|own| own.mounts()).unwrap_or_default();
    mounts
        .into_iter()
        .filter(|m| Path::new(&m.point).starts_with(scratch))
        .map(|m| format!("mount {}", m.point))
        .collect()
}

fn remove_files(scratch: &Path) -> Vec<String> {
    let gone = |removed: io::Result<()>, path: PathBuf| match removed {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Some(format!("{} ({e})", path.display())),
        _ => None,
    };
    let (base, record) = (scratch.join(BASE), scratch.join(RECORD));
    [gone(std::fs::remove_dir(&base), base), gone(std::fs::remove_file(&record), record)]
        .into_iter()
        .flatten()
        .collect()
}

/// How far below a run's directory boundaries have theirs.
const SWEEP_DEPTH: u32 = 3;

/// Undoes what boundaries of a killed runner left outside their scratch directories: their cgroups, and whatever might
/// still be in those. `scratch` is such a directory, or the whole run's. Processes and mounts need no sweeping: they end
/// with the runner. Says what could not be removed.
#[must_use]
pub fn sweep(scratch: &Path) -> Vec<String> {
    let mut left = Vec::new();
    sweep_below(scratch, SWEEP_DEPTH, &mut left);
    left
}

fn sweep_below(directory: &Path, depth: u32, left: &mut Vec<String>) {
    if let Ok(id) = std::fs::read_to_string(directory.join(RECORD)) {
        if !id.is_empty() && id.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-') {
            left.extend(cgroup::sweep(&id));
        }
        left.extend(remove_files(directory));
    }
    if depth == 0 {
        return;
    }
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        // What guests may have written to is not looked into.
        let ours = entry.file_name() != "workspace" && entry.file_name() != "image";
        if ours && entry.file_type().is_ok_and(|t| t.is_dir()) {
            sweep_below(&entry.path(), depth - 1, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(platform: Option<&str>) -> Attempt {
        Attempt::new(platform.map(str::to_owned), false)
    }

    #[test]
    fn the_flags_name_the_network_and_leave_cgroups_to_us() {
        let root = attempt(None).flags();
        assert!(root.contains(&"--network=none".to_owned()) && root.contains(&"--ignore-cgroups=true".to_owned()));
        assert!(root.contains(&"--directfs=false".to_owned()));
        assert!(!Attempt::new(None, true).flags().iter().any(|f| f.contains("directfs") || f.contains("rootless")));
    }

    #[test]
    fn an_old_release_is_tried_again_without_what_it_lacks() {
        let mut old = attempt(None);
        old.learn(Stage::Engine, "runsc create", None, "flag provided but not defined: -directfs\nUsage").unwrap();
        assert!(!old.flags().contains(&"--directfs=false".to_owned()));
        old.learn(Stage::Engine, "runsc create", None, "invalid platform \"systrap\"").unwrap();
        assert!(old.flags().contains(&"--platform=ptrace".to_owned()));
        assert!(old.learn(Stage::Engine, "runsc create", None, "no such device").is_err());
    }

    #[test]
    fn a_platform_that_was_asked_for_is_not_replaced() {
        let error =
            attempt(Some("systrap")).learn(Stage::Engine, "runsc create", None, "systrap is broken").unwrap_err();
        assert!(matches!(error, PrepareError::Unavailable { .. }));
        // Nor is the network, whatever the engine says.
        assert!(attempt(None).learn(Stage::Engine, "x", None, "flag provided but not defined: -network").is_err());
    }

    #[test]
    fn refused_namespaces_name_the_fix() {
        let mut one = attempt(None);
        let Err(PrepareError::Unavailable { help, .. }) =
            one.learn(Stage::Namespaces, "unshare", Some(libc::EPERM), "")
        else {
            panic!("not refused")
        };
        assert!(help.contains("apparmor_restrict_unprivileged_userns"));
        one.learn(Stage::Procfs, "mount procfs", Some(libc::EPERM), "").unwrap();
        assert!(!one.pid_namespace);
    }

    #[test]
    fn sweeping_removes_the_traces_of_a_dead_boundary_and_ignores_a_strange_record() {
        let dir = tempfile::tempdir().unwrap();
        let step = dir.path().join("01-step/gvisor");
        std::fs::create_dir_all(step.join(BASE)).unwrap();
        std::fs::write(step.join(RECORD), "../../etc").unwrap();
        assert_eq!(sweep(dir.path()), Vec::<String>::new());
        assert!(!step.join(BASE).exists() && !step.join(RECORD).exists());
    }
}
