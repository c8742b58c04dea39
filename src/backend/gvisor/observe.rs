//! Looking at a gVisor boundary from the host.
//!
//! The sentry is found by the channel, as everywhere. What is particular to gVisor: the processes below the launcher (the
//! gofer among them), descriptors that the sentry holds into the gofer's read-only mounts, and limits by cgroup.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::Duration;

use crate::backend::cgroup::Group;
use crate::evidence::fact::{EngineKind, Identity};
use crate::evidence::identity::identify;
use crate::evidence::observe::{Boundary, Expectation, Snapshot};
use crate::evidence::proc::{FileId, ProcDir, all_pids};
use crate::evidence::{ControlId, Fact, Observation};

use super::runsc::Runsc;

/// Unit of times in `/proc/<pid>/stat`: `USER_HZ`, the same on every architecture that we build for.
const TICKS_PER_SECOND: u64 = 100;

/// A process of the boundary, remembered so that it can be missed later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Pid as the runner sees it.
    pub pid: u32,
    /// Start time, clock ticks since boot.
    pub start: u64,
    /// Its pid namespace.
    pub namespace: Option<FileId>,
}

/// What the first observation saw, for the second.
#[derive(Debug)]
pub struct First {
    /// The sentry.
    pub snapshot: Snapshot,
    /// Limits read back.
    pub limits: Vec<Fact>,
}

/// What an observation needs to know of the plan.
#[derive(Debug)]
pub struct Known<'a> {
    /// Inodes of the channel.
    pub channel: &'a [u64],
    /// The launcher, as the runner's child.
    pub launcher: u32,
    /// Mount points that show host files.
    pub planned: Vec<String>,
    /// The engine.
    pub engine: &'a Runsc,
    /// SHA-256 of the opened engine.
    pub sha256: &'a str,
    /// Digests that the operator trusts.
    pub trusted: &'a BTreeSet<String>,
    /// The cgroup.
    pub group: &'a Group,
    /// Bytes that the program may write.
    pub disk_bytes: u64,
}

/// The boundary, if the process that holds the channel came from our launcher.
///
/// # Errors
/// If nobody, or somebody else, holds the channel.
pub fn find(known: &Known<'_>, family: &[Member]) -> io::Result<Boundary> {
    let boundary = Boundary::find(known.channel)?;
    if !family.iter().any(|m| m.pid == boundary.snapshot.pid && m.start == boundary.snapshot.start_time) {
        return Err(io::Error::other(format!(
            "pid {} holds the channel, but the launcher did not start it",
            boundary.snapshot.pid
        )));
    }
    Ok(boundary)
}

/// Everything about the boundary before dispatch.
#[must_use]
pub fn before(
    known: &Known<'_>,
    boundary: &Boundary,
    family: &[Member],
    answered: Option<Duration>,
) -> Vec<Observation> {
    let gofers = gofers(boundary, family);
    let expected = Expectation {
        planned_mounts: known.planned.clone(),
        channel: known.channel.to_vec(),
        environment: Vec::new(),
        engine_mounts: gofers.iter().filter_map(|g| g.mounts().ok()).flatten().collect(),
    };
    let mut seen = boundary.snapshot.observations(&expected);
    seen.push(boundary.challenge(answered));
    seen.push(Observation::host(executable(known, &boundary.snapshot)));
    let limits = limits(known.group, boundary);
    seen.extend(disk_limit(&limits, known.disk_bytes).map(Observation::host));
    seen.extend(limits.into_iter().map(Observation::host));
    let source = "the sentry started afresh and draws from the host's getrandom; no state was restored".to_owned();
    seen.push(Observation::host(Fact::Entropy { source, fresh: true }));
    for gofer in &gofers {
        if let Some(what) = describe_gofer(gofer) {
            seen.push(Observation::host(Fact::Remark { control: ControlId::Filesystem, what }));
        }
    }
    seen
}

