//! Looking at a gVisor boundary from the host.
//!
//! The sentry is found by the channel, as everywhere. What is particular to gVisor: the processes below the launcher (the
//! gofer among them), descriptors that the sentry holds into the gofer's read-only mounts, and limits by cgroup.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use crate::backend::cgroup::Group;
use crate::backend::family::Family;
use crate::evidence::fact::{EngineKind, Identity};
use crate::evidence::identity::identify;
use crate::evidence::observe::{Boundary, Expectation, Snapshot};
use crate::evidence::proc::ProcDir;
use crate::evidence::{ControlId, Fact, Observation};

use crate::backend::executable::Executable;

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
    pub engine: &'a Executable,
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
pub fn find(known: &Known<'_>, family: &Family) -> io::Result<Boundary> {
    let boundary = Boundary::find(known.channel)?;
    if !family.holds(boundary.snapshot.pid, boundary.snapshot.start_time) {
        return Err(io::Error::other(format!(
            "pid {} holds the channel, but the launcher did not start it",
            boundary.snapshot.pid
        )));
    }
    Ok(boundary)
}

/// Everything about the boundary before dispatch.
#[must_use]
pub fn before(known: &Known<'_>, boundary: &Boundary, family: &Family, answered: Option<Duration>) -> Vec<Observation> {
    let gofers = gofers(boundary, family);
    let expected = Expectation {
        planned_mounts: known.planned.clone(),
        channel: known.channel.to_vec(),
        environment: Vec::new(),
        devices: Vec::new(),
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
    let what = "graded from binary-identity and challenge: in force if an identified runsc answered".to_owned();
    seen.push(Observation::host(Fact::Remark { control: ControlId::GuestKernel, what }));
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

/// Processes of the engine's executable that are neither the sentry nor below it: they hold the file system for it.
fn gofers(boundary: &Boundary, family: &Family) -> Vec<ProcDir> {
    let Ok(sentry) = boundary.process.file_id("exe") else { return Vec::new() };
    let below: BTreeSet<u32> = Family::of(boundary.snapshot.pid).pids().collect();
    family
        .pids()
        .filter(|pid| !below.contains(pid))
        .filter_map(|pid| ProcDir::open(pid).ok())
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
