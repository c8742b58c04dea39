//! What the runner sees of a boundary's process, from outside.
//!
//! [`Snapshot::take`] reads everything once; [`Snapshot::observations`] turns it into facts; [`Snapshot::changes`]
//! compares two snapshots of the same process, before dispatch and after the run. [`holders`] finds the process in the
//! first place: whoever holds our channel, not whoever an engine says it started.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::Duration;

use super::control::ControlId;
use super::fact::{Fact, Namespace, Observation};
use super::proc::{Descriptor, FileId, Mount, ProcDir, Status, all_pids, file_id_text};

/// What a backend planned for its boundary, so that what is seen can be told from what should not be there.
#[derive(Debug, Clone, Default)]
pub struct Expectation {
    /// Mount points inside the boundary that show host files, read-only.
    pub planned_mounts: Vec<String>,
    /// Inodes of our channel's pipes or sockets.
    pub channel: Vec<u64>,
    /// Environment variables that the boundary's process may have.
    pub environment: Vec<String>,
    /// What descriptors of devices that the engine works with say, such as `/dev/kvm`; or how they begin, if it ends in
    /// `:`.
    pub devices: Vec<String>,
    /// Mounts of the namespace that the engine was set up in, where descriptors may have been opened.
    pub engine_mounts: Vec<Mount>,
}

/// Everything read about one process at one moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Process id.
    pub pid: u32,
    /// Clock ticks since boot.
    pub start_time: u64,
    /// SHA-256 of `exe`.
    pub exe_sha256: Result<String, String>,
    namespaces: BTreeMap<Namespace, FileId>,
    own: BTreeMap<Namespace, FileId>,
    uids: Vec<u32>,
    gids: Vec<u32>,
    groups: Vec<u32>,
    capabilities: Option<u64>,
    threads: u32,
    filtered: u32,
    no_new_privs: u32,
    root: Result<FileId, String>,
    host_root: Result<FileId, String>,
    mounts: Result<Vec<Mount>, String>,
    host_devices: BTreeSet<String>,
    descriptors: Result<Vec<Descriptor>, String>,
    interfaces: Result<Vec<String>, String>,
    environment: Result<Vec<String>, String>,
    limits: Option<String>,
}

impl Snapshot {
    /// Reads `process`. What may not be read is kept as such and graded `unknown`.
    ///
    /// # Errors
    /// If the process ended before or while it was read.
    pub fn take(process: &ProcDir) -> io::Result<Self> {
        let digest = process.exe_sha256().map_err(|e| e.to_string());
        Self::read(process, digest)
    }

    /// As [`Snapshot::take`], for a process beside one whose snapshot is `main`. If both execute the same file, its digest
    /// is not computed again: an engine is some 30 MB, and gVisor has four such processes.
    ///
    /// # Errors
    /// As [`Snapshot::take`].
    pub fn take_beside(process: &ProcDir, main_process: &ProcDir, main: &Self) -> io::Result<Self> {
        match (process.file_id("exe"), main_process.file_id("exe")) {
            (Ok(one), Ok(other)) if one == other => Self::read(process, main.exe_sha256.clone()),
            _ => Self::take(process),
        }
    }

