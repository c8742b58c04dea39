//! Publishing, against forges that are played on this machine: GitHub with memory and faults, GitHub as its own OpenAPI
//! description has it (by Prism), GitLab as its documentation has it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;
#[path = "../report/samples.rs"]
#[allow(dead_code, reason = "shared with the tests of reports")]
mod samples;

#[path = "../forge/project.rs"]
#[allow(dead_code, reason = "shared with the tests of forges")]
mod project;

#[path = "../service/support.rs"]
#[allow(dead_code, reason = "shared with the tests of the service")]
mod support;

mod another_job;
mod binary;
mod fake;
mod github;
mod gitlab;
mod hostile;
mod jobs;
mod prism;
mod service;
mod tls;

use plimsoll::env::{Env, Var};
use plimsoll::forge::Context;
use plimsoll::publish::{self, Options, Publication, Record, Target};
use samples::Sample;

const HEAD: &str = "3b18e512dba79e4c8300dd08aeb37f8e728b8dad";
const TOKEN: &str = "ghs_hushHushHUSH0123456789";

/// A job of GitHub's, with an event of `tests/forge/events`.
fn github_env(event: &str, api: &str) -> Vec<(Var, String)> {
    let path = common::fixture(&format!("forge/events/{event}.json"));
    let name = match event {
        "pull_request_fork" | "pull_request_deleted_fork" => "pull_request",
        "workflow_run_fork" => "workflow_run",
        other => other,
    };
    [
        (Var::GithubActions, "true"),
        (Var::GithubRepository, "octo/widgets"),
        (Var::GithubSha, "0a1b2c3d4e5f60718293a4b5c6d7e8f901234567"),
        (Var::GithubJob, "unit"),
        (Var::GithubWorkflow, "ci"),
        (Var::GithubRunId, "30433642"),
        (Var::GithubRunAttempt, "1"),
        (Var::GithubEventName, name),
        (Var::GithubEventPath, path.to_str().unwrap()),
        (Var::GithubToken, TOKEN),
        (Var::GithubApiUrl, api),
    ]
    .map(|(var, value)| (var, value.to_owned()))
    .to_vec()
}

/// What a published report comes to.
struct Case {
    env: Vec<(Var, String)>,
    options: Options,
    _directory: tempfile::TempDir,
    what: Publication,
}

impl Case {
    /// A sample as this job's own report.
    fn own(mut sample: Sample, env: Vec<(Var, String)>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        sample.commit(directory.path());
        let context = Context::detect(&snapshot(&env));
        let what = Publication::own(&sample.report, &directory.path().join("report"), context, Options::default());
        Self { env, options: Options::default(), _directory: directory, what }
    }

    fn set(mut self, var: Var, value: &str) -> Self {
        self.env.retain(|(v, _)| *v != var);
        self.env.push((var, value.to_owned()));
        self.what.context = Context::detect(&snapshot(&self.env));
        self
    }

    async fn publish(&self, targets: &[Target]) -> Record {
        publish::publish(&self.what, targets, &snapshot(&self.env)).await
    }
}

fn snapshot(env: &[(Var, String)]) -> Env {
    env.iter().map(|(var, value)| (*var, value)).collect()
}

/// Outcome and reason of the only target.
fn only(record: &Record) -> (&'static str, String) {
    assert_eq!(record.targets.len(), 1, "{record:?}");
    let entry = &record.targets[0];
    (entry.outcome, entry.reason.clone().unwrap_or_default())
}
