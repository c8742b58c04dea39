//! What the runner sees of a worker: the facts that every boundary has, and those that only this one has.

use std::collections::BTreeSet;

use crate::backend::Plan;
use crate::backend::jail;
use crate::evidence::fact::{EngineKind, Identity};
use crate::evidence::observe::{Boundary, Expectation};
use crate::evidence::{ControlId, Fact, Observation, identity};

/// Facts about a worker before dispatch, on top of those that [`Boundary`] itself gives.
pub fn worker(boundary: &Boundary, plan: &Plan, landlock: &str, disk: bool) -> Vec<Observation> {
    let mut facts = vec![executable(boundary, &plan.engines.trusted)];
    facts.extend(limits(boundary, plan, disk));
    facts.push(Fact::Entropy { source: entropy_source(plan).to_owned(), fresh: !plan.deterministic });
    facts.push(Fact::Configured { control: ControlId::Filesystem, what: landlock.to_owned() });
    facts.push(Fact::Configured {
        control: ControlId::Seccomp,
        what: if disk || plan.filesystem != plimsoll_guest::Filesystem::None {
            "the filter admits memory, time and files below open directories; no socket, process or thread".to_owned()
        } else {
            "the filter admits memory, time and the channel; no file, socket, process or thread".to_owned()
        },
    });
    let bound = format!("wasmtime bounds the guest's own memories and tables to {} bytes", plan.bounds.memory_bytes);
    facts.push(Fact::Configured { control: ControlId::MemoryLimit, what: bound });
    facts.into_iter().map(Observation::host).collect()
}

/// The limit that was in force while the guest's code ran, seen while the worker still waits after it.
pub fn memory_while_running(boundary: &Boundary) -> Option<Observation> {
    let limit = soft_limit(&boundary.process.text("limits").ok()?, "Max data size")?;
    let what = format!("when the guest's code had run, RLIMIT_DATA of the worker was {limit} bytes");
    Some(Observation::host(Fact::Remark { control: ControlId::MemoryLimit, what }))
}

/// What a worker may have open and see.
pub fn expectation(plan: &Plan, channel: [u64; 2]) -> Expectation {
    let mounts = plan.mounts.iter().map(|(_, at)| at.clone());
    let workspace = plan.workspace.iter().map(|_| super::wasi::WORKSPACE.to_owned());
    Expectation {
        planned_mounts: if plan.filesystem == plimsoll_guest::Filesystem::None {
            Vec::new()
        } else {
            workspace.chain(mounts).collect()
        },
        channel: channel.to_vec(),
        ..Expectation::default()
    }
}

/// The worker is a copy of the runner: the same bytes, or something is wrong.
fn executable(boundary: &Boundary, trusted: &BTreeSet<String>) -> Fact {
    let path = identity::own_path().unwrap_or_else(|_| "plimsoll".into());
    let sha256 = match &boundary.snapshot.exe_sha256 {
        Ok(digest) => digest.clone(),
        Err(e) => return Fact::Unreadable { control: ControlId::BinaryIdentity, what: format!("exe: {e}") },
    };
    let identity = match jail::own_sha256() {
        Ok(own) if own == sha256 => match identity::identify(EngineKind::Worker, &path, &sha256, trusted) {
            listed @ (Identity::Release { .. } | Identity::Operator) => listed,
            _ => Identity::Runner,
        },
        Ok(_) => Identity::Unidentified { reason: "it is not the runner's own executable".to_owned() },
        Err(e) => Identity::Unidentified { reason: format!("the runner's own executable cannot be read ({e})") },
    };
    Fact::Executable { engine: EngineKind::Worker, path: path.display().to_string(), sha256, identity }
}

fn entropy_source(plan: &Plan) -> &'static str {
    if plan.deterministic {
        "a seeded sequence, as the step asks (`deterministic`)"
    } else {
        "the host kernel's getrandom(2), drawn by the worker after it started; nothing was restored"
    }
}

