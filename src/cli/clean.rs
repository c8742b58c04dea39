//! `plimsoll clean`: for hooks of runners, and after a machine was switched off.

use clap::Args;

use super::failure::Failure;
use super::output::Log;
use super::{CommonArgs, session};
use crate::env::Env;
use crate::exit::Exit;
use crate::image::cache::{self, Cache};
use crate::report::words;

/// Arguments.
#[derive(Debug, Args)]
pub struct CleanArgs {}

/// Removes copies of images, and half-made ones, that nobody holds; says how many.
fn images(env: &Env) -> Result<u64, Failure> {
    let Some(path) = cache::base(env).map(|base| base.join("image")).filter(|path| path.is_dir()) else { return Ok(0) };
    let swept = Cache::at(&path).and_then(|cache| cache.sweep_unfinished()).map(|swept| swept as u64);
    swept.map_err(|e| Failure::from_error(Exit::Internal, &e).with_help(e.help()))
}

/// Removes what killed runs left. Runs that live are left alone.
pub fn clean(_args: &CleanArgs, common: &CommonArgs, env: &Env) -> Result<Exit, Failure> {
    let state = crate::run::state_dir(env);
    let swept = crate::run::clean(&state).map_err(|e| session::no_report(&e.into()))?;
    let mut out = Log::data();
    let copies = images(env)?;
    if !common.quiet {
        for removed in &swept.removed {
            out.line(&format!("removed {removed}"));
        }
        if copies > 0 {
            out.line(&format!("removed {} from the cache of images", words::count(copies, "unfinished image")));
        }
        if swept.removed.is_empty() && swept.failed.is_empty() && copies == 0 {
            out.line(&format!("nothing was left in {}", state.display()));
        }
    }
    if swept.failed.is_empty() {
        return Ok(Exit::Passed);
    }
    let failed = format!("could not be removed: {}", swept.failed.join("; "));
    Err(Failure::new(Exit::Internal, failed).with_help("run `plimsoll clean` as the user whose run it was"))
}
