//! The guest agent: process 1 inside a boundary, waiting on the channel.
//!
//! * [`serve`] holds the conversation. Before a dispatch it answers challenges and touches nothing of the image or the
//!   artifact; a dispatch is run once; after its result the agent waits to be released, so that the runner can look at
//!   the boundary while it still stands.
//! * `place` assembles what the program sees: `/workspace` over the read-only artifact, `/tmp`, the script.
//! * [`machine`] is what comes before all that in a microVM.
//! * `program` starts it without any privilege, relays its output, ends everything it left running.
//! * `sys` is the one place with `unsafe`.
//!
//! The agent keeps uid 0 of the boundary to itself. It trusts the runner; from the moment the program starts, it
//! trusts nothing else in the boundary, and the runner trusts nothing that it says.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub use place::Corner;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use crate::wire::{FrameError, FromGuest, GuestResult, MAX_TO_GUEST, PROTOCOL, ToGuest, read_message, write_message};

mod group;
pub mod machine;
mod place;
mod program;
mod sys;

/// The channel to the runner, whatever carries it: pipes here, a vsock connection in a microVM.
#[derive(Debug)]
pub struct Transport {
    input: File,
    output: File,
}

impl Transport {
    /// The channel is standard input and output. They move to descriptors that no program inherits, and `/dev/null`
    /// takes their place.
    ///
    /// # Errors
    /// If descriptors cannot be copied or `/dev/null` is missing.
    pub fn stdio() -> io::Result<Self> {
        let (stdin, stdout) = (rustix::stdio::stdin(), rustix::stdio::stdout());
        let transport = Self::new(fcntl_dupfd_cloexec(stdin, 3)?, fcntl_dupfd_cloexec(stdout, 3)?);
        let null = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        rustix::stdio::dup2_stdin(&null)?;
        rustix::stdio::dup2_stdout(&null)?;
        // Standard error stays what the engine made it: only a crash of the agent writes there.
        Ok(transport)
    }

    /// A channel over two descriptors.
    #[must_use]
    pub fn new(input: OwnedFd, output: OwnedFd) -> Self {
        Self { input: File::from(input), output: File::from(output) }
    }

    /// Its two directions: what the runner sends, and what goes to it.
    #[must_use]
    pub fn into_files(self) -> (File, File) {
        (self.input, self.output)
    }

    fn send(&mut self, message: &FromGuest) -> Result<(), FrameError> {
        write_message(&mut self.output, message)
    }

    fn receive(&mut self) -> Result<ToGuest, FrameError> {
        read_message(&mut self.input, MAX_TO_GUEST)
    }

    /// For waiting: readable or hung up while a program runs means that the runner wants nothing more of it.
    fn input(&self) -> BorrowedFd<'_> {
        self.input.as_fd()
    }
}

/// Tells the runner, in place of an answer, why there is no boundary.
pub fn apologise(mut transport: Transport, why: &io::Error) {
    let _ = transport.receive();
    let _ = transport.send(&FromGuest::Notice(why.to_string()));
    let _ = transport.receive();
}

/// Keeps others in the boundary from looking into the agent's memory and descriptors. First thing in `main`.
///
/// Engines may ignore it (gVisor does), so the agent has neither arguments nor an environment worth reading.
///
/// # Errors
/// As prctl(2).
pub fn harden() -> io::Result<()> {
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Answers, runs what is dispatched, and waits to be released.
///
/// # Errors
/// If the channel fails. A channel that closes is the end, not an error.
pub fn serve(mut transport: Transport, mut corner: Corner) -> Result<(), FrameError> {
    let mut ran = false;
    loop {
        match transport.receive() {
            Ok(ToGuest::Challenge { nonce }) => {
                transport.send(&answer(nonce))?;
                // While the runner looks at the boundary.
                corner.stage();
            }
            Ok(ToGuest::Dispatch(dispatch)) if !ran => {
                ran = true;
                let result = program::run(*dispatch, &mut corner, &mut transport)?;
                transport.send(&FromGuest::Result(result))?;
            }
            Ok(ToGuest::Dispatch(_)) => return Err(FrameError::Malformed),
            Ok(ToGuest::Release) | Err(FrameError::Closed) => return Ok(()),
            Err(e) => return Err(e),
        }
    }
}

fn answer(nonce: [u8; 32]) -> FromGuest {
    let uname = rustix::system::uname();
    let kernel = format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy());
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned();
    FromGuest::Answer { protocol: PROTOCOL, nonce, kernel, boot_id }
}

/// A result that says why nothing could be started.
fn fault(message: String) -> GuestResult {
    GuestResult {
        exit_code: None,
        signal: None,
        limit_hit: None,
        refused: None,
        message: Some(message),
        peak_memory_bytes: 0,
        cpu_ms: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Dispatch, GuestLimits, MAX_FROM_GUEST, OutputBudget, Program};

    fn dispatch() -> ToGuest {
        ToGuest::Dispatch(Box::new(Dispatch {
            program: Program::Script { argv: vec!["sh".to_owned(), "{0}".to_owned()], text: "exit 0".to_owned() },
            env: Vec::new(),
            working_directory: ".".to_owned(),
            user: (47_113, 47_113),
            outputs: Vec::new(),
            output_budget: OutputBudget { files: 0, bytes: 0 },
            limits: GuestLimits { pids: 1, memory_bytes: 1, disk_bytes: 1, deadline_ms: 1 },
            clock_ns: 0,
            entropy: [0; 32],
            drives: Vec::new(),
        }))
    }

    /// What the agent answers to these messages, and how its conversation ended.
    fn converse(messages: &[ToGuest]) -> (Vec<FromGuest>, Result<(), FrameError>) {
        let (guest_in, mut to_guest) = io::pipe().unwrap();
        let (mut from_guest, guest_out) = io::pipe().unwrap();
        let agent = std::thread::spawn(move || {
            let corner = Corner::of_container().unwrap();
            serve(Transport::new(guest_in.into(), guest_out.into()), corner)
        });
        messages.iter().for_each(|m| write_message(&mut to_guest, m).unwrap());
        drop(to_guest);
        let mut heard = Vec::new();
        while let Ok(message) = read_message(&mut from_guest, MAX_FROM_GUEST) {
            heard.push(message);
        }
        (heard, agent.join().unwrap())
    }

    #[test]
    fn every_challenge_gets_its_own_nonce_back() {
        let ask = |n| ToGuest::Challenge { nonce: [n; 32] };
        let (heard, ended) = converse(&[ask(1), ask(2), ToGuest::Release]);
        let nonces: Vec<u8> = heard
            .iter()
            .map(|m| match m {
                FromGuest::Answer { protocol: PROTOCOL, nonce, .. } => nonce[0],
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(nonces, [1, 2]);
        assert!(ended.is_ok());
    }

    #[test]
    fn an_agent_that_is_not_process_1_runs_nothing() {
        let (heard, ended) = converse(&[dispatch()]);
        let [FromGuest::Result(result)] = heard.as_slice() else { panic!("{heard:?}") };
        assert!(result.exit_code.is_none() && result.message.as_ref().unwrap().contains("process 1"));
        assert!(ended.is_ok());
    }

    #[test]
    fn a_second_dispatch_ends_the_conversation() {
        let (heard, ended) = converse(&[dispatch(), dispatch()]);
        assert_eq!(heard.len(), 1);
        assert!(matches!(ended, Err(FrameError::Malformed)));
    }
}
