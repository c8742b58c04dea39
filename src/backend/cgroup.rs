//! Control groups: limits that the host's kernel enforces on everything in a boundary, and what it used.
//!
//! [`Group`] is made by the runner before the engine starts, and the engine's first process is put into it, so that
//! nothing of the boundary is ever outside; the engine itself is told to leave cgroups alone (a failed start of it
//! leaves directories behind). Version 1 and 2 are used as found, per controller. As root a group is made below the
//! runner's own, or at the top; a plain user needs a delegated subtree ([`parent`]). What cannot be had is said in words, per
//! limit, and graded as not enforced.
//!
//! A limit counts only when the observed process is in the group and the group's file says the number
//! ([`Group::facts`]). Sources: the kernel's `admin-guide/cgroup-v1` and `cgroup-v2` documents.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use self::hierarchy::{Hierarchy, hierarchies};
use crate::evidence::proc::ProcDir;
use crate::evidence::{ControlId, Fact};

mod hierarchy;
mod parent;

/// Length of a scheduling period, microseconds.
const PERIOD: u64 = 100_000;
/// How long the kernel may take to let go of an emptied group.
const REMOVAL: Duration = Duration::from_secs(2);

/// Limits to set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes.
    pub memory_bytes: u64,
    /// Thousandths of a CPU.
    pub cpu_millis: u64,
    /// Tasks of the host: processes and threads, the engine's own included.
    pub tasks: u64,
}

/// A controller that we use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Controller {
    Memory,
    Cpu,
    Pids,
    /// Version 1 counts CPU time in a hierarchy of its own.
    CpuAccount,
}

impl Controller {
    const LIMITING: [Self; 3] = [Self::Memory, Self::Cpu, Self::Pids];

    const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
            Self::Pids => "pids",
            Self::CpuAccount => "cpuacct",
        }
    }

    const fn control(self) -> ControlId {
        match self {
            Self::Memory => ControlId::MemoryLimit,
            Self::Cpu | Self::CpuAccount => ControlId::CpuLimit,
            Self::Pids => ControlId::PidsLimit,
        }
    }
}

/// One directory that was made.
#[derive(Debug)]
struct Part {
    controllers: Vec<Controller>,
    version: u8,
    directory: PathBuf,
}

/// A group of our own, removed on drop if it is empty by then.
#[derive(Debug)]
pub struct Group {
    name: String,
    parts: Vec<Part>,
    refused: Vec<(Controller, String)>,
    limits: Limits,
}

/// Name of the group for a boundary.
#[must_use]
pub fn group_name(id: &str) -> String {
    format!("plimsoll-{id}")
}

impl Group {
    /// Makes a group for the boundary `id` and sets its limits. What this host or user does not allow is kept as the
    /// reason why a limit is not enforced.
    #[must_use]
    pub fn create(id: &str, limits: Limits) -> Self {
        let mut group = Self { name: group_name(id), parts: Vec::new(), refused: Vec::new(), limits };
        let hierarchies = match hierarchies() {
            Ok(found) => found,
            Err(e) => {
                let why = format!("cgroups cannot be found ({e})");
                group.refused = Controller::LIMITING.map(|c| (c, why.clone())).into();
                return group;
            }
        };
        let mut second = Vec::new();
        for controller in Controller::LIMITING.into_iter().chain([Controller::CpuAccount]) {
            let first = hierarchies.iter().find(|h| h.controllers.iter().any(|c| c == controller.name()));
            match first {
                Some(hierarchy) => {
                    if let Err(why) = group.make_v1(hierarchy, controller) {
                        group.refuse(controller, why);
                    }
                }
                None if controller == Controller::CpuAccount => {}
                None => second.push(controller),
            }
        }
        if !second.is_empty() {
            let made = match hierarchies.iter().find(|h| h.version == 2) {
                Some(hierarchy) => group.make_v2(hierarchy, &second, rustix::process::geteuid().is_root()),
                None => Err("no cgroup hierarchy is mounted".to_owned()),
            };
            match made {
                Ok(missing) => missing.into_iter().for_each(|(c, why)| group.refuse(c, why)),
                Err(why) => second.into_iter().for_each(|c| group.refuse(c, why.clone())),
            }
        }
        group
    }

