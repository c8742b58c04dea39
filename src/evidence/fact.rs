//! Typed facts: what can be seen of a boundary.
//!
//! A fact is raw: numbers read, names found. What it is worth is the judge's to say ([`Fact::grade`] is the table), so
//! that a report can be judged again from its own observations, long after the boundary is gone.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::control::{ControlId, Status};

/// Where a fact was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// By the runner, from the host's side of the boundary.
    Host,
    /// Said by the inside. It may lower a grade, never raise one.
    Guest,
}

/// Kinds of Linux namespaces that a boundary is judged by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Namespace {
    /// User and group ids, capabilities.
    User,
    /// Mounts.
    Mnt,
    /// Process ids.
    Pid,
    /// Network.
    Net,
    /// System V IPC, POSIX message queues.
    Ipc,
    /// Host name.
    Uts,
}

impl Namespace {
    /// All kinds.
    pub const ALL: [Namespace; 6] =
        [Namespace::User, Namespace::Mnt, Namespace::Pid, Namespace::Net, Namespace::Ipc, Namespace::Uts];

    /// File name below `/proc/<pid>/ns`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Namespace::User => "user",
            Namespace::Mnt => "mnt",
            Namespace::Pid => "pid",
            Namespace::Net => "net",
            Namespace::Ipc => "ipc",
            Namespace::Uts => "uts",
        }
    }
}

/// How an engine's executable was identified.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "by", rename_all = "kebab-case")]
pub enum Identity {
    /// Its digest is in the built-in list of releases.
    Release {
        /// Version that the list gives.
        version: String,
    },
    /// Its digest is in the operator's policy.
    Operator,
    /// Not listed, but owned by root along a path that nobody else can write.
    RootOwned,
    /// Plimsoll's own worker: the same executable as the runner that reports this, byte for byte. It cannot vouch for
    /// itself, so this is never more than partial.
    Runner,
    /// None of these; why not, in words.
    Unidentified {
        /// The reason.
        reason: String,
    },
}

/// What an engine is, so that only the right one counts for a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EngineKind {
    /// Plimsoll's own worker process, with wasmtime in it.
    Worker,
    /// gVisor's runsc: the sentry is a guest kernel.
    Runsc,
    /// Firecracker: a virtual machine monitor.
    Firecracker,
    /// Firecracker's jailer, which starts the monitor as root and is gone when the boundary is looked at.
    Jailer,
}

impl EngineKind {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            EngineKind::Worker => "plimsoll",
            EngineKind::Runsc => "runsc",
            EngineKind::Firecracker => "firecracker",
            EngineKind::Jailer => "jailer",
        }
    }
}

