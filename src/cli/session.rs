//! A run from the command line, from claimed directories to a written report.
//!
//! [`run`] is the order: signals, directories, steps, policy, the run itself with its live log, the report, what the forge
//! is handed, the result lines. Directories come before steps are read, so that a broken step file leaves no old report
//! that could be taken for this one's.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;

use clap::{Args, ValueHint};
use tokio::sync::mpsc;

use super::failure::{self, Failure};
use super::output::github::{self, Outputs};
use super::output::live::{Live, Mode, Shape};
use super::output::{self, Log, Style, result};
use super::publish::{PublishingArgs, Telling};
use super::served::{self, ServiceArgs, Way, Whose};
use super::{CommonArgs, LogFormat, signals, unread};
use crate::backend::Engines;
use crate::backend::channel::{Cancel, CancelSignal};
use crate::env::{Env, Var};
use crate::exit::Exit;
use crate::forge;
use crate::report::write::{ClaimError, OutputsDir, ReportDir};
use crate::report::{self, Ci, PolicyRecord, Report, Staging, StepReport, Verdict};
use crate::run::{self, Event, Job, RunError};
use crate::service::client::{self, Answer, Ask};
use crate::service::link::Link;
use crate::spec::{Policy, Step, Surroundings};
use crate::text::{LogTarget, Untrusted};

/// Where the report goes by default.
pub const REPORT_DIR: &str = "plimsoll-report";
/// Where outputs go by default.
pub const OUTPUTS_DIR: &str = "plimsoll-outputs";
/// Annotations of a run: GitHub shows ten errors of a step.
const MAX_ANNOTATIONS: usize = 10;

/// Where results go.
#[derive(Debug, Args)]
#[command(next_help_heading = "Results")]
pub struct ResultArgs {
    /// Where the report goes; replaced as a whole
    #[arg(long, value_name = "DIR", default_value = REPORT_DIR, value_hint = ValueHint::DirPath)]
    pub report_dir: PathBuf,

    /// Where output files go, which are untrusted; replaced as a whole
    #[arg(long, value_name = "DIR", default_value = OUTPUTS_DIR, value_hint = ValueHint::DirPath)]
    pub outputs_dir: PathBuf,

    /// Append verdict, tier, exit-code, report-dir and outputs-dir to the outputs of a GitHub step
    #[arg(long)]
    pub github_output: bool,

    /// Where and how it is published.
    #[command(flatten)]
    pub publish: PublishingArgs,
}

/// What a command asks of a session.
pub struct Request<'a> {
    /// Reads the steps.
    pub steps: &'a dyn Fn(&Surroundings) -> Result<Vec<Step>, Failure>,
    /// Steps that run at the same time.
    pub jobs: usize,
    /// Engine executables.
    pub engines: Engines,
    /// Registries that may be asked without TLS.
    pub insecure_registries: &'a [String],
    /// Where results go.
    pub results: &'a ResultArgs,
    /// Who runs it.
    pub service: &'a ServiceArgs,
    /// How messages are shown.
    pub common: &'a CommonArgs,
    /// The environment.
    pub env: &'a Env,
}

/// Runs the steps, and says how to exit.
///
/// # Errors
/// Where there is no report to tell it.
pub fn run(request: &Request<'_>) -> Result<Exit, Failure> {
    let done = super::runtime()?.block_on(attempt(request));
    let results = request.results;
    if let (Err(failure), true) = (&done, results.github_output) {
        let outputs = Outputs::without_report(failure.exit, &results.report_dir, &results.outputs_dir);
        hand_over(outputs.write(request.env));
    }
    done
}