/// Limits of the sentry's cgroup, as they are now.
#[must_use]
pub fn limits(group: &Group, boundary: &Boundary) -> Vec<Fact> {
    group.facts(&boundary.process)
}

/// What bounds the program's writes, as far as the host sees it: no mount of the boundary can be written, so every byte
/// that the program writes is the sentry's memory, and the cgroup that limits the one limits the other. `None` where no
/// cgroup does, or where it allows more than `disk_bytes`.
#[must_use]
pub fn disk_limit(limits: &[Fact], disk_bytes: u64) -> Option<Fact> {
    limits.iter().find_map(|fact| match fact {
        Fact::Limit { control: ControlId::MemoryLimit, read: Some(read), place, .. } if *read <= disk_bytes => {
            Some(Fact::Limit {
                control: ControlId::DiskLimit,
                wanted: disk_bytes,
                read: Some(*read),
                place: format!("{place}: nothing outside the sentry's memory can be written"),
            })
        }
        _ => None,
    })
}

/// What differs from the first observation.
#[must_use]
pub fn changes(first: &First, boundary: &Boundary, group: &Group) -> Vec<Observation> {
    let mut changes = first.snapshot.changes(&boundary.snapshot);
    for stranger in &boundary.strangers {
        changes.push(Observation::host(Fact::Changed {
            control: ControlId::Challenge,
            what: "holders of the channel".to_owned(),
            before: "the sentry and its stubs".to_owned(),
            after: stranger.clone(),
        }));
    }
    for (before, after) in first.limits.iter().zip(limits(group, boundary)) {
        if *before != after {
            changes.push(Observation::host(Fact::Changed {
                control: before.control(),
                what: "limit".to_owned(),
                before: before.words(),
                after: after.words(),
            }));
        }
    }
    changes
}

fn executable(known: &Known<'_>, sentry: &Snapshot) -> Fact {
    let path = known.engine.path();
    match &sentry.exe_sha256 {
        Ok(sha256) => {
            // Where the opened file lies says nothing about another one.
            let identity = if sha256 == known.sha256 {
                identify(EngineKind::Runsc, path, sha256, known.trusted)
            } else {
                Identity::Unidentified { reason: "the running executable is not the one that was opened".to_owned() }
            };
            Fact::Executable {
                engine: EngineKind::Runsc,
                path: path.display().to_string(),
                sha256: sha256.clone(),
                identity,
            }
        }
        Err(e) => Fact::Unreadable { control: ControlId::BinaryIdentity, what: format!("exe: {e}") },
    }
}

/// Every live process below `launcher`, itself included.
#[must_use]
pub fn family(launcher: u32) -> Vec<Member> {
    let mut parents: BTreeMap<u32, Vec<Member>> = BTreeMap::new();
    let mut members = Vec::new();
    for pid in all_pids().unwrap_or_default() {
        let Ok(process) = ProcDir::open(pid) else { continue };
        let Ok((start, parent)) = process.start_and_parent() else { continue };
        let member = Member { pid, start, namespace: None };
        if pid == launcher {
            members.push(member);
        } else {
            parents.entry(parent).or_default().push(member);
        }
    }
    let mut next = 0;
    while let Some(pid) = members.get(next).map(|m| m.pid) {
        members.extend(parents.remove(&pid).unwrap_or_default());
        next += 1;
    }
    for member in &mut members {
        member.namespace = ProcDir::open(member.pid).and_then(|p| p.file_id("ns/pid")).ok();
    }
    members
}

/// Processes of the engine's executable that are neither the sentry nor below it: they hold the file system for it.
fn gofers(boundary: &Boundary, family: &[Member]) -> Vec<ProcDir> {
    let Ok(sentry) = boundary.process.file_id("exe") else { return Vec::new() };
    let below: BTreeSet<u32> = self::family(boundary.snapshot.pid).into_iter().map(|m| m.pid).collect();
    family
        .iter()
        .filter(|m| !below.contains(&m.pid))
        .filter_map(|m| ProcDir::open(m.pid).ok())
        .filter(|p| p.file_id("exe").is_ok_and(|id| id == sentry))
        .collect()
}

