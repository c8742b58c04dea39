//! `plimsoll setup wasm-python`.

use clap::Args;

use super::{CommonArgs, Env, Exit, Failure, FromArgs, PlaceArgs, failure};
use crate::setup::wasm_python;

/// Arguments.
#[derive(Debug, Args)]
#[command(mut_arg("sha256", |sha256| sha256.hide(true)))]
pub struct WasmPythonArgs {
    /// Where from; its digest is built in.
    #[command(flatten)]
    pub from: FromArgs,

    /// Where to.
    #[command(flatten)]
    pub place: PlaceArgs,
}

/// Sets it up.
pub fn set_up(args: &WasmPythonArgs, common: &CommonArgs, env: &Env) -> Result<Exit, Failure> {
    if args.from.sha256.is_some() {
        return Err(Failure::usage("--sha256: the package's digest is built in"));
    }
    let place = args.place.place(env)?;
    let source = args.from.source(wasm_python::official())?;
    let plan = wasm_python::plan(&place, &source, env).map_err(|e| failure(&e))?;
    args.place.carry_out(&plan, &place, common, env)
}
