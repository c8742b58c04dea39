//! The job's summary: a file that the runner names. Needs no token.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::PathBuf;

use crate::env::{Env, Var};
use crate::publish::body::{self, Section};
use crate::publish::{Outcome, Publication, Publisher, Said, Standing};
use crate::report::markdown;

/// Largest summary of a step that GitHub takes: 1 MiB. More is refused whole, so it must not come to that.
const MAX_SUMMARY: usize = 1024 * 1024;

/// Appends to the summary.
#[derive(Debug)]
pub struct Summary<'a> {
    /// Where the file is named.
    pub env: &'a Env,
}

impl Publisher for Summary<'_> {
    async fn publish(&self, what: &Publication) -> Outcome {
        let text = match (&what.said, &what.standing) {
            (Said::Report { report, logs }, Standing::Own) => markdown::render(report, logs, markdown::BUDGET),
            _ => body::compose(&[Section::of(what)], MAX_SUMMARY / 8),
        };
        let Some(path) = self.env.path(Var::GithubStepSummary) else {
            let name = Var::GithubStepSummary.name();
            return Outcome::Skipped(format!("{name} is not set: this is no step of GitHub Actions"));
        };
        match append(&path, &text) {
            Ok(()) => Outcome::Posted { url: None },
            Err(error) => Outcome::Failed(format!("failed to append to {}: {error}", path.display())),
        }
    }
}

fn append(path: &PathBuf, text: &str) -> io::Result<()> {
    if text.len() >= MAX_SUMMARY {
        return Err(io::Error::other("the summary has more than 1 MiB"));
    }
    OpenOptions::new().append(true).create(true).open(path)?.write_all(format!("{}\n", text.trim_end()).as_bytes())
}
