//! Child processes: a deadline, a kill of the whole tree, capped capture, and cleanup on every path.
//!
//! [`run`] is for a short engine command whose output matters; [`spawn`] for a process that stays. Both start the child
//! on one thread that lives as long as the runner ([`on_spawner`]): the kernel ties a parent-death signal to the *thread*
//! that forked, and a runtime's threads come and go. A [`Child`] that is dropped is killed with everything below it, and
//! reaped.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Mutex, OnceLock, mpsc};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::net::unix::pipe::Receiver;

use super::sys;
use crate::evidence::proc::{ProcDir, all_pids};

pub use super::sys::Exit;

/// How long a killed process may take to end before it is given up (it may hang in the kernel).
const DEATH_PATIENCE: Duration = Duration::from_secs(3);

type Job = Box<dyn FnOnce() + Send>;

/// Runs `work` on the thread that starts every child, and waits for it.
///
/// Work runs one piece at a time, so nothing in it sees a child half started: a forked child that has not yet executed
/// its program holds every descriptor of the runner for a moment.
///
/// # Errors
/// If the thread cannot be started, or `work` panicked.
pub fn on_spawner<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    static SPAWNER: OnceLock<Mutex<mpsc::Sender<Job>>> = OnceLock::new();
    let gone = || io::Error::other("the thread that starts children is gone");
    let sender = match SPAWNER.get() {
        Some(sender) => sender,
        None => {
            let (sender, jobs) = mpsc::channel::<Job>();
            std::thread::Builder::new().name("spawner".to_owned()).spawn(move || {
                // A login of root has supplementary groups (sudo: group 0), which engines keep when they change their
                // uid. This thread has none, and so have its children; a plain user's stay, as they may be his way to KVM.
                let _ = rustix::thread::set_thread_groups(&[]);
                for job in jobs {
                    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
                }
            })?;
            // Lost the race: the other thread's spawner stays, ours ends with its sender.
            SPAWNER.get_or_init(|| Mutex::new(sender))
        }
    };
    let (answer, answered) = mpsc::sync_channel(1);
    let job: Job = Box::new(move || {
        let _ = answer.send(work());
    });
    sender.lock().map_err(|_| gone())?.send(job).map_err(|_| gone())?;
    answered.recv().map_err(|_| gone())
}

/// A child of the runner, held by pid and pidfd until it is reaped.
#[derive(Debug)]
pub struct Child {
    pid: Pid,
    pidfd: OwnedFd,
    exit: Option<Exit>,
    /// Its standard input, if piped.
    pub stdin: Option<ChildStdin>,
    /// Its standard output, if piped.
    pub stdout: Option<ChildStdout>,
    /// Its standard error, if piped.
    pub stderr: Option<ChildStderr>,
}

/// Starts a child that dies with the runner. Its standard streams are as `command` says.
///
/// # Errors
/// As [`Command::spawn`].
pub fn spawn(mut command: Command) -> io::Result<Child> {
    sys::die_with_parent(&mut command);
    start(command)
}

/// Starts a child that sees to its parent-death signal itself.
///
/// # Errors
/// As [`Command::spawn`].
pub fn start(mut command: Command) -> io::Result<Child> {
    on_spawner(move || {
        let mut child = command.spawn()?;
        let raw = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
        match pidfd_open(raw, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Child {
                pid: raw,
                pidfd,
                exit: None,
                stdin: child.stdin.take(),
                stdout: child.stdout.take(),
                stderr: child.stderr.take(),
            }),
            Err(e) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(e.into())
            }
        }
    })?
}

impl Child {
    /// Process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// The pidfd.
    #[must_use]
    pub const fn pidfd(&self) -> &OwnedFd {
        &self.pidfd
    }

    /// Kills the process alone.
    pub fn kill(&self) {
        if self.exit.is_none() {
            let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        }
    }

    /// Kills the process and everything below it.
    pub fn kill_tree(&self) {
        if self.exit.is_none() {
            kill_tree(self.pid());
            self.kill();
        }
    }

    /// How it ended, if it has. Reaps it.
    ///
    /// # Errors
    /// As wait4(2).
    pub fn try_wait(&mut self) -> io::Result<Option<Exit>> {
        if self.exit.is_none() {
            self.exit = sys::reap(self.pid)?;
        }
        Ok(self.exit)
    }

