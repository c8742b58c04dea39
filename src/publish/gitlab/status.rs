//! The status of the pipeline's commit.

use serde_json::{Value, json};

use crate::env::{Env, Var};
use crate::forge::Http;
use crate::forge::gitlab::{ApiError, Gitlab};
use crate::publish::status::{State, Status, statuses};
use crate::publish::{Outcome, Publication, Publisher, Target};

/// Characters of a description.
const DESCRIPTION: usize = 255;
/// Characters of a link; a longer one is refused, so it is left out.
const TARGET_URL: usize = 255;

/// Publishes the status.
#[derive(Debug)]
pub struct StatusPublisher<'a> {
    /// Names the API, the project and the token.
    pub env: &'a Env,
    /// The client.
    pub http: Http,
}

impl Publisher for StatusPublisher<'_> {
    async fn publish(&self, what: &Publication) -> Outcome {
        // With the pipeline's number goes the pipeline's commit: in a merged-results pipeline that is the merge, and GitLab
        // finds no pipeline of that number for the head.
        let pipeline = self.env.number(Var::CiPipelineId);
        let context = what.context.as_ref();
        let sha = context.and_then(|c| if pipeline.is_some() { c.sha.as_deref() } else { c.head_sha.as_deref() });
        let (Some(sha), Some(project)) = (sha, self.env.number(Var::CiProjectId)) else {
            return Outcome::Skipped("CI_COMMIT_SHA or CI_PROJECT_ID is not set".to_owned());
        };
        if let Some(skipped) = super::without_token(self.env) {
            return skipped;
        }
        let set = async {
            let gitlab = Gitlab::new(self.env, self.http.clone())?;
            let mut unchanged = true;
            for status in statuses(what, DESCRIPTION).iter().rev() {
                match gitlab.set_status(project, sha, body(status, what.run_url(), pipeline)).await {
                    Ok(_) => unchanged = false,
                    // A status does not go from a state to itself.
                    Err(error) if is_there_already(&error, status.state) => {}
                    Err(error) => return Err(error),
                }
            }
            Ok::<bool, ApiError>(unchanged)
        };
        let url = what.run_url().map(str::to_owned);
        match set.await {
            Ok(true) => Outcome::Unchanged { url },
            Ok(false) => Outcome::Posted { url },
            Err(error) => super::outcome(&error, Target::GitlabStatus),
        }
    }
}

const fn word(state: State) -> &'static str {
    match state {
        // That is what GitLab calls a job that works.
        State::Pending => "running",
        State::Success => "success",
        State::Failure | State::Error => "failed",
    }
}

fn is_there_already(error: &ApiError, state: State) -> bool {
    matches!(error, ApiError::Refused { status, message, .. }
        if status.as_u16() == 400 && message.contains("Cannot transition status") && message.contains(&format!("from :{}", word(state))))
}

fn body(status: &Status, url: Option<&str>, pipeline: Option<u64>) -> Value {
    let mut body = json!({"state": word(status.state), "name": status.context, "description": status.description});
    if let Some(members) = body.as_object_mut() {
        if let Some(url) = url.filter(|url| url.chars().count() <= TARGET_URL) {
            members.insert("target_url".to_owned(), url.into());
        }
        if let Some(pipeline) = pipeline {
            members.insert("pipeline_id".to_owned(), pipeline.into());
        }
    }
    body
}
