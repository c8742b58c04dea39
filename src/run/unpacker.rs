//! The jailed helper that unpacks: [`crate::artifact::helper`] put into a [`crate::backend::jail`].

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::ExitCode;
use std::time::Duration;

use crate::artifact::helper::{Job, Running, SUBCOMMAND};
use crate::backend::jail::{Inside, Jail, JailedChild, Limits, Profile, Spec};

/// Internal word that the helper is started under.
pub const ENTRY: &str = SUBCOMMAND;

/// Private memory of the helper, bytes: decoders with large windows (zstd, xz) need most of it.
const MEMORY: u64 = 1 << 30;

/// The helper, once it is jailed.
#[must_use]
pub fn main(inside: Inside) -> ExitCode {
    let Some(channel) = inside.inherited.into_iter().next() else { return ExitCode::FAILURE };
    match Job::receive(channel).and_then(Job::run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Starts the helper with its end of the socket; it can write below `destination`, which becomes its own.
///
/// # Errors
/// If the jail cannot be built.
pub fn start(channel: OwnedFd, destination: BorrowedFd<'_>) -> io::Result<Helper> {
    let destination = destination.try_clone_to_owned()?;
    let spec = Spec {
        entry: ENTRY,
        profile: Profile::Unpack,
        limits: Limits { data_bytes: MEMORY, file_bytes: u64::MAX, threads: 8 },
        binds: Vec::new(),
        give: vec![destination.try_clone()?],
        inherit: vec![channel, destination],
    };
    Jail::spawn(spec).map(Helper).map_err(|e| io::Error::other(crate::text::chain(&e)))
}

/// The running helper.
#[derive(Debug)]
pub struct Helper(JailedChild);

impl Running for Helper {
    fn kill(&mut self) -> io::Result<()> {
        self.0.child.kill_tree();
        Ok(())
    }

    fn try_wait(&mut self) -> io::Result<Option<String>> {
        Ok(self.0.child.wait_for(Duration::ZERO)?.map(|exit| format!("{exit:?} {}", self.0.last_words())))
    }
}
