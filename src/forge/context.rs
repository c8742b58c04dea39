//! What CI this is, and what it says about the job.
//!
//! [`Context::detect`] reads the environment and, on GitHub, the event's payload. Both were written by the forge's
//! runner, but a job can change them, so all of it is claims. What doesn't have the right form is left out, with a
//! remark; nothing here can fail a run.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use jiff::Timestamp;
use rustix::fs::{Mode, OFlags};
use serde::Deserialize;

use crate::env::{Env, Var};

/// Largest event payload read, bytes. GitHub caps webhook payloads at 25 MB; those of pull requests have tens of KB.
const MAX_EVENT: u64 = 32 * 1024 * 1024;
/// Longest claim kept, bytes.
const MAX_CLAIM: usize = 512;
/// Most matrix values kept.
const MAX_MATRIX: usize = 64;

/// A forge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Provider {
    /// GitHub, GitHub Enterprise, or what runs their workflows.
    Github,
    /// GitLab.
    Gitlab,
}

impl Provider {
    /// The name used in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Provider::Github => "github",
            Provider::Gitlab => "gitlab",
        }
    }
}

/// What kind of change the job looks at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A push, a schedule, a manual run.
    None,
    /// A pull or merge request.
    Request {
        /// Its number.
        number: u64,
        /// It comes from another repository, so the job's token can't write.
        fork: bool,
    },
    /// A merge queue's candidate for a pull request.
    Queued {
        /// The pull request that entered the queue last.
        number: u64,
        /// The branch it is queued for; may hold `/`.
        base: String,
    },
}

/// Another run, as the event names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Producer {
    /// Its number.
    pub run: Option<u64>,
    /// Link to it.
    pub url: Option<String>,
    /// `owner:branch` that it ran on, as the API filters pull requests by it.
    pub head: Option<String>,
    /// When it began.
    pub started: Option<Timestamp>,
}

/// What the environment claims about the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Context {
    /// Which forge.
    pub provider: Provider,
    /// `owner/name` or the project's path.
    pub repository: Option<String>,
    /// The commit that the job runs on, lowercase hex.
    pub sha: Option<String>,
    /// The head commit of the request or of the queue's candidate; else the same as `sha`.
    pub head_sha: Option<String>,
    /// What it looks at.
    pub change: Change,
    /// Job id (GitHub) or name (GitLab).
    pub job: Option<String>,
    /// Attempt number.
    pub attempt: Option<u64>,
    /// The run's number: GitHub's of the workflow run, GitLab's of the pipeline.
    pub run: Option<u64>,
    /// Name of the workflow (GitHub).
    pub workflow: Option<String>,
    /// The run that this one was started by, and whose results it looks at (`workflow_run`).
    pub producer: Option<Producer>,
    /// Matrix values.
    pub matrix: BTreeMap<String, String>,
    /// Link to the run (GitHub) or job (GitLab).
    pub run_url: Option<String>,
    /// The runner's name.
    pub runner: Option<String>,
    /// What was left out, and why.
    pub remarks: Vec<String>,
}

impl Context {
    /// Reads the environment; `None` outside of a known CI.
    #[must_use]
    pub fn detect(env: &Env) -> Option<Self> {
        if env.is_true(Var::GithubActions) {
            Some(Self::github(env))
        } else if env.is_true(Var::GitlabCi) {
            Some(Self::gitlab(env))
        } else {
            None
        }
    }

    /// Number of the pull or merge request, also of one in a merge queue.
    #[must_use]
    pub const fn number(&self) -> Option<u64> {
        match &self.change {
            Change::None => None,
            Change::Request { number, .. } | Change::Queued { number, .. } => Some(*number),
        }
    }

    fn new(provider: Provider, env: &Env) -> Self {
        let mut context = Self {
            provider,
            repository: None,
            sha: None,
            head_sha: None,
            change: Change::None,
            job: None,
            attempt: None,
            run: None,
            workflow: None,
            producer: None,
            matrix: BTreeMap::new(),
            run_url: None,
            runner: None,
            remarks: Vec::new(),
        };
        if let Some(text) = env.text(Var::Matrix) {
            match matrix(text) {
                Ok(values) => context.matrix = values,
                Err(why) => context.remarks.push(format!("{} is left out: {why}", Var::Matrix.name())),
            }
        }
        context
    }

