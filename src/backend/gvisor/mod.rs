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
//! * [`attempt`] is what is tried on an engine, and what a failure teaches; [`bundle`] is the OCI configuration.
//! * [`observe`] reads the facts; [`family`] is the boundary's processes; [`traces`] what it leaves outside itself.
//!
//! As root the sentry runs as an unprivileged host user without any descriptor into a host file system
//! (`--directfs=false`) and in a cgroup of ours. A plain user's boundary lies in his own user namespace; the sentry
//! reads the image's files itself there, through mounts that were made read-only before the engine started, and limits
//! take a delegated cgroup. `--rootless` is not used: it keeps a host procfs in the sentry's root.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use plimsoll_guest::{Dispatch, LimitHit};

use super::cgroup::{Group, Limits};
use super::channel::{Cancel, Channel, Outcome};
use super::executable::{Executable, Identity, NO_VERSION};
use super::family::{Family, Used};
use super::launcher::control::{Launched, Standby, launch};
use super::launcher::teardown::Remains;
use super::launcher::{Reply, Request, Work};
use super::traces::{BASE, Mark};
use super::{Backend, BinaryRecord, EngineRecord, Output, Phase, Plan, PrepareError, Usage};
use crate::evidence::fact::EngineKind;
use crate::evidence::proc::ProcDir;
use crate::evidence::{Admission, ControlId, Fact, Observation};
use crate::image::Rootfs;
use crate::time::millis;

use self::attempt::Attempt;
use self::observe::{First, Known};
use self::skeleton::Skeleton;

pub mod attempt;
pub mod bundle;
pub mod observe;
pub mod raise;
pub mod runsc;
pub mod skeleton;

