//! The launcher: a copy of the runner that starts an engine and owns everything that comes of it.
//!
//! One launcher serves every engine, root and plain users. It is the runner's own executable with [`ENTRY`] as its only
//! argument, no environment and one descriptor: a control socket as standard input. Over it come one [`Request`] and,
//! with it, what the engine needs open (its executables, the channel's ends); back go one [`Reply`] when the engine is
//! started, and one at its end. What is particular to an engine is its [`Work`].
//!
//! ```text
//! runner ── launcher (mount, pid and, as a plain user, user namespaces) ── inner: process 1 ─┬ gofer
//!                                                                                            ├ sentry ─ stubs
//!                                                                                            └ or: VMM
//! ```
//!
//! The inner process is process 1 of a pid namespace: when it ends, the kernel ends everything in it. It ends when it is
//! told to, when the runner's end of the socket closes, and when its parent dies; the parent is killed with the runner.
//! So nothing of a boundary outlives the runner, however that ends. The files that an engine is given or makes lie on a
//! tmpfs in the launcher's mount namespace, and vanish with it.
//!
//! Where procfs cannot be mounted (inside some containers), there is no pid namespace; then the inner process, as a
//! subreaper, kills what it started when the socket closes.

use std::io::{self, PipeReader, PipeWriter, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use plimsoll_guest::{read_message, write_message};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, getpid, getppid, pidfd_open, set_child_subreaper,
    set_parent_process_death_signal, waitpid,
};
use rustix::thread::UnshareFlags;
use serde::{Deserialize, Serialize};

pub mod control;
mod socket;
pub mod teardown;

use super::sys::{self, Forked};
use super::{firecracker, gvisor};
use crate::evidence::proc::all_pids;
use crate::time::millis;

/// The internal word that makes a copy of the runner a launcher.
pub const ENTRY: &str = "__launcher";
/// What the runner says when the boundary is to end.
pub const END: u8 = b'e';
/// Longest request, bytes; a skeleton's small files are in it.
const MAX_REQUEST: usize = 64 * 1024 * 1024;
/// Longest reply, bytes.
pub const MAX_REPLY: usize = 64 * 1024;
/// Last bytes of the engine's standard error that are kept.
const LOG: usize = 8 * 1024;

/// What to launch.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Request {
    /// Make a user namespace first: the runner is no root.
    pub user_namespace: bool,
    /// Make a pid namespace with its own procfs.
    pub pid_namespace: bool,
    /// Make network, IPC and UTS namespaces too, for an engine that makes none of its own.
    pub more_namespaces: bool,
    /// What is to be started.
    pub work: Work,
    /// How long the engine may take, milliseconds.
    pub patience_ms: u64,
}

/// What an engine needs of the launcher.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Work {
    /// A gVisor container. Descriptors: the channel's ends (the agent's input and output), the engine.
    Gvisor(gvisor::raise::Work),
    /// A microVM. Descriptors: the VMM and, as root, its jailer.
    Firecracker(firecracker::raise::Work),
}

/// What the launcher answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Reply {
    /// The engine is started: a container's agent waits, a VMM takes requests or soon will.
    Up,
    /// Something failed; nothing is left.
    Failed {
        /// What was being done.
        stage: Stage,
        /// In words, with the path it is about.
        what: String,
        /// `errno`, where there is one.
        errno: Option<i32>,
        /// The end of what the engine wrote to standard error.
        log: String,
    },
    /// Everything is ended, as asked.
    Ended {
        /// How the engine's main process ended and what it used.
        engine: Option<EngineEnd>,
        /// Processes that could not be ended.
        left: Vec<u32>,
        /// The end of what the engine wrote to standard error. Its last words: hostile.
        log: String,
    },
}

/// Parts of launching.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// Making namespaces.
    Namespaces,
    /// Mounting procfs.
    Procfs,
    /// Assembling the files that the engine is given.
    Files,
    /// The engine.
    Engine,
}

/// How an engine's main process ended, from `wait4`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineEnd {
    /// Exit code, unless a signal ended it.
    pub code: Option<i32>,
    /// Signal that ended it.
    pub signal: Option<i32>,
    /// CPU time of it and of the children it waited for, milliseconds.
    pub cpu_ms: u64,
    /// Largest resident set of one process, bytes.
    pub peak_memory_bytes: u64,
}

