//! Running the dispatched program: find it, start it without privilege, relay its output, end what it leaves.

use std::ffi::CString;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use rustix::process::{Pid, WaitOptions, WaitStatus, getpid, wait};
use rustix::time::Timespec;

use super::group::Group;
use super::place::{Corner, Place, WORKSPACE};
use super::sys::{self, Spawn, SpawnError, Stage};
use super::{Transport, fault};
use crate::collect;
use crate::wire::{Dispatch, FrameError, FromGuest, GuestResult, LimitHit, MAX_CHUNK, Program, Stream};

/// The runner ends a run at its deadline; the agent does so this much later, in case nobody does.
const GRACE: Duration = Duration::from_secs(2);
/// How often the agent looks at the program's memory, where that is its own to bound.
const LOOK: Duration = Duration::from_millis(250);
/// Looks in a row that find the program starving before it is ended.
const STARVED: u32 = 4;
/// How long the agent tries to end what the program left running.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// Where programs are looked for when the environment has no `PATH`.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Open files of the program, at most.
const MAX_FILES: u64 = 4096;

/// Runs what was dispatched, sends its output and files, and says how it ended. An error is the channel's.
pub fn run(dispatch: Dispatch, corner: &mut Corner, transport: &mut Transport) -> Result<GuestResult, FrameError> {
    let until = Instant::now() + Duration::from_millis(dispatch.limits.deadline_ms) + GRACE;
    let Program::Script { argv, text } = &dispatch.program else {
        return Ok(fault("this boundary runs no WebAssembly".to_owned()));
    };
    // Ending every process is only right where every process belongs to the boundary.
    if !getpid().is_init() {
        return Ok(fault("the agent is not process 1 of its boundary".to_owned()));
    }
    if dispatch.user.0 == 0 || dispatch.user.1 == 0 {
        return Ok(fault("a program may not run with uid or gid 0".to_owned()));
    }
    let place = match Place::assemble(corner, &dispatch) {
        Ok(place) => place,
        Err(e) => return Ok(fault(e.to_string())),
    };
    let mut result = match start(&dispatch, argv, text, &place) {
        Ok(started) => started.attend(until, transport, &place, dispatch.limits.pids)?,
        Err(result) => return Ok(result),
    };
    if !dispatch.outputs.is_empty() {
        match open(WORKSPACE, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
            Ok(workspace) => {
                let mut sink = |message: &FromGuest| transport.send(message);
                collect::send(workspace.as_fd(), &dispatch.outputs, dispatch.output_budget, &mut sink)?;
            }
            Err(e) => result.message = Some(format!("cannot open {WORKSPACE} for its outputs: {e}")),
        }
    }
    Ok(result)
}

struct Started {
    main: Pid,
    signals: File,
    /// Read ends, until they are at their end.
    streams: [(Stream, Option<File>); 2],
}

/// A shell's way of saying that a program could not be started.
fn not_started(exit_code: i32, message: String) -> GuestResult {
    GuestResult { exit_code: Some(exit_code), ..fault(message) }
}

fn start(dispatch: &Dispatch, argv: &[String], text: &str, place: &Place) -> Result<Started, GuestResult> {
    let text_error = |what: &str| fault(format!("{what} holds a NUL character"));
    let Some(name) = argv.first() else { return Err(fault("there is no command to run".to_owned())) };
    let script = place.script(name, text).map_err(|e| fault(e.to_string()))?;
    let directory = Path::new(WORKSPACE).join(&dispatch.working_directory);
    if !directory.is_dir() {
        return Err(fault(format!("the working directory {:?} does not exist", dispatch.working_directory)));
    }
    let path = dispatch.env.iter().rev().find(|(key, _)| key == "PATH").map_or(DEFAULT_PATH, |(_, value)| value);
    let program = find(name, path, &directory)
        .ok_or_else(|| not_started(127, format!("{name}: not found in this image (PATH is {path})")))?;

    let script = script.to_string_lossy();
    let argv: Result<Vec<_>, _> = argv.iter().map(|a| CString::new(a.replace("{0}", &script))).collect();
    let env: Result<Vec<_>, _> = dispatch.env.iter().map(|(k, v)| CString::new(format!("{k}={v}"))).collect();
    let (argv, env) = (argv.map_err(|_| text_error("the command"))?, env.map_err(|_| text_error("the environment"))?);
    let c_path = |path: &Path| CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| text_error("a path"));

    let io_error = |e: Errno| fault(format!("cannot set up the program's streams: {e}"));
    let null = open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(io_error)?;
    let (out, out_end) = stream_pipe().map_err(io_error)?;
    let (err, err_end) = stream_pipe().map_err(io_error)?;
    let signals = sys::child_signals().map_err(|e| fault(format!("cannot watch child processes: {e}")))?;
    let group = place.group().and_then(Group::entrance);
    let spawn = Spawn {
        program: &c_path(&program)?,
        argv: &argv,
        env: &env,
        directory: &c_path(&directory)?,
        stdio: [null.as_fd(), out_end.as_fd(), err_end.as_fd()],
        user: dispatch.user,
        // Where there is a control group, that shall be the one to say no: it is known of it afterwards.
        processes: if group.is_some() { dispatch.limits.pids.saturating_mul(2) } else { dispatch.limits.pids },
        files: MAX_FILES,
        group: group.as_deref(),
    };
    let main = sys::spawn(&spawn).map_err(|SpawnError { stage, why }| match (stage, why.raw_os_error()) {
        (Stage::Fork, Some(libc::EAGAIN)) => {
            GuestResult { limit_hit: Some(LimitHit::Pids), ..fault("the limit of processes allows none".to_owned()) }
        }
        (Stage::Exec, Some(libc::ENOENT)) => {
            not_started(127, format!("{}: its interpreter is not in this image", program.display()))
        }
        (Stage::Exec, _) => not_started(126, format!("{}: cannot be executed: {why}", program.display())),
        (stage, _) => fault(format!("cannot start the program: {}: {why}", stage.words())),
    })?;
    Ok(Started {
        main,
        signals: File::from(signals),
        streams: [(Stream::Stdout, Some(File::from(out))), (Stream::Stderr, Some(File::from(err)))],
    })
}

