//! `plimsoll check`: would it run here? Reads the steps, applies the policy, and builds each step's boundary with nothing of the
//! user's in it ([`trial`]).

use std::io;
use std::path::Path;

use clap::Args;

use super::args::{self, SelectArgs, StepArgs};
use super::failure::Failure;
use super::output::{self, Log, Style, style};
use super::trial::{self, Trials};
use super::{CommonArgs, signals};
use crate::env::{Env, Var};
use crate::exit::Exit;
use crate::report::Verdict;
use crate::spec::{ArtifactSource, Policy, Step, Surroundings};
use crate::text::Untrusted;

/// Arguments.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Which steps.
    #[command(flatten)]
    pub select: SelectArgs,

    /// What each of them is.
    #[command(flatten)]
    pub step: StepArgs,
}

/// Checks the steps.
pub fn check(args: &CheckArgs, common: &CommonArgs, env: &Env) -> Result<Exit, Failure> {
    let steps = args::steps(&args.select, &args.step, &Surroundings { home: env.path(Var::Home) })?;
    let trials = Trials::new(args.step.engines(env), env)?;
    let harmless = steps.iter().cloned().map(|step| trials.harmless(step)).collect();
    let report = super::runtime()?.block_on(async {
        let cancel = signals::listen().map_err(|e| Failure::from_error(Exit::Internal, &e))?;
        let report = trials.run(harmless, Policy::load(), cancel.clone()).await?;
        match *cancel.borrow() {
            Some(signal) => Err(Failure::new(signals::exit(signal), "cancelled")),
            None => Ok(report),
        }
    })?;
    let (target, paint) = (output::log_target(env), Style::of(env, &io::stdout()));
    let clean = |text: &str| Untrusted::new(text).for_log_line(target, 1000);
    let mut out = Log::data();
    let mut exits = Vec::new();
    for (step, asked) in report.steps.iter().zip(&steps) {
        let exit = trial::exit(step);
        if exit == Exit::Passed
            && let Some(missing) = missing_artifact(asked)
        {
            exits.push(Exit::Rejected);
            let verdict = Verdict::of(Exit::Rejected);
            let head = format!("{} {:02} {}", style::sign(verdict), step.index, clean(&step.name));
            let code = Exit::Rejected.code();
            out.line(&format!("{} would not run: exit code {code}", paint.verdict(verdict, &head)));
            out.line(&format!("     because artifact {} does not exist (artifact)", clean(&missing.to_string_lossy())));
            continue;
        }
        exits.push(exit);
        let verdict = Verdict::of(exit);
        let head = format!("{} {:02} {}", style::sign(verdict), step.index, clean(&step.name));
        let backend = step.backend.as_deref().unwrap_or("no backend");
        let said = match step.tier.filter(|_| exit == Exit::Passed) {
            Some(tier) => format!("would run in {backend}: {tier} proven, floor {}", step.floor),
            None => format!("would not run: exit code {}", exit.code()),
        };
        out.line(&format!("{} {said}", paint.verdict(verdict, &head)));
        if common.quiet || exit == Exit::Passed {
            continue;
        }
        if let Some(refusal) = &step.refusal {
            out.line(&format!("     because {} ({})", clean(&refusal.message), refusal.stage));
            if let Some(help) = refusal.help.as_deref().filter(|h| !h.is_empty()) {
                out.line(&format!("     help: {}", clean(help)));
            }
        }
    }
    if steps.is_empty() {
        out.line("no steps: a run would be skipped");
    }
    Ok(Exit::of_many(exits))
}

/// The path of a step's artifact, if there is nothing at it. Its content is not looked at: that takes a run.
fn missing_artifact(step: &Step) -> Option<&Path> {
    match &step.artifact {
        ArtifactSource::Path(path) | ArtifactSource::PathWithDigest { path, .. } if !path.exists() => Some(path),
        _ => None,
    }
}
