//! GitHub: the job's summary, the comment, the commit's status, the check run.

pub mod check;
pub mod comment;
pub mod status;
pub mod summary;

use crate::forge::github::{ApiError, Github, Pull};
use crate::publish::{Outcome, Publication, Target};
use crate::text::chain;

/// What a refusal means to whoever reads the job's log.
fn outcome(error: &ApiError, target: Target, what: &Publication) -> Outcome {
    let ApiError::Refused { status, message, limited, .. } = error else {
        return match error {
            ApiError::Unknown(why) if why.contains("token") => Outcome::Degraded(format!("{why}; {}", grant(target))),
            ApiError::Unknown(why) => Outcome::Degraded(why.clone()),
            _ => Outcome::Failed(chain(error)),
        };
    };
    let lower = message.to_ascii_lowercase();
    match status.as_u16() {
        _ if *limited => {
            Outcome::Failed(format!("{error}; GitHub limits how often it is asked, and the wait is too long"))
        }
        401 => Outcome::Degraded(format!("the token is not accepted ({message}); {}", grant(target))),
        403 if lower.contains("locked") => {
            Outcome::Degraded("the pull request is locked, and this token may not comment on it".to_owned())
        }
        403 if what.from_fork() => Outcome::Degraded(format!(
            "the token of a fork's pull request can't write ({message}): publish from a workflow_run workflow, as \
             docs/publishing.md shows"
        )),
        // What a token may not see is not found.
        403 | 404 => Outcome::Degraded(format!("{error}: the token may not do that; {}", grant(target))),
        410 => Outcome::Degraded(format!("{error}: comments are switched off")),
        422 if lower.contains("maximum number of statuses") => Outcome::Degraded(
            "the commit has 1,000 statuses of this context already, as many as GitHub takes".to_owned(),
        ),
        _ => Outcome::Failed(chain(error)),
    }
}

/// The line that gives the missing permission.
fn grant(target: Target) -> String {
    let permission = target.permission();
    format!("it needs `{permission}`: give the job `permissions: {{{permission}}}`, and the action its `token`")
}

/// The pull request that a commit is proposed in: of the event, else looked for by the commit, as the event has none for
/// forks. What a report says is not asked.
async fn pull_request(github: &Github, what: &Publication) -> Result<Option<u64>, ApiError> {
    if let Some(number) = what.request() {
        return Ok(Some(number));
    }
    let Some(context) = &what.context else { return Ok(None) };
    let (Some(producer), Some(sha)) = (&context.producer, &context.head_sha) else { return Ok(None) };
    let one = |pulls: Vec<Pull>| {
        let open = |p: &&Pull| p.head.sha == *sha && p.state.as_deref() != Some("closed");
        let found: Vec<u64> = pulls.iter().filter(open).map(|p| p.number).collect();
        // A commit that several pull requests propose is each one's head; none is more its own than another.
        found.iter().copied().min()
    };
    if let Some(head) = &producer.head
        && let Some(number) = one(github.pulls_from(head).await?)
    {
        return Ok(Some(number));
    }
    match github.pulls_of_commit(sha).await {
        Ok(pulls) => Ok(one(pulls)),
        // A fork's commit may be unknown to the repository.
        Err(ApiError::Refused { status, limited: false, .. }) if matches!(status.as_u16(), 404 | 422) => Ok(None),
        Err(error) => Err(error),
    }
}
