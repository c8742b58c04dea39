//! Whether a run goes through the service of this machine, and what its report is when nothing came back.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum, ValueHint};

use super::failure::Failure;
use crate::env::{Env, Var};
use crate::exit::Exit;
use crate::gate::Dispatched;
use crate::report::{Ci, PolicyRecord, RefusalRecord, Report, StepReport, Verdict};
use crate::run::{self, RunError};
use crate::service::client::{self, Answer, Unwelcome};
use crate::service::link::Link;
use crate::service::parcel::SendError;
use crate::service::protocol::Declined;
use crate::service::{self};
use crate::spec::Step;

/// Whether to use the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// If there is one that can be trusted
    Auto,
    /// Nothing else will do
    Require,
    /// This user runs the steps
    Never,
}

/// Whether to use the service, and which.
#[derive(Debug, Args)]
#[command(next_help_heading = "Service")]
pub struct ServiceArgs {
    /// Run through this machine's service, whose reports a job can't forge: auto (the default) uses it if it is there
    #[arg(long, value_name = "WHEN")]
    pub service: Option<Mode>,

    /// Where the service listens; it has to be root's, or your own
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub service_socket: Option<PathBuf>,
}

impl ServiceArgs {
    /// Where the service is looked for.
    #[must_use]
    pub fn socket(&self) -> &Path {
        self.service_socket.as_deref().unwrap_or(Path::new(service::SOCKET))
    }

    fn mode(&self, env: &Env) -> Result<Mode, Failure> {
        match (self.service, env.text(Var::Service)) {
            (Some(mode), _) => Ok(mode),
            (None, None) => Ok(Mode::Auto),
            (None, Some(word)) => Mode::from_str(word, false).map_err(|_| {
                let name = Var::Service.name();
                Failure::usage(format!("{name}: `{}` is no way to use the service", crate::spec::place::shown(word)))
                    .with_help(format!("set {name} to auto, require or never"))
            }),
        }
    }
}

/// How a run goes.
#[derive(Debug)]
pub enum Way {
    /// Here.
    Local,
    /// Through a service that said welcome.
    Service(Link),
    /// Not at all: the service is required and can't be had.
    None(RefusalRecord),
}

/// Finds out how a run goes. Warns where a service is there and not used.
///
/// # Errors
/// If the variable says something that it can't.
pub async fn way(args: &ServiceArgs, env: &Env) -> Result<Way, Failure> {
    let mode = args.mode(env)?;
    if mode == Mode::Never {
        return Ok(Way::Local);
    }
    let (why, help) = match reach(args).await {
        Ok(Some(link)) => return Ok(Way::Service(link)),
        Ok(None) if mode == Mode::Auto => return Ok(Way::Local),
        Ok(None) => (
            format!("there is no service at {}", args.socket().display()),
            "have it set up on this machine (`plimsoll setup service`, as root)".to_owned(),
        ),
        Err(faults) => faults,
    };
    if mode == Mode::Auto {
        tracing::warn!("{why}; the run goes on without the service, and its report is this job's own statement");
        return Ok(Way::Local);
    }
    Ok(Way::None(RefusalRecord {
        stage: "service".to_owned(),
        reason: "service-unavailable".to_owned(),
        message: format!("the service is required, and {why}"),
        help: Some(help),
    }))
}

async fn reach(args: &ServiceArgs) -> Result<Option<Link>, (String, String)> {
    let chosen = args.service_socket.is_some();
    let found = client::find(args.socket(), chosen).await.map_err(|error| {
        let help = match error {
            client::Unfit::Untrusted { .. } => {
                "the socket and every directory above it must be root's, and writable by nobody else".to_owned()
            }
            client::Unfit::Silent { .. } => "see `systemctl status plimsoll.socket plimsoll.service`".to_owned(),
        };
        (crate::text::chain(&error), help)
    })?;
    let Some(mut link) = found else { return Ok(None) };
    match client::greet(&mut link).await {
        Ok(()) => Ok(Some(link)),
        Err(Unwelcome::Declined(declined)) => Err((declined.message, declined.help)),
        Err(error @ Unwelcome::Silent(_)) => {
            Err((crate::text::chain(&error), "see `journalctl -u plimsoll.service`".to_owned()))
        }
    }
}

/// Whose run it is, for a report that this side has to write.
#[derive(Debug, Clone)]
pub struct Whose {
    /// The steps.
    pub steps: Vec<Step>,
    /// The CI job.
    pub ci: Option<Ci>,
    /// The machine's name, as CI gives it.
    pub runner: Option<String>,
}

impl Whose {
    fn without_result(self, tell: impl Fn(&mut StepReport)) -> Result<Report, RunError> {
        // The policy is the service's to apply, and is not known here to have been.
        let policy = PolicyRecord { sha256: None, effect: "none".to_owned() };
        run::without_result(&self.steps, policy, self.ci, self.runner, tell)
    }

    /// The report of a run that nothing was asked for.
    ///
    /// # Errors
    /// If the executable cannot be read.
    pub fn refused(self, exit: Exit, refusal: &RefusalRecord) -> Result<Report, RunError> {
        self.without_result(|report| end(report, exit, refusal.clone()))
    }