    fn read(process: &ProcDir, exe_sha256: Result<String, String>) -> io::Result<Self> {
        let own = ProcDir::own()?;
        let text = |e: io::Error| e.to_string();
        let status = process.status()?;
        let threads = process.threads()?;
        let count = |key: &str, value: &str| {
            u32::try_from(threads.iter().filter(|t| t.get(key) == Some(value)).count()).unwrap_or(u32::MAX)
        };
        let runner = own.status()?;
        let filtered = threads.iter().filter(|thread| has_own_filter(thread, &runner)).count();
        let filtered = u32::try_from(filtered).unwrap_or(u32::MAX);
        let capability_sets = ["CapInh", "CapPrm", "CapEff", "CapAmb"];
        let capabilities = threads
            .iter()
            .flat_map(|t| capability_sets.iter().map(|set| t.mask(set)))
            .try_fold(0, |all, mask| mask.map(|mask| all | mask));
        let snapshot = Self {
            pid: process.pid(),
            start_time: process.start_and_parent()?.0,
            exe_sha256,
            namespaces: namespaces(process),
            own: namespaces(&own),
            uids: status.numbers("Uid"),
            gids: status.numbers("Gid"),
            groups: status.numbers("Groups"),
            capabilities: if threads.is_empty() { None } else { capabilities },
            threads: u32::try_from(threads.len()).unwrap_or(u32::MAX),
            filtered,
            no_new_privs: count("NoNewPrivs", "1"),
            root: process.file_id("root/").map_err(text),
            host_root: own.file_id("root/").map_err(text),
            mounts: process.mounts().map_err(text),
            host_devices: own.mounts()?.into_iter().map(|m| m.device).collect(),
            descriptors: process.descriptors().map_err(text),
            interfaces: process.interfaces().map_err(text),
            environment: process.bytes("environ").map(|b| variable_names(&b)).map_err(text),
            limits: process.text("limits").ok(),
        };
        if process.alive() { Ok(snapshot) } else { Err(io::Error::from_raw_os_error(libc::ESRCH)) }
    }

    /// The facts that every boundary's process is judged by.
    #[must_use]
    pub fn observations(&self, expected: &Expectation) -> Vec<Observation> {
        let own_ns = |n: Namespace| match (self.namespaces.get(&n), self.own.get(&n)) {
            (Some(theirs), Some(ours)) => theirs != ours,
            _ => false,
        };
        let (own, shared) = Namespace::ALL.into_iter().partition(|&n| own_ns(n));
        let facts = [
            Fact::Namespaces { own, shared },
            Fact::Seccomp { threads: self.threads, filtered: self.filtered },
            Fact::NoNewPrivs { threads: self.threads, set: self.no_new_privs },
            match self.capabilities {
                Some(mask) => {
                    Fact::Capabilities { mask: format!("{mask:016x}"), own_user_namespace: own_ns(Namespace::User) }
                }
                None => unreadable(ControlId::Capabilities, "capability sets", "absent"),
            },
            Fact::HostIds { uids: self.uids.clone(), gids: self.gids.clone(), groups: self.groups.clone() },
            self.root_fact(expected),
            self.descriptor_fact(expected),
            match &self.interfaces {
                Ok(names) => Fact::Interfaces { names: names.clone(), own_namespace: own_ns(Namespace::Net) },
                Err(e) => unreadable(ControlId::Network, "net/dev", e),
            },
            match &self.environment {
                Ok(names) => Fact::Environment {
                    names: names.clone(),
                    leaked: names.iter().filter(|n| !expected.environment.contains(n)).cloned().collect(),
                },
                Err(e) => unreadable(ControlId::Secrets, "environ", e),
            },
        ];
        facts.into_iter().map(Observation::host).collect()
    }

    fn root_fact(&self, expected: &Expectation) -> Fact {
        let (root, host_root, mounts) = match (&self.root, &self.host_root, &self.mounts) {
            (Ok(root), Ok(host), Ok(mounts)) => (*root, *host, mounts),
            (Err(e), _, _) | (_, Err(e), _) => return unreadable(ControlId::RootIsolated, "root", e),
            (_, _, Err(e)) => return unreadable(ControlId::RootIsolated, "mountinfo", e),
        };
        // A file system that the host has mounted too is the host's, unless we planned to show it.
        let foreign = mounts
            .iter()
            .filter(|m| self.host_devices.contains(&m.device))
            .filter(|m| !(m.read_only() && expected.planned_mounts.iter().any(|p| within(&m.point, p))))
            .map(|m| format!("{} ({})", m.point, m.kind))
            .collect();
        Fact::Root {
            root: file_id_text(root),
            host_root: file_id_text(host_root),
            mounts: u32::try_from(mounts.len()).unwrap_or(u32::MAX),
            foreign,
        }
    }

