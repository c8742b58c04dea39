//! The launcher's part that is particular to gVisor: the skeleton, `runsc create`, `runsc start`.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::skeleton::{self, Skeleton};
use crate::backend::launcher::{Failure, Launcher, Main, Stage};

/// What to start.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Work {
    /// What the boundary's root is made of.
    pub skeleton: Skeleton,
    /// The bundle's `config.json`.
    pub config: String,
    /// The engine's global flags.
    pub flags: Vec<String>,
    /// The container's id.
    pub id: String,
}

/// Builds the boundary up to the waiting agent. `descriptors` are the agent's input and output, and the engine.
///
/// # Errors
/// What failed; the launcher ends everything.
pub fn raise(launcher: &mut Launcher, work: &Work, descriptors: Vec<OwnedFd>, until: Instant) -> Result<(), Failure> {
    let error = |why: io::Error| Failure { stage: Stage::Engine, what: "runsc".to_owned(), why };
    let [input, output, engine]: [OwnedFd; 3] =
        descriptors.try_into().map_err(|_| error(io::Error::other("three descriptors are wanted")))?;
    let places = skeleton::build(&work.skeleton, &work.config).map_err(|(what, why)| Failure {
        stage: Stage::Files,
        what,
        why,
    })?;
    let command = |launcher: &Launcher, words: Vec<OsString>| -> io::Result<Command> {
        let mut command = launcher.command(&engine, "runsc")?;
        command.arg("--root").arg(&places.state).args(&work.flags).args(words);
        Ok(command)
    };
    let id = OsString::from(&work.id);
    let mut create = command(
        launcher,
        vec![
            "create".into(),
            "--bundle".into(),
            places.bundle.clone().into(),
            "--pid-file".into(),
            places.pid_file.clone().into(),
            id.clone(),
        ],
    )
    .map_err(error)?;
    create.stdin(input).stdout(output);
    let start = command(launcher, vec!["start".into(), id]).map_err(error)?;
    launcher.main_is(Main::File(places.pid_file));
    launcher.run(create, "runsc create", until)?;
    launcher.run(start, "runsc start", until)
}
