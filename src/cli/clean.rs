//! `plimsoll clean`: for hooks of runners, and after a machine was switched off.

use clap::Args;

use super::failure::Failure;
use super::output::Log;
use super::{CommonArgs, session};
use crate::env::Env;
use crate::exit::Exit;

/// Arguments.
#[derive(Debug, Args)]
pub struct CleanArgs {}

/// Removes what killed runs left. Runs that live are left alone.
pub fn clean(_args: &CleanArgs, common: &CommonArgs, env: &Env) -> Result<Exit, Failure> {
    let state = crate::run::state_dir(env);
    let swept = crate::run::clean(&state).map_err(|e| session::no_report(&e.into()))?;
    let mut out = Log::data();
    if !common.quiet {
        for removed in &swept.removed {
            out.line(&format!("removed {removed}"));
        }
        if swept.removed.is_empty() && swept.failed.is_empty() {
            out.line(&format!("nothing was left in {}", state.display()));
        }
    }
    if swept.failed.is_empty() {
        return Ok(Exit::Passed);
    }
    let failed = format!("could not be removed: {}", swept.failed.join("; "));
    Err(Failure::new(Exit::Internal, failed).with_help("run `plimsoll clean` as the user whose run it was"))
}
