//! Firecracker: each step in a microVM of its own.
//!
//! ```text
//! runner ── launcher: process 1 of a pid namespace ── (jailer) ── VMM: API thread, vCPU threads
//!    │ API socket: builds the machine, reads its configuration back, starts it
//!    └ vsock socket: one connection, to the guest agent, which is process 1 in the machine
//! ```
//!
//! As root the VMM runs under Firecracker's own jailer: a host uid of its own, a root directory that nothing else is in,
//! pid, mount, network, IPC and UTS namespaces. A plain user who may use `/dev/kvm` gets the same from namespaces of
//! the launcher's, and the report says which. The VMM's root directory lies on a tmpfs that only the launcher's mount
//! namespace has: the host opens nothing in it after dispatch, and it vanishes with the launcher.
//!
//! The machine has read-only drives, one vsock device, no network device and no serial port. It is booted afresh for
//! every step; nothing is restored. What the guest's memory holds is all that it can write.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use plimsoll_guest::{Dispatch, Drive, LimitHit};
use rustix::fs::{Access, Mode, OFlags, open};
use rustix::io::Errno;

use super::cgroup::{Group, Limits};
use super::channel::{Cancel, Channel, Outcome};
use super::executable::Identity;
use super::family::Family;
use super::launcher::control::{Launched, Standby, launch};
use super::launcher::teardown::Remains;
use super::launcher::{Reply, Request, Work};
use super::traces::{BASE, Mark};
use super::{Backend, BinaryRecord, EngineRecord, MachineParts, Output, Phase, Plan, PrepareError, Usage, fix, sys};
use crate::evidence::fact::EngineKind;
use crate::evidence::{Admission, ControlId, Fact, Observation};
use crate::time::millis;

use self::boot::{Trouble, raise_machine};
use self::config::{LEAST_MEMORY, MIB, Machine, drive_name};
use self::engine::{JAILER_PREFIX, VERSION_PREFIX, Vmm};
use self::observe::{First, Known};

pub mod api;
mod boot;
pub mod config;
pub mod engine;
pub mod observe;
pub mod raise;

/// The only version of KVM's interface that there is (the kernel's `virt/kvm/api` document).
const KVM_VERSION: i32 = 12;
/// How long the launcher may take to start the VMM.
const START_PATIENCE: Duration = Duration::from_secs(10);
/// Memory that the VMM and the launcher may take beyond the guest's, bytes.
const OVERHEAD: u64 = 128 * MIB;
/// Host tasks that they may be.
const TASKS: u64 = 64;
/// First host uid of VMMs that root starts; above those of [`super::jail::JAIL_UIDS`].
const FIRST_UID: u32 = 0x7800_0000;
/// How many of them there are. One is drawn for each VMM, so that no two share one but by a chance of one in millions.
const UIDS: u32 = 0x0800_0000;

/// A prepared boundary.
#[derive(Debug)]
pub struct Firecracker {
    launched: Launched,
    channel: Channel,
    pid: u32,
    vmm: Vmm,
    identity: Identity,
    jailer: Option<Identity>,
    machine: Machine,
    parts: MachineParts,
    plan: Plan,
    group: Group,
    family: Family,
    first: Option<First>,
    own_memory: Option<u64>,
    peak_memory: Option<u64>,
    rootful: bool,
}

fn unavailable(blocker: impl Into<String>, help: impl Into<String>) -> PrepareError {
    PrepareError::Unavailable { backend: Backend::Firecracker, blocker: blocker.into(), help: help.into() }
}

/// Whether this host has what a microVM takes: the executables, and a `/dev/kvm` that this user may open. Quick; whether
/// a guest really runs, only [`Firecracker::prepare`] finds out.
///
/// # Errors
/// [`PrepareError::Unavailable`].
pub fn available(engines: &super::Engines) -> Result<(), PrepareError> {
    Vmm::open(engines, rustix::process::geteuid().is_root())?;
    Ok(usable_kvm()?)
}

