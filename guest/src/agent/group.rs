//! The program's control group in a microVM, where the kernel is the agent's to set up.
//!
//! It bounds processes and memory, so that the agent still runs when the program has used up either, and it knows for
//! certain which limit was met. Nothing here is evidence: the runner takes it as a guest's word. Source: the kernel's
//! `admin-guide/cgroup-v2` document.

use std::ffi::CString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, mount};

use crate::wire::LimitHit;

/// Memory that is left to the kernel and the agent, bytes.
const RESERVE: u64 = 16 * 1024 * 1024;

/// A control group, empty until the program is started in it.
#[derive(Debug)]
pub struct Group {
    directory: PathBuf,
    /// `memory.max`, bytes.
    memory: Option<u64>,
}

impl Group {
    /// Makes one below `corner`, without limits.
    ///
    /// # Errors
    /// If the kernel has no control groups of version 2, or not these controllers.
    pub fn make(corner: &Path) -> io::Result<Self> {
        let top = corner.join("cgroup");
        fs::create_dir(&top)?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        mount("cgroup2", &top, "cgroup2", flags, None)?;
        fs::write(top.join("cgroup.subtree_control"), "+memory +pids +cpu")?;
        let directory = top.join("step");
        fs::create_dir(&directory)?;
        Ok(Self { directory, memory: None })
    }

    /// Bounds it to so many processes and threads, and to the memory that is there now, less a reserve.
    ///
    /// # Errors
    /// If the kernel takes a limit for none.
    pub fn bound(&mut self, pids: u64) -> io::Result<()> {
        fs::write(self.directory.join("pids.max"), pids.to_string())?;
        let memory = available().map(|available| available.saturating_sub(RESERVE).max(RESERVE));
        if let Some(memory) = memory {
            fs::write(self.directory.join("memory.max"), memory.to_string())?;
        }
        self.memory = memory;
        Ok(())
    }

    /// The file that a process writes `0` to in order to join.
    pub fn entrance(&self) -> Option<CString> {
        CString::new(self.directory.join("cgroup.procs").into_os_string().into_encoded_bytes()).ok()
    }

    /// The limit that was met, if one was.
    pub fn limit_hit(&self) -> Option<LimitHit> {
        if self.field("memory.events", "oom_kill").unwrap_or(0) > 0 {
            Some(LimitHit::Memory)
        } else if self.field("pids.events", "max").unwrap_or(0) > 0 {
            Some(LimitHit::Pids)
        } else {
            None
        }
    }

    /// Whether hardly anything of its memory is left that the kernel could take back: then programs crawl, since their own
    /// code is dropped and read again all the time, and the kernel, which sees that as progress, kills none of them.
    pub fn is_starving(&self) -> bool {
        let Some(limit) = self.memory else { return false };
        let held = |key: &str| self.field("memory.stat", key).unwrap_or(0);
        held("anon ") + held("shmem ") > limit - limit / 16
    }

    /// The most memory that it had at once, files it wrote included, bytes.
    pub fn peak_memory_bytes(&self) -> Option<u64> {
        fs::read_to_string(self.directory.join("memory.peak")).ok()?.trim().parse().ok()
    }

    /// CPU time of all processes that were in it, milliseconds.
    pub fn cpu_ms(&self) -> Option<u64> {
        self.field("cpu.stat", "usage_usec").map(|us| us / 1000)
    }

    fn field(&self, file: &str, key: &str) -> Option<u64> {
        let text = fs::read_to_string(self.directory.join(file)).ok()?;
        text.lines().find_map(|line| line.strip_prefix(key)?.trim().parse().ok())
    }
}

/// Memory that programs could have now, bytes (proc_meminfo(5)).
fn available() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}
