//! `plimsoll setup userns`.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use clap::{Args, ValueHint};

use super::{CommonArgs, Env, Exit, Failure, PlaceArgs, failure};
use crate::backend::process;
use crate::setup::userns;

/// How long loading a profile may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Arguments.
#[derive(Debug, Args)]
pub struct UsernsArgs {
    /// The plimsoll that the profile is for; otherwise this one
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub program: Option<PathBuf>,

    /// Where to.
    #[command(flatten)]
    pub place: PlaceArgs,
}

/// Sets it up.
pub fn set_up(args: &UsernsArgs, common: &CommonArgs, env: &Env) -> Result<Exit, Failure> {
    let place = args.place.place(env)?;
    let program = match &args.program {
        Some(program) => program.clone(),
        None => std::env::current_exe().map_err(|e| Failure::from_error(Exit::Internal, &e))?,
    };
    let plan = userns::plan(&place, &program).map_err(|e| failure(&e))?;
    let done = args.place.carry_out(&plan, &place, common, env)?;
    if let Some((loader, arguments)) = userns::load(&place).filter(|_| !args.place.dry_run && !plan.files.is_empty()) {
        let mut command = Command::new(loader);
        command.args(arguments);
        let loaded = super::super::runtime()?.block_on(process::run(command, PATIENCE, 4096));
        let loaded = loaded.map_err(|e| Failure::from_error(Exit::Internal, &e))?;
        if !loaded.status.success() {
            let said = String::from_utf8_lossy(&loaded.stderr).trim().to_owned();
            return Err(Failure::new(Exit::Internal, format!("{loader} does not take the profile: {said}")));
        }
    }
    Ok(done)
}