impl Firecracker {
    /// See [`super::Sandbox::prepare`].
    ///
    /// # Errors
    /// As [`PrepareError`] says; nothing is left behind.
    pub async fn prepare(plan: &Plan, standby: Option<Standby>) -> Result<Self, PrepareError> {
        let rootful = rustix::process::geteuid().is_root();
        let vmm = Vmm::open(&plan.engines, rootful)?;
        usable_kvm()?;
        let parts = plan.machine.clone().ok_or_else(|| {
            unavailable("no kernel and image were made ready for it", "give the step an image: `sandbox.image`")
        })?;
        let machine = Machine::new(&plan.bounds, &parts)
            .ok_or_else(|| unavailable("a microVM has at most 26 drives", "give the step fewer `sandbox.mounts`"))?;
        if machine.memory_mib < LEAST_MEMORY {
            return Err(unavailable(
                format!("a microVM does not boot in {} MiB", machine.memory_mib),
                format!("raise `sandbox.memory` to {LEAST_MEMORY}MiB or more"),
            ));
        }
        // Meanwhile: that takes as long as some of the boot.
        let again = || PrepareError::io("open the engine again");
        let identifying = vmm.firecracker.identify(EngineKind::Firecracker, VERSION_PREFIX).map_err(again())?;
        let jailer = vmm.jailer.as_ref().map(|jailer| jailer.identify(EngineKind::Jailer, JAILER_PREFIX)).transpose();
        let jailer = jailer.map_err(again())?;
        let mark = Mark::make(&plan.scratch, &plan.id)?;
        let mut group = Group::create(
            &plan.id,
            Limits {
                memory_bytes: plan.bounds.memory_bytes + OVERHEAD,
                cpu_millis: plan.bounds.cpu_millis,
                tasks: TASKS + machine.vcpus,
            },
        );
        mark.add(&plan.id, &group.directories())?;
        let request = request(plan, &machine, &parts, &group, rootful)?;
        let descriptors: Vec<_> =
            std::iter::once(&vmm.firecracker).chain(&vmm.jailer).map(|e| e.descriptor()).collect();
        let (launched, reply) = launch(standby, &request, &descriptors, &mut group)
            .await
            .map_err(|(what, source)| PrepareError::Io { action: what, source })?;
        let raised = match reply {
            Reply::Up => raise_machine(&launched, &request, &machine, plan).await,
            Reply::Failed { stage, what, errno, log } => Err(Trouble::Failed { stage, what, errno, log }),
            Reply::Ended { .. } => Err(Trouble::Told("the launcher ended".to_owned())),
        };
        let (channel, pid) = match raised {
            Ok(both) => both,
            Err(trouble) => {
                let (log, end) = match launched.end().await {
                    Some(Reply::Ended { log, engine, .. }) => (log, engine),
                    _ => (String::new(), None),
                };
                let _ = group.remove();
                return Err(trouble.explain(&log, end, rootful));
            }
        };
        mark.keep();
        let unread = || PrepareError::io("read the engine's executable");
        let identity = identifying.finish().await.map_err(unread())?;
        let jailer = match jailer {
            Some(identifying) => Some(identifying.finish().await.map_err(unread())?),
            None => None,
        };
        let family = Family::of(launched.launcher.pid());
        Ok(Self {
            launched,
            channel,
            pid,
            vmm,
            identity,
            jailer,
            machine,
            parts,
            plan: plan.clone(),
            group,
            family,
            first: None,
            own_memory: None,
            peak_memory: None,
            rootful,
        })
    }

    /// The channel into the boundary.
    pub fn channel(&mut self) -> &mut Channel {
        &mut self.channel
    }

