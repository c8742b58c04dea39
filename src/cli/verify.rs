//! `plimsoll verify REPORT_DIR`.

use std::io;
use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::CommonArgs;
use super::failure::Failure;
use super::output::{Log, Style};
use crate::env::Env;
use crate::exit::Exit;
use crate::report::verify;
use crate::text::Untrusted;

/// Arguments.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The report directory
    #[arg(value_name = "REPORT_DIR", value_hint = ValueHint::DirPath)]
    pub report: PathBuf,

    /// Check the output files in this directory as well
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub outputs_dir: Option<PathBuf>,
}

/// Checks the report against itself, and judges its facts again.
pub fn verify(args: &VerifyArgs, common: &CommonArgs, env: &Env) -> Result<Exit, Failure> {
    let verified = verify::verify(&args.report, args.outputs_dir.as_deref()).map_err(|e| {
        Failure::from_error(Exit::Usage, &e)
            .with_help("name the directory that `plimsoll run` wrote, by default plimsoll-report")
    })?;
    let style = Style::of(env, &io::stdout());
    let mut out = Log::data();
    for fault in &verified.faults {
        out.line(&style.bad(&format!("fault: {fault}")));
    }
    if !common.quiet {
        for unchecked in &verified.unchecked {
            out.line(&style.dim(&format!("not checked: {}", Untrusted::new(unchecked).for_terminal(500))));
        }
    }
    match (&verified.report, verified.faults.len()) {
        (Some(report), 0) => {
            let said = format!("it says {}, with exit code {}", report.verdict, report.exit_code.code());
            out.line(&format!("{}: {said}", style.good("consistent; origin not proven")));
        }
        (_, 1) => out.line(&style.bad("1 fault")),
        (_, n) => out.line(&style.bad(&format!("{n} faults"))),
    }
    Ok(verified.exit())
}