    fn refuse(&mut self, controller: Controller, why: String) {
        if controller != Controller::CpuAccount {
            self.refused.push((controller, why));
        }
    }

    fn make_v1(&mut self, hierarchy: &Hierarchy, controller: Controller) -> Result<(), String> {
        let directory = hierarchy.own.join(&self.name);
        if let Some(part) = self.parts.iter_mut().find(|p| p.directory == directory) {
            part.controllers.push(controller);
        } else {
            fs::create_dir(&directory).map_err(|e| {
                format!(
                    "a cgroup cannot be made in {} ({e}); it takes root, or a delegated group",
                    hierarchy.own.display()
                )
            })?;
            self.parts.push(Part { controllers: vec![controller], version: 1, directory: directory.clone() });
        }
        match set_v1(&directory, controller, self.limits) {
            Ok(()) => Ok(()),
            Err(e) => {
                self.forget(controller);
                Err(format!("{} limit cannot be set in {} ({e})", controller.name(), directory.display()))
            }
        }
    }

    /// Limits that could not be set, unless there is no group at all.
    fn make_v2(
        &mut self,
        hierarchy: &Hierarchy,
        controllers: &[Controller],
        root: bool,
    ) -> Result<Vec<(Controller, String)>, String> {
        let (parent, usable) = parent::find(hierarchy, controllers, root);
        if usable.is_empty() {
            return Err(format!(
                "no cgroup above {} hands its controllers to this user (start the runner in a delegated group: \
                 systemd `Delegate=yes`)",
                hierarchy.own.display()
            ));
        }
        let directory = parent.join(&self.name);
        fs::create_dir(&directory).map_err(|e| format!("a cgroup cannot be made in {} ({e})", parent.display()))?;
        self.parts.push(Part { controllers: usable.clone(), version: 2, directory: directory.clone() });
        let mut missing = Vec::new();
        for &controller in controllers {
            let set = if usable.contains(&controller) {
                set_v2(&directory, controller, self.limits).map_err(|e| e.to_string())
            } else {
                Err(format!("{} does not hand on the {} controller", parent.display(), controller.name()))
            };
            if let Err(why) = set {
                self.forget(controller);
                missing.push((controller, why));
            }
        }
        Ok(missing)
    }

    fn forget(&mut self, controller: Controller) {
        for part in &mut self.parts {
            part.controllers.retain(|&c| c != controller);
        }
    }

    /// Puts a process, and with it everything it will start, into the group. A hierarchy that refuses it is given up.
    pub fn add(&mut self, pid: u32) {
        let parts = std::mem::take(&mut self.parts);
        for part in parts {
            match fs::write(part.directory.join("cgroup.procs"), pid.to_string()) {
                Ok(()) => self.parts.push(part),
                Err(e) => {
                    let why = format!("pid {pid} cannot be moved to {} ({e})", part.directory.display());
                    part.controllers.iter().for_each(|&c| self.refuse(c, why.clone()));
                    let _ = fs::remove_dir(&part.directory);
                }
            }
        }
    }

    /// Limits that could not be set: which controller's, and why.
    pub fn refused(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.refused.iter().map(|(controller, why)| (controller.name(), why.as_str()))
    }

    /// Versions of the hierarchies that it is in: `v1`, `v2`, or both.
    #[must_use]
    pub fn versions(&self) -> String {
        let versions: BTreeSet<u8> = self.parts.iter().map(|part| part.version).collect();
        versions.iter().map(|version| format!("v{version}")).collect::<Vec<_>>().join(" and ")
    }

    /// Directories that were made.
    #[must_use]
    pub fn directories(&self) -> Vec<PathBuf> {
        self.parts.iter().map(|p| p.directory.clone()).collect()
    }

    /// The version 2 group's directory below the top of its hierarchy, such as `system.slice/plimsoll-1`.
    #[must_use]
    pub fn v2_path(&self) -> Option<String> {
        let part = self.parts.iter().find(|p| p.version == 2)?;
        let hierarchies = hierarchies().ok()?;
        let relative =
            hierarchies.iter().filter(|h| h.version == 2).find_map(|h| part.directory.strip_prefix(&h.mount).ok())?;
        Some(relative.display().to_string())
    }

    fn part(&self, controller: Controller) -> Option<&Part> {
        self.parts.iter().find(|p| p.controllers.contains(&controller))
    }