    fn descriptor_fact(&self, expected: &Expectation) -> Fact {
        let descriptors = match &self.descriptors {
            Ok(descriptors) => descriptors,
            Err(e) => return unreadable(ControlId::Filesystem, "fd", e),
        };
        let no_mounts = Vec::new();
        let mounts = self.mounts.as_ref().unwrap_or(&no_mounts);
        let (mut planned, mut unplanned) = (Vec::new(), Vec::new());
        let device = |d: &Descriptor| {
            expected.devices.iter().any(|e| d.link == *e || (e.ends_with(':') && d.link.starts_with(e.as_str())))
        };
        for descriptor in descriptors.iter().filter(|d| !anonymous(d, &expected.channel) && !device(d)) {
            let mount = mounts.iter().chain(&expected.engine_mounts).find(|m| Some(m.id) == descriptor.mount);
            let inside =
                mount.is_some_and(|m| m.read_only() && expected.planned_mounts.iter().any(|p| within(&m.point, p)));
            let list = if inside { &mut planned } else { &mut unplanned };
            list.push(descriptor.link.clone());
        }
        planned.sort();
        planned.dedup();
        Fact::Descriptors { total: u32::try_from(descriptors.len()).unwrap_or(u32::MAX), planned, unplanned }
    }

    /// What differs between this snapshot, taken before dispatch, and one taken after the run.
    #[must_use]
    pub fn changes(&self, later: &Self) -> Vec<Observation> {
        let mut changes = Vec::new();
        let mut compare = |control: ControlId, what: &str, before: String, after: String| {
            if before != after {
                changes.push(Observation::host(Fact::Changed { control, what: what.to_owned(), before, after }));
            }
        };
        let or_error = |r: &Result<String, String>| r.clone().unwrap_or_else(|e| format!("unreadable ({e})"));
        let id = |r: &Result<FileId, String>| or_error(&r.clone().map(file_id_text));
        compare(ControlId::Challenge, "pid", self.pid.to_string(), later.pid.to_string());
        compare(ControlId::Challenge, "start time", self.start_time.to_string(), later.start_time.to_string());
        compare(ControlId::BinaryIdentity, "executable", or_error(&self.exe_sha256), or_error(&later.exe_sha256));
        for kind in Namespace::ALL {
            let read = |s: &Self| s.namespaces.get(&kind).map_or("unreadable".to_owned(), |&id| file_id_text(id));
            compare(ControlId::Namespaces, &format!("{} namespace", kind.name()), read(self), read(later));
        }
        let ids = |s: &Self| format!("uids {:?} gids {:?} groups {:?}", s.uids, s.gids, s.groups);
        compare(ControlId::NonRoot, "ids", ids(self), ids(later));
        let mask = |s: &Self| s.capabilities.map_or("unreadable".to_owned(), |m| format!("{m:016x}"));
        compare(ControlId::Capabilities, "capabilities", mask(self), mask(later));
        let all =
            |part: u32, of: u32| if part == of { "every thread".to_owned() } else { format!("{part} of {of} threads") };
        compare(ControlId::Seccomp, "seccomp", all(self.filtered, self.threads), all(later.filtered, later.threads));
        let privs = |s: &Self| all(s.no_new_privs, s.threads);
        compare(ControlId::NoNewPrivs, "NoNewPrivs", privs(self), privs(later));
        compare(ControlId::RootIsolated, "root", id(&self.root), id(&later.root));
        let mounts = |s: &Self| match &s.mounts {
            Ok(mounts) => mounts
                .iter()
                .map(|m| format!("{} on {} {}", m.device, m.point, m.options))
                .collect::<Vec<_>>()
                .join("; "),
            Err(e) => format!("unreadable ({e})"),
        };
        compare(ControlId::RootIsolated, "mounts", mounts(self), mounts(later));
        let limits = |s: &Self| s.limits.clone().unwrap_or_default();
        if !only_lowered(&limits(self), &limits(later)) {
            compare(ControlId::MemoryLimit, "resource limits", limits(self), limits(later));
        }
        let interfaces = |s: &Self| or_error(&s.interfaces.clone().map(|names| names.join(", ")));
        compare(ControlId::Network, "interfaces", interfaces(self), interfaces(later));
        changes
    }