/// What failed while an engine was being started.
#[derive(Debug)]
pub struct Failure {
    /// What was being done.
    pub stage: Stage,
    /// In words, with the path it is about.
    pub what: String,
    /// Why it failed.
    pub why: io::Error,
}

/// A [`Failure`], for `map_err`.
pub fn failed<E: Into<io::Error>>(stage: Stage, what: impl Into<String>) -> impl FnOnce(E) -> Failure {
    let what = what.into();
    move |why| Failure { stage, what, why: why.into() }
}

/// The launcher's `main`: called first thing, in a process with one thread, when [`ENTRY`] is the first argument.
/// Returns the exit code.
#[must_use]
pub fn main() -> u8 {
    u8::from(launch().is_err())
}

/// Everything the inner process has.
pub struct Launcher {
    request: Request,
    control: UnixStream,
    log: Log,
    log_end: PipeWriter,
    /// The engine's main process, as far as it is known.
    main: Main,
}

/// How the pid of an engine's main process is found out.
#[derive(Debug)]
pub enum Main {
    /// Not yet started.
    Unknown,
    /// The engine writes it to a file.
    File(PathBuf),
    /// The launcher's own child.
    Child(u32),
}

impl Main {
    fn pid(&self) -> Option<u32> {
        match self {
            Self::Unknown => None,
            Self::File(file) => std::fs::read_to_string(file).ok()?.trim().parse().ok(),
            Self::Child(pid) => Some(*pid),
        }
    }
}

fn launch() -> io::Result<()> {
    // Whatever else was inherited, from the runner or from who started that.
    sys::close_from(3)?;
    // A terminal's Ctrl-C goes to the runner alone, which looks at the boundary before it ends it.
    rustix::process::setsid()?;
    let control = UnixStream::from(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?);
    let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    drop(null);
    let descriptors = socket::receive(&control)?;
    let request: Request = read_message(&mut &control, MAX_REQUEST).map_err(|e| io::Error::other(e.to_string()))?;
    let runner = getppid();
    if let Err(failure) = namespaces(&request) {
        return tell(&control, &failure, "");
    }
    // A change of credentials may have cleared what the runner set, and it may be gone meanwhile.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid() != runner {
        return Err(io::ErrorKind::BrokenPipe.into());
    }
    if request.pid_namespace
        && let Forked::Parent(inner) = sys::fork()?
    {
        drop((control, descriptors));
        let _ = waitpid(Some(inner), WaitOptions::empty());
        return Ok(());
    }
    let (log, log_end) = io::pipe()?;
    let log = Log { pipe: Some(log), tail: Vec::new() };
    let mut launcher = Launcher { request, control, log, log_end, main: Main::Unknown };
    match launcher.raise(descriptors) {
        Ok(()) => launcher.hold(),
        Err(failure) => {
            launcher.log.drain();
            let log = launcher.log.text();
            launcher.end_everything();
            tell(&launcher.control, &failure, &log)
        }
    }
}

fn tell(mut control: &UnixStream, failure: &Failure, log: &str) -> io::Result<()> {
    let reply = Reply::Failed {
        stage: failure.stage,
        what: format!("{}: {}", failure.what, failure.why),
        errno: failure.why.raw_os_error(),
        log: log.to_owned(),
    };
    write_message(&mut control, &reply).map_err(|e| io::Error::other(e.to_string()))
}

/// Enters the launcher's namespaces. A single id can be mapped by the process itself (user_namespaces(7)).
fn namespaces(request: &Request) -> Result<(), Failure> {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let mut flags = UnshareFlags::NEWNS;
    flags.set(UnshareFlags::NEWUSER, request.user_namespace);
    flags.set(UnshareFlags::NEWPID, request.pid_namespace);
    flags.set(UnshareFlags::NEWNET | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS, request.more_namespaces);
    sys::unshare(flags).map_err(failed(Stage::Namespaces, "unshare"))?;
    if request.user_namespace {
        let maps = [
            ("setgroups", "deny".to_owned()),
            ("uid_map", format!("0 {uid} 1\n")),
            ("gid_map", format!("0 {gid} 1\n")),
        ];
        for (file, text) in maps {
            std::fs::write(format!("/proc/self/{file}"), text)
                .map_err(failed(Stage::Namespaces, "write the id maps"))?;
        }
    }
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(failed(Stage::Namespaces, "make mounts private"))
}