/// A pipe whose read end does not block, as large as it may be.
fn stream_pipe() -> Result<(OwnedFd, OwnedFd), Errno> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&read, true)?;
    let _ = fcntl_setpipe_size(&read, 512 * 1024);
    Ok((read, write))
}

/// The executable that `name` means, as a shell would look for it.
fn find(name: &str, path: &str, directory: &Path) -> Option<PathBuf> {
    let executable = |p: &Path| p.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
    if name.contains('/') {
        let full = directory.join(name);
        return full.exists().then_some(full);
    }
    // An empty entry means the current directory.
    path.split(':').map(|entry| directory.join(entry).join(name)).find(|p| executable(p))
}

impl Started {
    /// Relays output until the program ends, then ends everything else and relays the rest.
    fn attend(
        mut self,
        until: Instant,
        transport: &mut Transport,
        place: &Place,
        pids: u64,
    ) -> Result<GuestResult, FrameError> {
        let mut buffer = vec![0u8; MAX_CHUNK];
        let mut ended = None;
        let mut crowd = 0;
        let (mut looks, mut looked) = (0, Instant::now());
        while ended.is_none() && Instant::now() < until && looks < STARVED {
            let next = place.group().map_or(until, |_| until.min(looked + LOOK));
            let ready = self.wait_for_something(next, transport)?;
            if let Some(group) = place.group()
                && looked.elapsed() >= LOOK
            {
                looks = if group.is_starving() { looks + 1 } else { 0 };
                looked = Instant::now();
            }
            if ready.runner {
                // The runner wants nothing more, or is gone: nothing outlives it.
                let _ = self.end_all(&mut ended);
                return Err(FrameError::Closed);
            }
            for index in 0..self.streams.len() {
                if ready.streams[index] {
                    self.relay(index, &mut buffer, transport)?;
                }
            }
            if ready.child {
                self.reap(&mut ended);
            }
        }
        let starved = looks >= STARVED;
        let late = ended.is_none() && !starved;
        if ended.is_some_and(|s| s.exit_status() != Some(0)) {
            // And the one that just ended, which counted while it ran.
            crowd = processes() + 1;
        }
        let finished = self.end_all(&mut ended);
        if !finished {
            transport.send(&FromGuest::Notice("some processes of the program could not be ended".to_owned()))?;
        }
        for index in 0..self.streams.len() {
            while self.relay(index, &mut buffer, transport)? {}
        }
        let usage = sys::children_usage();
        let (exit_code, signal) = match ended {
            Some(status) if !late && !starved => (status.exit_status(), status.terminating_signal()),
            _ => (None, Some(libc::SIGKILL)),
        };
        let failed = exit_code != Some(0);
        let met = place.group().and_then(Group::limit_hit);
        let limit_hit = if late {
            Some(LimitHit::Time)
        } else if starved || (failed && met == Some(LimitHit::Memory)) {
            Some(LimitHit::Memory)
        } else if failed && place.full() {
            Some(LimitHit::Disk)
        } else if failed && (met.is_some() || crowd >= pids) {
            Some(LimitHit::Pids)
        } else {
            None
        };
        Ok(GuestResult {
            exit_code,
            signal,
            limit_hit,
            refused: None,
            message: None,
            peak_memory_bytes: place.group().and_then(Group::peak_memory_bytes).unwrap_or(usage.peak_memory_bytes),
            cpu_ms: place.group().and_then(Group::cpu_ms).unwrap_or(usage.cpu_ms),
        })
    }