    /// Whether another process of the same boundary is confined like this one: same executable and namespaces, a
    /// filter and `NoNewPrivs` on every thread. Says what is wrong otherwise.
    ///
    /// # Errors
    /// The first difference, in words.
    pub fn confined_like(&self, main: &Self) -> Result<(), String> {
        if self.exe_sha256 != main.exe_sha256 {
            return Err("another executable".to_owned());
        }
        if self.namespaces != main.namespaces {
            return Err("other namespaces".to_owned());
        }
        if self.threads == 0 || self.filtered != self.threads || self.no_new_privs != self.threads {
            return Err("a thread without seccomp filter or NoNewPrivs".to_owned());
        }
        Ok(())
    }
}

/// Whether a thread runs behind a seccomp filter that it does not have from the runner. Filters are inherited: in a container
/// whose engine filters everything, as Docker's does, each process has one before it confines itself. How many a thread
/// runs behind is told since Linux 5.9 (proc_pid_status(5)); before, a filter of the runner's own hides those of others.
fn has_own_filter(thread: &Status, runner: &Status) -> bool {
    let filtered = |status: &Status| status.get("Seccomp") == Some("2");
    let filters = |status: &Status| status.numbers("Seccomp_filters").first().copied();
    filtered(thread)
        && (!filtered(runner)
            || matches!((filters(thread), filters(runner)), (Some(theirs), Some(ours)) if theirs > ours))
}

fn unreadable(control: ControlId, what: &str, why: &str) -> Fact {
    Fact::Unreadable { control, what: format!("{what}: {why}") }
}

fn namespaces(process: &ProcDir) -> BTreeMap<Namespace, FileId> {
    Namespace::ALL
        .into_iter()
        .filter_map(|n| process.file_id(&format!("ns/{}", n.name())).ok().map(|id| (n, id)))
        .collect()
}

fn variable_names(environ: &[u8]) -> Vec<String> {
    environ
        .split(|&b| b == 0)
        .filter(|entry| !entry.is_empty())
        .map(|entry| String::from_utf8_lossy(entry.split(|&b| b == b'=').next().unwrap_or(entry)).into_owned())
        .collect()
}

/// Whether a path is a planned mount point or lies below it.
fn within(path: &str, point: &str) -> bool {
    path == point || (path.starts_with(point) && path.as_bytes().get(point.len()) == Some(&b'/'))
}

/// Descriptors that lead into no host file system. A memory file counts as anonymous; a deleted file does not.
fn anonymous(descriptor: &Descriptor, channel: &[u64]) -> bool {
    let link = descriptor.link.as_str();
    let inode = link.split_once(":[").and_then(|(_, rest)| rest.strip_suffix(']')).and_then(|n| n.parse().ok());
    inode.is_some_and(|n: u64| channel.contains(&n))
        || link.starts_with("pipe:[")
        || link.starts_with("socket:[")
        || ["anon_inode:[eventfd]", "anon_inode:[eventpoll]", "anon_inode:[timerfd]", "anon_inode:[signalfd]"]
            .contains(&link)
        || link.starts_with("/memfd:")
        || (descriptor.number <= 2 && link == "/dev/null")
}

