//! Publishing: what a report says, told where people decide.
//!
//! A [`Publication`] is what is said: a report or why there is none, how far it is to be believed ([`Standing`]), and the job's
//! surroundings ([`Context`](crate::forge::Context)). [`publish`] tells it to every [`Target`] asked for, each for itself: none
//! hides another's failure, and none changes a verdict. What came of it is a [`Record`], written as `publish.json`.
//!
//! Only `report.json`, its signature and excerpts of its logs are read of a report ([`statement`]), and everything is rendered
//! again. Where something is published (repository, commit, pull request) comes from the event or the forge, never from
//! the report; text in it is hostile.

use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;

use crate::env::Env;
use crate::forge::http::Patience;
use crate::forge::{Http, HttpError, Provider};

pub mod body;
pub mod github;
pub mod gitlab;
pub mod proof;
mod record;
pub mod standing;
pub mod statement;
pub mod status;
mod sticky;

pub use record::{Record, SCHEMA, WriteError};
pub use standing::Standing;
pub use statement::{Options, Publication, Said};

/// No target may take longer than this, waits and tries included.
const WHOLE: Duration = Duration::from_secs(240);
/// The same in a job that is being cancelled: it is killed some 7 seconds after the signal.
const WHOLE_CANCELLED: Duration = Duration::from_secs(2);
/// The same for a status that says that work has begun, which the work waits for.
const WHOLE_PENDING: Duration = Duration::from_secs(15);

/// Where a result can be published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// The summary of a job on GitHub; needs no token.
    GithubSummary,
    /// The comment on a pull request.
    GithubComment,
    /// The status of a commit on GitHub.
    GithubStatus,
    /// A check run on GitHub, with annotations.
    GithubCheck,
    /// The note on a merge request.
    GitlabNote,
    /// The status of a commit on GitLab.
    GitlabStatus,
}

impl Target {
    /// All of them.
    pub const ALL: [Target; 6] = [
        Target::GithubSummary,
        Target::GithubComment,
        Target::GithubStatus,
        Target::GithubCheck,
        Target::GitlabNote,
        Target::GitlabStatus,
    ];

    /// The word used in flags and files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Target::GithubSummary => "github-summary",
            Target::GithubComment => "github-comment",
            Target::GithubStatus => "github-status",
            Target::GithubCheck => "github-check",
            Target::GitlabNote => "gitlab-note",
            Target::GitlabStatus => "gitlab-status",
        }
    }

    /// What it is, for `--help` and the documentation.
    #[must_use]
    pub const fn describe(self) -> &'static str {
        match self {
            Target::GithubSummary => "the job's summary",
            Target::GithubComment => "one comment on the pull request, kept up to date",
            Target::GithubStatus => "a status of the head commit",
            Target::GithubCheck => "a check run with annotations",
            Target::GitlabNote => "one note on the merge request, kept up to date",
            Target::GitlabStatus => "a status of the commit, in this pipeline",
        }
    }

    /// What the token has to be allowed.
    #[must_use]
    pub const fn permission(self) -> &'static str {
        match self {
            Target::GithubSummary => "none",
            Target::GithubComment => "pull-requests: write",
            Target::GithubStatus => "statuses: write",
            Target::GithubCheck => "checks: write",
            Target::GitlabNote | Target::GitlabStatus => "api",
        }
    }

    /// The forge that it is on.
    #[must_use]
    pub const fn provider(self) -> Provider {
        match self {
            Target::GithubSummary | Target::GithubComment | Target::GithubStatus | Target::GithubCheck => {
                Provider::Github
            }
            Target::GitlabNote | Target::GitlabStatus => Provider::Gitlab,
        }
    }

    /// What `auto` stands for: everything that is not opt-in.
    #[must_use]
    pub fn auto(provider: Option<Provider>) -> Vec<Target> {
        let all = Target::ALL.into_iter().filter(|&t| t != Target::GithubCheck);
        all.filter(|t| Some(t.provider()) == provider).collect()
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// What came of publishing to one target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It is there, new.
    Posted {
        /// Link to it.
        url: Option<String>,
    },
    /// What was there says it now.
    Updated {
        /// Link to it.
        url: Option<String>,
    },
    /// What was there says it already.
    Unchanged {
        /// Link to it.
        url: Option<String>,
    },
    /// There is nothing that it could be published to, and that is as it should be.
    Skipped(String),
    /// It may not be published there, or not as it should.
    Degraded(String),
    /// It could not be published.
    Failed(String),
}