impl Launcher {
    /// Starts the engine.
    fn raise(&mut self, descriptors: Vec<OwnedFd>) -> Result<(), Failure> {
        if self.request.pid_namespace {
            // The parent, on the other side of the namespace.
            set_parent_process_death_signal(Some(Signal::KILL))
                .map_err(failed(Stage::Namespaces, "tie the launcher to its parent"))?;
            let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
            mount("proc", "/proc", "proc", flags, None).map_err(failed(Stage::Procfs, "mount procfs"))?;
        } else {
            // Cleaning up takes this process, so it outlives the runner for a moment; the socket tells it.
            set_parent_process_death_signal(None)
                .map_err(failed(Stage::Namespaces, "untie the launcher from its parent"))?;
            set_child_subreaper(Some(getpid())).map_err(failed(Stage::Namespaces, "adopt orphans"))?;
        }
        let until = Instant::now() + Duration::from_millis(self.request.patience_ms);
        match self.request.work.clone() {
            Work::Gvisor(work) => gvisor::raise::raise(self, &work, descriptors, until)?,
            Work::Firecracker(work) => firecracker::raise::raise(self, &work, descriptors, until)?,
        }
        self.reply(&Reply::Up).map_err(failed(Stage::Engine, "report"))?;
        Ok(())
    }

    /// Says which process is the engine's main one.
    pub fn main_is(&mut self, main: Main) {
        self.main = main;
    }

    /// Whether the launcher stands in a user namespace of its own, where it has one id only.
    #[must_use]
    pub const fn rootless(&self) -> bool {
        self.request.user_namespace
    }

    /// A command that executes an open executable, with nothing in its environment and its errors kept.
    ///
    /// # Errors
    /// If the launcher has no descriptor left.
    pub fn command(&self, executable: &OwnedFd, name: &str) -> io::Result<Command> {
        let mut command = Command::new(format!("/proc/self/fd/{}", executable.as_raw_fd()));
        command.arg0(name).env_clear().current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(self.log_end.try_clone()?);
        Ok(command)
    }

    /// Another end of the pipe that keeps the engine's errors.
    ///
    /// # Errors
    /// If the launcher has no descriptor left.
    pub fn log(&self) -> io::Result<PipeWriter> {
        self.log_end.try_clone()
    }