/// Whether a table of limits (proc_pid_limits(5)) is another one with at most some numbers lowered, which is every
/// process's own right (setrlimit(2)) and takes nothing away from what was judged.
fn only_lowered(before: &str, after: &str) -> bool {
    let number = |word: &str| if word == "unlimited" { Some(u64::MAX) } else { word.parse().ok() };
    let word = |before: &str, after: &str| match (number(before), number(after)) {
        (Some(before), Some(after)) => after <= before,
        _ => before == after,
    };
    let line = |(before, after): (&str, &str)| {
        let (before, after) = (before.split_whitespace(), after.split_whitespace());
        before.clone().count() == after.clone().count() && before.zip(after).all(|(b, a)| word(b, a))
    };
    before.lines().count() == after.lines().count() && before.lines().zip(after.lines()).all(line)
}

/// A process that holds the channel.
#[derive(Debug)]
pub struct Holder {
    /// The process, held.
    pub process: ProcDir,
    /// Its parent.
    pub parent: u32,
}

/// Every process but the runner that holds one of the pipes or sockets in `inodes`.
///
/// A process that this user may not look into is skipped: it runs as somebody else, outside anything we started.
///
/// # Errors
/// If `/proc` cannot be listed.
pub fn holders(inodes: &[u64]) -> io::Result<Vec<Holder>> {
    let runner = std::process::id();
    let mut found = Vec::new();
    for pid in all_pids()? {
        if pid == runner {
            continue;
        }
        let Ok(process) = ProcDir::open(pid) else { continue };
        let Ok(descriptors) = process.descriptors() else { continue };
        let holds = descriptors.iter().any(|d| {
            let inode = d.link.split_once(":[").and_then(|(_, rest)| rest.strip_suffix(']'));
            inode.and_then(|n| n.parse().ok()).is_some_and(|n: u64| inodes.contains(&n))
        });
        if holds && let Ok((_, parent)) = process.start_and_parent() {
            found.push(Holder { process, parent });
        }
    }
    Ok(found)
}

/// The boundary's process among the holders of its channel, a count of its confined children, and holders that should
/// not be there.
#[derive(Debug)]
pub struct Boundary {
    /// The process.
    pub process: ProcDir,
    /// Its snapshot.
    pub snapshot: Snapshot,
    /// Confined descendants that hold the channel too.
    pub stubs: u32,
    /// `pid (reason)` of every other holder.
    pub strangers: Vec<String>,
}

impl Boundary {
    /// Finds the boundary behind a channel: the only holder whose parent is no holder. Every other holder has to be
    /// a descendant of it, confined like it.
    ///
    /// # Errors
    /// If nobody or more than one such process holds the channel, or it ended.
    pub fn find(inodes: &[u64]) -> io::Result<Self> {
        let mut all = holders(inodes)?;
        let pids: BTreeSet<u32> = all.iter().map(|h| h.process.pid()).collect();
        let tops: Vec<usize> = (0..all.len()).filter(|&i| !pids.contains(&all[i].parent)).collect();
        let &[top] = tops.as_slice() else {
            let who = tops.iter().map(|&i| all[i].process.pid().to_string()).collect::<Vec<_>>().join(", ");
            let why = if who.is_empty() {
                "nobody holds the channel".to_owned()
            } else {
                format!("pids {who} hold the channel")
            };
            return Err(io::Error::other(why));
        };
        let process = all.swap_remove(top).process;
        let snapshot = Snapshot::take(&process)?;
        let (mut stubs, mut strangers) = (0, Vec::new());
        for holder in &all {
            let beside = Snapshot::take_beside(&holder.process, &process, &snapshot);
            match beside.map_err(|e| e.to_string()).and_then(|s| s.confined_like(&snapshot)) {
                Ok(()) => stubs += 1,
                Err(why) => strangers.push(format!("{} ({why})", holder.process.pid())),
            }
        }
        Ok(Self { process, snapshot, stubs, strangers })
    }

    /// The boundary whose process is known by its pid: the one that listens on the socket that our channel connects to.
    ///
    /// # Errors
    /// If it ended.
    pub fn of(pid: u32) -> io::Result<Self> {
        let process = ProcDir::open(pid)?;
        let snapshot = Snapshot::take(&process)?;
        Ok(Self { process, snapshot, stubs: 0, strangers: Vec::new() })
    }

