//! The runner's side: it starts the child, writes its id maps, and holds it.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{ChildStderr, Command, Stdio};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use plimsoll_guest::FrameError;
use plimsoll_guest::wire::{read_message, write_message};
use rustix::process::geteuid;

use super::blocker::{self, Blocker};
use super::{
    Access, Bind, FIRST_INHERITED, FromJail, INSIDE_ID, JAIL_UIDS, MAX_HANDSHAKE, Mapped, Setup, SetupBind, Spec,
};
use crate::backend::process::{self, Child, readable};
use crate::backend::sys;
use crate::evidence::proc::executable_sha256;

/// How long building a jail may take; it takes milliseconds unless the machine is overloaded.
const PATIENCE: Duration = Duration::from_secs(20);

/// Why a jail could not be built.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    /// This host does not let us.
    #[error("{0}")]
    Blocked(Blocker),
    /// Something failed that is no property of the host.
    #[error("failed to {step} in the jail: {why}")]
    Step {
        /// The step that failed.
        step: String,
        /// Why.
        why: String,
    },
    /// Something failed on the runner's side.
    #[error("failed to {action}")]
    Runner {
        /// What was being done.
        action: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

fn failed(action: &str) -> impl FnOnce(io::Error) -> JailError + '_ {
    move |source| JailError::Runner { action: action.to_owned(), source }
}

/// The runner's own executable, opened once. Every copy of the runner executes this file, whatever its path leads to by
/// then.
///
/// # Errors
/// If there is no `/proc`.
pub fn own_executable() -> io::Result<&'static File> {
    static EXECUTABLE: OnceLock<File> = OnceLock::new();
    match EXECUTABLE.get() {
        Some(file) => Ok(file),
        None => {
            let file = File::open("/proc/self/exe")?;
            Ok(EXECUTABLE.get_or_init(|| file))
        }
    }
}

/// SHA-256 of [`own_executable`], lowercase hex.
///
/// # Errors
/// If it cannot be read.
pub fn own_sha256() -> io::Result<String> {
    executable_sha256(own_executable()?)
}

/// Builder of jails; see [`Jail::spawn`].
#[derive(Debug)]
pub struct Jail;

/// A process in a jail, waiting on its channel. Dropping it kills and reaps everything.
#[derive(Debug)]
pub struct JailedChild {
    /// The process between, which ends when the jailed one does. Its [`process::Exit`] covers both.
    pub child: Child,
    /// To the jailed process.
    pub to: PipeWriter,
    /// From the jailed process. Once something of a guest's has been parsed inside, everything here is hostile.
    pub from: PipeReader,
    /// The jailed process's standard error: diagnostics of the runner's own code. As hostile as `from`.
    pub diagnostics: ChildStderr,
    /// Inodes of the two pipes.
    pub channel: [u64; 2],
    /// Host uid of the jail.
    pub uid: u32,
    /// Keeps the uid from other jails of this runner.
    pub lease: Lease,
    /// What Landlock does, as the child says; cannot be seen from outside.
    pub landlock: String,
    /// How each bind was made.
    pub binds: Vec<String>,
}

impl Jail {
    /// Builds a jail around a copy of the runner. Blocks for some milliseconds; call it from a thread that may.
    ///
    /// # Errors
    /// As [`JailError`] says; nothing is left behind.
    pub fn spawn(spec: Spec) -> Result<JailedChild, JailError> {
        let root = geteuid().is_root();
        let (inside_in, mut to) = io::pipe().map_err(failed("make a pipe"))?;
        let (mut from, inside_out) = io::pipe().map_err(failed("make a pipe"))?;
        let inode = |fd: &dyn std::os::fd::AsFd| rustix::fs::fstat(fd.as_fd()).map(|s| s.st_ino);
        let channel = [
            inode(&to).map_err(|e| failed("look at a pipe")(e.into()))?,
            inode(&from).map_err(|e| failed("look at a pipe")(e.into()))?,
        ];
        let mut child = start(spec.entry, spec.inherit.as_slice(), inside_in, inside_out)?;
        let diagnostics = child
            .stderr
            .take()
            .ok_or_else(|| failed("start a copy of the runner")(io::ErrorKind::BrokenPipe.into()))?;
        let setup = Setup {
            profile: spec.profile,
            limits: spec.limits,
            runner: std::process::id(),
            root,
            inherited: u32::try_from(spec.inherit.len()).unwrap_or(u32::MAX),
            binds: spec.binds.iter().map(setup_bind).collect(),
        };
        let until = Instant::now() + PATIENCE;
        send(&mut to, &setup)?;
        match hear(&mut from, until)? {
            FromJail::Unshared => {}
            other => return Err(unexpected(other)),
        }
        let lease = map_ids(&child, root, &spec)?;
        send(&mut to, &Mapped)?;
        match hear(&mut from, until)? {
            FromJail::Jailed { landlock, binds } => {
                let uid = lease.0;
                Ok(JailedChild { child, to, from, diagnostics, channel, uid, lease, landlock, binds })
            }
            other => Err(unexpected(other)),
        }
    }
}

