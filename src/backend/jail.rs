//! A jail that the runner builds around a copy of itself: the WebAssembly worker runs in one, and the helper that
//! unpacks artifacts in another.
//!
//! The runner executes its own executable, through a descriptor opened once, with an internal word as first argument
//! and nothing else: [`Jail::spawn`] is the runner's side, [`internal_entry`] and the module `inside` are the child's.
//! They shake hands over the two pipes that later are the channel:
//!
//! ```text
//! runner                                    child (one thread, empty environment)
//!   Setup{profile, limits, binds}   ->      closes every descriptor it should not have
//!                                   <-      Unshared: in new user, mount, pid, net, ipc and uts namespaces
//!   writes the id maps: Mapped      ->      takes its ids, forks; the parent of the two only waits, confined
//!                                   <-      Jailed: private root, Landlock, limits, no capabilities, seccomp
//! ```
//!
//! Until `Jailed` the child is the runner's own code working on the runner's own words; it is trusted. Nothing a guest
//! made is parsed before that.
//!
//! As root each jail gets a host uid of its own ([`JAIL_UIDS`]), so that two jails never share one; as a plain user the
//! jail's uid is the user's. Where user namespaces do not work, [`userns_probe`] says what stands in the way.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitCode;

use serde::{Deserialize, Serialize};

mod blocker;
mod inside;
mod profile;
mod root;
mod spawn;

pub use blocker::{Blocker, userns_probe};
pub(in crate::backend) use inside::drop_privilege;
pub use inside::{Inside, Visible, Wire};
pub use root::SCRATCH_MOUNT;
pub use spawn::{Jail, JailError, JailedChild, Lease, own_executable, own_sha256};

/// Host uids (and gids) of jails that root starts. Outside every range that systemd hands out
/// (<https://systemd.io/UIDS-GIDS/>) and above what `useradd` delegates; made from the jail's pid, which is unique while
/// it lives, and five random bits against quick reuse.
pub const JAIL_UIDS: Range<u32> = 0x7000_0000..0x7800_0000;
/// Uid and gid inside every jail.
pub const INSIDE_ID: u32 = 1000;
/// Number of the first descriptor that [`Spec::inherit`] has inside.
pub const FIRST_INHERITED: u32 = 3;
/// Longest message of the handshake, bytes.
const MAX_HANDSHAKE: usize = 256 * 1024;

/// What a jail's process may do: its system calls, descriptors, threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Profile {
    /// Compute and talk over the channel: no file, no socket, no thread.
    Compute,
    /// As `Compute`, and files below the planned mounts.
    Files,
    /// Use the files in [`Spec::inherit`], write below the planned mounts, and start threads; map nothing executable.
    Unpack,
}

/// How a host directory or file appears inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Access {
    /// As it is, read-only.
    ReadOnly,
    /// As it is, writable. As root, it is first given to the jail's uid; it should be an empty directory made for this.
    Own,
    /// A writable view that is thrown away; the host's copy never changes. An overlay whose upper half is in memory, or
    /// a copy in memory where that is not possible.
    Scratch {
        /// Bytes the view may grow by (a copy is counted too).
        bytes: u64,
    },
}

/// One host directory or file shown inside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bind {
    /// On the host.
    pub source: PathBuf,
    /// Absolute path inside, of plain components.
    pub target: String,
    /// How.
    pub access: Access,
}

/// Limits of a jail's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// `RLIMIT_DATA`: private writable memory, bytes.
    pub data_bytes: u64,
    /// `RLIMIT_FSIZE`: largest file, bytes.
    pub file_bytes: u64,
    /// Threads, the first one included. Only [`Profile::Unpack`] may have more than one.
    pub threads: u64,
}

/// What a jail is built to.
#[derive(Debug)]
pub struct Spec {
    /// Internal word that the copy of the runner is started with.
    pub entry: &'static str,
    /// What it may do.
    pub profile: Profile,
    /// Its limits.
    pub limits: Limits,
    /// What of the host's files it sees.
    pub binds: Vec<Bind>,
    /// Open files that it gets, as descriptors 3, 4 and so on. Landlock lets it work below the directories among them.
    pub inherit: Vec<OwnedFd>,
    /// Directories that are to belong to it: as root they are given to the jail's uid before it starts. They should be
    /// empty and made for this.
    pub give: Vec<OwnedFd>,
}

/// First message: what to build.
#[derive(Debug, Serialize, Deserialize)]
struct Setup {
    profile: Profile,
    limits: Limits,
    /// The runner's pid, to notice that it ended before the parent-death signal was set.
    runner: u32,
    /// The runner is root: groups can be dropped, and mounts are cloned with the host's rights.
    root: bool,
    /// How many descriptors it gets, from 3 on.
    inherited: u32,
    binds: Vec<SetupBind>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SetupBind {
    source: Vec<u8>,
    target: String,
    access: Access,
}

/// Second message from the runner.
#[derive(Debug, Serialize, Deserialize)]
struct Mapped;

/// What the child says during the handshake.
#[derive(Debug, Serialize, Deserialize)]
enum FromJail {
    Unshared,
    Jailed {
        /// What Landlock was asked to do and does.
        landlock: String,
        /// How each bind was made, in words.
        binds: Vec<String>,
    },
    Failed {
        step: String,
        errno: i32,
        why: String,
    },
}

/// What a jailed copy of the runner does.
pub type Entry = fn(Inside) -> ExitCode;

/// Runs an internal entry point if the process was started as one. To be called first thing in `main`, while there is
/// one thread and nothing is set up: the process jails itself before the entry's function is called.
#[must_use]
pub fn internal_entry(entries: &[(&str, Entry)]) -> Option<ExitCode> {
    let word = std::env::args_os().nth(1)?;
    let (_, run) = entries.iter().find(|(name, _)| word == *name)?;
    match inside::enter() {
        Ok(inside) => Some(run(inside)),
        // The runner has been told why.
        Err(_) => Some(ExitCode::from(2)),
    }
}