    /// The challenge fact: an answer came in `micros`, or none did.
    #[must_use]
    pub fn challenge(&self, answered: Option<Duration>) -> Observation {
        Observation::host(Fact::Challenge {
            answered: answered.is_some(),
            micros: answered.map_or(0, |d| u64::try_from(d.as_micros()).unwrap_or(u64::MAX)),
            pid: self.snapshot.pid,
            start_time: self.snapshot.start_time,
            stubs: self.stubs,
            strangers: self.strangers.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_the_runner_itself_is_behind_confines_nobody_else() {
        let status = |mode: u32, filters: Option<u32>| {
            let filters = filters.map_or(String::new(), |n| format!("Seccomp_filters:\t{n}\n"));
            Status::parse(&format!("Name:\tx\nSeccomp:\t{mode}\n{filters}"))
        };
        let (free, docker, old) = (status(0, Some(0)), status(2, Some(1)), status(2, None));
        assert!(has_own_filter(&status(2, Some(1)), &free));
        assert!(has_own_filter(&status(2, None), &status(0, None)), "a kernel that does not count");
        assert!(has_own_filter(&status(2, Some(2)), &docker));
        assert!(!has_own_filter(&status(2, Some(1)), &docker), "inherited");
        assert!(!has_own_filter(&old, &old), "not to be told apart");
        assert!(!has_own_filter(&free, &free) && !has_own_filter(&status(1, Some(0)), &free));
    }

    #[test]
    fn only_channel_anonymous_and_stdio_descriptors_pass_for_nothing() {
        let fd = |number, link: &str| Descriptor { number, link: link.to_owned(), mount: None };
        assert!(anonymous(&fd(7, "pipe:[99]"), &[]));
        assert!(anonymous(&fd(0, "/dev/null"), &[]));
        assert!(!anonymous(&fd(9, "/dev/null"), &[]));
        assert!(!anonymous(&fd(4, "/etc/passwd"), &[]));
        assert!(!anonymous(&fd(4, "anon_inode:kvm-vm"), &[]));
    }

    #[test]
    fn limits_may_be_lowered_and_not_raised() {
        let table =
            |data: &str| format!("Limit Soft Hard Units\nMax data size {data} {data} bytes\nMax core 0 0 bytes\n");
        assert!(only_lowered(&table("100"), &table("100")) && only_lowered(&table("100"), &table("99")));
        assert!(only_lowered(&table("unlimited"), &table("5")));
        for (before, after) in [("100", "101"), ("100", "unlimited"), ("unlimited", "x")] {
            assert!(!only_lowered(&table(before), &table(after)), "{before} {after}");
        }
        assert!(!only_lowered(&table("1"), "") && !only_lowered("", &table("1")));
    }

    #[test]
    fn a_planned_point_covers_what_is_below_it_and_no_namesake() {
        assert!(within("/usr", "/usr") && within("/usr/lib", "/usr"));
        assert!(!within("/usr2", "/usr"));
    }

    #[test]
    fn the_test_process_itself_proves_nothing() {
        let own = ProcDir::own().unwrap();
        let observations = Snapshot::take(&own).unwrap().observations(&Expectation::default());
        let judgement = super::super::judge::weigh(&observations);
        assert_eq!(judgement.tier, super::super::Tier::Process);
    }

    #[test]
    fn an_unconfined_child_that_holds_the_channel_is_found_by_it() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let inode = rustix::fs::fstat(&reader).unwrap().st_ino;
        let mut child = std::process::Command::new("sleep").arg("60").stdin(reader).spawn().unwrap();
        let boundary = Boundary::find(&[inode]).unwrap();
        assert_eq!(boundary.process.pid(), child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(Boundary::find(&[inode]).is_err());
    }
}