async fn attempt(request: &Request<'_>) -> Result<Exit, Failure> {
    let (env, results) = (request.env, request.results);
    let cancel = signals::listen().map_err(|e| Failure::from_error(Exit::Internal, &e))?;
    apart(&results.report_dir, &results.outputs_dir)?;
    let report_dir = ReportDir::claim(&results.report_dir).map_err(claim)?;
    let outputs_dir = OutputsDir::claim(&results.outputs_dir).map_err(claim)?;
    let logs = report_dir.staging().join("steps");
    fs::create_dir(&logs).map_err(|e| Failure::from_error(Exit::Internal, &e))?;

    let context = forge::Context::detect(env);
    for remark in context.iter().flat_map(|c| &c.remarks) {
        tracing::warn!("{remark}");
    }
    let telling = Telling::new(&results.publish, context.clone(), env);
    telling.begun(cancel.clone()).await;

    let ran = ran(request, context, cancel.clone(), report_dir, outputs_dir, logs).await;
    let (report, unread) = match ran {
        Ok(ran) => ran,
        Err(failure) => {
            telling.missing(&failure, cancel).await;
            return Err(failure);
        }
    };
    let published = telling.report(&report, &results.report_dir, cancel).await;
    // Publishing that was required and failed decides where nothing graver does.
    let exit = |of: Exit| if published { of } else { Exit::of_many([of, Exit::PublishFailed]) };
    if results.github_output {
        let outputs = Outputs::of(&report, &results.report_dir, &results.outputs_dir);
        hand_over(Outputs { exit: exit(report.exit_code), ..outputs }.write(env));
    }
    match unread {
        // Printed as the error that it is.
        Some(failure) => {
            failure.print(env);
            Ok(exit(failure.exit))
        }
        None => {
            print(&report, request);
            Ok(exit(report.exit_code))
        }
    }
}

/// Reads the steps, runs them, and puts report and outputs in place. Steps that can't be read make a report as well.
async fn ran(
    request: &Request<'_>,
    context: Option<forge::Context>,
    cancel: Cancel,
    report_dir: ReportDir,
    outputs_dir: OutputsDir,
    logs: PathBuf,
) -> Result<(Report, Option<Failure>), Failure> {
    let (env, results) = (request.env, request.results);
    let (steps, unread) = match (request.steps)(&Surroundings { home: env.path(Var::Home) }) {
        Ok(steps) => (steps, None),
        Err(failure) => (Vec::new(), Some(failure)),
    };
    let shape = match steps.len() {
        0 | 1 => Shape::One,
        _ if request.jobs > 1 => Shape::Parallel,
        _ => Shape::Serial,
    };
    let whose = Whose { steps, ci: context.as_ref().map(ci), runner: context.as_ref().and_then(|c| c.runner.clone()) };
    // Without a step there is nothing to ask for.
    let way = if whose.steps.is_empty() { Way::Local } else { served::way(request.service, env).await? };
    let exclude = [report_dir.path(), report_dir.staging(), outputs_dir.path(), outputs_dir.staging()];
    let exclude = exclude.map(Path::to_owned).to_vec();
    let (mut report, written) = match way {
        Way::Local => {
            let job = Job {
                steps: whose.steps,
                policy: Policy::load(),
                jobs: request.jobs,
                engines: request.engines.clone(),
                insecure_registries: request.insecure_registries.to_vec(),
                state: run::state_dir(env),
                logs,
                outputs: outputs_dir.staging().to_owned(),
                staging: vec![built(report_dir.being_built())?, built(outputs_dir.being_built())?],
                exclude,
                ci: whose.ci,
                runner: whose.runner,
                announce: None,
            };
            (shown(job, request, shape, cancel).await?, false)
        }
        Way::Service(link) => {
            let ask = Ask {
                steps: whose.steps.clone(),
                jobs: request.jobs,
                platform: request.engines.platform.clone(),
                ci: whose.ci.clone(),
                runner: whose.runner.clone(),
                exclude,
                temp: env.temp_dir(),
                report: report_dir.staging().to_owned(),
                outputs: outputs_dir.staging().to_owned(),
                insecure_registries: request.insecure_registries.to_vec(),
                env: env.clone(),
            };
            asked(link, ask, whose, request, shape, cancel).await?
        }
        Way::None(refusal) => (whose.refused(Exit::Unavailable, &refusal).map_err(|e| no_report(&e))?, false),
    };
    if let Some(failure) = &unread {
        unread::tell(&mut report, failure);
    }
    if written {
        report_dir.install().map_err(|e| Failure::from_error(Exit::Internal, &e))?;
    } else {
        report_dir.commit(&report).map_err(|e| Failure::from_error(Exit::Internal, &e))?;
    }
    outputs_dir.commit().map_err(|e| {
        Failure::new(Exit::Internal, format!("failed to put {} in place: {e}", results.outputs_dir.display()))
    })?;
    Ok((report, unread))
}

