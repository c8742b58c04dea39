//! Reports that came out of another job: what they may claim, and what is shown of it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use plimsoll::env::Var;
use plimsoll::forge::Context;
use plimsoll::publish::Target::{GithubCheck, GithubComment, GithubStatus};
use plimsoll::publish::standing::Expected;
use plimsoll::publish::{self, Options, Publication, Record, Standing};
use serde_json::json;

use crate::fake::Github;
use crate::samples;
use crate::{HEAD, github_env, only, snapshot};

const UNVERIFIED: &str = "unverified: claimed by the pull request's own job";

/// A report of a fork's job, as the privileged half of the pair gets it.
fn report() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    samples::passed().commit(directory.path());
    directory
}

async fn publish_in(github: &Github, report: &Path, targets: &[publish::Target]) -> (Record, Publication) {
    let mut env = github_env("workflow_run_fork", &github.uri());
    env.retain(|(var, _)| *var != Var::GithubJob);
    env.push((Var::GithubJob, "publish".to_owned()));
    let env = snapshot(&env);
    let context = Context::detect(&env);
    let (what, _) = Publication::of_another_job(report, &[], &Expected::default(), context, Options::default());
    (publish::publish(&what, targets, &env).await, what)
}

#[tokio::test]
async fn an_unsigned_report_is_shown_and_never_green() {
    let github = Github::start().await.with(|state| {
        state.pulls = vec![
            json!({"number": 26, "state": "open", "head": {"sha": "0".repeat(40)}}),
            json!({"number": 27, "state": "open", "head": {"sha": HEAD}}),
        ];
    });
    let report = report();
    let targets = [GithubComment, GithubStatus, GithubCheck];
    let (record, _) = publish_in(&github, &report.path().join("report"), &targets).await;
    assert!(record.targets.iter().all(|t| t.outcome == "posted"), "{record:?}");
    assert_eq!(record.standing, "unverified");
    let status = &github.statuses()[0];
    assert_eq!((status["state"].as_str(), status["sha"].as_str()), (Some("error"), Some(HEAD)));
    assert_eq!(status["context"], "plimsoll / publish", "the publishing job's name, not one that a report claims");
    assert!(status["description"].as_str().unwrap().starts_with(UNVERIFIED), "{status}");
    assert_eq!(status["target_url"], "https://github.com/octo/widgets/actions/runs/30433642");
    assert_eq!(github.state.lock().unwrap().checks[0]["conclusion"], "neutral");
    let text = &github.comments()[0].body;
    assert!(text.contains("### ❔ Plimsoll: unverified") && text.contains(&format!("_{UNVERIFIED}_")), "{text}");
    assert!(text.contains("It says **passed**") && text.contains("(--key)") && text.contains("(--spec)"), "{text}");
    assert!(text.contains("it is about another commit") && text.contains("it is about another repository"), "{text}");
    let asked = github.asked().await;
    assert!(asked.contains(&"POST /repos/octo/widgets/issues/27/comments".to_owned()), "by the head: {asked:?}");
}

#[tokio::test]
async fn a_number_that_a_report_claims_is_not_believed() {
    // The sample says that it is about pull request 42; nothing that GitHub says leads there.
    let github = Github::start().await.with(|state| {
        state.pulls = vec![json!({"number": 42, "state": "open", "head": {"sha": "1".repeat(40)}})];
    });
    let report = report();
    let (record, _) = publish_in(&github, &report.path().join("report"), &[GithubComment]).await;
    assert_eq!(only(&record).0, "skipped", "{record:?}");
    assert!(github.comments().is_empty());
}

#[tokio::test]
async fn a_job_that_left_no_report_is_an_error_and_not_silence() {
    let github = Github::start().await.with(|state| {
        state.pulls = vec![json!({"number": 27, "state": "open", "head": {"sha": HEAD}})];
    });
    let empty = tempfile::tempdir().unwrap();
    let broken = tempfile::tempdir().unwrap();
    fs::write(broken.path().join("report.json"), "{}").unwrap();
    for place in [empty.path().to_owned(), broken.path().to_owned(), empty.path().join("absent")] {
        publish_in(&github, &place, &[GithubStatus, GithubComment]).await;
        let status = github.statuses().pop().unwrap();
        assert_eq!(status["state"], "error");
        assert!(status["description"].as_str().unwrap().starts_with("No report: "), "{status}");
        assert!(github.comments()[0].body.contains("### ⚠️ Plimsoll: no report"), "{}", github.comments()[0].body);
    }
}

#[tokio::test]
async fn links_in_a_report_lead_nowhere() {
    let github = Github::start().await.with(|state| {
        state.pulls = vec![json!({"number": 27, "state": "open", "head": {"sha": HEAD}})];
    });
    let secret = tempfile::tempdir().unwrap();
    fs::write(secret.path().join("secret"), "hush-of-the-runner").unwrap();
    // A log that is a link.
    let report = report();
    let root = report.path().join("report");
    let log = root.join("steps/01-unit-tests-of-the-generated-patch/stdout.log");
    fs::remove_file(&log).unwrap();
    symlink(secret.path().join("secret"), &log).unwrap();
    let (_, what) = publish_in(&github, &root, &[GithubComment]).await;
    assert!(
        matches!(&what.standing, Standing::Unverified(reasons) if reasons.iter().any(|r| r.contains("hold together")))
    );
    assert!(!github.comments()[0].body.contains("hush-of-the-runner"));
    // A directory that is one, and a record that is one.
    fs::rename(root.join("steps"), root.join("moved")).unwrap();
    symlink(root.join("moved"), root.join("steps")).unwrap();
    publish_in(&github, &root, &[GithubComment]).await;
    assert!(!github.comments()[0].body.contains("collecting from /workspace"), "{}", github.comments()[0].body);
    fs::rename(root.join("report.json"), secret.path().join("report.json")).unwrap();
    symlink(secret.path().join("report.json"), root.join("report.json")).unwrap();
    publish_in(&github, &root, &[GithubComment]).await;
    assert!(github.comments()[0].body.contains("no report"), "{}", github.comments()[0].body);
}

#[tokio::test]
async fn a_pipe_in_place_of_a_report_holds_nothing_up() {
    let github = Github::start().await;
    let directory = tempfile::tempdir().unwrap();
    let made = std::process::Command::new("mkfifo").arg(directory.path().join("report.json")).status().unwrap();
    assert!(made.success());
    publish_in(&github, directory.path(), &[GithubStatus]).await;
    assert_eq!(github.statuses()[0]["state"], "error");
}
