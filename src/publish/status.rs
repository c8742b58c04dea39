//! What a commit's status says, on either forge.

use sha2::{Digest, Sha256};

use super::body::UNVERIFIED;
use super::{Publication, Said, Standing};
use crate::report::{Report, StepReport, Verdict, words};
use crate::text::Untrusted;

/// What a status comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Work has begun.
    Pending,
    /// Good.
    Success,
    /// The code failed, or was refused.
    Failure,
    /// Nothing is known about the code.
    Error,
}

/// A status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// What it comes to.
    pub state: State,
    /// What tells it from others of the commit.
    pub context: String,
    /// One line.
    pub description: String,
}

/// Characters of a context that both forges take (255), with room for what is appended.
const CONTEXT: usize = 230;
/// Steps that get a status of their own.
const MAX_STEPS: usize = 50;

/// The status of the run, and those of its steps where they are asked for. Descriptions have at most `limit` characters.
#[must_use]
pub fn statuses(what: &Publication, limit: usize) -> Vec<Status> {
    let context = cut_context(&match &what.options.status_context {
        Some(context) => context.clone(),
        None => format!("plimsoll / {}", what.label()),
    });
    let (state, description) = run(what);
    let status = |state, context, text: &str| Status { state, context, description: plain(text, limit) };
    let mut all = vec![status(state, context.clone(), &description)];
    if let (Some((report, _)), true) = (what.report(), what.options.step_statuses) {
        for step in report.steps.iter().take(MAX_STEPS) {
            let name = cut_context(&format!("{context} / {} {}", step.index, one_line(&step.name)));
            let (state, text) = match &what.standing {
                Standing::Unverified(_) => (State::Error, format!("{UNVERIFIED}: {}", step.verdict)),
                _ => of_step(step),
            };
            all.push(status(state, name, &text));
        }
    }
    all
}

fn run(what: &Publication) -> (State, String) {
    match (&what.said, &what.standing) {
        (Said::Pending, _) => (State::Pending, "Running".to_owned()),
        (Said::Missing(why), _) => (State::Error, format!("No report: {why}")),
        (Said::Report { report, .. }, Standing::Unverified(_)) => {
            (State::Error, format!("{UNVERIFIED}: {}", report.verdict))
        }
        (Said::Report { report, .. }, _) => (state(report), words::headline(report)),
    }
}

const fn state(report: &Report) -> State {
    of_verdict(report.verdict)
}

const fn of_verdict(verdict: Verdict) -> State {
    match verdict {
        Verdict::Passed | Verdict::Skipped => State::Success,
        Verdict::Failed | Verdict::Refused => State::Failure,
        Verdict::Error | Verdict::Cancelled => State::Error,
    }
}

fn of_step(step: &StepReport) -> (State, String) {
    let tier = step.tier.filter(|_| step.proven()).map_or(String::new(), |tier| format!(" behind a {tier} boundary"));
    let forgiven = if step.forgiven { ", forgiven" } else { "" };
    let state = if step.forgiven { State::Success } else { of_verdict(step.verdict) };
    (state, format!("{}{tier}: {}{forgiven}", step.verdict, words::ending(step)))
}

/// A context of allowed length; of two that are cut, each keeps what tells it from the other.
fn cut_context(context: &str) -> String {
    let context = one_line(context);
    if context.chars().count() <= CONTEXT {
        return context;
    }
    let digest = hex::encode(Sha256::digest(&context));
    let head: String = context.chars().take(CONTEXT - 10).collect();
    format!("{head}… {}", &digest[..8])
}

fn one_line(text: &str) -> String {
    Untrusted::new(text).for_terminal(4096)
}

/// One line of at most `limit` characters, cut at the end. Plain text on both forges: nothing in it is live.
fn plain(text: &str, limit: usize) -> String {
    let text = one_line(text);
    if text.chars().count() <= limit {
        return text;
    }
    text.chars().take(limit - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_long_is_cut_in_characters_and_stays_distinct() {
        assert_eq!(plain(&"ä".repeat(140), 140).chars().count(), 140);
        let cut = plain(&"ä".repeat(141), 140);
        assert!(cut.chars().count() == 140 && cut.ends_with('…'), "{cut}");
        let (a, b) = (format!("{}a", "x".repeat(300)), format!("{}b", "x".repeat(300)));
        assert!(cut_context(&a).chars().count() <= 255);
        assert_ne!(cut_context(&a), cut_context(&b));
        assert_eq!(cut_context("a\nb"), "a\\nb");
    }
}