/// One thing seen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Fact {
    /// `/proc/<pid>/ns/*` compared with the runner's own.
    Namespaces {
        /// Differ from the runner's.
        own: BTreeSet<Namespace>,
        /// The same as the runner's.
        shared: BTreeSet<Namespace>,
    },
    /// `Seccomp:` of every thread in `/proc/<pid>/task/*/status`.
    Seccomp {
        /// Threads seen.
        threads: u32,
        /// Threads with a filter (mode 2).
        filtered: u32,
    },
    /// `NoNewPrivs:` of every thread.
    NoNewPrivs {
        /// Threads seen.
        threads: u32,
        /// Threads with the flag.
        set: u32,
    },
    /// `CapInh`, `CapPrm`, `CapEff`, `CapAmb` of every thread, as one union; and whether the user namespace that
    /// they count in is the boundary's own.
    Capabilities {
        /// Union of the sets, as a hexadecimal mask.
        mask: String,
        /// The process is in a user namespace of its own.
        own_user_namespace: bool,
    },
    /// Real, effective, saved and filesystem ids, as the runner's namespace sees them.
    HostIds {
        /// Uids, in the order of `status`.
        uids: Vec<u32>,
        /// Gids, in the order of `status`.
        gids: Vec<u32>,
        /// Supplementary groups.
        groups: Vec<u32>,
    },
    /// `/proc/<pid>/root` and `mountinfo`.
    Root {
        /// `device:inode` of the boundary's root.
        root: String,
        /// `device:inode` of the runner's root.
        host_root: String,
        /// Mounts in the boundary's namespace.
        mounts: u32,
        /// Mount points that show the host's root file system, or a part of it that was not planned.
        foreign: Vec<String>,
    },
    /// `/proc/<pid>/fd`.
    Descriptors {
        /// Descriptors seen.
        total: u32,
        /// Paths that lie in planned read-only mounts.
        planned: Vec<String>,
        /// Anything else that is neither stdio, our channel nor anonymous.
        unplanned: Vec<String>,
    },
    /// `/proc/<pid>/net/dev`.
    Interfaces {
        /// Names.
        names: Vec<String>,
        /// The network namespace is the boundary's own.
        own_namespace: bool,
    },
    /// A limit that the host enforces, read back.
    Limit {
        /// Which one.
        control: ControlId,
        /// What was asked for (bytes, processes, thousandths of a CPU, milliseconds).
        wanted: u64,
        /// What was read back; absent if it could not be.
        read: Option<u64>,
        /// Where it was read: a file, a system call.
        place: String,
    },
    /// A limit that was asked for and that nothing here enforces.
    Unlimited {
        /// Which one.
        control: ControlId,
        /// Why not.
        reason: String,
    },
    /// The executable of the observed process, hashed through `/proc/<pid>/exe`.
    Executable {
        /// What engine it stands for.
        engine: EngineKind,
        /// Path it was opened by; a label.
        path: String,
        /// SHA-256, lowercase hex.
        sha256: String,
        /// How it was identified.
        identity: Identity,
    },
    /// A challenge and who holds the channel it went over.
    Challenge {
        /// The nonce came back.
        answered: bool,
        /// Microseconds from question to answer.
        micros: u64,
        /// The observed process.
        pid: u32,
        /// Its start time, clock ticks since boot (`stat` field 22).
        start_time: u64,
        /// Other holders that are confined descendants of it.
        stubs: u32,
        /// Holders that should not be: `pid (reason)`.
        strangers: Vec<String>,
    },
    /// KVM descriptors of a virtual machine monitor, and time its vCPUs spent in the guest.
    Kvm {
        /// `anon_inode:kvm-vm` descriptors.
        vms: u32,
        /// `anon_inode:kvm-vcpu:*` descriptors.
        vcpus: u32,
        /// Sum of the threads' `guest_time`, clock ticks.
        guest_time: u64,
    },
    /// The environment and arguments of the boundary's process, from `/proc/<pid>/environ`.
    Environment {
        /// Variable names seen.
        names: Vec<String>,
        /// Names that are not on the allow-list.
        leaked: Vec<String>,
    },
    /// Where the inside draws randomness.
    Entropy {
        /// In words.
        source: String,
        /// No state was restored that could repeat.
        fresh: bool,
    },
    /// Something that was set up and that the host cannot see in force (Landlock rules, filter contents).
    Configured {
        /// The control it belongs to.
        control: ControlId,
        /// What was set up.
        what: String,
    },
    /// Something could not be read.
    Unreadable {
        /// The control it leaves open.
        control: ControlId,
        /// What, and why.
        what: String,
    },
    /// A host setting that weakens a boundary of this kind (SMT, KSM, swap): reported, not graded.
    Remark {
        /// The control it belongs to.
        control: ControlId,
        /// What was seen.
        what: String,
    },
    /// The inside says that a control is not in force.
    Denied {
        /// The control.
        control: ControlId,
        /// What it says.
        what: String,
    },
    /// Something differs from the first observation.
    Changed {
        /// The control it belongs to.
        control: ControlId,
        /// What it is.
        what: String,
        /// Before dispatch.
        before: String,
        /// After the run.
        after: String,
    },
    /// A known vulnerability of the engine's version.
    Advisory {
        /// Which engine.
        engine: EngineKind,
        /// Version that has it.
        version: String,
        /// Name of the vulnerability, such as a CVE number.
        id: String,
        /// What it is.
        what: String,
        /// It shows in the way the engine is used here.
        applies: bool,
        /// The operator's policy refuses engines that have one.
        refused: bool,
    },
    /// What was looked for after the run, and found.
    Leftovers {
        /// What was looked for, in words.
        looked_for: Vec<String>,
        /// What is still there.
        found: Vec<String>,
    },
}

/// A fact and where it was seen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    /// Who saw it.
    pub origin: Origin,
    /// What.
    pub fact: Fact,
}

impl Observation {
    /// Seen by the runner.
    #[must_use]
    pub const fn host(fact: Fact) -> Self {
        Self { origin: Origin::Host, fact }
    }

    /// Said by the inside.
    #[must_use]
    pub const fn guest(fact: Fact) -> Self {
        Self { origin: Origin::Guest, fact }
    }
}