    fn known(&self) -> Known<'_> {
        Known {
            pid: self.pid,
            vmm: (&self.vmm.firecracker, &self.identity.sha256),
            jailer: self.vmm.jailer.as_ref().zip(self.jailer.as_ref().map(|jailer| jailer.sha256.as_str())),
            version: &self.identity.version,
            trusted: &self.plan.engines.trusted,
            refuse_vulnerable: self.plan.engines.refuse_vulnerable,
            group: &self.group,
            machine: &self.machine,
            memory_bytes: self.plan.bounds.memory_bytes,
            disk_bytes: self.plan.bounds.disk_bytes,
        }
    }

    /// See [`super::Sandbox::observe`].
    ///
    /// # Errors
    /// If the VMM ended, or is none of the launcher's.
    pub fn observe(&mut self, phase: Phase, answered: Option<Duration>) -> io::Result<Vec<Observation>> {
        self.family = Family::of(self.launched.launcher.pid());
        let known = self.known();
        let boundary = observe::find(&known, &self.family)?;
        self.peak_memory = boundary.process.status().ok().and_then(|status| {
            let kib = status.get("VmHWM")?.split_ascii_whitespace().next()?.parse::<u64>().ok()?;
            Some(kib * 1024)
        });
        match (phase, &self.first) {
            (Phase::After, Some(first)) => observe::changes(first, &self.known(), &boundary),
            _ => {
                let mut seen = observe::before(&self.known(), &boundary, answered)?;
                let jail = if self.rootful {
                    "the VMM runs under Firecracker's jailer, with a host uid of its own"
                } else {
                    "the VMM runs in plimsoll's own jail: the runner's uid, in namespaces of its own"
                };
                seen.push(Observation::host(Fact::Remark { control: ControlId::Namespaces, what: jail.to_owned() }));
                let limits = observe::limits(&self.known(), &boundary);
                self.own_memory = observe::own_memory(&boundary.process);
                let kvm = observe::kvm(&boundary.process)?;
                self.first = Some(First { snapshot: boundary.snapshot, limits, kvm });
                Ok(seen)
            }
        }
    }

    /// See [`super::Sandbox::dispatch`].
    pub async fn dispatch(
        &mut self,
        _admission: Admission,
        mut dispatch: Dispatch,
        output: &mut Output,
        deadline: Duration,
        cancel: &mut Cancel,
    ) -> Outcome {
        dispatch.drives = drives(&self.parts);
        self.channel.converse(dispatch, output, deadline, cancel, |_, _| {}).await
    }

    /// See [`super::Sandbox::usage`].
    #[must_use]
    pub fn usage(&mut self) -> Usage {
        Usage {
            cpu_ms: self.group.cpu_time().map(millis).or(Some(self.family.used(self.pid).cpu_ms).filter(|&ms| ms > 0)),
            peak_memory_bytes: self.group.peak_memory().or(self.peak_memory),
            boundary_memory_bytes: self.own_memory,
        }
    }

    /// A limit that the host itself saw being hit.
    #[must_use]
    pub fn limit_hit(&self) -> Option<LimitHit> {
        (self.group.out_of_memory_kills() > 0).then_some(LimitHit::Memory)
    }

    /// See [`super::Sandbox::engine`].
    #[must_use]
    pub fn engine(&self) -> EngineRecord {
        let record = |path: &Path, identity: &Identity| BinaryRecord {
            path: path.display().to_string(),
            version: identity.version.clone(),
            sha256: identity.sha256.clone(),
        };
        let mut binaries = vec![record(self.vmm.firecracker.path(), &self.identity)];
        binaries
            .extend(self.vmm.jailer.as_ref().zip(self.jailer.as_ref()).map(|(jailer, id)| record(jailer.path(), id)));
        let settings = [
            ("jail", if self.rootful { "jailer" } else { "own" }.to_owned()),
            ("network", "none".to_owned()),
            ("vcpus", self.machine.vcpus.to_string()),
            ("kernel", self.parts.kernel_release.clone()),
            ("kernel-sha256", self.parts.kernel_sha256.clone()),
        ];
        EngineRecord {
            name: Backend::Firecracker.name().to_owned(),
            engine_version: self.identity.version.clone(),
            binaries,
            settings: settings.into_iter().map(|(k, v)| (k.to_owned(), v)).collect::<BTreeMap<_, _>>(),
        }
    }

    /// See [`super::Sandbox::teardown`].
    pub async fn teardown(self) -> Vec<Observation> {
        let Self { launched, group, family, plan, channel, .. } = self;
        drop(channel);
        Remains { launched, group, family, scratch: plan.scratch }.end("the VMM").await
    }
}

/// Where the drives go that hold the step's own content. The first is the root file system, which the agent has mounted.
fn drives(parts: &MachineParts) -> Vec<Drive> {
    let workspace = parts.workspace.iter().map(|_| ("/workspace".to_owned(), None));
    let mounts = parts.mounts.iter().map(|m| (m.at.clone(), m.file.clone()));
    let numbered = workspace.chain(mounts).zip(1..);
    numbered.filter_map(|((at, file), index)| Some(Drive { device: drive_name(index)?, at, file })).collect()
}

