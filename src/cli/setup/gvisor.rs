//! `plimsoll setup gvisor`.

use clap::Args;

use super::{CommonArgs, Env, Exit, Failure, FromArgs, PlaceArgs, failure};
use crate::setup::gvisor;

/// Arguments.
#[derive(Debug, Args)]
pub struct GvisorArgs {
    /// Where from.
    #[command(flatten)]
    pub from: FromArgs,

    /// The release: `latest`, or a date such as 20260601
    #[arg(long, value_name = "RELEASE", default_value = "latest")]
    pub release: String,

    /// Where to.
    #[command(flatten)]
    pub place: PlaceArgs,
}

/// Sets it up.
pub fn set_up(args: &GvisorArgs, common: &CommonArgs, env: &Env) -> Result<Exit, Failure> {
    let place = args.place.place(env)?;
    let source = args.from.source(gvisor::official(&args.release))?;
    let plan = gvisor::plan(&place, &source, &args.release, args.from.pin()?, env).map_err(|e| failure(&e))?;
    args.place.carry_out(&plan, &place, common, env)
}
