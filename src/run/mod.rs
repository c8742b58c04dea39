//! One run: steps from the spec through artifact, image and gate into the report.
//!
//! This is the library that local mode and the service call; it knows nothing of terminals or forges. Main
//! function: [`run`].

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jiff::Timestamp;
use plimsoll_guest::Stream;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;

use self::record::{refusal, refuse};
use self::scratch::{Scratch, ScratchError, Swept};
use crate::artifact::FileId;
use crate::backend::channel::{Cancel, CancelSignal};
use crate::backend::{Backend, Engines};
use crate::env::Env;
use crate::exit::Exit;
use crate::gate::Dispatched;
use crate::image::cache::Cache;
use crate::report::{Ci, PolicyRecord, Report, ReportOrigin, Staging, StepReport, Verdict};
use crate::spec::{Policy, PolicyRefusal, Step};

pub mod fetching;
pub mod host;
pub mod image;
mod machine;
mod parts;
mod payload;
pub mod puller;
mod record;
pub mod request;
pub mod scratch;
mod step;
pub mod task;
pub mod unpacker;

/// File of a run's directory that names what the run builds elsewhere.
const STAGING: &str = "staging";

/// What happens during a run, for whoever shows it live. Guest bytes are raw.
#[derive(Debug, Clone)]
pub enum Event {
    /// A step begins.
    Started {
        /// From 1.
        index: u32,
        /// The step's name.
        name: String,
    },
    /// A step reached the next part of its way: `unpacking`, `preparing gvisor`, `running`, …
    Progress {
        /// From 1.
        index: u32,
        /// In a word or two.
        what: String,
    },
    /// A piece of the guest's output.
    Output {
        /// From 1.
        index: u32,
        /// Which stream.
        stream: Stream,
        /// Raw guest bytes.
        bytes: Vec<u8>,
    },
    /// A step is over.
    Ended {
        /// Everything about it.
        step: Box<StepReport>,
    },
}

/// What a run is asked to do.
#[derive(Debug)]
pub struct Job {
    /// Steps, as selected.
    pub steps: Vec<Step>,
    /// The operator's policy, or why it can't be applied: then every step is refused.
    pub policy: Result<Policy, PolicyRefusal>,
    /// Steps that run at the same time.
    pub jobs: usize,
    /// Engine executables named by flags or the environment.
    pub engines: Engines,
    /// Registries, as `host[:port]`, that may be asked without TLS. One on this host may be in any case.
    pub insecure_registries: Vec<String>,
    /// Where runs keep private directories: see [`scratch`].
    pub state: PathBuf,
    /// Directory in which each step's log files go to `<step>/`; exists.
    pub logs: PathBuf,
    /// Directory in which each step's output files go to `<step>/`; exists.
    pub outputs: PathBuf,
    /// Directories being built that are to be removed if this run is killed.
    pub staging: Vec<Staging>,
    /// Directories that a directory artifact does not carry: the report's and the outputs', as they are and as they
    /// are being built.
    pub exclude: Vec<PathBuf>,
    /// The CI job.
    pub ci: Option<Ci>,
    /// The machine's name, as CI gives it.
    pub runner: Option<String>,
    /// Told before a step's code is started, if somebody has to know by then.
    pub announce: Option<Announce>,
}

/// Tells somebody that a step's code is about to be started; the step's index comes along. The code is started once the
/// call comes back.
#[derive(Clone)]
pub struct Announce(Arc<dyn Fn(u32) + Send + Sync>);

impl Announce {
    /// What to call. It may block.
    pub fn new(tell: impl Fn(u32) + Send + Sync + 'static) -> Self {
        Self(Arc::new(tell))
    }
}

impl std::fmt::Debug for Announce {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Announce")
    }
}

/// What the steps of one run share.
struct Context {
    id: String,
    scratch: PathBuf,
    logs: PathBuf,
    outputs: PathBuf,
    exclude: Vec<FileId>,
    engines: Engines,
    insecure_registries: Vec<String>,
    events: mpsc::UnboundedSender<Event>,
    announce: Option<Announce>,
}

impl Context {
    fn announce(&self, index: u32) {
        if let Some(Announce(tell)) = &self.announce {
            tell(index);
        }
    }
}