/// Why a device cannot be used, and what to do about it.
#[derive(Debug)]
pub struct Blocked {
    /// What stands in the way.
    pub blocker: String,
    /// One line.
    pub help: String,
}

impl From<Blocked> for PrepareError {
    fn from(Blocked { blocker, help }: Blocked) -> Self {
        unavailable(blocker, help)
    }
}

/// Whether `/dev/kvm` is there and this process may use it. Whether it works, only a boot tells.
///
/// # Errors
/// Why not.
pub fn usable_kvm() -> Result<(), Blocked> {
    let path = "/dev/kvm";
    let blocked = |blocker: String, help: &str| Blocked { blocker, help: help.to_owned() };
    if !Path::new(path).exists() {
        return Err(blocked("there is no /dev/kvm on this host".to_owned(), fix::NO_KVM));
    }
    let allowed = rustix::fs::access(path, Access::READ_OK | Access::WRITE_OK)
        .and_then(|()| open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()));
    let no_driver =
        "load the module kvm_intel or kvm_amd; in a container hand the real device in (`--device /dev/kvm`)";
    let device = allowed.map_err(|e| {
        let help = match e {
            // A node with nothing behind it: no rights would help.
            Errno::NODEV | Errno::NXIO => no_driver,
            _ => fix::KVM_DENIED,
        };
        blocked(format!("/dev/kvm cannot be opened: {}", io::Error::from(e)), help)
    })?;
    match sys::kvm_version(&device) {
        Ok(KVM_VERSION) => Ok(()),
        other => Err(blocked(
            match other {
                Ok(version) => format!("/dev/kvm speaks version {version} of KVM's interface, not {KVM_VERSION}"),
                Err(e) => format!("/dev/kvm is no KVM device: {e}"),
            },
            no_driver,
        )),
    }
}

fn request(
    plan: &Plan,
    machine: &Machine,
    parts: &MachineParts,
    group: &Group,
    rootful: bool,
) -> Result<Request, PrepareError> {
    let mut files =
        vec![("kernel".to_owned(), parts.kernel.clone()), ("initramfs".to_owned(), parts.initramfs.clone())];
    let images = std::iter::once(&parts.rootfs).chain(&parts.workspace).chain(parts.mounts.iter().map(|m| &m.image));
    files.extend(machine.drives.iter().cloned().zip(images.cloned()));
    let mut random = [0u8; 4];
    getrandom::fill(&mut random).map_err(|e| PrepareError::io("draw randomness")(io::Error::other(e.to_string())))?;
    Ok(Request {
        user_namespace: !rootful,
        pid_namespace: true,
        more_namespaces: true,
        work: Work::Firecracker(raise::Work {
            base: plan.scratch.join(BASE),
            id: plan.id.clone(),
            user: FIRST_UID + u32::from_le_bytes(random) % UIDS,
            files,
            cgroup: group.v2_path().map(|path| (2, path)).or(Some((1, String::new()))),
        }),
        patience_ms: millis(START_PATIENCE),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::MachineMount;

    #[test]
    fn drives_go_where_their_content_belongs() {
        let parts = MachineParts {
            kernel: "k".into(),
            initramfs: "i".into(),
            kernel_release: "6".into(),
            kernel_sha256: "0".into(),
            rootfs: "r".into(),
            workspace: None,
            mounts: vec![MachineMount { image: "m".into(), at: "/wheels".into(), file: Some("a.whl".into()) }],
        };
        let drive = |device: &str, at: &str, file: Option<&str>| Drive {
            device: device.to_owned(),
            at: at.to_owned(),
            file: file.map(str::to_owned),
        };
        assert_eq!(drives(&parts), [drive("vdb", "/wheels", Some("a.whl"))]);
        let with = MachineParts { workspace: Some("w".into()), ..parts };
        assert_eq!(drives(&with), [drive("vdb", "/workspace", None), drive("vdc", "/wheels", Some("a.whl"))]);
    }
}
