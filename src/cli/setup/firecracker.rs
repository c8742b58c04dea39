//! `plimsoll setup firecracker`.

use clap::Args;

use super::{CommonArgs, Env, Exit, Failure, FromArgs, PlaceArgs, failure};
use crate::setup::firecracker;

/// Arguments.
#[derive(Debug, Args)]
pub struct FirecrackerArgs {
    /// Where from.
    #[command(flatten)]
    pub from: FromArgs,

    /// The release, 1.16.0 or newer
    #[arg(long, value_name = "RELEASE", default_value = firecracker::RELEASE)]
    pub release: String,

    /// Where to.
    #[command(flatten)]
    pub place: PlaceArgs,
}

/// Sets it up.
pub fn set_up(args: &FirecrackerArgs, common: &CommonArgs, env: &Env) -> Result<Exit, Failure> {
    let place = args.place.place(env)?;
    let release = firecracker::release(&args.release).map_err(|e| failure(&e))?;
    let source = args.from.source(firecracker::official(&release))?;
    let plan = firecracker::plan(&place, &source, &release, args.from.pin()?, env).map_err(|e| failure(&e))?;
    args.place.carry_out(&plan, &place, common, env)
}