/// Limits, read back from `/proc/<pid>`.
fn limits(boundary: &Boundary, plan: &Plan, disk: bool) -> Vec<Fact> {
    let text = boundary.process.text("limits").unwrap_or_default();
    let limit = |control, wanted, name: &str, place: &str| Fact::Limit {
        control,
        wanted,
        read: soft_limit(&text, name),
        place: format!("{place} in /proc/{}/limits", boundary.process.pid()),
    };
    let mut facts = vec![
        limit(
            ControlId::MemoryLimit,
            plan.bounds.memory_bytes.saturating_add(super::COMPILER),
            "Max data size",
            "RLIMIT_DATA of the whole worker (the step's memory, and 256 MiB for compiling until the code starts)",
        ),
        limit(ControlId::PidsLimit, plan.bounds.pids, "Max processes", "RLIMIT_NPROC"),
        cpu(boundary, plan, &text),
    ];
    if disk {
        let mounts = boundary.process.text("mountinfo").unwrap_or_default();
        facts.push(Fact::Limit {
            control: ControlId::DiskLimit,
            wanted: plan.bounds.disk_bytes,
            read: scratch_size(&mounts),
            place: format!("the size of the scratch tmpfs in /proc/{}/mountinfo", boundary.process.pid()),
        });
    } else {
        // Nothing can be written at all; the largest file that could be is 0 bytes.
        facts.push(limit(ControlId::DiskLimit, plan.bounds.disk_bytes, "Max file size", "RLIMIT_FSIZE"));
    }
    facts
}

/// One thread that cannot start another takes one CPU at most; less than that nothing here enforces.
fn cpu(boundary: &Boundary, plan: &Plan, limits: &str) -> Fact {
    let control = ControlId::CpuLimit;
    let threads = boundary.process.threads().map(|t| t.len()).unwrap_or_default();
    if threads == 1 && soft_limit(limits, "Max processes") == Some(1) && plan.bounds.cpu_millis >= 1000 {
        let place = "the count of threads in /proc, with RLIMIT_NPROC 1, in thousandths of a CPU".to_owned();
        return Fact::Limit { control, wanted: plan.bounds.cpu_millis, read: Some(1000), place };
    }
    let reason = "the worker is one thread and takes up to one CPU; less than one takes a cgroup".to_owned();
    Fact::Unlimited { control, reason }
}

/// A soft limit in the table that proc_pid_limits(5) describes; nothing if it is unlimited.
fn soft_limit(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

/// `size=` of the scratch file system; the kernel writes it in KiB.
fn scratch_size(mountinfo: &str) -> Option<u64> {
    let point = format!(" /{} ", jail::SCRATCH_MOUNT);
    let line = mountinfo.lines().find(|line| line.contains(&point))?;
    let (_, right) = line.rsplit_once(" - ")?;
    let size = right.split([',', ' ']).find_map(|o| o.strip_prefix("size="))?;
    size.strip_suffix('k')?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Resident memory and its peak from `status`, bytes.
pub fn memory(boundary: &Boundary) -> (Option<u64>, Option<u64>) {
    let Ok(status) = boundary.process.status() else { return (None, None) };
    let bytes = |key| -> Option<u64> { Some(status.get(key)?.strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1024) };
    (bytes("VmRSS"), bytes("VmHWM"))
}

/// CPU time so far, milliseconds, from fields 14 and 15 of `stat`.
pub fn cpu_ms(boundary: &Boundary) -> Option<u64> {
    let text = boundary.process.text("stat").ok()?;
    let (_, rest) = text.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let ticks = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some(ticks * 1000 / rustix::param::clock_ticks_per_second().max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_from_the_kernels_table() {
        let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
                    Max data size             67108864             67108864             bytes     \n\
                    Max processes             unlimited            unlimited            processes \n";
        assert_eq!(soft_limit(text, "Max data size"), Some(64 << 20));
        assert_eq!(soft_limit(text, "Max processes"), None);
        assert_eq!(soft_limit(text, "Max file size"), None);
    }

    #[test]
    fn the_size_of_the_scratch_is_read_in_kibibytes() {
        let line = "99 98 0:52 / /.scratch rw,nosuid,nodev - tmpfs tmpfs rw,size=1024k,nr_inodes=1024,mode=755,uid=1";
        assert_eq!(scratch_size(line), Some(1 << 20));
        assert_eq!(scratch_size("99 98 0:52 / / ro - tmpfs tmpfs rw,size=64k"), None);
    }
}