/// Refuses a report directory in the outputs directory, or the other way round: each is replaced as a whole.
fn apart(report: &Path, outputs: &Path) -> Result<(), Failure> {
    let whole = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let (report, outputs) = (whole(report), whole(outputs));
    if report.starts_with(&outputs) || outputs.starts_with(&report) {
        let message = format!(
            "the outputs directory {} and the report directory {} lie in each other",
            outputs.display(),
            report.display()
        );
        return Err(Failure::new(Exit::Usage, message)
            .with_help("give each a directory of its own with --report-dir and --outputs-dir"));
    }
    Ok(())
}

/// Runs the job and shows it meanwhile.
async fn shown(job: Job, request: &Request<'_>, shape: Shape, cancel: Cancel) -> Result<Report, Failure> {
    let (steps, policy) = (job.steps.clone(), run::policy_record(&job.policy));
    let (ci, runner) = (job.ci.clone(), job.runner.clone());
    let running = |events| run::run(job, events, cancel.clone());
    match watched(request, shape, cancel.clone(), running).await {
        Ok(report) => report.map_err(|e| no_report(&e)),
        Err(signal) => run::given_up(&steps, signal, policy, ci, runner).map_err(|e| no_report(&e)),
    }
}

/// Asks the service and shows what it says meanwhile. Says as well whether the report's files are written already.
async fn asked(
    link: Link,
    ask: Ask,
    whose: Whose,
    request: &Request<'_>,
    shape: Shape,
    cancel: Cancel,
) -> Result<(Report, bool), Failure> {
    tell_service(request);
    let staging = [ask.report.clone(), ask.outputs.clone()];
    let asking = |events| client::ask(link, ask, events, cancel.clone());
    let report = match watched(request, shape, cancel.clone(), asking).await {
        Ok(Answer::Report(record)) => return Ok((report::model(&record), true)),
        Ok(answer) => whose.unanswered(&answer),
        Err(signal) => {
            let policy = PolicyRecord { sha256: None, effect: "none".to_owned() };
            run::given_up(&whose.steps, signal, policy, whose.ci, whose.runner)
        }
    };
    // Half a result is none: what came of it must not stand beside a report that knows nothing of it.
    for staging in staging {
        emptied(&staging).map_err(|e| Failure::from_error(Exit::Internal, &e))?;
    }
    Ok((report.map_err(|e| no_report(&e))?, false))
}

