//! The processes of a boundary, remembered so that they can be counted, and missed when it is over.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;

use crate::evidence::proc::{FileId, ProcDir, all_pids};

/// Unit of times in `/proc/<pid>/stat`: `USER_HZ`, the same on every architecture that we build for.
const TICKS_PER_SECOND: u64 = 100;

/// A process below the runner's launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Member {
    /// Pid as the runner sees it.
    pid: u32,
    /// Start time, clock ticks since boot.
    start: u64,
}

/// All processes of a boundary at one moment.
#[derive(Debug, Default)]
pub struct Family {
    members: Vec<Member>,
    /// Their pid namespaces, but not the runner's. Held open: the kernel gives the number of a namespace that ended to
    /// the next one at once, which may be another boundary's.
    namespaces: BTreeMap<FileId, File>,
}

/// What a boundary has used, where no cgroup counts it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Used {
    /// CPU time, children that ended included, milliseconds.
    pub cpu_ms: u64,
    /// Largest resident sets: the sentry's, plus the largest of its stubs, which holds the guest's pages. Bytes.
    pub peak_memory_bytes: u64,
    /// Resident now, in the same sense. Bytes.
    pub memory_bytes: u64,
}

impl Family {
    /// Every live process below `ancestor`, itself included.
    #[must_use]
    pub fn of(ancestor: u32) -> Self {
        let mut children: BTreeMap<u32, Vec<Member>> = BTreeMap::new();
        let mut members = Vec::new();
        for pid in all_pids().unwrap_or_default() {
            let Ok((start, parent)) = ProcDir::open(pid).and_then(|p| p.start_and_parent()) else { continue };
            let member = Member { pid, start };
            if pid == ancestor {
                members.push(member);
            } else {
                children.entry(parent).or_default().push(member);
            }
        }
        let mut next = 0;
        while let Some(pid) = members.get(next).map(|m| m.pid) {
            members.extend(children.remove(&pid).unwrap_or_default());
            next += 1;
        }
        let own = pid_namespace("self").map(|(id, _)| id);
        let namespaces = members
            .iter()
            .filter_map(|m| pid_namespace(&m.pid.to_string()))
            .filter(|(id, _)| Some(*id) != own)
            .collect();
        Self { members, namespaces }
    }

    /// Number of processes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Their pids.
    pub fn pids(&self) -> impl Iterator<Item = u32> {
        self.members.iter().map(|m| m.pid)
    }

    /// Whether the process with this pid and start time is one of them.
    #[must_use]
    pub fn holds(&self, pid: u32, start: u64) -> bool {
        self.members.contains(&Member { pid, start })
    }

    /// Those that still live, and whoever else shares a pid namespace of theirs.
    #[must_use]
    pub fn survivors(&self) -> Vec<String> {
        let mut alive = Vec::new();
        for pid in all_pids().unwrap_or_default() {
            let Ok(process) = ProcDir::open(pid) else { continue };
            let remembered = process.start_and_parent().is_ok_and(|(start, _)| self.holds(pid, start));
            let inside = process.file_id("ns/pid").is_ok_and(|n| self.namespaces.contains_key(&n));
            if remembered || inside {
                alive.push(format!("process {pid}"));
            }
        }
        alive
    }

    /// What they have used so far; `sentry` is one of them.
    #[must_use]
    pub fn used(&self, sentry: u32) -> Used {
        let mut used = Used::default();
        let (mut stub_peak, mut stub_now) = (0, 0);
        for pid in self.pids() {
            let Ok(process) = ProcDir::open(pid) else { continue };
            let (Ok(stat), Ok(status)) = (process.text("stat"), process.status()) else { continue };
            let fields: Vec<&str> = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
            // utime, stime, cutime, cstime: fields 14 to 17 (proc_pid_stat(5)); the first after the name is field 3.
            let ticks: u64 = (11..15).filter_map(|n| fields.get(n)).filter_map(|f| f.parse::<u64>().ok()).sum();
            used.cpu_ms += ticks * 1000 / TICKS_PER_SECOND;
            let bytes = |key: &str| {
                let kib = status.get(key).and_then(|v| v.split_whitespace().next()).and_then(|n| n.parse::<u64>().ok());
                kib.unwrap_or(0) * 1024
            };
            if pid == sentry {
                used.peak_memory_bytes += bytes("VmHWM");
                used.memory_bytes += bytes("VmRSS");
            } else {
                stub_peak = stub_peak.max(bytes("VmHWM"));
                stub_now = stub_now.max(bytes("VmRSS"));
            }
        }
        used.peak_memory_bytes += stub_peak;
        used.memory_bytes += stub_now;
        used
    }
}

fn pid_namespace(process: &str) -> Option<(FileId, File)> {
    let file = File::open(format!("/proc/{process}/ns/pid")).ok()?;
    let meta = file.metadata().ok()?;
    Some(((meta.dev(), meta.ino()), file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descendants_are_found_and_missed_when_they_are_gone() {
        let mut child = std::process::Command::new("sh").args(["-c", "sleep 60 & wait"]).spawn().unwrap();
        let family = (0..200)
            .map(|_| {
                std::thread::sleep(std::time::Duration::from_millis(5));
                Family::of(child.id())
            })
            .find(|f| f.len() == 2)
            .unwrap();
        assert_eq!(family.survivors().len(), 2);
        assert!(family.pids().any(|pid| pid == child.id()));
        crate::backend::process::kill_tree(child.id());
        child.wait().unwrap();
        let gone = (0..200).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(5));
            family.survivors().is_empty()
        });
        assert!(gone);
    }
}