    /// The report of a run of which no report came: why, and of each step whether its code was started, as far as that
    /// is known. Never a success.
    ///
    /// # Errors
    /// If the executable cannot be read.
    pub fn unanswered(self, answer: &Answer) -> Result<Report, RunError> {
        match answer {
            Answer::Declined(declined) => self.refused(declined_exit(declined), &refusal_of(declined)),
            Answer::Unsent(error) => self.refused(unsent_exit(error), &unsent(error)),
            Answer::Cancelled(signal) => {
                let exit = super::signals::exit(*signal);
                self.without_result(|report| {
                    report.exit = exit;
                    report.verdict = Verdict::of(exit);
                })
            }
            Answer::Lost { why, dispatched } => self.without_result(|report| {
                report.dispatched = dispatched.get(&report.index).copied().unwrap_or(Dispatched::No);
                let refusal = RefusalRecord {
                    stage: "service".to_owned(),
                    reason: "service-lost".to_owned(),
                    message: format!("the service ended without a report: {why}"),
                    help: Some("see `journalctl -u plimsoll.service`, and run again".to_owned()),
                };
                end(report, Exit::Internal, refusal);
            }),
            // There is one.
            Answer::Report(_) => self.without_result(|_| {}),
        }
    }
}

fn end(report: &mut StepReport, exit: Exit, refusal: RefusalRecord) {
    report.exit = exit;
    report.verdict = Verdict::of(exit);
    report.refusal = Some(refusal);
}

/// A service can say why it runs nothing, and not that something passed.
const fn declined_exit(declined: &Declined) -> Exit {
    match declined.exit {
        Exit::Passed => Exit::Internal,
        exit => exit,
    }
}

fn refusal_of(declined: &Declined) -> RefusalRecord {
    RefusalRecord {
        stage: declined.stage.clone(),
        reason: declined.reason.clone(),
        message: declined.message.clone(),
        help: Some(declined.help.clone()).filter(|help| !help.is_empty()),
    }
}

const fn unsent_exit(error: &SendError) -> Exit {
    match error {
        SendError::Missing { exit, .. } => *exit,
        SendError::TooMuch => Exit::Usage,
        SendError::Temporary { .. } => Exit::Internal,
        SendError::Unreadable { .. }
        | SendError::MadeUp { .. }
        | SendError::Kind { .. }
        | SendError::Directory { .. } => Exit::Rejected,
    }
}

fn unsent(error: &SendError) -> RefusalRecord {
    if let SendError::Missing { stage, reason, message, help, .. } = error {
        return RefusalRecord {
            stage: (*stage).to_owned(),
            reason: (*reason).to_owned(),
            message: message.clone(),
            help: Some(help.clone()).filter(|help| !help.is_empty()),
        };
    }
    let (reason, help) = match error {
        SendError::Missing { reason, .. } => (*reason, ""),
        SendError::Unreadable { .. } => ("unreadable", "name a file or directory that this user can read"),
        SendError::MadeUp { .. } => ("made-up", "name a file of the checkout"),
        SendError::Kind { .. } => ("kind", "name a file or a directory"),
        SendError::Directory { .. } => ("unreadable", "leave it out of the directory, or name another one"),
        SendError::Temporary { .. } => ("temporary", "make room there, or set TMPDIR to another directory"),
        SendError::TooMuch => ("too-much", "run fewer steps at once (`--step`, `--shard`)"),
    };
    RefusalRecord {
        stage: "artifact".to_owned(),
        reason: reason.to_owned(),
        message: crate::text::chain(error),
        help: Some(help.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::spec::{Overrides, Surroundings, load};

    fn whose() -> Whose {
        let flags = Overrides { run: Some("make".to_owned()), ..Overrides::default() };
        let mut steps = load(&[], &flags, &Surroundings::default()).unwrap();
        steps.push(steps[0].clone());
        steps[1].index = 2;
        Whose { steps, ci: None, runner: None }
    }

    #[test]
    fn a_service_that_dies_leaves_an_error_and_what_is_known_of_each_step() {
        let dispatched = BTreeMap::from([(1, Dispatched::Unknown)]);
        let report = whose().unanswered(&Answer::Lost { why: "gone".to_owned(), dispatched }).unwrap();
        assert_eq!((report.verdict, report.exit_code), (Verdict::Error, Exit::Internal));
        let seen: Vec<_> = report.steps.iter().map(|step| step.dispatched).collect();
        assert_eq!(seen, [Dispatched::Unknown, Dispatched::No]);
        assert!(report.steps.iter().all(|step| step.verdict == Verdict::Error));
    }

    #[test]
    fn a_refusal_is_never_a_success() {
        let declined = service::server::declined(Exit::Passed, "x", "y", "z", "");
        let report = whose().unanswered(&Answer::Declined(declined)).unwrap();
        assert_eq!((report.verdict, report.exit_code), (Verdict::Error, Exit::Internal));
    }

    #[test]
    fn the_variable_says_one_of_three_words() {
        let args = |service| ServiceArgs { service, service_socket: None };
        let env = |word: &str| Env::from_iter([(Var::Service, word)]);
        assert_eq!(args(None).mode(&Env::default()).unwrap(), Mode::Auto);
        assert_eq!(args(None).mode(&env("require")).unwrap(), Mode::Require);
        assert_eq!(args(Some(Mode::Never)).mode(&env("require")).unwrap(), Mode::Never, "the flag wins");
        assert!(args(None).mode(&env("yes")).is_err());
    }
}