/// Starts the copy: its own executable, one argument, no environment, the channel and a diagnostics pipe.
fn start(entry: &str, inherit: &[OwnedFd], input: PipeReader, output: PipeWriter) -> Result<Child, JailError> {
    let executable = own_executable().map_err(|e| {
        if e.kind() == io::ErrorKind::NotFound {
            JailError::Blocked(Blocker::no_procfs())
        } else {
            failed("open the runner's own executable")(e)
        }
    })?;
    let mut command = Command::new(format!("/proc/self/fd/{}", executable.as_raw_fd()));
    command.arg0("plimsoll").arg(entry).env_clear().current_dir("/");
    command.stdin(input).stdout(output).stderr(Stdio::piped());
    if !inherit.is_empty() {
        let numbered = (FIRST_INHERITED..).zip(inherit);
        sys::hand_over(&mut command, numbered).map_err(failed("hand over descriptors"))?;
    }
    process::start(command).map_err(failed("start a copy of the runner"))
}

fn setup_bind(bind: &Bind) -> SetupBind {
    SetupBind { source: bind.source.as_os_str().as_bytes().to_vec(), target: bind.target.clone(), access: bind.access }
}

fn send(to: &mut PipeWriter, message: &impl serde::Serialize) -> Result<(), JailError> {
    write_message(to, message).map_err(|e| failed("talk to the jail")(io::Error::other(e.to_string())))
}

/// Reads one message of the handshake. The child is our own code, so a frame that has begun will end.
fn hear(from: &mut PipeReader, until: Instant) -> Result<FromJail, JailError> {
    let lost = |why: String| JailError::Step { step: "answer".to_owned(), why };
    while !readable(&*from, until.saturating_duration_since(Instant::now())).map_err(failed("hear from the jail"))? {
        if Instant::now() >= until {
            return Err(lost(format!("nothing was heard within {} s", PATIENCE.as_secs())));
        }
    }
    read_message(from, MAX_HANDSHAKE).map_err(|e| match e {
        FrameError::Closed => lost("it ended before it was built".to_owned()),
        e => lost(e.to_string()),
    })
}

fn unexpected(message: FromJail) -> JailError {
    match message {
        FromJail::Failed { step, errno, why } => match blocker::explain(&step, errno) {
            Some(blocker) => JailError::Blocked(blocker),
            None => JailError::Step { step, why },
        },
        other => JailError::Step { step: "keep to the handshake".to_owned(), why: format!("it said {other:?}") },
    }
}

/// Writes the maps: one id inside, one outside. Gives directories that the jail is to own to it.
fn map_ids(child: &Child, root: bool, spec: &Spec) -> Result<Lease, JailError> {
    let proc = format!("/proc/{}", child.pid());
    let write = |file: &str, text: String| {
        std::fs::write(format!("{proc}/{file}"), text).map_err(|e| match e.raw_os_error() {
            Some(errno @ (libc::EPERM | libc::EACCES)) => match blocker::explain("write the id maps", errno) {
                Some(blocker) => JailError::Blocked(blocker),
                None => failed("write the jail's id maps")(e),
            },
            _ => failed("write the jail's id maps")(e),
        })
    };
    let (lease, gid) = if root {
        let lease = host_uid(child.pid(), &spec.binds).map_err(JailError::Blocked)?;
        let gid = lease.0;
        (lease, gid)
    } else {
        // A plain user may map only himself, and only once groups cannot be dropped any more.
        write("setgroups", "deny".to_owned())?;
        (Lease(geteuid().as_raw()), rustix::process::getegid().as_raw())
    };
    let uid = lease.0;
    write("uid_map", format!("{INSIDE_ID} {uid} 1\n"))?;
    write("gid_map", format!("{INSIDE_ID} {gid} 1\n"))?;
    if root {
        for bind in spec.binds.iter().filter(|b| b.access == Access::Own) {
            std::os::unix::fs::lchown(&bind.source, Some(uid), Some(gid))
                .map_err(failed("give a directory to the jail"))?;
        }
        for directory in &spec.give {
            std::os::unix::fs::fchown(directory, Some(uid), Some(gid))
                .map_err(failed("give a directory to the jail"))?;
        }
    }
    Ok(lease)
}