/// Runs the steps and says what happened. Fails only where there is nothing to report from.
///
/// # Errors
/// If there is no private place to work in, or the executable cannot be read.
pub async fn run(job: Job, events: mpsc::UnboundedSender<Event>, cancel: Cancel) -> Result<Report, RunError> {
    let started_at = Timestamp::now();
    // Every report names the executable's digest. Known by the time it is needed; a worker's is compared with it, and then what
    // the cache says is not enough.
    let compared = job.steps.iter().any(|step| step.candidates().contains(&Backend::Wasm));
    let tool = std::thread::spawn(move || {
        let cache = if compared { None } else { Cache::kept(&Env::process()) };
        host::tool(cache.as_ref())
    });
    let request_sha256 = request_sha256(&job.steps, job.policy.as_ref().ok());
    let policy = policy_record(&job.policy);
    for leftover in clean(&job.state)?.failed {
        tracing::warn!("a killed run left something that could not be removed: {leftover}");
    }
    let scratch = Scratch::create(&job.state)?;
    std::fs::write(scratch.path().join(STAGING), Staging::record(&job.staging)).map_err(RunError::Record)?;
    let mut engines = job.engines;
    if let Ok(policy) = &job.policy {
        engines.trusted.extend(policy.engines().iter().map(ToString::to_string));
    }
    let context = Arc::new(Context {
        id: scratch::fresh_id().map_err(RunError::Randomness)?,
        scratch: scratch.path().to_owned(),
        logs: job.logs,
        outputs: job.outputs,
        exclude: job
            .exclude
            .iter()
            .filter_map(|path| File::open(path).ok())
            .filter_map(|dir| FileId::of(dir).ok())
            .collect(),
        engines,
        insecure_registries: job.insecure_registries,
        events,
        announce: job.announce,
    });
    let policed: Vec<_> = job.steps.iter().map(|step| police(&job.policy, step)).collect();
    let steps = run_all(&context, policed, job.jobs, cancel).await;
    let exit_code = Exit::of_many(steps.iter().filter(|s| !s.forgiven).map(|s| s.exit));
    Ok(Report {
        verdict: if steps.is_empty() { Verdict::Skipped } else { Verdict::of(exit_code) },
        exit_code,
        origin: ReportOrigin::Local,
        tool: tool.join().unwrap_or_else(|_| host::tool(None)).map_err(RunError::Executable)?,
        policy,
        host: host::describe(job.runner),
        ci: job.ci,
        started_at,
        ended_at: Timestamp::now(),
        steps,
        request_sha256,
    })
}

/// The digest of what is asked for: the report's `request_sha256`.
#[must_use]
pub fn request_sha256(steps: &[Step], policy: Option<&Policy>) -> String {
    request::digest(steps, policy)
}

/// The report of a run that was cancelled and did not end in time: whether a step's code had been started is not known.
///
/// # Errors
/// If the executable cannot be read.
pub fn given_up(
    steps: &[Step],
    signal: CancelSignal,
    policy: PolicyRecord,
    ci: Option<Ci>,
    runner: Option<String>,
) -> Result<Report, RunError> {
    let report = without_result(steps, policy, ci, runner, |report| {
        record::cancel(report, signal);
        report.dispatched = Dispatched::Unknown;
        report.notices.push("the run was given up before its boundaries had ended".to_owned());
    })?;
    Ok(Report { verdict: Verdict::Cancelled, ..report })
}

/// The report of a run that somebody else was asked for and of which there is no result; `tell` says why of each step.
///
/// # Errors
/// If the executable cannot be read.
pub fn without_result(
    steps: &[Step],
    policy: PolicyRecord,
    ci: Option<Ci>,
    runner: Option<String>,
    tell: impl Fn(&mut StepReport),
) -> Result<Report, RunError> {
    let now = Timestamp::now();
    let request_sha256 = request::digest(steps, None);
    let steps: Vec<StepReport> = steps
        .iter()
        .map(|step| {
            let mut report = record::blank(step);
            tell(&mut report);
            report
        })
        .collect();
    let exit_code = Exit::of_many(steps.iter().map(|s| s.exit));
    Ok(Report {
        verdict: Verdict::of(exit_code),
        exit_code,
        origin: ReportOrigin::Local,
        tool: host::tool(None).map_err(RunError::Executable)?,
        policy,
        host: host::describe(runner),
        ci,
        started_at: now,
        ended_at: now,
        request_sha256,
        steps,
    })
}

/// Where runs keep their private directories. Root's is where nobody else could have put something; a plain user's is
/// checked when it is entered, and so is that of a root that isn't one out here (a user namespace, a read-only system).
/// On a disk, since artifacts are unpacked there.
#[must_use]
pub fn state_dir(env: &Env) -> PathBuf {
    let uid = rustix::process::geteuid();
    let writable = |path: &str| rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok();
    // Under the service's unit nothing of the system can be written but this one directory.
    if uid.is_root() && (writable("/var/lib/plimsoll") || writable("/var/lib")) {
        PathBuf::from("/var/lib/plimsoll/runs")
    } else {
        env.temp_dir().join(format!("plimsoll-{}", uid.as_raw()))
    }
}

/// What the policy did, for the report.
#[must_use]
pub fn policy_record(policy: &Result<Policy, PolicyRefusal>) -> PolicyRecord {
    PolicyRecord {
        sha256: policy.as_ref().ok().and_then(Policy::sha256).map(|digest| digest.to_string()),
        effect: policy.as_ref().map_or("refused", |policy| policy.effect().name()).to_owned(),
    }
}

/// The step under the policy, or its report if the policy refuses it.
fn police(policy: &Result<Policy, PolicyRefusal>, step: &Step) -> Result<Step, Box<StepReport>> {
    let refused = |error: &PolicyRefusal| {
        let mut report = record::blank(step);
        let help = error.help().unwrap_or_default();
        refuse(&mut report, Exit::Refused, refusal("policy", error.reason(), crate::text::chain(error), &help));
        Box::new(report)
    };
    match policy {
        Ok(policy) => policy.apply(step).map_err(|error| refused(&error)),
        Err(error) => Err(refused(error)),
    }
}