impl Outcome {
    /// The word used in `publish.json`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Outcome::Posted { .. } => "posted",
            Outcome::Updated { .. } => "updated",
            Outcome::Unchanged { .. } => "unchanged",
            Outcome::Skipped(_) => "skipped",
            Outcome::Degraded(_) => "degraded",
            Outcome::Failed(_) => "failed",
        }
    }

    /// Link to what is there.
    #[must_use]
    pub fn url(&self) -> Option<&str> {
        match self {
            Outcome::Posted { url } | Outcome::Updated { url } | Outcome::Unchanged { url } => url.as_deref(),
            _ => None,
        }
    }

    /// Why not.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        match self {
            Outcome::Skipped(why) | Outcome::Degraded(why) | Outcome::Failed(why) => Some(why),
            _ => None,
        }
    }

    /// Whether `--publish-required` is content with it.
    #[must_use]
    pub const fn is_fine(&self) -> bool {
        !matches!(self, Outcome::Degraded(_) | Outcome::Failed(_))
    }
}

/// One place to publish to. Whatever goes wrong is an [`Outcome`].
pub trait Publisher {
    /// Publishes.
    fn publish(&self, what: &Publication) -> impl Future<Output = Outcome>;
}

/// Publishes to every target, one after the other, in the order given.
pub async fn publish(what: &Publication, targets: &[Target], env: &Env) -> Record {
    let whole = if what.cancelled() { WHOLE_CANCELLED } else { WHOLE };
    let patience = if what.cancelled() { Patience::short() } else { Patience::default() };
    let http = Http::new(env).map(|http| http.with_patience(patience));
    let mut record = Record::new(what);
    for &target in targets {
        let done = tokio::time::timeout(whole, one(what, target, env, &http)).await;
        let outcome = done.unwrap_or_else(|_| Outcome::Failed(format!("given up after {} seconds", whole.as_secs())));
        record.add(target, outcome);
    }
    record
}

/// Says that work has begun, to those targets that can say so, before anything is prepared.
pub async fn pending(what: &Publication, targets: &[Target], env: &Env) -> Vec<(Target, Outcome)> {
    let patience = Patience { tries: 2, whole: Duration::from_secs(5), ..Patience::default() };
    let http = Http::new(env).map(|http| http.with_patience(patience));
    let mut all = Vec::new();
    for &target in targets.iter().filter(|t| matches!(t, Target::GithubStatus | Target::GitlabStatus)) {
        let done = tokio::time::timeout(WHOLE_PENDING, one(what, target, env, &http)).await;
        all.push((target, done.unwrap_or_else(|_| Outcome::Failed("given up".to_owned()))));
    }
    all
}

async fn one(what: &Publication, target: Target, env: &Env, http: &Result<Http, HttpError>) -> Outcome {
    if target == Target::GithubSummary {
        return github::summary::Summary { env }.publish(what).await;
    }
    if what.context.as_ref().map(|c| c.provider) != Some(target.provider()) {
        return Outcome::Skipped(format!("this is no job of {}", forge(target.provider())));
    }
    let http = match http {
        Ok(http) => http.clone(),
        Err(error) => return Outcome::Failed(crate::text::chain(error)),
    };
    match target {
        Target::GithubSummary => github::summary::Summary { env }.publish(what).await,
        Target::GithubComment => github::comment::CommentPublisher { env, http }.publish(what).await,
        Target::GithubStatus => github::status::StatusPublisher { env, http }.publish(what).await,
        Target::GithubCheck => github::check::CheckPublisher { env, http }.publish(what).await,
        Target::GitlabNote => gitlab::note::NotePublisher { env, http }.publish(what).await,
        Target::GitlabStatus => gitlab::status::StatusPublisher { env, http }.publish(what).await,
    }
}

const fn forge(provider: Provider) -> &'static str {
    match provider {
        Provider::Github => "GitHub's",
        Provider::Gitlab => "GitLab's",
    }
}

/// Now, for records.
fn now() -> Timestamp {
    Timestamp::now()
}