impl Fact {
    /// The control that the fact belongs to.
    #[must_use]
    pub const fn control(&self) -> ControlId {
        match self {
            Fact::Namespaces { .. } => ControlId::Namespaces,
            Fact::Seccomp { .. } => ControlId::Seccomp,
            Fact::NoNewPrivs { .. } => ControlId::NoNewPrivs,
            Fact::Capabilities { .. } => ControlId::Capabilities,
            Fact::HostIds { .. } => ControlId::NonRoot,
            Fact::Root { .. } => ControlId::RootIsolated,
            Fact::Descriptors { .. } => ControlId::Filesystem,
            Fact::Interfaces { .. } => ControlId::Network,
            Fact::Executable { .. } | Fact::Advisory { .. } => ControlId::BinaryIdentity,
            Fact::Challenge { .. } => ControlId::Challenge,
            Fact::Kvm { .. } => ControlId::Hypervisor,
            Fact::Environment { .. } => ControlId::Secrets,
            Fact::Entropy { .. } => ControlId::Entropy,
            Fact::Leftovers { .. } => ControlId::Teardown,
            Fact::Limit { control, .. }
            | Fact::Unlimited { control, .. }
            | Fact::Configured { control, .. }
            | Fact::Unreadable { control, .. }
            | Fact::Remark { control, .. }
            | Fact::Denied { control, .. }
            | Fact::Changed { control, .. } => *control,
        }
    }

    /// What the fact is worth for its control when the host saw it; `None` if it neither raises nor lowers.
    ///
    /// `Partial` for namespaces means that some are the boundary's own; whether that is enough is the tier's to say.
    #[must_use]
    pub fn grade(&self) -> Option<Status> {
        let yes = |ok: bool| Some(if ok { Status::Enforced } else { Status::NotEnforced });
        match self {
            Fact::Namespaces { own, .. } => Some(match own.len() {
                0 => Status::NotEnforced,
                n if n == Namespace::ALL.len() => Status::Enforced,
                _ => Status::Partial,
            }),
            Fact::Seccomp { threads, filtered } => yes(*threads > 0 && filtered == threads),
            Fact::NoNewPrivs { threads, set } => yes(*threads > 0 && set == threads),
            Fact::Capabilities { mask, own_user_namespace } => {
                yes(*own_user_namespace || (!mask.is_empty() && mask.bytes().all(|b| b == b'0')))
            }
            Fact::HostIds { uids, gids, groups } => {
                yes(!uids.is_empty() && !gids.is_empty() && !uids.iter().chain(gids).chain(groups).any(|&id| id == 0))
            }
            Fact::Root { root, host_root, foreign, .. } => yes(root != host_root && foreign.is_empty()),
            Fact::Descriptors { planned, unplanned, .. } => Some(if !unplanned.is_empty() {
                Status::NotEnforced
            } else if planned.is_empty() {
                Status::Enforced
            } else {
                Status::Partial
            }),
            Fact::Interfaces { names, own_namespace } => yes(*own_namespace && names.iter().all(|n| n == "lo")),
            Fact::Limit { wanted, read, .. } => match read {
                Some(read) => yes(read <= wanted),
                None => Some(Status::Unknown),
            },
            Fact::Executable { identity, .. } => Some(match identity {
                Identity::Release { .. } | Identity::Operator => Status::Enforced,
                Identity::RootOwned | Identity::Runner => Status::Partial,
                Identity::Unidentified { .. } => Status::NotEnforced,
            }),
            Fact::Challenge { answered, strangers, .. } => yes(*answered && strangers.is_empty()),
            Fact::Kvm { vms, vcpus, guest_time } => yes(*vms > 0 && *vcpus > 0 && *guest_time > 0),
            Fact::Environment { leaked, .. } => yes(leaked.is_empty()),
            Fact::Entropy { fresh, .. } => yes(*fresh),
            Fact::Leftovers { found, .. } => yes(found.is_empty()),
            Fact::Unlimited { .. } | Fact::Denied { .. } | Fact::Changed { .. } => Some(Status::NotEnforced),
            Fact::Unreadable { .. } => Some(Status::Unknown),
            Fact::Advisory { refused: true, .. } => Some(Status::NotEnforced),
            Fact::Advisory { .. } | Fact::Configured { .. } | Fact::Remark { .. } => None,
        }
    }

