//! What is published: a report, read from a directory that may be a stranger's, and what is around it.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};

use super::Standing;
use super::proof::{Proof, PublicKey};
use super::standing::{Expected, weigh};
use crate::forge::{Change, Context};
use crate::report::json_v1::{self, ReadError, ReportV1};
use crate::report::write::REPORT_JSON;
use crate::report::{Logs, Report, Verdict, open_beneath, read_back};

/// What is said.
#[derive(Debug, Clone)]
pub enum Said {
    /// Work has begun.
    Pending,
    /// A report.
    Report {
        /// The report.
        report: Box<Report>,
        /// Its logs, for excerpts.
        logs: Logs,
    },
    /// There is no report, and why.
    Missing(String),
}

/// How it is said.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// The commit status's context, in place of `plimsoll / <job> (<matrix values>)`.
    pub status_context: Option<String>,
    /// A status for each step as well.
    pub step_statuses: bool,
}

/// What is published.
#[derive(Debug, Clone)]
pub struct Publication {
    /// What is said.
    pub said: Said,
    /// How far it is to be believed.
    pub standing: Standing,
    /// The job that publishes, and what its event says.
    pub context: Option<Context>,
    /// How it is said.
    pub options: Options,
}

/// Why there is no report in a directory.
#[derive(Debug, thiserror::Error)]
pub enum NoReport {
    /// It can't be read.
    #[error("failed to read {REPORT_JSON} in {}", path.display())]
    Io {
        /// The directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is none.
    #[error("failed to understand {REPORT_JSON} in {}", path.display())]
    Read {
        /// The directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: ReadError,
    },
}

impl Publication {
    /// Of this job's own run.
    #[must_use]
    pub fn own(report: &Report, directory: &Path, context: Option<Context>, options: Options) -> Self {
        let said = Said::Report { report: Box::new(report.clone()), logs: Logs::new(directory) };
        Self { said, standing: Standing::Own, context, options }
    }

    /// That work has begun.
    #[must_use]
    pub fn begun(context: Option<Context>, options: Options) -> Self {
        Self { said: Said::Pending, standing: Standing::Own, context, options }
    }

    /// That a run came to no report.
    #[must_use]
    pub fn missing(why: impl Into<String>, standing: Standing, context: Option<Context>, options: Options) -> Self {
        Self { said: Said::Missing(why.into()), standing, context, options }
    }

    /// Of another job's report. One that can't be read is a statement as well, of which the error is given too.
    #[must_use]
    pub fn of_another_job(
        directory: &Path,
        keys: &[PublicKey],
        expected: &Expected,
        context: Option<Context>,
        options: Options,
    ) -> (Self, Option<NoReport>) {
        match read(directory) {
            Ok(read) => {
                let proof = Proof::of(directory, keys);
                // What was signed, where something was: the file may have been another by now.
                let record = proof.record.as_ref().unwrap_or(&read.record);
                let standing = weigh(record, &proof, expected, context.as_ref());
                let report = Box::new(read_back::model(record));
                (Self { said: Said::Report { report, logs: read.logs }, standing, context, options }, None)
            }
            Err(error) => {
                let why = "the other job left no report that can be read";
                let standing = Standing::Unverified(vec![crate::text::chain(&error)]);
                (Self::missing(why, standing, context, options), Some(error))
            }
        }
    }

    /// The report, if there is one.
    #[must_use]
    pub fn report(&self) -> Option<(&Report, &Logs)> {
        match &self.said {
            Said::Report { report, logs } => Some((report, logs)),
            _ => None,
        }
    }

    /// Whether this job is being cancelled.
    #[must_use]
    pub fn cancelled(&self) -> bool {
        self.standing == Standing::Own && self.report().is_some_and(|(r, _)| r.verdict == Verdict::Cancelled)
    }

    /// What tells this job from others of the change: its name and matrix values, of the job that publishes.
    #[must_use]
    pub fn label(&self) -> String {
        let job = self.context.as_ref().and_then(|c| c.job.as_deref()).unwrap_or("run");
        let values: Vec<&str> = self.context.iter().flat_map(|c| c.matrix.values()).map(String::as_str).collect();
        if values.is_empty() { job.to_owned() } else { format!("{job} ({})", values.join(", ")) }
    }

    /// Link to the run that the report came out of.
    #[must_use]
    pub fn run_url(&self) -> Option<&str> {
        let context = self.context.as_ref()?;
        context.producer.as_ref().and_then(|p| p.url.as_deref()).or(context.run_url.as_deref())
    }

    /// The pull or merge request that it is about, if the event names one that comments belong to.
    #[must_use]
    pub fn request(&self) -> Option<u64> {
        match self.context.as_ref()?.change {
            Change::Request { number, .. } => Some(number),
            Change::None | Change::Queued { .. } => None,
        }
    }

    /// Whether the token of this job is one of a fork's, which can't write.
    #[must_use]
    pub fn from_fork(&self) -> bool {
        let context = self.context.as_ref();
        context.is_some_and(|c| matches!(c.change, Change::Request { fork: true, .. }) && c.producer.is_none())
    }
}

/// A record and the logs that lie beside it.
struct Found {
    record: ReportV1,
    logs: Logs,
}

fn read(directory: &Path) -> Result<Found, NoReport> {
    let io = |source: io::Error| NoReport::Io { path: directory.to_owned(), source };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = openat(CWD, directory, flags, Mode::empty()).map_err(|e| io(e.into()))?;
    let mut bytes = Vec::new();
    let opened = open_beneath(root.as_fd(), REPORT_JSON)
        .and_then(|(file, _)| file.take(json_v1::MAX_BYTES as u64 + 1).read_to_end(&mut bytes));
    opened.map_err(io)?;
    let record = ReportV1::read(&bytes).map_err(|source| NoReport::Read { path: directory.to_owned(), source })?;
    let logs = Logs::beneath(root.as_fd()).map_err(io)?;
    Ok(Found { record, logs })
}
