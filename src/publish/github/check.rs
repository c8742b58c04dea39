//! The check run: opt-in, since a check run made with a workflow's own token appears in whatever suite GitHub picks.

use serde_json::{Value, json};

use crate::env::Env;
use crate::forge::Http;
use crate::forge::github::{ApiError, Github};
use crate::publish::body::{Mark, Section};
use crate::publish::status;
use crate::publish::{Outcome, Publication, Publisher, Said, Standing, Target};
use crate::report::{Report, Verdict, words};
use crate::text::Untrusted;

use super::status::StatusPublisher;

/// Annotations of one request, as many as GitHub takes.
const BATCH: usize = 50;
/// Annotations in all.
const MAX_ANNOTATIONS: usize = 500;
/// Characters of a summary or text.
const TEXT: usize = 65_535;
/// The file that annotations stand at.
const STEP_FILE: &str = "plimsoll.yml";
/// Characters of an annotation's title.
const TITLE: usize = 255;

/// Publishes the check run; the commit's status, where the token may not.
#[derive(Debug)]
pub struct CheckPublisher<'a> {
    /// Names the API, the repository and the token.
    pub env: &'a Env,
    /// The client.
    pub http: Http,
}

impl Publisher for CheckPublisher<'_> {
    async fn publish(&self, what: &Publication) -> Outcome {
        let Some(sha) = what.context.as_ref().and_then(|c| c.head_sha.as_deref()) else {
            return Outcome::Skipped("the event names no commit".to_owned());
        };
        match self.check(what, sha).await {
            Ok(url) => Outcome::Posted { url },
            Err(error) => match super::outcome(&error, Target::GithubCheck, what) {
                Outcome::Degraded(why) => {
                    let instead = StatusPublisher { env: self.env, http: self.http.clone() }.publish(what).await;
                    let instead = if instead.is_fine() {
                        "the commit's status is set instead"
                    } else {
                        "the commit's status can't be set either"
                    };
                    Outcome::Degraded(format!("{why}; {instead}"))
                }
                other => other,
            },
        }
    }
}

impl CheckPublisher<'_> {
    async fn check(&self, what: &Publication, sha: &str) -> Result<Option<String>, ApiError> {
        let github = Github::new(self.env, self.http.clone())?;
        let name = status::statuses(what, 140).swap_remove(0).context;
        let all = what.report().map(|(report, _)| annotations(report)).unwrap_or_default();
        let mut batches = all.chunks(BATCH);
        let first = batches.next().unwrap_or_default();
        let conclusion = conclusion(what);
        let mut check = json!({
            "name": name,
            "head_sha": sha,
            "status": "completed",
            "conclusion": conclusion,
            "completed_at": crate::publish::now().to_string(),
            "output": output(what, first),
        });
        if let (Some(url), Some(members)) = (what.run_url(), check.as_object_mut()) {
            members.insert("details_url".to_owned(), url.into());
        }
        let made = github.create_check(&check).await?;
        if let Some(id) = made.id {
            for batch in batches {
                github.update_check(id, &json!({"output": output(what, batch)})).await?;
            }
        }
        Ok(made.html_url)
    }
}

/// Neutral is what nothing vouches for: neither green nor red.
const fn conclusion(what: &Publication) -> &'static str {
    match (&what.said, &what.standing) {
        (Said::Missing(_), _) => "failure",
        (_, Standing::Unverified(_)) | (Said::Pending, _) => "neutral",
        (Said::Report { report, .. }, _) => match report.verdict {
            Verdict::Passed => "success",
            Verdict::Failed | Verdict::Refused | Verdict::Error => "failure",
            Verdict::Cancelled => "cancelled",
            Verdict::Skipped => "skipped",
        },
    }
}

fn output(what: &Publication, annotations: &[Value]) -> Value {
    let section = Section::of(what);
    let title = match what.report() {
        Some((report, _)) if what.standing.is_believed() => words::headline(report),
        _ => format!("Plimsoll: {}", Mark::of(what).word()),
    };
    let whole = |text: &str| text.chars().count() <= TEXT;
    let mut output = json!({"title": cut(&title, TITLE), "summary": section.brief, "annotations": annotations});
    if let (true, Some(members)) = (!section.details.is_empty() && whole(&section.details), output.as_object_mut()) {
        members.insert("text".to_owned(), section.details.into());
    }
    output
}

/// One for each step that did not pass, at the step file's beginning: a report has neither its name nor lines.
fn annotations(report: &Report) -> Vec<Value> {
    let faults = report.steps.iter().filter(|s| !matches!(s.verdict, Verdict::Passed | Verdict::Skipped));
    faults
        .take(MAX_ANNOTATIONS)
        .map(|step| {
            let level = if step.forgiven { "warning" } else { "failure" };
            let why = step.refusal.as_ref().map(|r| Untrusted::new(&r.message).for_terminal(2000));
            let name = Untrusted::new(&step.name).for_terminal(150);
            json!({
                "path": STEP_FILE,
                "start_line": 1,
                "end_line": 1,
                "annotation_level": level,
                "title": cut(&format!("{name}: {}", step.verdict), TITLE),
                "message": why.unwrap_or_else(|| words::ending(step)),
            })
        })
        .collect()
}

fn cut(text: &str, limit: usize) -> String {
    text.chars().take(limit).collect()
}
