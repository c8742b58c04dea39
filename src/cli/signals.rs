//! Signals that end a run: the first asks it to stop cleanly, later ones change nothing.
//!
//! GitHub sends SIGINT, SIGTERM 7.5 s later, and kills 2.5 s after that; a person presses Ctrl-C twice. So a second
//! signal must not cut the cleaning short: it is bounded anyway.

use std::io;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use crate::backend::channel::{Cancel, CancelSignal, cancelled};
use crate::exit::Exit;

/// How long a cancelled run may clean up and write its report before it is left where it is. Below GitHub's 7.5 s.
const PATIENCE: Duration = Duration::from_millis(6500);

/// Starts to listen, and gives what a run listens to. SIGHUP counts as SIGTERM, unless it was ignored when we started
/// (`nohup`).
///
/// # Errors
/// If handlers can't be installed.
pub fn listen() -> io::Result<Cancel> {
    let (tell, cancel) = watch::channel(None);
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = if hangup_is_ignored() { None } else { Some(signal(SignalKind::hangup())?) };
    tokio::spawn(async move {
        loop {
            let seen = tokio::select! {
                _ = interrupt.recv() => CancelSignal::Interrupt,
                _ = terminate.recv() => CancelSignal::Terminate,
                () = received(&mut hangup) => CancelSignal::Terminate,
            };
            tell.send_if_modified(|first| {
                let is_first = first.is_none();
                first.get_or_insert(seen);
                is_first
            });
        }
    });
    Ok(cancel)
}

async fn received(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => std::future::pending().await,
    }
}

/// From `SigIgn` of `/proc/self/status` (proc(5)): a mask whose lowest bit is signal 1, SIGHUP.
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:")).map(str::trim);
    mask.and_then(|m| u64::from_str_radix(m, 16).ok()).is_some_and(|m| m & 1 == 1)
}

/// Resolves when a cancelled run has had its time; never while nobody cancelled.
pub async fn overdue(mut cancel: Cancel) -> CancelSignal {
    let signal = cancelled(&mut cancel).await;
    tokio::time::sleep(PATIENCE).await;
    signal
}

/// The exit code that goes with a signal.
#[must_use]
pub const fn exit(signal: CancelSignal) -> Exit {
    match signal {
        CancelSignal::Interrupt => Exit::Interrupted,
        CancelSignal::Terminate => Exit::Terminated,
    }
}