    fn wait_for_something(&self, until: Instant, transport: &Transport) -> Result<Ready, FrameError> {
        let mut watched =
            vec![PollFd::from_borrowed_fd(transport.input(), PollFlags::IN), PollFd::new(&self.signals, PollFlags::IN)];
        let open: Vec<usize> = (0..self.streams.len()).filter(|&i| self.streams[i].1.is_some()).collect();
        watched.extend(self.streams.iter().filter_map(|(_, s)| s.as_ref()).map(|s| PollFd::new(s, PollFlags::IN)));
        let patience = until.saturating_duration_since(Instant::now());
        let patience = Timespec {
            tv_sec: i64::try_from(patience.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: patience.subsec_nanos().into(),
        };
        match poll(&mut watched, Some(&patience)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(FrameError::Io(e.into())),
        }
        let is_ready = |n: usize| !watched[n].revents().is_empty();
        let mut ready = Ready { runner: is_ready(0), child: is_ready(1), streams: [false; 2] };
        for (n, index) in open.into_iter().enumerate() {
            ready.streams[index] = is_ready(n + 2);
        }
        Ok(ready)
    }

    /// Sends one piece of a stream, if there is one. Blocks while the runner does not read, which in turn blocks the
    /// program: nothing is kept here.
    fn relay(&mut self, index: usize, buffer: &mut [u8], transport: &mut Transport) -> Result<bool, FrameError> {
        let (stream, slot) = &mut self.streams[index];
        let Some(file) = slot else { return Ok(false) };
        match file.read(buffer) {
            Ok(0) => *slot = None,
            Ok(n) => {
                transport.send(&FromGuest::Output { stream: *stream, bytes: buffer[..n].to_vec() })?;
                return Ok(true);
            }
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => return Ok(true),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => *slot = None,
        }
        Ok(false)
    }

    /// Collects every child that ended, orphans included. Says whether any child is left.
    fn reap(&mut self, ended: &mut Option<WaitStatus>) -> bool {
        let mut siginfo = [0u8; 128];
        while matches!(self.signals.read(&mut siginfo), Ok(n) if n > 0) {}
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => {
                    if pid == self.main {
                        *ended = Some(status);
                    }
                }
                Ok(None) => return true,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }

    /// Kills until there is no process left but the agent; says whether that was so in time.
    fn end_all(&mut self, ended: &mut Option<WaitStatus>) -> bool {
        let until = Instant::now() + LAST_WORDS;
        loop {
            sys::kill_everyone();
            if !self.reap(ended) {
                return true;
            }
            if Instant::now() > until {
                return false;
            }
            let mut watched = [PollFd::new(&self.signals, PollFlags::IN)];
            let _ = poll(&mut watched, Some(&Timespec { tv_sec: 0, tv_nsec: 5_000_000 }));
        }
    }
}

struct Ready {
    runner: bool,
    child: bool,
    streams: [bool; 2],
}

/// Processes of other users than the agent's, which in a microVM is the kernel's too; 0 if they cannot be counted.
fn processes() -> u64 {
    let Ok(entries) = std::fs::read_dir("/proc") else { return 0 };
    let numbers = entries.flatten().filter(|e| e.file_name().to_string_lossy().bytes().all(|b| b.is_ascii_digit()));
    numbers.filter(|e| e.metadata().is_ok_and(|m| m.uid() != 0)).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_as_a_shell_finds_them() {
        let here = Path::new("/usr");
        assert_eq!(find("sh", "/nowhere:/bin", here), Some(PathBuf::from("/bin/sh")));
        assert_eq!(find("sh", "bin", here), Some(PathBuf::from("/usr/bin/sh")));
        assert_eq!(find("sh", "/nowhere", here), None);
        assert_eq!(find("no-such-program", DEFAULT_PATH, here), None);
        // A name with a slash is a path; what is wrong with it is for the exec to say.
        assert_eq!(find("./bin/sh", "/nowhere", here), Some(PathBuf::from("/usr/./bin/sh")));
        assert_eq!(find("./missing", DEFAULT_PATH, here), None);
        // A directory or a file without execute bit is no program.
        assert_eq!(find("passwd", "/etc", here), None);
        assert_eq!(find("share", "/usr", here), None);
    }
}
