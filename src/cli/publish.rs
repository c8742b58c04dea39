//! `--publish` of a run, and `plimsoll publish REPORT_DIR TARGET…`.
//!
//! What a run publishes is its own. What `publish` is given came out of another job, whatever it says of itself, and is
//! believed only as far as [`standing`](crate::publish::standing) allows.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::PossibleValue;
use clap::{Args, ValueEnum, ValueHint};

use super::args::SelectArgs;
use super::failure::{self, Failure};
use super::output::{self, Log};
use super::{CommonArgs, args, signals};
use crate::artifact::digest::Source;
use crate::backend::channel::{Cancel, cancelled};
use crate::env::{Env, Var};
use crate::exit::Exit;
use crate::forge::Context;
use crate::publish::proof::PublicKey;
use crate::publish::standing::Expected;
use crate::publish::{self, Options, Publication, Record, Standing, Target};
use crate::report::Report;
use crate::spec::Surroundings;
use crate::text::{LogTarget, Untrusted};

/// How long publishing may go on once the job is cancelled.
const AFTER_CANCEL: Duration = Duration::from_secs(2);

/// A target, or those that fit where the job runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// Summary, status and comment; or status and note.
    Auto,
    /// This one.
    One(Target),
}

impl Choice {
    const ALL: [Choice; 7] = [
        Choice::Auto,
        Choice::One(Target::GithubSummary),
        Choice::One(Target::GithubComment),
        Choice::One(Target::GithubStatus),
        Choice::One(Target::GithubCheck),
        Choice::One(Target::GitlabNote),
        Choice::One(Target::GitlabStatus),
    ];
}

impl ValueEnum for Choice {
    fn value_variants<'a>() -> &'a [Self] {
        &Self::ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            Choice::Auto => PossibleValue::new("auto").help("summary, status, and comment or note"),
            Choice::One(target) => PossibleValue::new(target.name()).help(target.describe()),
        })
    }
}

/// The targets chosen, each once.
fn targets(choices: &[Choice], context: Option<&Context>) -> Vec<Target> {
    let mut all = Vec::new();
    for choice in choices {
        let chosen = match choice {
            Choice::Auto => Target::auto(context.map(|c| c.provider)),
            Choice::One(target) => vec![*target],
        };
        all.extend(chosen.into_iter().filter(|target| !all.contains(target)).collect::<Vec<_>>());
    }
    all
}

/// How a result is published.
#[derive(Debug, Args)]
#[command(next_help_heading = "Publishing")]
pub struct HowArgs {
    /// The status's context, in place of `plimsoll / <job> (<matrix values>)`
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub status_context: Option<String>,

    /// A status for each step as well
    #[arg(long)]
    pub step_statuses: bool,

    /// Exit with 14 when a target degraded or failed and nothing graver happened
    #[arg(long)]
    pub publish_required: bool,
}

impl HowArgs {
    fn options(&self) -> Options {
        Options { status_context: self.status_context.clone(), step_statuses: self.step_statuses }
    }
}

/// Whether and how a run publishes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Publishing")]
pub struct PublishingArgs {
    /// Publish the result; a target that can't be used changes no verdict
    #[arg(long, value_name = "TARGET", value_delimiter = ',', hide_possible_values = false)]
    pub publish: Vec<Choice>,

    /// How.
    #[command(flatten)]
    pub how: HowArgs,
}

/// What a run tells its forge, from its beginning to its end.
pub struct Telling<'a> {
    targets: Vec<Target>,
    how: &'a HowArgs,
    context: Option<Context>,
    env: &'a Env,
}

impl<'a> Telling<'a> {
    /// To the targets of the flags.
    pub fn new(args: &'a PublishingArgs, context: Option<Context>, env: &'a Env) -> Self {
        Self { targets: targets(&args.publish, context.as_ref()), how: &args.how, context, env }
    }

    /// That work has begun. Before anything is prepared.
    pub async fn begun(&self, mut cancel: Cancel) {
        let what = Publication::begun(self.context.clone(), self.how.options());
        let told = tokio::select! {
            told = publish::pending(&what, &self.targets, self.env) => told,
            _ = cancelled(&mut cancel) => return,
        };
        for (target, outcome) in told.iter().filter(|(_, outcome)| !outcome.is_fine()) {
            // It is told again, with annotation, when the result is published.
            tracing::info!("{target}: {}", outcome.reason().unwrap_or_default());
        }
    }

    /// The report. Gives whether that is fine with `--publish-required`.
    pub async fn report(&self, report: &Report, directory: &Path, cancel: Cancel) -> bool {
        if self.targets.is_empty() {
            return true;
        }
        let what = Publication::own(report, directory, self.context.clone(), self.how.options());
        let record = self.tell(&what, cancel).await;
        if let Err(error) = record.write(directory) {
            tracing::warn!("{}", crate::text::chain(&error));
        }
        record.is_fine() || !self.how.publish_required
    }

    /// That there is none.
    pub async fn missing(&self, failure: &Failure, cancel: Cancel) {
        if self.targets.is_empty() {
            return;
        }
        let what = Publication::missing(failure.message(), Standing::Own, self.context.clone(), self.how.options());
        self.tell(&what, cancel).await;
    }

    async fn tell(&self, what: &Publication, mut cancel: Cancel) -> Record {
        let cut_short = async {
            cancelled(&mut cancel).await;
            tokio::time::sleep(AFTER_CANCEL).await;
        };
        let record = tokio::select! {
            record = publish::publish(what, &self.targets, self.env) => record,
            () = cut_short => Record::cut_short(what, &self.targets),
        };
        show(&record, self.env);
        record
    }
}