    /// Waits for its end, blocking, for at most `patience`; `None` if it still runs.
    ///
    /// # Errors
    /// As wait4(2).
    pub fn wait_for(&mut self, patience: Duration) -> io::Result<Option<Exit>> {
        let until = Instant::now() + patience;
        loop {
            if let Some(exit) = self.try_wait()? {
                return Ok(Some(exit));
            }
            if !readable(&self.pidfd, until.saturating_duration_since(Instant::now()))? && Instant::now() >= until {
                return Ok(None);
            }
        }
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// As wait4(2), or if there is no runtime.
    pub async fn wait(&mut self) -> io::Result<Exit> {
        let watched = sys::watch(self.pidfd.try_clone()?)?;
        loop {
            if let Some(exit) = self.try_wait()? {
                return Ok(exit);
            }
            watched.readable().await?.clear_ready();
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !matches!(self.try_wait(), Ok(None)) {
            return;
        }
        self.kill_tree();
        if !matches!(self.wait_for(DEATH_PATIENCE), Ok(Some(_))) {
            tracing::warn!(pid = self.pid(), "a killed child process did not end");
        }
    }
}

/// Waits until a descriptor has something to read, or `patience` is over; says which.
///
/// # Errors
/// As poll(2).
pub fn readable(fd: impl AsFd, patience: Duration) -> io::Result<bool> {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let timeout = rustix::time::Timespec {
        tv_sec: i64::try_from(patience.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(patience.subsec_nanos()),
    };
    match poll(&mut fds, Some(&timeout)) {
        Ok(n) => Ok(n > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Kills every descendant of `pid`, then `pid`. Each is stopped before its children are looked up, so that none is born
/// meanwhile.
pub fn kill_tree(pid: u32) {
    let mut stopped = Vec::new();
    let mut todo = vec![pid];
    while let Some(next) = todo.pop() {
        let Ok(held) = ProcDir::open(next) else { continue };
        let _ = pidfd_send_signal(held.pidfd(), Signal::STOP);
        stopped.push(held);
        // Children of children appear once their parent stands still, so the list is read again for each.
        todo.extend(children().remove(&next).unwrap_or_default());
    }
    for held in stopped.iter().rev() {
        let _ = pidfd_send_signal(held.pidfd(), Signal::KILL);
    }
}

/// Every process's children, from the parents that `/proc/<pid>/stat` names.
fn children() -> BTreeMap<u32, Vec<u32>> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for pid in all_pids().unwrap_or_default() {
        if let Ok((_, parent)) = ProcDir::open(pid).and_then(|p| p.start_and_parent()) {
            children.entry(parent).or_default().push(pid);
        }
    }
    children
}

/// A command that ran to its end.
#[derive(Debug)]
pub struct Captured {
    /// How it ended.
    pub status: ExitStatus,
    /// Its output, at most as long as the cap.
    pub stdout: Vec<u8>,
    /// Its errors, at most as long as the cap.
    pub stderr: Vec<u8>,
    /// Something of either was dropped.
    pub truncated: bool,
}

/// Why a command did not run to its end.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// It could not be started.
    #[error("failed to start {program}")]
    Start {
        /// The program.
        program: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It took too long and was killed, with everything below it.
    #[error("{program} did not end within {deadline:?}: {said}")]
    Deadline {
        /// The program.
        program: String,
        /// How long it had.
        deadline: Duration,
        /// The end of what it wrote to standard error.
        said: String,
    },
    /// Waiting or reading failed.
    #[error("failed to follow {program}")]
    Follow {
        /// The program.
        program: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Runs a command without input until it ends. Of each output stream `cap` bytes are kept. A process that it leaves
/// behind may keep the pipes open: what it writes later is not waited for.
///
/// # Errors
/// As [`RunError`] says. If the future is dropped, the whole tree is killed.
pub async fn run(mut command: Command, deadline: Duration, cap: usize) -> Result<Captured, RunError> {
    let program = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = spawn(command).map_err(|source| RunError::Start { program: program.clone(), source })?;
    let mut stdout = Capture::new(child.stdout.take().map(OwnedFd::from), cap);
    let mut stderr = Capture::new(child.stderr.take().map(OwnedFd::from), cap);
    let follow = async {
        let status = {
            let mut drain = std::pin::pin!(async { tokio::join!(stdout.follow(), stderr.follow()) });
            let mut drained = false;
            loop {
                tokio::select! {
                    exit = child.wait() => break exit?.status,
                    _ = &mut drain, if !drained => drained = true,
                }
            }
        };
        stdout.rest();
        stderr.rest();
        Ok(status)
    };
    match tokio::time::timeout(deadline, follow).await {
        Ok(Ok(status)) => Ok(Captured {
            status,
            truncated: stdout.truncated || stderr.truncated,
            stdout: stdout.bytes,
            stderr: stderr.bytes,
        }),
        Ok(Err(source)) => Err(RunError::Follow { program, source }),
        Err(_) => {
            let tail = stderr.bytes.len().saturating_sub(512);
            let said = String::from_utf8_lossy(&stderr.bytes[tail..]).trim().to_owned();
            Err(RunError::Deadline { program, deadline, said })
        }
    }
}

/// One stream being captured.
struct Capture {
    pipe: Option<Receiver>,
    bytes: Vec<u8>,
    cap: usize,
    truncated: bool,
}

impl Capture {
    fn new(pipe: Option<OwnedFd>, cap: usize) -> Self {
        Self { pipe: pipe.and_then(|p| Receiver::from_owned_fd(p).ok()), bytes: Vec::new(), cap, truncated: false }
    }

    fn keep(&mut self, piece: &[u8]) {
        let kept = piece.len().min(self.cap - self.bytes.len());
        self.bytes.extend_from_slice(&piece[..kept]);
        self.truncated |= kept < piece.len();
    }

    /// Reads until the other end is closed.
    async fn follow(&mut self) {
        while let Some(pipe) = &self.pipe {
            if pipe.readable().await.is_err() || self.take() == Some(0) {
                self.pipe = None;
            }
        }
    }

    /// Reads what is there now. Past tokio, which tries no read before it has heard of an event.
    fn rest(&mut self) {
        let Some(pipe) = self.pipe.take() else { return };
        let mut piece = [0u8; 16 * 1024];
        while let Ok(n @ 1..) = rustix::io::read(&pipe, &mut piece) {
            self.keep(&piece[..n]);
        }
    }

    /// One read: its length, or nothing if there is nothing to read now.
    fn take(&mut self) -> Option<usize> {
        let mut piece = [0u8; 16 * 1024];
        match self.pipe.as_ref()?.try_read(&mut piece) {
            Ok(n) => {
                self.keep(&piece[..n]);
                Some(n)
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => None,
            Err(_) => Some(0),
        }
    }
}

/// What is in a pipe now, at most `cap` bytes, without waiting for more.
pub fn available(mut pipe: impl Read + AsFd, cap: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; cap];
    let mut have = 0;
    while have < cap && readable(&pipe, Duration::ZERO).unwrap_or(false) {
        match pipe.read(&mut bytes[have..]) {
            Ok(n) if n > 0 => have += n,
            _ => break,
        }
    }
    bytes.truncate(have);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[tokio::test]
    async fn output_is_captured_up_to_the_cap() {
        let ran = run(shell("printf 123456; printf abc >&2; exit 3"), Duration::from_secs(20), 4).await.unwrap();
        assert_eq!((ran.stdout.as_slice(), ran.stderr.as_slice(), ran.truncated), (&b"1234"[..], &b"abc"[..], true));
        assert_eq!(ran.status.code(), Some(3));
    }

    #[tokio::test]
    async fn a_daemon_that_keeps_the_pipes_does_not_hold_up_the_command() {
        let ran = run(shell("sleep 61 & echo $!"), Duration::from_secs(20), 100).await.unwrap();
        let daemon: u32 = String::from_utf8(ran.stdout).unwrap().trim().parse().unwrap();
        kill_tree(daemon);
    }

    #[tokio::test]
    async fn at_the_deadline_the_whole_tree_is_killed() {
        let script = "setsid sh -c 'sleep 62 & echo $! >&2; wait' & echo $! >&2; wait";
        let error = run(shell(script), Duration::from_millis(700), 100).await.unwrap_err();
        let RunError::Deadline { said, .. } = error else { panic!("{error}") };
        let pids: Vec<u32> = said.split_whitespace().map(|p| p.parse().unwrap()).collect();
        assert_eq!(pids.len(), 2);
        for pid in pids {
            // Killed, though whoever adopted it may not have reaped it yet.
            let dead = (0..200).any(|_| {
                std::thread::sleep(Duration::from_millis(10));
                ProcDir::open(pid).is_err()
            });
            assert!(dead, "{pid} still runs");
        }
    }

    #[test]
    fn a_dropped_child_is_killed_and_reaped() {
        let child = spawn(shell("sleep 63; true")).unwrap();
        let pid = child.pid();
        drop(child);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }

    #[tokio::test]
    async fn waiting_tells_how_it_ended_and_what_it_used() {
        let mut child = spawn(shell("kill -TERM $$")).unwrap();
        let exit = child.wait().await.unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&exit.status), Some(15));
        assert!(exit.peak_memory_bytes > 0);
    }
}