fn describe_gofer(gofer: &ProcDir) -> Option<String> {
    let status = gofer.status().ok()?;
    let uid = status.numbers("Uid").first().copied()?;
    Some(format!(
        "file access goes through pid {}: host uid {uid}, capabilities {}, NoNewPrivs {}, Seccomp {}, its own root",
        gofer.pid(),
        status.get("CapEff").unwrap_or("unknown"),
        status.get("NoNewPrivs").unwrap_or("unknown"),
        status.get("Seccomp").unwrap_or("unknown"),
    ))
}

/// What processes have used, where no cgroup counts it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Used {
    /// CPU time, children that ended included, milliseconds.
    pub cpu_ms: u64,
    /// Largest resident sets: the sentry's, plus the largest of its stubs, which holds the guest's pages. Bytes.
    pub peak_memory_bytes: u64,
    /// Resident now, in the same sense. Bytes.
    pub memory_bytes: u64,
}

/// Reads what the boundary's processes have used so far.
#[must_use]
pub fn used(sentry: u32, family: &[Member]) -> Used {
    let mut used = Used::default();
    let (mut stub_peak, mut stub_now) = (0, 0);
    for member in family {
        let Ok(process) = ProcDir::open(member.pid) else { continue };
        let (Ok(stat), Ok(status)) = (process.text("stat"), process.status()) else { continue };
        let fields: Vec<&str> = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
        // utime, stime, cutime, cstime: fields 14 to 17 (proc_pid_stat(5)); the first two after the name are 3 and 4.
        let ticks: u64 = (11..15).filter_map(|n| fields.get(n)).filter_map(|f| f.parse::<u64>().ok()).sum();
        used.cpu_ms += ticks * 1000 / TICKS_PER_SECOND;
        let kib = |key: &str| {
            status.get(key).and_then(|v| v.split_whitespace().next()).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0)
        };
        let (peak, now) = (kib("VmHWM") * 1024, kib("VmRSS") * 1024);
        if member.pid == sentry {
            used.peak_memory_bytes += peak;
            used.memory_bytes += now;
        } else {
            stub_peak = stub_peak.max(peak);
            stub_now = stub_now.max(now);
        }
    }
    used.peak_memory_bytes += stub_peak;
    used.memory_bytes += stub_now;
    used
}

/// Processes of the boundary that still live: those remembered, and whoever shares a pid namespace that was theirs.
#[must_use]
pub fn survivors(family: &[Member]) -> Vec<String> {
    let own = ProcDir::own().and_then(|p| p.file_id("ns/pid")).ok();
    let namespaces: BTreeSet<FileId> = family.iter().filter_map(|m| m.namespace).filter(|n| Some(*n) != own).collect();
    let mut alive = Vec::new();
    for pid in all_pids().unwrap_or_default() {
        let Ok(process) = ProcDir::open(pid) else { continue };
        let Ok((start, _)) = process.start_and_parent() else { continue };
        let remembered = family.iter().any(|m| m.pid == pid && m.start == start);
        let inside = process.file_id("ns/pid").is_ok_and(|n| namespaces.contains(&n));
        if remembered || inside {
            alive.push(format!("process {pid}"));
        }
    }
    alive
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_bounded_by_memory_only_where_memory_is_and_is_no_larger() {
        let memory =
            |read| Fact::Limit { control: ControlId::MemoryLimit, wanted: 512, read, place: "memory.max".to_owned() };
        assert!(
            disk_limit(&[memory(Some(512))], 1024)
                .is_some_and(|f| f.grade() == Some(crate::evidence::Status::Enforced))
        );
        assert_eq!(disk_limit(&[memory(Some(512))], 256), None);
        assert_eq!(disk_limit(&[memory(None)], 1024), None);
        let none = Fact::Unlimited { control: ControlId::MemoryLimit, reason: "no cgroup".to_owned() };
        assert_eq!(disk_limit(&[none], 1024), None);
    }
}
