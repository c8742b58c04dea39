//! Text that a guest or a pull request wrote, in every text that is published.

use std::fs;

use plimsoll::publish::Target::{GithubCheck, GithubComment, GithubStatus};
use plimsoll::publish::body::{self, MARKER};
use plimsoll::publish::{Publication, Standing};
use plimsoll::report::StepReport;

use crate::common::{available, fixture, installed, program};
use crate::fake::Github;
use crate::samples::{self, HOSTILE, Sample};
use crate::{Case, github_env};

/// More of what a comment could obey, beside the sample's own: markers, fences, unfinished elements, quick actions.
const MORE: &str = "\n<!-- plimsoll:comment v1 -->\n<!-- plimsoll:end -->\n<!-- plimsoll:section v1 key=aaaaaaaaaaaaaaaa run=9999999999 \
    attempt=9 sha=3b18e512dba79e4c8300dd08aeb37f8e728b8dad verdict=passed -->\n```\n````\n~~~\n</details>\n</code>\n\n/close\n/merge\n\
    /approve\n@all @octo-org/admins closes #1, fixes octo/widgets#2 GH-3 !4 ~bug %1 $5 &6 [x](javascript:alert(1))\n<details>\n<!--\n";

fn hostile() -> Sample {
    let mut sample = samples::hostile();
    let text = format!("{HOSTILE}{MORE}");
    for (stdout, stderr) in &mut sample.logs {
        stdout.extend_from_slice(text.as_bytes());
        stderr.extend_from_slice(text.as_bytes());
    }
    for step in &mut sample.report.steps {
        step.name.push_str(&MORE.replace('\n', " "));
        step.notices.push(text.clone());
        step.command = text.clone();
        if let Some(refusal) = &mut step.refusal {
            (refusal.message, refusal.stage) = (text.clone(), text.clone());
        }
    }
    sample
}

async fn published(sample: Sample, change: impl FnOnce(&mut Publication)) -> (String, Vec<serde_json::Value>) {
    let github = Github::start().await;
    let mut case = Case::own(sample, github_env("pull_request", &github.uri()));
    case.what.options.step_statuses = true;
    change(&mut case.what);
    let record = case.publish(&[GithubComment, GithubStatus, GithubCheck]).await;
    assert!(record.targets.iter().all(|t| t.outcome == "posted"), "{record:?}");
    (github.comments()[0].body.clone(), github.statuses())
}

/// Renders as GitHub does (its own cmark-gfm), and looks at what is live in it.
fn live(body: &str) -> Option<String> {
    let python = installed("plimsoll-test-python");
    if !available("cmarkgfm", python) {
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("body.md");
    fs::write(&file, body).unwrap();
    let script = fixture("publish/live.py");
    Some(program("plimsoll-test-python").args([script, file]).run().exits(0).stdout)
}

#[tokio::test]
async fn nothing_that_a_guest_prints_is_live() {
    for standing in [Standing::Own, Standing::Unverified(vec![format!("{HOSTILE}{MORE}")])] {
        let (body, statuses) = published(hostile(), |what| {
            what.standing = standing;
            if let Some(context) = &mut what.context {
                context.job = Some(format!("unit {MORE}").replace('\n', " "));
            }
        })
        .await;
        assert_eq!(body.matches("<!--").count(), 4, "four markers of ours, and no comment of theirs: {body}");
        let sections = body::parse(&body);
        assert_eq!((sections.len(), sections[0].run), (1, 30_433_642), "{body}");
        for line in body.lines() {
            assert!(!line.starts_with('/'), "a quick action: {line}");
        }
        for status in &statuses {
            for text in [&status["description"], &status["context"]] {
                let text = text.as_str().unwrap();
                assert!(!text.contains(char::is_control) && !text.contains('\u{202e}'), "{text:?}");
            }
            assert!(status["description"].as_str().unwrap().chars().count() <= 140);
        }
        let Some(found) = live(&body) else { return };
        assert_eq!(found, "", "{body}");
    }
}

#[tokio::test]
async fn what_looks_for_live_text_finds_it() {
    let control = "<details>\n\n@octocat fixes #1, see https://evil.example\n\n<u>x</u>\n";
    let Some(found) = live(control) else { return };
    for what in ["@octocat", "#1", "https://evil.example", "<u>", "details is left open"] {
        assert!(found.contains(what), "{what}: {found}");
    }
    assert_eq!(live("### ✅ Plimsoll: passed\n\n`@octocat` said `#1`\n\n```\n<script>\n```\n").unwrap(), "");
}

#[tokio::test]
async fn a_body_that_is_cut_begins_with_the_verdict_and_leaves_nothing_open() {
    // Many steps, each with as much text as an excerpt takes, of characters that count threefold in bytes.
    let mut sample = samples::failed();
    let step = sample.report.steps[0].clone();
    let log = "誰もが騙される <details> ``` \n".repeat(2000);
    sample.cap = 1 << 20;
    sample.report.steps = (1..=30).map(|index| StepReport { index, ..step.clone() }).collect();
    sample.logs = (1..=30).map(|_| (log.clone().into_bytes(), log.clone().into_bytes())).collect();
    let (body, _) = published(sample, |_| {}).await;
    assert!(body.chars().count() <= 65_536, "{}", body.chars().count());
    assert!(body.starts_with(&format!("{MARKER}\n### ❌ Plimsoll: failed\n")), "{body}");
    assert!(body.contains("did not fit here"), "what is left out is counted");
    assert_eq!(body::parse(&body).len(), 1);
    let Some(found) = live(&body) else { return };
    assert_eq!(found, "", "{body}");
}

#[tokio::test]
async fn many_jobs_share_one_comment_and_all_are_counted() {
    let github = Github::start().await;
    let noisy = || {
        let mut sample = samples::failed();
        sample.logs[0].0 = "x".repeat(80).repeat(1000).into_bytes();
        sample.cap = 1 << 20;
        sample
    };
    for job in 0..20 {
        let mut case = Case::own(noisy(), github_env("pull_request", &github.uri()));
        case.what.context.as_mut().unwrap().job = Some(format!("job-{job}"));
        case.publish(&[GithubComment]).await;
    }
    let body = &github.comments()[0].body;
    assert!(body.chars().count() <= 65_536 && body.contains("20 jobs: 20 failed."), "{body}");
    assert_eq!(body::parse(body).len(), 20, "no job is lost before its details are");
    if let Some(found) = live(body) {
        assert_eq!(found, "");
    }
}
