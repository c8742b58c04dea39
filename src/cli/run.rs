//! `plimsoll run`.

use clap::Args;

use super::CommonArgs;
use super::args::{self, SelectArgs, StepArgs};
use super::failure::Failure;
use super::served::ServiceArgs;
use super::session::{self, Request, ResultArgs};
use crate::env::Env;
use crate::exit::Exit;

/// Arguments.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Which steps.
    #[command(flatten)]
    pub select: SelectArgs,

    /// Steps that run at the same time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..), help_heading = "Steps")]
    pub jobs: u16,

    /// What each of them is.
    #[command(flatten)]
    pub step: StepArgs,

    /// Where results go.
    #[command(flatten)]
    pub results: ResultArgs,

    /// Who runs it.
    #[command(flatten)]
    pub service: ServiceArgs,
}

/// Runs the steps.
pub fn run(args: &RunArgs, common: &CommonArgs, env: &Env) -> Result<Exit, Failure> {
    session::run(&Request {
        steps: &|around| args::steps(&args.select, &args.step, around),
        jobs: usize::from(args.jobs),
        engines: args.step.engines(env),
        insecure_registries: &args.step.insecure_registry,
        results: &args.results,
        service: &args.service,
        common,
        env,
    })
}
