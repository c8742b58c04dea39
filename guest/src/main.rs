//! The guest agent: process 1 of a boundary.
//!
//! It is built static and embedded in the runner. See [`plimsoll_guest::agent`] for what it does.

use std::process::ExitCode;

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    use plimsoll_guest::FrameError;
    use plimsoll_guest::agent::{Transport, harden, serve};
    match harden().and_then(|()| Transport::stdio()).map_err(FrameError::Io).and_then(serve) {
        Ok(()) => ExitCode::SUCCESS,
        // Nobody is left to tell: the channel is the only way out of the boundary.
        Err(_) => ExitCode::from(70),
    }
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    ExitCode::from(70)
}
