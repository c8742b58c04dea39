//! `plimsoll shell SCRIPT`: a shell for steps of GitHub workflows, which write `run` into a file and call the shell with its
//! path: `shell: plimsoll shell --backend gvisor {0}`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::CommonArgs;
use super::args::StepArgs;
use super::failure::Failure;
use super::served::ServiceArgs;
use super::session::{self, Request, ResultArgs};
use crate::env::Env;
use crate::exit::Exit;
use crate::spec;

/// Arguments.
#[derive(Debug, Args)]
#[command(mut_arg("run", |run| run.hide(true)))]
pub struct ShellArgs {
    /// The script; the current directory is the artifact
    #[arg(value_name = "SCRIPT", value_hint = ValueHint::FilePath)]
    pub script: PathBuf,

    /// What the step is.
    #[command(flatten)]
    pub step: StepArgs,

    /// Where results go.
    #[command(flatten)]
    pub results: ResultArgs,

    /// Who runs it.
    #[command(flatten)]
    pub service: ServiceArgs,
}

/// Runs the script.
pub fn shell(args: &ShellArgs, common: &CommonArgs, env: &Env) -> Result<Exit, Failure> {
    if args.step.run.is_some() {
        let help = "leave --run out; for a command without a script there is `plimsoll run --run CMD`";
        return Err(Failure::usage("--run: a shell runs its script").with_help(help));
    }
    session::run(&Request {
        steps: &|around| Ok(vec![spec::from_script(&args.script, &args.step.overrides()?, around)?]),
        jobs: 1,
        engines: args.step.engines(env),
        insecure_registries: &args.step.insecure_registry,
        results: &args.results,
        service: &args.service,
        common,
        env,
    })
}