    fn github(env: &Env) -> Self {
        let mut context = Self::new(Provider::Github, env);
        context.repository = claim(env, Var::GithubRepository);
        context.sha = env.text(Var::GithubSha).and_then(sha);
        context.job = claim(env, Var::GithubJob);
        context.attempt = env.number(Var::GithubRunAttempt);
        context.run = env.number(Var::GithubRunId);
        context.workflow = claim(env, Var::GithubWorkflow);
        context.runner = claim(env, Var::RunnerName);
        let server = claim(env, Var::GithubServerUrl).unwrap_or_else(|| "https://github.com".to_owned());
        if let (Some(repository), Some(run)) = (&context.repository, env.number(Var::GithubRunId)) {
            let base = format!("{}/{repository}/actions/runs/{run}", server.trim_end_matches('/'));
            context.run_url = Some(match context.attempt {
                Some(attempt) => format!("{base}/attempts/{attempt}"),
                None => base,
            });
        }

        let event = env
            .path(Var::GithubEventPath)
            .map(|path| read_event(&path).map_err(|e| format!("the event in {} is left out: {e}", path.display())));
        let event = match event {
            Some(Ok(event)) => event,
            Some(Err(why)) => {
                context.remarks.push(why);
                Event::default()
            }
            None => Event::default(),
        };
        context.producer = event.producer(&server);
        let (change, head) = event.change(env.text(Var::GithubEventName).unwrap_or_default(), env.text(Var::GithubRef));
        context.change = change;
        context.head_sha = head.or_else(|| context.sha.clone());
        context
    }

    fn gitlab(env: &Env) -> Self {
        let mut context = Self::new(Provider::Gitlab, env);
        context.repository = claim(env, Var::CiProjectPath);
        context.sha = env.text(Var::CiCommitSha).and_then(sha);
        context.job = claim(env, Var::CiJobName);
        context.run = env.number(Var::CiPipelineId);
        context.runner = claim(env, Var::CiRunnerDescription);
        context.run_url = claim(env, Var::CiJobUrl);
        // Set in merged-results pipelines only, where the job's commit is a merge that nobody wrote.
        context.head_sha = env.text(Var::CiMergeRequestSourceBranchSha).and_then(sha).or_else(|| context.sha.clone());
        if let Some(number) = env.number(Var::CiMergeRequestIid) {
            let (target, source) =
                (env.text(Var::CiMergeRequestProjectPath), env.text(Var::CiMergeRequestSourceProjectPath));
            let fork = matches!((target, source), (Some(target), Some(source)) if target != source);
            context.change = Change::Request { number, fork };
        } else if let Some(open) = env.text(Var::CiOpenMergeRequests) {
            match open_requests(open, context.repository.as_deref()).as_slice() {
                [number] => context.change = Change::Request { number: *number, fork: false },
                [] => {}
                several => context.remarks.push(format!(
                    "the branch has {} open merge requests, so the report names none of them",
                    several.len()
                )),
            }
        }
        context
    }
}

/// A value short enough to carry, without control characters.
fn claim(env: &Env, var: Var) -> Option<String> {
    env.text(var).filter(|v| v.len() <= MAX_CLAIM && !v.contains(char::is_control)).map(str::to_owned)
}

/// `owner/name` as GitHub allows them, so that it can stand in a path.
#[must_use]
pub fn is_repository(text: &str) -> bool {
    let word = |part: &str| {
        let known = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        !part.is_empty() && part.len() <= 100 && part.bytes().all(known) && part.bytes().any(|b| b != b'.')
    };
    matches!(text.split_once('/'), Some((owner, name)) if word(owner) && word(name))
}

/// A commit id, SHA-1 or SHA-256.
fn sha(text: &str) -> Option<String> {
    let hex = text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    ((text.len() == 40 || text.len() == 64) && hex).then(|| text.to_owned())
}

/// `group/project!3,group/project!4`: those of this project. In a fork's branch pipeline they name the parent.
fn open_requests(list: &str, project: Option<&str>) -> Vec<u64> {
    list.split(',')
        .filter_map(|entry| entry.trim().rsplit_once('!'))
        .filter(|(path, _)| project.is_none_or(|project| project == *path))
        .filter_map(|(_, number)| number.parse().ok())
        .collect()
}

/// `refs/heads/gh-readonly-queue/<base>/pr-<number>-<sha>`; the base may hold `/`, even `/pr-1-x`, so the last part counts.
fn queued(reference: &str) -> Option<(String, u64)> {
    let reference = reference.strip_prefix("refs/heads/").unwrap_or(reference);
    let (base, entry) = reference.strip_prefix("gh-readonly-queue/")?.rsplit_once('/')?;
    let (number, commit) = entry.strip_prefix("pr-")?.split_once('-')?;
    sha(commit)?;
    (!base.is_empty() && base.len() <= MAX_CLAIM).then_some((base.to_owned(), number.parse().ok()?))
}

fn matrix(text: &str) -> Result<BTreeMap<String, String>, String> {
    let value: serde_json::Value = serde_json::from_str(text).map_err(|e| format!("it is no JSON ({e})"))?;
    let values = match value {
        serde_json::Value::Null => return Ok(BTreeMap::new()),
        serde_json::Value::Object(values) => values,
        _ => return Err("it is no JSON object".to_owned()),
    };
    if values.len() > MAX_MATRIX {
        return Err(format!("it has more than {MAX_MATRIX} values"));
    }
    values
        .into_iter()
        .map(|(key, value)| {
            let value = match value {
                serde_json::Value::String(text) => text,
                other => other.to_string(),
            };
            if key.len() > MAX_CLAIM || value.len() > MAX_CLAIM {
                return Err(format!("a value is longer than {MAX_CLAIM} bytes"));
            }
            Ok((key, value))
        })
        .collect()
}