    /// The fact in words, for people. Holds no guest text.
    #[must_use]
    pub fn words(&self) -> String {
        let list = |names: &[String]| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        match self {
            Fact::Namespaces { own, shared } => {
                let join = |set: &BTreeSet<Namespace>| set.iter().map(|n| n.name()).collect::<Vec<_>>().join(", ");
                if shared.is_empty() {
                    format!("own namespaces: {}", join(own))
                } else {
                    format!("own namespaces: {}; shared with the host: {}", join(own), join(shared))
                }
            }
            Fact::Seccomp { threads, filtered } => {
                format!("{filtered} of {threads} threads run behind a seccomp filter of their own")
            }
            Fact::NoNewPrivs { threads, set } => format!("{set} of {threads} threads have NoNewPrivs"),
            Fact::Capabilities { mask, own_user_namespace } => format!(
                "capability mask {mask} in {}",
                if *own_user_namespace { "its own user namespace" } else { "the host's user namespace" }
            ),
            Fact::HostIds { uids, gids, groups } => {
                format!("host-side uids {uids:?}, gids {gids:?}, groups {groups:?}")
            }
            Fact::Root { root, host_root, mounts, foreign } => {
                let base = format!("root is {root}, the host's is {host_root}; {mounts} mounts");
                if foreign.is_empty() { base } else { format!("{base}, unplanned: {}", foreign.join(", ")) }
            }
            Fact::Descriptors { total, planned, unplanned } => match (planned.as_slice(), unplanned.as_slice()) {
                ([], []) => format!("{total} descriptors, none into a host file system"),
                (_, []) => format!("{total} descriptors; inside planned read-only mounts: {}", planned.join(", ")),
                _ => format!("{total} descriptors; unplanned: {}", unplanned.join(", ")),
            },
            Fact::Interfaces { names, own_namespace } => format!(
                "network interfaces: {} in {}",
                list(names),
                if *own_namespace { "its own network namespace" } else { "the host's network namespace" }
            ),
            Fact::Limit { control, wanted, read, place } => match read {
                Some(read) => format!("{control} {read} read from {place} (asked for {wanted})"),
                None => format!("{control} {wanted} was set, but {place} could not be read back"),
            },
            Fact::Unlimited { control, reason } => format!("{control} is not enforced: {reason}"),
            Fact::Executable { path, sha256, identity, .. } => {
                let short = sha256.get(..12).unwrap_or(sha256);
                match identity {
                    Identity::Release { version } => format!("{path} is release {version} (sha256 {short}…)"),
                    Identity::Operator => format!("{path} is listed in the operator's policy (sha256 {short}…)"),
                    Identity::RootOwned => {
                        format!(
                            "{path} is unlisted, but root-owned along a path that nobody else can write (sha256 {short}…)"
                        )
                    }
                    Identity::Runner => format!("{path} is the runner's own executable (sha256 {short}…)"),
                    Identity::Unidentified { reason } => {
                        format!("{path} is not identified: {reason} (sha256 {short}…)")
                    }
                }
            }
            Fact::Challenge { answered, micros, pid, stubs, strangers, .. } => {
                let said =
                    if *answered { format!("nonce answered in {micros} µs") } else { "nonce not answered".to_owned() };
                let who = match stubs {
                    0 => format!("only pid {pid} holds the channel"),
                    n => format!("pid {pid} and {n} confined children of it hold the channel"),
                };
                if strangers.is_empty() {
                    format!("{said}; {who}")
                } else {
                    format!("{said}; {who}; strangers hold it too: {}", strangers.join(", "))
                }
            }
            Fact::Kvm { vms, vcpus, guest_time } => {
                format!("{vms} KVM VM and {vcpus} vCPU descriptors; {guest_time} ticks spent in the guest")
            }
            Fact::Environment { names, leaked } => match (names.as_slice(), leaked.as_slice()) {
                ([], _) => "the boundary's process has an empty environment".to_owned(),
                (_, []) => format!("environment holds only {}", names.join(", ")),
                _ => format!("environment holds {} that it should not", leaked.join(", ")),
            },
            Fact::Entropy { source, fresh } => {
                if *fresh {
                    source.clone()
                } else {
                    format!("{source}, which may repeat")
                }
            }
            Fact::Configured { what, .. } => format!("configured, not proven: {what}"),
            Fact::Unreadable { what, .. } => format!("could not be read: {what}"),
            Fact::Remark { what, .. } => what.clone(),
            Fact::Advisory { version, id, what, refused, .. } => {
                let policy = if *refused { "; the operator's policy refuses such engines" } else { "" };
                format!("version {version} has {id}: {what}{policy}")
            }
            Fact::Denied { what, .. } => format!("the inside says it is not in force: {what}"),
            Fact::Changed { what, before, after, .. } => format!("{what} changed while running: {before} -> {after}"),
            Fact::Leftovers { looked_for, found } => {
                if found.is_empty() {
                    format!("nothing left: {}", looked_for.join(", "))
                } else {
                    format!("left behind: {}", found.join(", "))
                }
            }
        }
    }
}
