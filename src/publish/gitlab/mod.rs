//! GitLab: the note on the merge request, and the commit's status.

pub mod note;
pub mod status;

use crate::env::{Env, Var};
use crate::forge::gitlab::ApiError;
use crate::publish::{Outcome, Target};
use crate::text::chain;

/// What to do where there is no token. Protected variables are absent in pipelines of merge requests and of branches that
/// are not protected.
const TOKEN: &str = "set GITLAB_TOKEN to a project access token with the scope `api` (a masked variable; a protected one \
    is missing here); the job's own CI_JOB_TOKEN can't write";

/// Nothing is tried without a token: that is common in forks and unprotected branches, and no fault.
fn without_token(env: &Env) -> Option<Outcome> {
    env.text(Var::GitlabToken).is_none().then(|| Outcome::Degraded(format!("there is no token: {TOKEN}")))
}

fn outcome(error: &ApiError, target: Target) -> Outcome {
    match error {
        ApiError::Refused { status, .. } => match status.as_u16() {
            401 => Outcome::Degraded(format!("{error}: the token is not accepted; {TOKEN}")),
            403 | 404 => {
                let role = match target {
                    Target::GitlabNote => "Reporter",
                    _ => "Developer",
                };
                Outcome::Degraded(format!("{error}: the token needs the role {role} and the scope `api`; {TOKEN}"))
            }
            _ => Outcome::Failed(chain(error)),
        },
        ApiError::Unknown(why) => Outcome::Degraded(why.clone()),
        ApiError::Http(_) => Outcome::Failed(chain(error)),
    }
}
