//! The `wasm` backend.

pub mod runtimes;
use std::time::Duration;

use plimsoll_guest::Dispatch;

use super::channel::{Cancel, Channel, Outcome};
use super::{BackendKind, EngineRecord, Output, Phase, Plan, PrepareError, Usage};
use crate::evidence::{Admission, Observation};

pub const ENTRY: &str = "__worker";
pub fn worker(_inside: super::jail::Inside) -> std::process::ExitCode {
    std::process::ExitCode::SUCCESS
}
/// A prepared boundary.
#[derive(Debug)]
pub struct Wasm {
    channel: Channel,
}

impl Wasm {
    /// See [`super::Sandbox::prepare`].
    ///
    /// # Errors
    /// As [`PrepareError`] says; nothing is left behind.
    pub async fn prepare(_plan: &Plan) -> Result<Self, PrepareError> {
        Err(PrepareError::Unavailable {
            backend: BackendKind::Wasm,
            blocker: "it is not built yet".to_owned(),
            help: String::new(),
        })
    }

    /// The channel into the boundary.
    pub fn channel(&mut self) -> &mut Channel {
        &mut self.channel
    }

    /// See [`super::Sandbox::observe`].
    ///
    /// # Errors
    /// If the boundary ended.
    pub fn observe(&mut self, _phase: Phase, _answered: Option<Duration>) -> std::io::Result<Vec<Observation>> {
        Ok(Vec::new())
    }

    /// See [`super::Sandbox::dispatch`].
    pub async fn dispatch(
        &mut self,
        _admission: Admission,
        dispatch: Dispatch,
        output: &mut Output,
        deadline: Duration,
        cancel: &mut Cancel,
    ) -> Outcome {
        self.channel.converse(dispatch, output, deadline, cancel, |_, _| {}).await
    }

    /// See [`super::Sandbox::usage`].
    #[must_use]
    pub fn usage(&mut self) -> Usage {
        Usage::default()
    }

    /// See [`super::Sandbox::engine`].
    #[must_use]
    pub fn engine(&self) -> EngineRecord {
        EngineRecord {
            name: "wasm".to_owned(),
            engine_version: String::new(),
            binaries: Vec::new(),
            settings: Default::default(),
        }
    }

    /// See [`super::Sandbox::teardown`].
    pub async fn teardown(self) -> Vec<Observation> {
        Vec::new()
    }
}
