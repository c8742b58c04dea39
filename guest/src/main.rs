//! The guest agent: process 1 of a boundary.
//!
//! It is built static and embedded in the runner. See [`plimsoll_guest::agent`] for what it does.

use std::process::ExitCode;

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    use plimsoll_guest::FrameError;
    use plimsoll_guest::agent::{Corner, Transport, apologise, harden, machine, serve};
    if machine::is_init() {
        match harden().and_then(|()| machine::boot()) {
            Ok((transport, Ok(corner))) => drop(serve(transport, corner)),
            Ok((transport, Err(why))) => apologise(transport, &why),
            Err(_) => {}
        }
        machine::end();
    }
    let ready = harden().and_then(|()| Ok((Transport::stdio()?, Corner::of_container()?)));
    match ready.map_err(FrameError::Io).and_then(|(transport, corner)| serve(transport, corner)) {
        Ok(()) => ExitCode::SUCCESS,
        // Nobody is left to tell: the channel is the only way out of the boundary.
        Err(_) => ExitCode::from(70),
    }
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    ExitCode::from(70)
}