    /// The limits as the kernel has them, if `process` is really in the group.
    #[must_use]
    pub fn facts(&self, process: &ProcDir) -> Vec<Fact> {
        let membership = process.text("cgroup").unwrap_or_default();
        let mut facts = Vec::new();
        for controller in Controller::LIMITING {
            let control = controller.control();
            let Some(part) = self.part(controller) else {
                let why = self.refused.iter().find(|(c, _)| *c == controller).map(|(_, why)| why.clone());
                facts.push(Fact::Unlimited {
                    control,
                    reason: why.unwrap_or_else(|| "no cgroup controller was found".to_owned()),
                });
                continue;
            };
            if !member(&membership, part.version, controller, &self.name) {
                facts.push(Fact::Unlimited {
                    control,
                    reason: format!("pid {} is not in {}", process.pid(), part.directory.display()),
                });
                continue;
            }
            let (wanted, file) = match (controller, part.version) {
                (Controller::Memory, 1) => (self.limits.memory_bytes, "memory.limit_in_bytes"),
                (Controller::Memory, _) => (self.limits.memory_bytes, "memory.max"),
                (Controller::Pids, _) => (self.limits.tasks, "pids.max"),
                (_, 1) => (self.limits.cpu_millis, "cpu.cfs_quota_us"),
                (_, _) => (self.limits.cpu_millis, "cpu.max"),
            };
            let path = part.directory.join(file);
            let read = if controller == Controller::Cpu { read_cpu(part) } else { number(&path) };
            facts.push(Fact::Limit { control, wanted, read, place: path.display().to_string() });
        }
        facts
    }

    /// Largest memory use so far, bytes.
    #[must_use]
    pub fn peak_memory(&self) -> Option<u64> {
        self.memory("memory.max_usage_in_bytes", "memory.peak")
    }

    /// Memory in use now, bytes.
    #[must_use]
    pub fn current_memory(&self) -> Option<u64> {
        self.memory("memory.usage_in_bytes", "memory.current")
    }

    fn memory(&self, first: &str, second: &str) -> Option<u64> {
        let part = self.part(Controller::Memory)?;
        number(&part.directory.join(if part.version == 1 { first } else { second }))
    }

    /// CPU time so far.
    #[must_use]
    pub fn cpu_time(&self) -> Option<Duration> {
        if let Some(part) = self.part(Controller::CpuAccount) {
            return number(&part.directory.join("cpuacct.usage")).map(Duration::from_nanos);
        }
        let part = self.parts.iter().find(|p| p.version == 2)?;
        field(&part.directory.join("cpu.stat"), "usage_usec").map(Duration::from_micros)
    }

    /// Processes of the group that the kernel killed for want of memory.
    #[must_use]
    pub fn out_of_memory_kills(&self) -> u64 {
        let Some(part) = self.part(Controller::Memory) else { return 0 };
        let file = if part.version == 1 { "memory.oom_control" } else { "memory.events" };
        field(&part.directory.join(file), "oom_kill").unwrap_or(0)
    }

    /// Removes the group once its processes are gone; says what is still there.
    #[must_use]
    pub fn remove(mut self) -> Vec<String> {
        remove(std::mem::take(&mut self.parts).into_iter().map(|p| p.directory), REMOVAL)
    }
}

impl Drop for Group {
    /// For a boundary that was given up: what is in the group has been killed, and may take a moment to be gone.
    fn drop(&mut self) {
        for left in remove(std::mem::take(&mut self.parts).into_iter().map(|p| p.directory), REMOVAL) {
            tracing::warn!("{left} could not be removed");
        }
    }
}

/// Directories of the group of boundary `id`, wherever it may be.
#[must_use]
pub fn find(id: &str) -> Vec<PathBuf> {
    let name = group_name(id);
    let mut found = Vec::new();
    for hierarchy in hierarchies().unwrap_or_default() {
        let above = hierarchy.own.ancestors().take_while(|p| p.starts_with(&hierarchy.mount));
        found.extend(above.map(|p| p.join(&name)).filter(|p| p.is_dir()));
    }
    found
}

