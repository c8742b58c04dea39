//! The process that goes to the registry, from both sides: [`main`] is the helper's, [`errand`] the runner's.
//!
//! The helper gets its [`Job`] on standard input, since that holds credentials, and says [`Said`] lines on standard output.
//! It is started by the caller ([`Started`]), who bounds its memory by [`MEMORY`] before it gets the job. What it says is
//! read like anything foreign: short lines, known words.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{ChildStdin, ChildStdout, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::{Failure, Job, Kind, Said, pull};
use crate::artifact::Digest;
use crate::artifact::helper::Running;

/// Internal word that the helper is started under.
pub const ENTRY: &str = "__pull";

/// Private memory of the helper, bytes. Four layers under way take some megabytes.
pub const MEMORY: u64 = 256 << 20;

/// Longest line, and longest job.
const LINE_MAX: u64 = 64 << 10;
/// How often the wait looks at the flag that cancels it.
const TICK: Duration = Duration::from_millis(100);

/// The helper.
#[must_use]
pub fn main() -> ExitCode {
    let said = match attempt() {
        Ok(digest) => Said::Done(digest),
        Err(failure) => Said::Failed(failure),
    };
    tell(&said);
    ExitCode::SUCCESS
}

fn attempt() -> Result<Digest, Failure> {
    let local = |e: io::Error| Failure::new(Kind::Local, e.to_string());
    let mut text = Vec::new();
    io::stdin().take(LINE_MAX).read_to_end(&mut text).map_err(local)?;
    let job: Job = serde_json::from_slice(&text).map_err(|e| local(e.into()))?;
    // The client library has none of its own.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(local)?;
    runtime.block_on(pull::run(&job, &tell))
}

/// A line to the runner; if that is gone, so is its helper soon.
fn tell(said: &Said) {
    if let Ok(mut line) = serde_json::to_vec(said) {
        line.push(b'\n');
        let _ = io::stdout().lock().write_all(&line);
    }
}

/// A started helper, which waits for its job.
#[derive(Debug)]
pub struct Started<R> {
    /// It.
    pub running: R,
    /// Where the job goes.
    pub input: ChildStdin,
    /// Where lines come from.
    pub output: ChildStdout,
}

/// Has a helper do the job, and waits for its end. `progress` is told bytes of layers that are here, and all.
///
/// # Errors
/// As [`Failure`] says; one of [`Kind::Local`] as well if `cancel` was set.
pub fn errand<R: Running>(
    job: &Job,
    deadline: Duration,
    cancel: &AtomicBool,
    progress: &dyn Fn(u64, u64),
    start: impl FnOnce() -> io::Result<Started<R>>,
) -> Result<Digest, Failure> {
    let until = Instant::now() + deadline;
    let local = |what: &str| {
        let what = what.to_owned();
        move |e: io::Error| Failure::new(Kind::Local, format!("failed to {what}: {e}"))
    };
    let text = serde_json::to_vec(job).map_err(|e| local("write the errand")(e.into()))?;
    let Started { mut running, mut input, output } = start().map_err(local("start the pulling helper"))?;
    input.write_all(&text).map_err(local("give the pulling helper its errand"))?;
    drop(input);
    let (lines, heard) = mpsc::sync_channel(16);
    // Ends with the pipe, which ends with the helper.
    std::thread::spawn(move || {
        let mut output = BufReader::new(output);
        loop {
            let mut line = Vec::new();
            match (&mut output).take(LINE_MAX).read_until(b'\n', &mut line) {
                Ok(n) if n > 0 => {}
                _ => break,
            }
            if lines.send(line).is_err() {
                break;
            }
        }
    });
    let mut last = Err(None);
    let done = loop {
        if cancel.load(Ordering::Relaxed) {
            break Err(Failure::new(Kind::Local, "cancelled"));
        }
        if Instant::now() >= until {
            let why = format!("the image did not come within {} s", deadline.as_secs());
            break Err(Failure::new(Kind::Unreachable, why));
        }
        match heard.recv_timeout(TICK) {
            Ok(line) => match serde_json::from_slice(&line) {
                Ok(Said::Progress { done, total }) => progress(done, total),
                Ok(Said::Done(digest)) => last = Ok(digest),
                Ok(Said::Failed(failure)) => last = Err(Some(Failure::new(failure.kind, failure.message))),
                Err(_) => break Err(Failure::new(Kind::Local, "the pulling helper says what it was not asked")),
            },
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                break last.map_err(|failure| failure.unwrap_or_else(died));
            }
        }
    };
    if done.is_err() {
        let _ = running.kill();
    }
    done
}

/// The helper ended without a word: of memory, most likely, since nothing else ends it.
fn died() -> Failure {
    let why = format!("the registry's answers took more than the {} MiB of memory that they may take", MEMORY >> 20);
    Failure::new(Kind::Hostile, why)
}