    /// Runs one engine command, `what`, to its end. Ends early when the runner is gone.
    ///
    /// # Errors
    /// If it cannot be started, takes longer than `until`, or fails.
    pub fn run(&mut self, mut command: Command, what: &str, until: Instant) -> Result<(), Failure> {
        let error = |why: io::Error| Failure { stage: Stage::Engine, what: what.to_owned(), why };
        let mut child = command.spawn().map_err(error)?;
        let pid = Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|e| error(e.into()))?;
        loop {
            match self.watch(Some(&pidfd), until).map_err(error)? {
                Seen::Ended => {
                    let status = child.wait().map_err(error)?;
                    return if status.success() { Ok(()) } else { Err(error(io::Error::other(describe(status)))) };
                }
                Seen::RunnerGone | Seen::Order(_) => return Err(error(io::ErrorKind::BrokenPipe.into())),
                Seen::Late => return Err(error(io::ErrorKind::TimedOut.into())),
                Seen::Nothing => {}
            }
        }
    }

    /// Keeps the boundary until the runner wants its end, or is gone.
    fn hold(&mut self) -> io::Result<()> {
        let far = Instant::now() + Duration::from_secs(100 * 365 * 24 * 3600);
        loop {
            match self.watch(None, far)? {
                Seen::Order(END) => break,
                Seen::RunnerGone => {
                    self.end_everything();
                    return Ok(());
                }
                Seen::Order(_) | Seen::Ended | Seen::Late | Seen::Nothing => {}
            }
        }
        let (engine, left) = self.end_everything();
        self.log.drain();
        let log = self.log.text();
        self.reply(&Reply::Ended { engine, left, log })
    }

    fn reply(&mut self, reply: &Reply) -> io::Result<()> {
        write_message(&mut self.control, reply).map_err(|e| io::Error::other(e.to_string()))
    }

    /// Waits for a process, the runner, or the log, which is taken in here.
    fn watch(&mut self, pidfd: Option<&OwnedFd>, until: Instant) -> io::Result<Seen> {
        let patience = until.saturating_duration_since(Instant::now());
        let timeout = rustix::time::Timespec {
            tv_sec: i64::try_from(patience.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: patience.subsec_nanos().into(),
        };
        let (control, log, child) = {
            let fds = [Some(self.control.as_fd()), self.log.pipe.as_ref().map(AsFd::as_fd), pidfd.map(AsFd::as_fd)];
            let mut watched: Vec<PollFd<'_>> =
                fds.iter().flatten().map(|&fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            match poll(&mut watched, Some(&timeout)) {
                Ok(0) => return Ok(Seen::Late),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => return Ok(Seen::Nothing),
                Err(e) => return Err(e.into()),
            }
            let mut ready = watched.iter().map(|w| !w.revents().is_empty());
            let mut take = |present: bool| present && ready.next().unwrap_or(false);
            (take(true), take(fds[1].is_some()), take(fds[2].is_some()))
        };
        if log {
            self.log.read();
        }
        if control {
            let mut order = [0u8; 1];
            return match self.control.read(&mut order) {
                Ok(0) => Ok(Seen::RunnerGone),
                Ok(_) => Ok(Seen::Order(order[0])),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(Seen::Nothing),
                Err(_) => Ok(Seen::RunnerGone),
            };
        }
        Ok(if child { Seen::Ended } else { Seen::Nothing })
    }

    /// Kills and reaps every process but this one: all of the pid namespace, or all that this process adopted. Says how
    /// the engine ended and what is still there.
    fn end_everything(&self) -> (Option<EngineEnd>, Vec<u32>) {
        let main = self.main.pid();
        let mut end = None;
        let until = Instant::now() + Duration::from_secs(3);
        loop {
            let mut left = Vec::new();
            for raw in all_pids().unwrap_or_default() {
                let Some(pid) = Pid::from_raw(raw.cast_signed()).filter(|&pid| pid != getpid()) else { continue };
                let ours = match sys::reap(pid) {
                    Ok(Some(exit)) => {
                        if Some(raw) == main {
                            end = Some(engine_end(exit));
                        }
                        continue;
                    }
                    Ok(None) => true,
                    Err(_) => false,
                };
                if ours || self.request.pid_namespace {
                    let _ = rustix::process::kill_process(pid, Signal::KILL);
                    left.push(raw);
                }
            }
            if left.is_empty() || Instant::now() > until {
                return (end, left);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn engine_end(exit: sys::Exit) -> EngineEnd {
    use std::os::unix::process::ExitStatusExt;
    EngineEnd {
        code: exit.status.code(),
        signal: exit.status.signal(),
        cpu_ms: millis(exit.cpu),
        peak_memory_bytes: exit.peak_memory_bytes,
    }
}

enum Seen {
    Ended,
    RunnerGone,
    Order(u8),
    Late,
    Nothing,
}

fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, signal) => format!("killed by signal {}", signal.unwrap_or(0)),
    }
}

/// The engine's standard error, of which the end is kept.
struct Log {
    pipe: Option<PipeReader>,
    tail: Vec<u8>,
}

impl Log {
    /// One read; blocks if there is nothing.
    fn read(&mut self) {
        let Some(pipe) = &mut self.pipe else { return };
        let mut piece = [0u8; 4096];
        match pipe.read(&mut piece) {
            Ok(0) | Err(_) => self.pipe = None,
            Ok(n) => {
                self.tail.extend_from_slice(&piece[..n]);
                let excess = self.tail.len().saturating_sub(LOG);
                self.tail.drain(..excess);
            }
        }
    }

    /// What is there now.
    fn drain(&mut self) {
        while self.pipe.as_ref().is_some_and(|p| crate::backend::process::readable(p, Duration::ZERO).unwrap_or(false))
        {
            self.read();
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.tail).trim().to_owned()
    }
}
