//! Trying a boundary by building it: with a step's own settings, and a trivial program of ours in place of its code.
//!
//! Looking at a host says little: a device may exist and not work, a sysctl may allow what a security module denies. So
//! `doctor` and `check` take the whole way through the gate, with nothing of the user's in it.

use std::fs;
use std::io;
use std::path::PathBuf;

use tempfile::TempDir;
use tokio::sync::mpsc;

use super::failure::Failure;
use super::session;
use crate::backend::Engines;
use crate::backend::channel::Cancel;
use crate::env::Env;
use crate::exit::Exit;
use crate::gate::Dispatched;
use crate::report::{Report, StepReport};
use crate::run::{self, Job};
use crate::spec::{ArtifactSource, Command, Policy, PolicyRefusal, Shell, Step, WasmProgram};

/// A module that does nothing.
const NOTHING: &str = "(module (memory (export \"memory\") 1) (func (export \"_start\")))\n";
const MODULE: &str = "nothing.wat";

/// A place for trials, removed on drop.
#[derive(Debug)]
pub struct Trials<'a> {
    dir: TempDir,
    engines: Engines,
    env: &'a Env,
}

impl<'a> Trials<'a> {
    /// Makes the place.
    ///
    /// # Errors
    /// If there is no room for it.
    pub fn new(engines: Engines, env: &'a Env) -> Result<Self, Failure> {
        let make = || -> io::Result<TempDir> {
            let dir = tempfile::Builder::new().prefix("plimsoll-trial-").tempdir_in(env.temp_dir())?;
            for name in ["artifact", "image/bin", "logs", "outputs"] {
                fs::create_dir_all(dir.path().join(name))?;
            }
            fs::write(dir.path().join("artifact").join(MODULE), NOTHING)?;
            Ok(dir)
        };
        let dir = make().map_err(|e| Failure::from_error(Exit::Internal, &e))?;
        Ok(Self { dir, engines, env })
    }

    fn artifact(&self) -> PathBuf {
        self.dir.path().join("artifact")
    }

    /// A root file system with nothing in it, for a backend that must be given one.
    #[must_use]
    pub fn image(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    /// The step with a program of ours: its boundary is the same, its code and outputs are not there.
    #[must_use]
    pub fn harmless(&self, mut step: Step) -> Step {
        step.artifact = ArtifactSource::Path(self.artifact());
        step.command = match step.command {
            Command::Script { .. } => Command::Script { shell: Shell::default(), text: "exit 0\n".to_owned() },
            Command::Wasm { .. } => Command::Wasm { program: WasmProgram::Module(MODULE.into()), args: Vec::new() },
        };
        step.working_directory = Default::default();
        step.env.clear();
        step.outputs.clear();
        step.junit = None;
        step
    }

    /// Takes harmless steps through the gate.
    ///
    /// # Errors
    /// If not even that can be tried.
    pub async fn run(
        &self,
        steps: Vec<Step>,
        policy: Result<Policy, PolicyRefusal>,
        cancel: Cancel,
    ) -> Result<Report, Failure> {
        let (events, _unseen) = mpsc::unbounded_channel();
        let job = Job {
            steps,
            policy,
            jobs: 1,
            engines: self.engines.clone(),
            insecure_registries: Vec::new(),
            state: crate::run::state_dir(self.env),
            logs: self.dir.path().join("logs"),
            outputs: self.dir.path().join("outputs"),
            staging: Vec::new(),
            exclude: Vec::new(),
            ci: None,
            runner: None,
            announce: None,
        };
        let report = run::run(job, events, cancel).await.map_err(|e| session::no_report(&e))?;
        // Steps of the next trial may have the same names.
        for name in ["logs", "outputs"] {
            let place = self.dir.path().join(name);
            let _ = fs::remove_dir_all(&place).and_then(|()| fs::create_dir(&place));
        }
        Ok(report)
    }
}

/// Whether the boundary was built, proven and admitted. How the trivial program ended says nothing about it: an image may
/// hold no shell.
#[must_use]
pub fn admitted(step: &StepReport) -> bool {
    step.dispatched == Dispatched::Yes && !matches!(step.exit, Exit::Refused | Exit::Unavailable | Exit::Internal)
}

/// The exit code that a failed trial stands for.
#[must_use]
pub fn exit(step: &StepReport) -> Exit {
    match step.exit {
        _ if admitted(step) => Exit::Passed,
        Exit::Passed | Exit::GuestFailed => Exit::Refused,
        other => other,
    }
}