fn read_event(path: &Path) -> io::Result<Event> {
    // A pipe that nobody writes to must not hold up the run.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    let mut text = Vec::new();
    file.take(MAX_EVENT + 1).read_to_end(&mut text)?;
    if text.len() as u64 > MAX_EVENT {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("it has more than {MAX_EVENT} bytes")));
    }
    serde_json::from_slice(&text).map_err(io::Error::from)
}

/// The few fields used of GitHub's event payloads
/// (<https://docs.github.com/en/webhooks/webhook-events-and-payloads>). Other fields are many, and none of our business.
#[derive(Debug, Default, Deserialize)]
struct Event {
    repository: Option<Repository>,
    pull_request: Option<PullRequest>,
    merge_group: Option<MergeGroup>,
    workflow_run: Option<WorkflowRun>,
    issue: Option<Issue>,
}

#[derive(Debug, Deserialize)]
struct PullRequest {
    number: u64,
    head: Option<Side>,
    base: Option<Side>,
}

#[derive(Debug, Deserialize)]
struct Side {
    sha: Option<String>,
    /// Null when the fork was deleted.
    repo: Option<Repository>,
}

#[derive(Debug, PartialEq, Deserialize)]
struct Repository {
    /// In `workflow_run` payloads the repositories of a pull request have no full name.
    id: Option<u64>,
    full_name: Option<String>,
}

#[derive(Debug, Deserialize)]
struct MergeGroup {
    head_sha: Option<String>,
    head_ref: Option<String>,
}

#[derive(Debug, Deserialize)]
struct WorkflowRun {
    id: Option<u64>,
    head_sha: Option<String>,
    head_branch: Option<String>,
    /// Of the attempt, not of the run's first.
    run_started_at: Option<String>,
    /// Null when the fork was deleted.
    head_repository: Option<Repository>,
    #[serde(default)]
    pull_requests: Vec<PullRequest>,
}

#[derive(Debug, Deserialize)]
struct Issue {
    number: u64,
    pull_request: Option<serde::de::IgnoredAny>,
}

impl PullRequest {
    fn fork(&self) -> bool {
        let repo = |side: &Option<Side>| side.as_ref().and_then(|s| s.repo.as_ref()).and_then(|r| r.id);
        match (repo(&self.head), repo(&self.base)) {
            (Some(head), Some(base)) => head != base,
            // A deleted fork is a fork; and what can't be told is treated as one.
            _ => true,
        }
    }

    fn head_sha(&self) -> Option<String> {
        self.head.as_ref()?.sha.as_deref().and_then(sha)
    }
}

impl Event {
    /// The run that this one was started by. Its link is made here: that of the payload is whatever was written there.
    fn producer(&self, server: &str) -> Option<Producer> {
        let run = self.workflow_run.as_ref()?;
        let name = |of: &Option<Repository>| of.as_ref().and_then(|r| r.full_name.clone()).filter(|n| is_repository(n));
        let url = name(&self.repository)
            .zip(run.id)
            .map(|(name, id)| format!("{}/{name}/actions/runs/{id}", server.trim_end_matches('/')));
        let branch = run.head_branch.as_deref().filter(|b| b.len() <= MAX_CLAIM && !b.contains(char::is_control));
        let owner = name(&run.head_repository).and_then(|n| Some(n.split_once('/')?.0.to_owned()));
        let started = run.run_started_at.as_deref().and_then(|text| text.parse().ok());
        Some(Producer {
            run: run.id,
            url,
            started,
            head: owner.zip(branch).map(|(owner, branch)| format!("{owner}:{branch}")),
        })
    }

    /// What the job looks at, and the head commit if the event names one.
    fn change(&self, name: &str, reference: Option<&str>) -> (Change, Option<String>) {
        if let Some(request) = &self.pull_request {
            return (Change::Request { number: request.number, fork: request.fork() }, request.head_sha());
        }
        if let Some(group) = &self.merge_group {
            let head = group.head_sha.as_deref().and_then(sha);
            let queued = group.head_ref.as_deref().or(reference).and_then(queued);
            return (queued.map_or(Change::None, |(base, number)| Change::Queued { number, base }), head);
        }
        if let Some(run) = &self.workflow_run {
            let head = run.head_sha.as_deref().and_then(sha);
            // Empty for forks. One whose head has moved on since is not what was tested.
            let change = match run.pull_requests.as_slice() {
                [one] if one.head_sha() == head => Change::Request { number: one.number, fork: one.fork() },
                _ => Change::None,
            };
            return (change, head);
        }
        if let Some(Issue { number, pull_request: Some(_) }) = self.issue {
            // The payload doesn't say where it comes from.
            return (Change::Request { number, fork: true }, None);
        }
        // Without its payload, a merge queue's ref still tells.
        match reference.filter(|_| name == "merge_group").and_then(queued) {
            Some((base, number)) => (Change::Queued { number, base }, None),
            None => (Change::None, None),
        }
    }
}

#[cfg(test)]
mod tests;