/// Uids of this runner's live jails.
static LEASED: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// A host uid that no other jail of this runner has while this lives. A plain user's jails all have the user's.
#[derive(Debug)]
pub struct Lease(u32);

impl Lease {
    /// The uid, unless a live jail has it.
    fn take(uid: u32) -> Option<Self> {
        let taken = LEASED.lock().ok()?.insert(uid);
        // Not `then_some`: what it would throw away is a lease, and giving that back takes the lock.
        if taken { Some(Self(uid)) } else { None }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Ok(mut leased) = LEASED.lock() {
            leased.remove(&self.0);
        }
    }
}

/// The host uid of a jail that root starts.
///
/// A tree that an earlier jail made, and that this one is to see as its own, decides it: an overlay can copy up only
/// files whose owner the jail knows. That earlier jail is gone; if another one uses the tree just now, it gets a fresh
/// uid and a copy instead.
fn host_uid(pid: u32, binds: &[Bind]) -> Result<Lease, Blocker> {
    let inherited = binds
        .iter()
        .filter(|b| matches!(b.access, Access::Scratch { .. }))
        .filter_map(|b| std::fs::symlink_metadata(&b.source).ok())
        .map(|m| m.uid())
        .find(|uid| JAIL_UIDS.contains(uid));
    let mut random = [0u8; 1];
    let _ = getrandom::fill(&mut random);
    let fresh = JAIL_UIDS.start + ((pid & 0x3f_ffff) << 5) + u32::from(random[0] & 31);
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let known = |uid| within_map(&map, uid);
    if let Some(lease) = inherited.and_then(known).and_then(Lease::take) {
        return Ok(lease);
    }
    // Few ids are known in some containers: then the first that no live jail has.
    (fresh..fresh + 64).filter_map(known).find_map(Lease::take).ok_or_else(Blocker::lone_root)
}

/// `wanted` if the runner's own user namespace knows it, else the like of it in the largest range that it knows.
fn within_map(map: &str, wanted: u32) -> Option<u32> {
    let ranges = map.lines().filter_map(|line| {
        let numbers: Vec<u32> = line.split_whitespace().filter_map(|n| n.parse().ok()).collect();
        match numbers.as_slice() {
            [inside, _, count] => Some((*inside, *count)),
            _ => None,
        }
    });
    let ranges: Vec<(u32, u32)> = ranges.collect();
    if ranges.iter().any(|&(start, count)| wanted >= start && wanted - start < count) {
        return Some(wanted);
    }
    // Not the lower half: that is where the container's own users are.
    let (start, count) = ranges.into_iter().max_by_key(|&(_, count)| count)?;
    let half = count / 2;
    if half == 0 { None } else { Some(start + half + wanted % (count - half)) }
}

impl JailedChild {
    /// What the runner's own code inside said last on standard error; hostile once a guest was dispatched.
    pub fn last_words(&mut self) -> String {
        let bytes = process::available(&mut self.diagnostics, 4096);
        String::from_utf8_lossy(&bytes).trim().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jail_of_root_never_gets_uid_0_and_stays_within_the_known_ids() {
        let whole = "0 0 4294967295\n";
        let fresh = host_uid(4_194_304, &[]);
        assert!(fresh.is_ok_and(|lease| lease.0 != 0));
        assert_eq!(within_map(whole, 0x7000_0001), Some(0x7000_0001));
        let container = "0 100000 65536\n";
        assert!(within_map(container, 0x7000_0001).is_some_and(|uid| (32768..65536).contains(&uid)));
        assert_eq!(within_map("0 1000 1\n", 0x7000_0001), None);
    }

    #[test]
    fn a_leased_uid_is_not_given_again_until_it_is_back() {
        let lease = Lease::take(0x7700_0000).unwrap();
        assert!(Lease::take(0x7700_0000).is_none());
        drop(lease);
        assert!(Lease::take(0x7700_0000).is_some());
    }

    #[test]
    fn every_pid_has_uids_inside_the_range() {
        for pid in [1, 4_194_304, 4_194_303] {
            assert!(JAIL_UIDS.contains(&(JAIL_UIDS.start + ((pid & 0x3f_ffff) << 5) + 31)));
        }
    }
}