/// Arguments.
#[derive(Debug, Args)]
pub struct PublishArgs {
    /// The report directory; only its report, signature and logs are read
    #[arg(value_name = "REPORT_DIR", value_hint = ValueHint::DirPath)]
    pub report: PathBuf,

    /// Where to publish it
    #[arg(value_name = "TARGET", required = true)]
    pub targets: Vec<Choice>,

    /// Public keys of services that may have signed it, in PEM; repeatable
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Belief")]
    pub key: Vec<PathBuf>,

    /// Step files that its steps have to come from, of the base branch; repeatable
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Belief")]
    pub spec: Vec<PathBuf>,

    /// Only the steps of this name; repeatable
    #[arg(long, value_name = "NAME", requires = "spec", help_heading = "Belief")]
    pub step: Vec<String>,

    /// The archive that has to be the one it is about; it is hashed, not unpacked
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath, help_heading = "Belief")]
    pub artifact: Option<PathBuf>,

    /// How.
    #[command(flatten)]
    pub how: HowArgs,
}

/// Publishes another job's report.
pub fn publish(args: &PublishArgs, _: &CommonArgs, env: &Env) -> Result<Exit, Failure> {
    let context = Context::detect(env);
    for remark in context.iter().flat_map(|c| &c.remarks) {
        tracing::warn!("{remark}");
    }
    let keys = keys(&args.key)?;
    let expected = expected(args, env)?;
    let targets = targets(&args.targets, context.as_ref());
    if targets.is_empty() {
        return Err(Failure::usage("`auto` names no target outside of a job of GitHub or GitLab")
            .with_help("name the targets, such as `gitlab-note` or `github-status`; see `plimsoll publish --help`"));
    }
    let (what, error) = Publication::of_another_job(&args.report, &keys, &expected, context, args.how.options());
    let record = super::runtime()?.block_on(async {
        let mut cancel = signals::listen().map_err(|e| Failure::from_error(Exit::Internal, &e))?;
        tokio::select! {
            record = publish::publish(&what, &targets, env) => Ok(record),
            signal = cancelled(&mut cancel) => Err(Failure::new(signals::exit(signal), "cancelled while publishing")),
        }
    })?;
    show(&record, env);
    if let Some(error) = error {
        // That there is none has been told where it counts; here it is a fault of the call as well.
        return Err(Failure::from_error(Exit::Usage, &error)
            .with_help("name the directory that `plimsoll run` wrote in the other job, as it was downloaded"));
    }
    if let Err(error) = record.write(&args.report) {
        tracing::warn!("{}", crate::text::chain(&error));
    }
    Ok(if record.is_fine() || !args.how.publish_required { Exit::Passed } else { Exit::PublishFailed })
}

fn keys(files: &[PathBuf]) -> Result<Vec<PublicKey>, Failure> {
    let mut keys = Vec::new();
    for file in files {
        keys.extend(PublicKey::load(file).map_err(|e| {
            Failure::from_error(Exit::Usage, &e)
                .with_help("give --key the service's public key, which is /etc/plimsoll/service.pub on its host")
        })?);
    }
    Ok(keys)
}

fn expected(args: &PublishArgs, env: &Env) -> Result<Expected, Failure> {
    let steps = if args.spec.is_empty() {
        None
    } else {
        let select = SelectArgs {
            specs: args.spec.clone(),
            step: args.step.clone(),
            from_workflow: None,
            job: None,
            shard: None,
        };
        Some(args::steps(&select, &args::StepArgs::default(), &Surroundings { home: env.path(Var::Home) })?)
    };
    let artifact = match &args.artifact {
        Some(path) => Some(digest(path)?),
        None => None,
    };
    Ok(Expected { steps, artifact })
}

/// The digest of an archive. It is not unpacked: that is the other job's to do, behind a boundary.
fn digest(path: &Path) -> Result<String, Failure> {
    let read = || -> io::Result<String> {
        let file = File::open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is not a file, and only a file's digest can be compared"));
        }
        Ok(Source::new(file)?.finish()?.0.to_string())
    };
    read().map_err(|e| Failure::new(Exit::Usage, format!("failed to read the artifact {}: {e}", path.display())))
}

/// Says what was published where. On GitHub, what was not is a notice on the run's page as well.
fn show(record: &Record, env: &Env) {
    let target = output::log_target(env);
    let mut log = Log::for_target(target);
    if record.standing == "unverified" {
        log.line(&format!("The report is {}:", publish::body::UNVERIFIED));
        for reason in &record.reasons {
            log.line(&format!("  {}", Untrusted::new(reason).for_log_line(target, 500)));
        }
    }
    for entry in &record.targets {
        let clean = |text: &str| Untrusted::new(text).for_log_line(target, 1000);
        let more = entry.url.as_deref().or(entry.reason.as_deref()).map(|m| format!(": {}", clean(m)));
        log.line(&format!("Published to {}: {}{}", entry.target, entry.outcome, more.unwrap_or_default()));
        if let (LogTarget::GitHub, "degraded" | "failed", Some(reason)) = (target, entry.outcome, &entry.reason) {
            let level = if entry.outcome == "failed" { "warning" } else { "notice" };
            log.line(&failure::command(level, &format!("{}: {reason}", entry.target)));
        }
    }
}