/// How long the engine may take to start a container.
const PATIENCE: Duration = Duration::from_secs(45);
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
    channel: Channel,
    runsc: Executable,
    sha256: String,
    version: String,
    platform: String,
    plan: Kept,
    skeleton: Skeleton,
    group: Group,
    family: Family,
    first: Option<First>,
    used: Used,
    idle_memory: Option<u64>,
    pid_namespace: bool,
    rootful: bool,
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
    pub async fn prepare(plan: &Plan, mut standby: Option<Standby>) -> Result<Self, PrepareError> {
        let engine = runsc::open(&plan.engines)?;
        let skeleton = skeleton(plan)?;
        let mark = Mark::make(&plan.scratch, &plan.id)?;
        // Meanwhile: the engine's 30 MB take a while to hash.
        let identifying = engine
            .identify(EngineKind::Runsc, runsc::VERSION_PREFIX)
            .map_err(PrepareError::io("open the engine again"))?;
        let user_namespace = !may_mount()?;
        let mut attempt = Attempt::new(plan.engines.platform.clone(), user_namespace);
        let (group, launched, channel) = loop {
            let mut group = Group::create(
                &plan.id,
                Limits {
                    memory_bytes: plan.bounds.memory_bytes,
                    cpu_millis: plan.bounds.cpu_millis,
                    tasks: IDLE_TASKS + TASKS_PER_PROCESS * plan.bounds.pids,
                },
            );
            mark.add(&plan.id, &group.directories())?;
            let config = bundle::config(&skeleton.root(), &skeleton.agent())
                .map_err(|e| PrepareError::io("write the bundle's configuration")(io::Error::other(e)))?;
            let request = Request {
                user_namespace,
                pid_namespace: attempt.pid_namespace,
                more_namespaces: false,
                work: Work::Gvisor(raise::Work {
                    skeleton: skeleton.clone(),
                    config,
                    flags: attempt.flags(),
                    id: plan.id.clone(),
                }),
                patience_ms: millis(PATIENCE),
            };
            let (channel, input, output) = Channel::pipes().map_err(PrepareError::io("make the channel"))?;
            // Nobody opens the channel again by a name in procfs, the pipes' owner included.
            for end in [input.as_fd(), output.as_fd()] {
                rustix::fs::fchmod(end, rustix::fs::Mode::empty())
                    .map_err(|e| PrepareError::io("close the channel to others")(e.into()))?;
            }
            let descriptors = [input.as_fd(), output.as_fd(), engine.descriptor()];
            let launched = launch(standby.take(), &request, &descriptors, &mut group).await;
            drop((input, output));
            let (launched, reply) = match launched {
                Ok(both) => both,
                // The launcher is in the group, and may be the one that the kernel chose.
                Err(_) if group.out_of_memory_kills() > 0 => {
                    let _ = group.remove();
                    return Err(too_little_memory(plan.bounds.memory_bytes));
                }
                Err((action, source)) => return Err(PrepareError::Io { action, source }),
            };
            match reply {
                Reply::Up => break (group, launched, channel),
                Reply::Failed { stage, what, errno, log } => {
                    drop(launched);
                    let starved = group.out_of_memory_kills() > 0;
                    let _ = group.remove();
                    if starved {
                        return Err(too_little_memory(plan.bounds.memory_bytes));
                    }
                    attempt.learn(stage, &what, errno, &log)?;
                }
                Reply::Ended { .. } => {
                    return Err(PrepareError::io("start the launcher")(io::ErrorKind::InvalidData.into()));
                }
            }
        };
        let identified = identifying.finish().await;
        let Identity { sha256, version } =
            identified.map_err(PrepareError::io(format!("read {}", engine.path().display())))?;
        // A program that takes any argument for an order well done would go on to answer no challenge.
        if version == NO_VERSION && !plan.engines.trusted.contains(&sha256) {
            drop(launched);
            let _ = group.remove();
            return Err(PrepareError::Unavailable {
                backend: Backend::Gvisor,
                blocker: format!("{} does not say that it is runsc", engine.path().display()),
                help: "name gVisor's `runsc`, or install it: `plimsoll setup gvisor`".to_owned(),
            });
        }
        mark.keep();
        let family = Family::of(launched.launcher.pid());
        Ok(Self {
            launched,
            channel,
            runsc: engine,
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
            rootful: !user_namespace,
        })
    }

    /// The channel into the boundary.
    pub fn channel(&mut self) -> &mut Channel {
        &mut self.channel
    }

    /// See [`super::Sandbox::observe`].
    ///
    /// # Errors
    /// If the boundary ended, or a process that the launcher did not start holds its channel.
    pub fn observe(&mut self, phase: Phase, answered: Option<Duration>) -> io::Result<Vec<Observation>> {
        self.family = Family::of(self.launched.launcher.pid());
        let known = Known {
            channel: self.channel.inodes(),
            launcher: self.launched.launcher.pid(),
            planned: self.skeleton.planned(),
            engine: &self.runsc,
            sha256: &self.sha256,
            trusted: &self.plan.trusted,
            group: &self.group,
            disk_bytes: self.plan.disk_bytes,
        };
        let boundary = observe::find(&known, &self.family)?;
        self.used = self.family.used(boundary.snapshot.pid);
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
        self.channel.converse(dispatch, output, deadline, cancel, |_, _| {}).await
    }

    /// See [`super::Sandbox::usage`].
    #[must_use]
    pub fn usage(&mut self) -> Usage {
        let some = |n: u64| Some(n).filter(|&n| n > 0);
        Usage {
            cpu_ms: self.group.cpu_time().map(millis).or(some(self.used.cpu_ms)),
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
            name: Backend::Gvisor.name().to_owned(),
            engine_version: self.version.clone(),
            binaries: vec![BinaryRecord {
                path: self.runsc.path().display().to_string(),
                version: self.version.clone(),
                sha256: self.sha256.clone(),
            }],
            settings: BTreeMap::from([
                ("platform".to_owned(), self.platform.clone()),
                ("network".to_owned(), "none".to_owned()),
                ("started-as".to_owned(), if self.rootful { "root" } else { "user" }.to_owned()),
            ]),
        }
    }

    /// See [`super::Sandbox::teardown`].
    pub async fn teardown(self) -> Vec<Observation> {
        let Self { launched, group, family, plan, .. } = self;
        Remains { launched, group, family, scratch: plan.scratch }.end("the sentry").await
    }
}

/// The limit ended the engine before there was a boundary.
fn too_little_memory(bytes: u64) -> PrepareError {
    PrepareError::Unavailable {
        backend: Backend::Gvisor,
        blocker: format!("gVisor itself does not fit into a memory limit of {bytes} bytes"),
        help: "raise `sandbox.memory`; an idle sandbox takes some 20 MiB, starting it some 60".to_owned(),
    }
}

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

/// Whether the sandbox would have root's own uid: root without `CAP_SYS_ADMIN` can map no other.
#[must_use]
pub fn lacks_a_uid() -> bool {
    rustix::process::geteuid().is_root() && may_mount().is_ok_and(|may| !may)
}

/// Whether this process may mount without a user namespace of its own.
fn may_mount() -> Result<bool, PrepareError> {
    let status = ProcDir::own().and_then(|own| own.status()).map_err(PrepareError::io("read /proc/self/status"))?;
    Ok(rustix::process::geteuid().is_root() && status.mask("CapEff").is_some_and(|mask| mask & CAP_SYS_ADMIN != 0))
}
