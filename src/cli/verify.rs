//! `plimsoll verify REPORT_DIR`.

use std::io;
use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::CommonArgs;
use super::failure::Failure;
use super::output::{Log, Style};
use crate::env::Env;
use crate::exit::Exit;
use crate::report::sign::{KeyError, PublicKey};
use crate::report::verify::{self, Provenance};
use crate::text::Untrusted;

/// Claims that a line names; more are counted.
const MAX_CLAIMS: usize = 12;

/// Arguments.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The report directory
    #[arg(value_name = "REPORT_DIR", value_hint = ValueHint::DirPath)]
    pub report: PathBuf,

    /// Check the output files in this directory as well
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub outputs_dir: Option<PathBuf>,

    /// Public key of the service that has to have signed it, or several of them in one file; repeatable
    #[arg(long, value_name = "PUB", value_hint = ValueHint::FilePath)]
    pub key: Vec<PathBuf>,
}

impl VerifyArgs {
    /// The keys; `None` if none was asked for.
    fn keys(&self) -> Result<Option<Vec<PublicKey>>, Failure> {
        if self.key.is_empty() {
            return Ok(None);
        }
        let mut keys = Vec::new();
        for path in &self.key {
            keys.extend(PublicKey::load(path).map_err(|e| unusable(&e))?);
        }
        Ok(Some(keys))
    }
}

fn unusable(error: &KeyError) -> Failure {
    Failure::from_error(Exit::Usage, error).with_help(
        "give --key the service's public key, which is /etc/plimsoll/service.pub on its host, in a copy that the job can't write",
    )
}

/// Checks the report against itself, and judges its facts again.
pub fn verify(args: &VerifyArgs, common: &CommonArgs, env: &Env) -> Result<Exit, Failure> {
    let outputs = args.outputs_dir.as_deref();
    let verified = match args.keys()? {
        Some(keys) => verify::verify_signed(&args.report, outputs, &keys),
        None => verify::verify(&args.report, outputs),
    };
    let verified = verified.map_err(|e| {
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
            match &verified.provenance {
                Provenance::NotProven => {
                    out.line(&format!("{}: {said}", style.good("consistent; origin not proven")));
                }
                Provenance::Proven { signer, claimed } => {
                    if !common.quiet {
                        out.line(
                            &style.dim(&format!("claimed by the job, not seen by the service: {}", list(claimed))),
                        );
                    }
                    let host = Untrusted::new(&signer.host).for_terminal(100);
                    let origin = format!("consistent; signed by the service of {host}, with key {}", signer.key_id);
                    out.line(&format!("{}: {said}", style.good(&origin)));
                }
            }
        }
        (_, 1) => out.line(&style.bad("1 fault")),
        (_, n) => out.line(&style.bad(&format!("{n} faults"))),
    }
    Ok(verified.exit())
}

fn list(claimed: &[String]) -> String {
    let mut shown: Vec<String> =
        claimed.iter().take(MAX_CLAIMS).map(|pointer| Untrusted::new(pointer).for_terminal(100)).collect();
    match claimed.len() {
        0 => shown.push("nothing".to_owned()),
        n if n > MAX_CLAIMS => shown.push(format!("and {} more", n - MAX_CLAIMS)),
        _ => {}
    }
    shown.join(", ")
}
