//! The worker: one jailed process, one guest.
//!
//! It answers challenges until it is dispatched, runs the guest, sends its outputs, tells the result, and waits to be
//! released, so that the runner can look at it once more. Whatever goes wrong in its own code is told as a result too:
//! as first process of its pid namespace it would not even die of an abort.

use std::fs::File;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::Duration;

use plimsoll_guest::wire::{read_message, write_message};
use plimsoll_guest::{
    Dispatch, Filesystem, FrameError, FromGuest, GuestResult, LimitHit, MAX_TO_GUEST, PROTOCOL, Program, ToGuest,
    encode,
};
use wasmtime::Engine;

use super::{engine, run, wasi};
use crate::backend::jail::{Inside, Wire};
use crate::backend::sys;

static ENGINE: OnceLock<Engine> = OnceLock::new();

/// Lets epochs pass for an engine, from a timer signal: the jail allows no thread that could do it.
///
/// # Errors
/// If there is one already.
pub fn tick(engine: &Engine) -> wasmtime::Result<()> {
    fn pass() {
        if let Some(engine) = ENGINE.get() {
            engine.increment_epoch();
        }
    }
    ENGINE.set(engine.clone()).map_err(|_| wasmtime::Error::msg("a worker runs one guest"))?;
    Ok(sys::every(Duration::from_millis(engine::EPOCH_MS), pass)?)
}

/// The worker's entry, jailed already.
#[must_use]
pub fn main(mut inside: Inside) -> ExitCode {
    // Where compiled code will be, if there is any.
    let handed = inside.inherited.pop().map(File::from);
    match report_faults().and_then(|()| serve(&inside, handed)) {
        // The runner closed the channel or let us go.
        Ok(()) | Err(FrameError::Closed) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn serve(inside: &Inside, mut handed: Option<File>) -> Result<(), FrameError> {
    loop {
        match read_message(&mut Wire, MAX_TO_GUEST)? {
            ToGuest::Challenge { nonce } => {
                let kernel = inside.kernel.clone();
                write_message(
                    &mut Wire,
                    &FromGuest::Answer { protocol: PROTOCOL, nonce, kernel, boot_id: String::new() },
                )?;
            }
            ToGuest::Dispatch(dispatch) => {
                let result = carry_out(inside, &dispatch, handed.take())?;
                write_message(&mut Wire, &FromGuest::Result(result))?;
            }
            ToGuest::Release => return Ok(()),
        }
    }
}

fn carry_out(inside: &Inside, dispatch: &Dispatch, handed: Option<File>) -> Result<GuestResult, FrameError> {
    let Program::Wasm(program) = &dispatch.program else {
        return Ok(failed("this boundary runs WebAssembly only", None));
    };
    let mut result = run::run(inside, dispatch, program, handed);
    if program.filesystem == Filesystem::Work && inside.visible.iter().any(|v| v.path == wasi::WORKSPACE) {
        let workspace = File::open(wasi::WORKSPACE).map_err(FrameError::Io)?;
        if result.exit_code != Some(0) && result.limit_hit.is_none() && is_full(&workspace) {
            result.limit_hit = Some(LimitHit::Disk);
        }
        plimsoll_guest::collect::send(workspace.as_fd(), &dispatch.outputs, dispatch.output_budget, &mut |message| {
            write_message(&mut Wire, message)
        })?;
    }
    Ok(result)
}

/// Whether the file system of the workspace has no room left for a page.
fn is_full(workspace: &File) -> bool {
    rustix::fs::fstatfs(workspace)
        .is_ok_and(|s| s.f_bavail.saturating_mul(u64::try_from(s.f_bsize).unwrap_or(0)) < 4096)
}

fn failed(message: &str, limit_hit: Option<LimitHit>) -> GuestResult {
    GuestResult {
        exit_code: None,
        signal: None,
        limit_hit,
        refused: None,
        message: Some(message.to_owned()),
        peak_memory_bytes: 0,
        cpu_ms: 0,
    }
}

/// Has panics and aborts told to the runner.
fn report_faults() -> Result<(), FrameError> {
    std::panic::set_hook(Box::new(|panic| {
        // A panic's message may quote the guest; the runner escapes it like all of ours.
        let result = failed(&format!("the worker failed: {panic}"), None);
        let _ = write_message(&mut Wire, &FromGuest::Result(result));
        let _ = read_message::<ToGuest>(&mut Wire, MAX_TO_GUEST);
        sys::exit_now(70);
    }));
    let memory = failed("the worker ran out of memory while it compiled or served the module", Some(LimitHit::Memory));
    let other = failed("the worker aborted", None);
    sys::report_aborts(encode(&FromGuest::Result(memory))?, encode(&FromGuest::Result(other))?).map_err(FrameError::Io)
}
