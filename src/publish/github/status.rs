//! The status of the head commit.

use serde_json::{Value, json};

use crate::env::Env;
use crate::forge::Http;
use crate::forge::github::{ApiError, Github};
use crate::publish::status::{State, Status, statuses};
use crate::publish::{Outcome, Publication, Publisher, Target};

/// Characters of a description.
const DESCRIPTION: usize = 140;

/// Publishes the status.
#[derive(Debug)]
pub struct StatusPublisher<'a> {
    /// Names the API, the repository and the token.
    pub env: &'a Env,
    /// The client.
    pub http: Http,
}

impl Publisher for StatusPublisher<'_> {
    async fn publish(&self, what: &Publication) -> Outcome {
        let Some(sha) = what.context.as_ref().and_then(|c| c.head_sha.as_deref()) else {
            return Outcome::Skipped("the event names no commit".to_owned());
        };
        let set = async {
            let github = Github::new(self.env, self.http.clone())?;
            // The run's own is last: what is required is not there before the others are.
            for status in statuses(what, DESCRIPTION).iter().rev() {
                github.create_status(sha, &body(status, what.run_url())).await?;
            }
            Ok::<(), ApiError>(())
        };
        match set.await {
            Ok(()) => Outcome::Posted { url: what.run_url().map(str::to_owned) },
            Err(error) => super::outcome(&error, Target::GithubStatus, what),
        }
    }
}

fn body(status: &Status, url: Option<&str>) -> Value {
    let state = match status.state {
        State::Pending => "pending",
        State::Success => "success",
        State::Failure => "failure",
        State::Error => "error",
    };
    let mut body = json!({"state": state, "context": status.context, "description": status.description});
    if let (Some(url), Some(members)) = (url, body.as_object_mut()) {
        members.insert("target_url".to_owned(), url.into());
    }
    body
}