/// Kills what is in groups that a boundary `id` had, and removes them: those found from here, and those of `recorded`
/// that bear its name in a cgroup file system. For a runner that was killed; says what is left.
#[must_use]
pub fn sweep(id: &str, recorded: &[PathBuf]) -> Vec<String> {
    let mut found = find(id);
    let name = group_name(id);
    let mounts: Vec<PathBuf> = hierarchies().unwrap_or_default().into_iter().map(|h| h.mount).collect();
    let ours = |path: &&PathBuf| {
        path.file_name().is_some_and(|n| *n == *name)
            && mounts.iter().any(|mount| path.starts_with(mount))
            && !path.components().any(|c| c == std::path::Component::ParentDir)
            && path.is_dir()
    };
    found.extend(recorded.iter().filter(ours).cloned());
    found.sort();
    found.dedup();
    for directory in &found {
        let pids = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
        for pid in pids.lines().filter_map(|pid| pid.parse().ok()) {
            if let Ok(process) = ProcDir::open(pid) {
                let _ = rustix::process::pidfd_send_signal(process.pidfd(), rustix::process::Signal::KILL);
            }
        }
    }
    remove(found.into_iter(), REMOVAL)
}

fn remove(directories: impl Iterator<Item = PathBuf>, patience: Duration) -> Vec<String> {
    let until = Instant::now() + patience;
    let mut left = Vec::new();
    for directory in directories {
        loop {
            match fs::remove_dir(&directory) {
                Ok(()) => break,
                Err(e) if e.kind() == io::ErrorKind::NotFound => break,
                Err(e) if Instant::now() > until => {
                    left.push(format!("cgroup {} ({e})", directory.display()));
                    break;
                }
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }
    left
}

fn set_v1(directory: &Path, controller: Controller, limits: Limits) -> io::Result<()> {
    let write = |file: &str, value: String| fs::write(directory.join(file), value);
    match controller {
        Controller::Memory => {
            write("memory.limit_in_bytes", limits.memory_bytes.to_string())?;
            // Without swap accounting the first is missing; the second keeps the kernel from swapping to get by.
            let _ = write("memory.memsw.limit_in_bytes", limits.memory_bytes.to_string());
            let _ = write("memory.swappiness", "0".to_owned());
            Ok(())
        }
        Controller::Cpu => {
            write("cpu.cfs_period_us", PERIOD.to_string())?;
            write("cpu.cfs_quota_us", quota(limits.cpu_millis).to_string())
        }
        Controller::Pids => write("pids.max", limits.tasks.to_string()),
        Controller::CpuAccount => Ok(()),
    }
}

fn set_v2(directory: &Path, controller: Controller, limits: Limits) -> io::Result<()> {
    let write = |file: &str, value: String| fs::write(directory.join(file), value);
    match controller {
        Controller::Memory => {
            write("memory.max", limits.memory_bytes.to_string())?;
            let _ = write("memory.swap.max", "0".to_owned());
            Ok(())
        }
        Controller::Cpu => write("cpu.max", format!("{} {PERIOD}", quota(limits.cpu_millis))),
        Controller::Pids => write("pids.max", limits.tasks.to_string()),
        Controller::CpuAccount => Ok(()),
    }
}

/// Microseconds of CPU time per period; the kernel takes no less than 1,000.
fn quota(cpu_millis: u64) -> u64 {
    (cpu_millis * (PERIOD / 1000)).max(1000)
}

fn read_cpu(part: &Part) -> Option<u64> {
    let (quota, period) = if part.version == 1 {
        (number(&part.directory.join("cpu.cfs_quota_us"))?, number(&part.directory.join("cpu.cfs_period_us"))?)
    } else {
        let text = fs::read_to_string(part.directory.join("cpu.max")).ok()?;
        let (quota, period) = text.trim().split_once(' ')?;
        (quota.parse().ok()?, period.parse().ok()?)
    };
    (quota * 1000).checked_div(period)
}

/// A file that holds one number; `max` and `-1` are none.
fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// A number after a name, in a file of such lines.
fn field(path: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    text.lines()
        .find_map(|l| l.split_once(' ').filter(|(key, _)| *key == name))
        .and_then(|(_, n)| n.trim().parse().ok())
}

/// Whether `/proc/<pid>/cgroup` puts the process into the group `name`, for this controller.
fn member(membership: &str, version: u8, controller: Controller, name: &str) -> bool {
    membership.lines().any(|line| {
        let mut fields = line.splitn(3, ':');
        let (number, controllers, path) = (fields.next(), fields.next().unwrap_or(""), fields.next().unwrap_or(""));
        let here = if version == 2 {
            number == Some("0") && controllers.is_empty()
        } else {
            controllers.split(',').any(|c| c == controller.name())
        };
        here && path.rsplit('/').next() == Some(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { memory_bytes: 256 << 20, cpu_millis: 1500, tasks: 96 };

    #[test]
    fn only_the_groups_own_members_count() {
        let text = "9:pids:/plimsoll-a\n8:memory:/plimsoll-b/x\n0::/deep/plimsoll-a";
        assert!(member(text, 1, Controller::Pids, "plimsoll-a"));
        assert!(!member(text, 1, Controller::Memory, "plimsoll-b"));
        assert!(!member(text, 1, Controller::Cpu, "plimsoll-a"));
        assert!(member(text, 2, Controller::Cpu, "plimsoll-a"));
        assert!(!member(text, 2, Controller::Cpu, "a"));
    }

    /// A directory that behaves like a version 2 tree as far as files go.
    fn tree(handed_on: &[(&str, &str)]) -> (tempfile::TempDir, Hierarchy) {
        let dir = tempfile::tempdir().unwrap();
        for (path, controllers) in handed_on {
            let at = dir.path().join(path);
            fs::create_dir_all(&at).unwrap();
            fs::write(at.join("cgroup.subtree_control"), controllers).unwrap();
            fs::write(at.join("cgroup.procs"), "").unwrap();
        }
        let own = dir.path().join(handed_on.last().unwrap().0);
        let hierarchy = Hierarchy { controllers: Vec::new(), version: 2, mount: dir.path().to_owned(), own };
        (dir, hierarchy)
    }

    #[test]
    fn a_group_is_made_where_the_controllers_are_handed_on_and_read_back() {
        let (dir, hierarchy) = tree(&[("", "memory"), ("user", "memory pids cpu"), ("user/job", "")]);
        let mut group = Group { name: "plimsoll-t".into(), parts: vec![], refused: vec![], limits: LIMITS };
        let missing = group.make_v2(&hierarchy, &Controller::LIMITING, false).unwrap();
        assert_eq!(missing, []);
        let [at] = group.directories().try_into().unwrap();
        assert_eq!(at, dir.path().join("user/plimsoll-t"));
        assert_eq!(read_cpu(&group.parts[0]), Some(1500));
        assert_eq!(number(&at.join("memory.max")), Some(256 << 20));
        assert_eq!(number(&at.join("pids.max")), Some(96));
    }

    #[test]
    fn where_nothing_is_handed_on_the_reason_says_what_to_do() {
        let (_dir, hierarchy) = tree(&[("", ""), ("job", "")]);
        let mut group = Group { name: "plimsoll-t".into(), parts: vec![], refused: vec![], limits: LIMITS };
        assert!(group.make_v2(&hierarchy, &Controller::LIMITING, false).unwrap_err().contains("Delegate=yes"));
    }

    #[test]
    fn a_process_outside_the_group_is_not_limited_by_it() {
        let group = Group::create(&format!("outside-{}", std::process::id()), LIMITS);
        let facts = group.facts(&ProcDir::own().unwrap());
        assert_eq!(facts.len(), 3);
        assert!(facts.iter().all(|f| matches!(f, Fact::Unlimited { .. })), "{facts:?}");
        assert_eq!(group.remove(), Vec::<String>::new());
    }

    #[test]
    fn limits_read_back_are_those_that_hold_for_a_member() {
        let id = format!("inside-{}", std::process::id());
        let mut group = Group::create(&id, LIMITS);
        if group.parts.is_empty() {
            println!("skipped: no cgroup can be made here: {:?}", group.refused);
            return;
        }
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        group.add(child.id());
        let facts = group.facts(&ProcDir::open(child.id()).unwrap());
        for fact in &facts {
            assert!(matches!(fact, Fact::Limit { wanted, read: Some(read), .. } if read == wanted), "{fact:?}");
        }
        assert!(group.cpu_time().is_some());
        let made = group.directories();
        std::mem::forget(group);
        assert_eq!(sweep(&id, &[]), Vec::<String>::new());
        child.wait().unwrap();
        assert!(made.iter().all(|d| !d.exists()));
    }
}