/// Removes what was received of a result, but for the mark that makes the directory ours.
fn emptied(staging: &Path) -> io::Result<()> {
    for entry in fs::read_dir(staging)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else if entry.file_name() != ".gitignore" {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// One line that says who runs it.
fn tell_service(request: &Request<'_>) {
    let socket = request.service.socket().display().to_string();
    let mut log = Log::for_target(output::log_target(request.env));
    match request.common.log_format {
        LogFormat::Json => log.line(&serde_json::json!({"event": "service", "socket": socket}).to_string()),
        LogFormat::Text if request.common.quiet => {}
        LogFormat::Text => {
            let socket = Untrusted::new(&socket).for_log_line(output::log_target(request.env), 200);
            log.line(&format!("run by the service of this machine ({socket})"));
        }
    }
}

/// Does work whose events are shown meanwhile; the signal that ended it if it did not end in time.
async fn watched<T, F: Future<Output = T>>(
    request: &Request<'_>,
    shape: Shape,
    cancel: Cancel,
    work: impl FnOnce(mpsc::UnboundedSender<Event>) -> F,
) -> Result<T, CancelSignal> {
    let mut live = live(request, shape);
    let (events, mut incoming) = mpsc::unbounded_channel::<Event>();
    // A thread of its own: a log that nobody reads must not hold up the run.
    let shower = thread::spawn(move || {
        while let Some(event) = incoming.blocking_recv() {
            live.event(event);
        }
        live.finish();
    });
    let done = tokio::select! {
        done = work(events) => done,
        signal = signals::overdue(cancel) => {
            let failure = Failure::new(signals::exit(signal), "cancelled, and cleaning up took too long");
            failure.with_help("`plimsoll clean` removes what is left").print(request.env);
            return Err(signal);
        }
    };
    let _ = shower.join();
    Ok(done)
}

/// The failure of a run that has no report.
pub fn no_report(error: &RunError) -> Failure {
    let failure = Failure::from_error(Exit::Internal, error);
    match error.help() {
        Some(help) => failure.with_help(help),
        None => failure,
    }
}

fn built(staging: io::Result<Staging>) -> Result<Staging, Failure> {
    staging.map_err(|e| Failure::from_error(Exit::Internal, &e))
}

fn live(request: &Request<'_>, shape: Shape) -> Live {
    let (env, common) = (request.env, request.common);
    let target = output::log_target(env);
    let mode = match common.log_format {
        LogFormat::Json => Mode::Json,
        LogFormat::Text if common.quiet => Mode::Quiet,
        LogFormat::Text if output::is_interactive(env, &io::stderr()) => Mode::Terminal,
        LogFormat::Text => Mode::Plain,
    };
    Live::new(Log::for_target(target), mode, target, Style::of(env, &io::stderr()), shape)
}

/// A fault here is told and changes no verdict.
fn hand_over(done: Result<(), github::HandOver>) {
    if let Err(error) = done {
        tracing::warn!("no outputs for the job: {}", crate::text::chain(&error));
    }
}

fn print(report: &Report, request: &Request<'_>) {
    let target = output::log_target(request.env);
    let options = result::Options {
        style: Style::of(request.env, &io::stdout()),
        target,
        quiet: request.common.quiet,
        verbose: request.common.verbose,
        report_dir: &request.results.report_dir,
        outputs_dir: &request.results.outputs_dir,
    };
    let mut out = Log::data();
    out.text(&result::render(report, options));
    if target == LogTarget::GitHub {
        let faults = report.steps.iter().filter(|s| !matches!(s.verdict, Verdict::Passed | Verdict::Skipped));
        for step in faults.filter(|s| !s.forgiven).take(MAX_ANNOTATIONS) {
            out.line(&annotation(step));
        }
    }
}

fn annotation(step: &StepReport) -> String {
    let help = step.refusal.as_ref().and_then(|r| r.help.as_deref());
    failure::annotation(&result::sentence(step), help, None, None)
}

fn claim(error: ClaimError) -> Failure {
    let exit = match error {
        ClaimError::Io { .. } => Exit::Internal,
        ClaimError::Unusable(_) | ClaimError::Refused { .. } | ClaimError::Busy { .. } => Exit::Usage,
    };
    Failure::from_error(exit, &error).with_help(error.help())
}

fn ci(context: &forge::Context) -> Ci {
    Ci {
        provider: context.provider.name().to_owned(),
        repository: context.repository.clone(),
        sha: context.sha.clone(),
        head_sha: context.head_sha.clone(),
        pull_request: context.number(),
        job: context.job.clone(),
        attempt: context.attempt,
        matrix: context.matrix.clone(),
        run_url: context.run_url.clone(),
    }
}