/// Runs the steps, `jobs` at a time; their reports come back in order.
async fn run_all(
    context: &Arc<Context>,
    steps: Vec<Result<Step, Box<StepReport>>>,
    jobs: usize,
    cancel: Cancel,
) -> Vec<StepReport> {
    let slots = Arc::new(Semaphore::new(jobs.max(1)));
    let mut running = JoinSet::new();
    let mut reports: Vec<Option<StepReport>> = Vec::new();
    for (position, step) in steps.into_iter().enumerate() {
        // What the report says if the task itself breaks.
        let mut broken = match &step {
            Ok(step) => record::blank(step),
            Err(report) => (**report).clone(),
        };
        if step.is_ok() {
            let help = "this is a fault of plimsoll";
            refuse(
                &mut broken,
                Exit::Internal,
                refusal("prepare", "internal", "the step's task broke".to_owned(), help),
            );
        }
        reports.push(Some(broken));
        let (context, cancel) = (Arc::clone(context), cancel.clone());
        // Taken here and not in the task, so that steps start in their order.
        let slot = Arc::clone(&slots).acquire_owned().await;
        running.spawn(async move {
            let _slot = slot;
            let report = match step {
                Ok(step) => {
                    let index = u32::try_from(step.index).unwrap_or(u32::MAX);
                    let _ = context.events.send(Event::Started { index, name: step.name.clone() });
                    step::run(&context, &step, cancel).await
                }
                Err(report) => {
                    let _ = context.events.send(Event::Started { index: report.index, name: report.name.clone() });
                    *report
                }
            };
            let _ = context.events.send(Event::Ended { step: Box::new(report.clone()) });
            (position, report)
        });
    }
    while let Some(done) = running.join_next().await {
        match done {
            Ok((position, report)) => reports[position] = Some(report),
            Err(error) => tracing::error!("a step's task broke: {error}"),
        }
    }
    reports.into_iter().flatten().collect()
}

/// Removes what killed runs left below the state directory and outside it.
///
/// # Errors
/// If the state directory belongs to somebody else.
pub fn clean(state: &Path) -> Result<Swept, ScratchError> {
    scratch::sweep(state, |run| {
        let steps = std::fs::read_dir(run).into_iter().flatten().flatten().map(|entry| entry.path());
        let backends = |step: PathBuf| crate::backend::Backend::ALL.map(|backend| step.join(backend.name()));
        let boundaries = steps.flat_map(backends);
        let mut left: Vec<String> = boundaries.flat_map(|boundary| crate::backend::traces::sweep(&boundary)).collect();
        for staging in Staging::recorded(&std::fs::read(run.join(STAGING)).unwrap_or_default()) {
            if let Err(e) = staging.remove() {
                left.push(format!("{}: {e}", staging.path().display()));
            }
        }
        left
    })
}

impl RunError {
    /// What the user can do about it.
    #[must_use]
    pub fn help(&self) -> Option<String> {
        match self {
            Self::Scratch(error) => Some(error.help()),
            Self::Randomness(_) | Self::Record(_) | Self::Executable(_) => None,
        }
    }
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// No private place to work in.
    #[error(transparent)]
    Scratch(#[from] ScratchError),
    /// No randomness.
    #[error("failed to draw a fresh name for the run")]
    Randomness(#[source] std::io::Error),
    /// No record of what this run builds could be made.
    #[error("failed to write down what this run builds")]
    Record(#[source] std::io::Error),
    /// The executable cannot be read.
    #[error("failed to read plimsoll's own executable")]
    Executable(#[source] std::io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::json_v1::ReportV1;
    use crate::spec::{Overrides, Surroundings, load};

    #[test]
    fn a_run_that_was_given_up_claims_nothing_of_its_steps() {
        for (signal, exit) in
            [(CancelSignal::Interrupt, Exit::Interrupted), (CancelSignal::Terminate, Exit::Terminated)]
        {
            let flags = Overrides { run: Some("make".to_owned()), ..Overrides::default() };
            let steps = load(&[], &flags, &Surroundings::default()).unwrap();
            let policy = policy_record(&Ok(Policy::absent()));
            let report = given_up(&steps, signal, policy, None, Some("runner-1".to_owned())).unwrap();
            assert_eq!((report.verdict, report.exit_code), (Verdict::Cancelled, exit));
            assert_eq!(report.host.runner, "runner-1");
            let [step] = report.steps.as_slice() else { panic!("{:?}", report.steps) };
            assert_eq!((step.verdict, step.exit, step.dispatched), (Verdict::Cancelled, exit, Dispatched::Unknown));
            assert!(
                step.tier.is_none() && step.controls.is_empty() && step.result.is_none() && step.outputs.is_empty()
            );
            assert!(step.notices.iter().any(|notice| notice.contains("given up")));
            // It is written like any other.
            let record = serde_json::to_value(ReportV1::from(&report)).unwrap();
            assert_eq!(record["steps"][0]["dispatched"], "unknown");
        }
    }
}
