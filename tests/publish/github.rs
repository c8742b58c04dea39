//! GitHub: what is written where, and what becomes of faults.

use plimsoll::env::Var;
use plimsoll::publish::Target::{GithubCheck, GithubComment, GithubStatus, GithubSummary};
use plimsoll::publish::body::{self, MARKER};
use plimsoll::publish::{self, Publication};
use wiremock::ResponseTemplate;

use crate::fake::{BOT, Comment, Github, refusal};
use crate::samples;
use crate::{Case, HEAD, TOKEN, github_env, only, snapshot};

const DENIED: &str = "Resource not accessible by integration";

#[tokio::test]
async fn a_report_is_told_in_every_place() {
    let github = Github::start().await;
    let files = tempfile::tempdir().unwrap();
    let summary = files.path().join("summary");
    let case = Case::own(samples::refused(), github_env("pull_request", &github.uri()))
        .set(Var::GithubStepSummary, summary.to_str().unwrap())
        .set(Var::Matrix, r#"{"python": "3.12"}"#);
    let record = case.publish(&[GithubSummary, GithubComment, GithubStatus, GithubCheck]).await;
    let outcomes: Vec<_> = record.targets.iter().map(|t| t.outcome).collect();
    assert_eq!(outcomes, ["posted"; 4], "{record:?}");
    assert!(std::fs::read_to_string(&summary).unwrap().starts_with("### ⛔ Plimsoll: refused\n"));

    let comments = github.comments();
    let text = &comments[0].body;
    assert!(text.starts_with(&format!("{MARKER}\n### ⛔ Plimsoll: refused\n")), "{text}");
    assert!(
        text.contains("#### ⛔ `unit (3.12)`\n")
            && text.contains("Commit `3b18e51`, [run](")
            && text.contains("_Evidence collected by the job itself._"),
        "{text}"
    );
    assert!(text.contains("**secrets** is not-enforced"), "{text}");

    let status = &github.statuses()[0];
    assert_eq!(status["sha"], HEAD, "the head, not the merge commit");
    assert_eq!(
        (status["state"].as_str(), status["context"].as_str()),
        (Some("failure"), Some("plimsoll / unit (3.12)"))
    );
    assert_eq!(status["target_url"], "https://github.com/octo/widgets/actions/runs/30433642/attempts/1");

    let check = &github.state.lock().unwrap().checks[0];
    assert_eq!((check["conclusion"].as_str(), check["head_sha"].as_str()), (Some("failure"), Some(HEAD)));
    assert_eq!(check["output"]["annotations"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn work_that_has_begun_is_pending_and_a_step_has_a_status_where_that_is_asked_for() {
    let github = Github::start().await;
    let mut case = Case::own(samples::mixed(), github_env("pull_request", &github.uri()));
    let begun = Publication::begun(case.what.context.clone(), case.options.clone());
    let told = publish::pending(&begun, &[GithubSummary, GithubComment, GithubStatus], &snapshot(&case.env)).await;
    assert_eq!(told.len(), 1, "{told:?}");
    case.what.options.step_statuses = true;
    case.what.options.status_context = Some("sandbox".to_owned());
    case.publish(&[GithubStatus]).await;
    let statuses = github.statuses();
    let shown: Vec<_> = statuses
        .iter()
        .map(|s| format!("{} {}", s["state"].as_str().unwrap(), s["context"].as_str().unwrap()))
        .collect();
    assert_eq!(shown[0], "pending plimsoll / unit");
    assert!(shown.contains(&"failure sandbox / 6 Deploy preview in a microVM".to_owned()), "{shown:?}");
    assert!(shown.contains(&"success sandbox / 3 Fuzz the parser for a while".to_owned()), "forgiven: {shown:?}");
    assert_eq!(shown.last().unwrap(), "failure sandbox", "the run's own comes last");
    assert!(statuses.iter().all(|s| s["sha"] == HEAD));
}

#[tokio::test]
async fn the_comment_is_found_on_any_page_by_its_author_and_left_alone_when_it_says_the_same() {
    let github = Github::start().await.with(|state| {
        let stranger = Some((9, "mallory"));
        state.comments =
            (1..=250).map(|id| Comment { id, author: stranger, body: format!("{MARKER}\nfooled?") }).collect();
        state.comments[7].author = None;
        state.comments.push(Comment { id: 251, author: Some((BOT, "github-actions[bot]")), body: MARKER.to_owned() });
    });
    let case = Case::own(samples::passed(), github_env("pull_request", &github.uri()));
    assert_eq!(only(&case.publish(&[GithubComment]).await).0, "updated");
    let record = case.publish(&[GithubComment]).await;
    assert_eq!(only(&record).0, "unchanged", "{record:?}");
    assert!(record.targets[0].url.as_deref().unwrap().ends_with("#issuecomment-251"));
    let comments = github.comments();
    assert!(comments.len() == 251 && comments[..250].iter().all(|c| c.body.ends_with("fooled?")));
    assert_eq!(body::parse(&comments[250].body).len(), 1);
    let writes = github.asked().await.into_iter().filter(|r| !r.starts_with("GET")).collect::<Vec<_>>();
    assert_eq!(writes, ["PATCH /repos/octo/widgets/issues/comments/251"]);
}

#[tokio::test]
async fn each_leg_of_a_matrix_has_its_section_and_the_gravest_is_the_verdict() {
    let github = Github::start().await;
    for (python, sample) in [("3.11", samples::passed()), ("3.12", samples::failed()), ("3.13", samples::passed())] {
        let case = Case::own(sample, github_env("pull_request", &github.uri()))
            .set(Var::Matrix, &format!(r#"{{"python": "{python}"}}"#));
        case.publish(&[GithubComment, GithubStatus]).await;
    }
    let comments = github.comments();
    assert_eq!(comments.len(), 1);
    let text = &comments[0].body;
    assert_eq!(body::parse(text).len(), 3);
    assert!(text.contains("### ❌ Plimsoll: failed") && text.contains("3 jobs: 1 failed, 2 passed."), "{text}");
    let contexts: Vec<_> = github.statuses().iter().map(|s| s["context"].clone()).collect();
    assert_eq!(contexts, ["plimsoll / unit (3.11)", "plimsoll / unit (3.12)", "plimsoll / unit (3.13)"]);
}

#[tokio::test]
async fn the_token_of_an_app_learns_its_name_from_its_first_comment() {
    let github = Github::start().await.with(|state| {
        let app = Some((77, "acme-ci[bot]"));
        state.comments = vec![Comment { id: 1, author: app, body: MARKER.to_owned() }];
    });
    // The fake gives a new comment the workflow's account; here it is to be the app's.
    let app = ResponseTemplate::new(201).set_body_json(serde_json::json!({
        "id": 2, "body": "", "user": {"id": 77, "login": "acme-ci[bot]"}, "html_url": null
    }));
    let github = github.fault("POST", "/comments", 1, app);
    let case = Case::own(samples::passed(), github_env("pull_request", &github.uri()));
    assert_eq!(only(&case.publish(&[GithubComment]).await).0, "updated");
    assert_eq!(github.comments().len(), 1, "into the one that was there");
}

#[tokio::test]
async fn a_merge_queue_gets_a_status_and_no_comment() {
    let github = Github::start().await;
    let case = Case::own(samples::passed(), github_env("merge_group", &github.uri()));
    let record = case.publish(&[GithubComment, GithubStatus]).await;
    assert_eq!((record.targets[0].outcome, record.targets[1].outcome), ("skipped", "posted"));
    assert_eq!(github.statuses()[0]["sha"], "c2b1e7f0a1d2c3b4a5968778695a4b3c2d1e0f00");
    assert!(record.is_fine());
}

#[tokio::test]
async fn a_push_has_no_pull_request() {
    let github = Github::start().await;
    let case = Case::own(samples::passed(), github_env("push", &github.uri()));
    let record = case.publish(&[GithubComment, GithubStatus]).await;
    assert_eq!((record.targets[0].outcome, record.targets[1].outcome), ("skipped", "posted"));
    assert_eq!(github.asked().await.len(), 1);
}

#[tokio::test]
async fn a_token_that_may_not_is_told_what_it_lacks_and_hides_nothing_else() {
    let github = Github::start().await.fault("POST", "/comments", 9, refusal(403, DENIED));
    let case = Case::own(samples::passed(), github_env("pull_request", &github.uri()));
    let record = case.publish(&[GithubComment, GithubStatus]).await;
    assert_eq!((record.targets[0].outcome, record.targets[1].outcome), ("degraded", "posted"), "{record:?}");
    let reason = record.targets[0].reason.as_deref().unwrap();
    assert!(reason.contains(DENIED) && reason.contains("`permissions: {pull-requests: write}`"), "{reason}");
    assert!(!record.is_fine());

    let github = Github::start().await.fault("POST", "/statuses", 9, refusal(403, DENIED));
    let case = Case::own(samples::passed(), github_env("pull_request", &github.uri()));
    let (outcome, reason) = only(&case.publish(&[GithubStatus]).await);
    assert!(outcome == "degraded" && reason.contains("`permissions: {statuses: write}`"), "{reason}");
}

#[tokio::test]
async fn a_forks_token_is_told_the_way_that_there_is() {
    let github = Github::start().await.fault("POST", "", 9, refusal(403, DENIED));
    let case = Case::own(samples::passed(), github_env("pull_request_fork", &github.uri()));
    for target in [GithubComment, GithubStatus] {
        let (outcome, reason) = only(&case.publish(&[target]).await);
        assert!(outcome == "degraded" && reason.contains("workflow_run"), "{target}: {outcome} {reason}");
    }
}

#[tokio::test]
async fn a_check_run_that_may_not_be_made_becomes_a_status() {
    let github = Github::start().await.fault("POST", "/check-runs", 9, refusal(403, DENIED));
    let case = Case::own(samples::passed(), github_env("pull_request", &github.uri()));
    let (outcome, reason) = only(&case.publish(&[GithubCheck]).await);
    assert!(
        outcome == "degraded" && reason.contains("checks: write") && reason.contains("status is set instead"),
        "{reason}"
    );
    assert_eq!(github.statuses()[0]["state"], "success");
}

#[tokio::test]
async fn annotations_come_in_batches() {
    let github = Github::start().await;
    let mut sample = samples::refused();
    let step = sample.report.steps[0].clone();
    sample.report.steps = (1..=120).map(|index| plimsoll::report::StepReport { index, ..step.clone() }).collect();
    let case = Case::own(sample, github_env("pull_request", &github.uri()));
    assert_eq!(only(&case.publish(&[GithubCheck]).await).0, "posted");
    let state = github.state.lock().unwrap();
    let count = |v: &serde_json::Value| v["output"]["annotations"].as_array().unwrap().len();
    assert_eq!(count(&state.checks[0]), 50);
    assert_eq!(state.updates.iter().map(count).collect::<Vec<_>>(), [50, 20]);
}

#[tokio::test]
async fn a_locked_pull_request_and_other_refusals_are_told_apart() {
    let rows = [
        (refusal(403, "Unable to create comment because issue is locked."), "degraded", "locked"),
        (refusal(404, "Not Found"), "degraded", "pull-requests: write"),
        (refusal(410, "Issues are disabled"), "degraded", "switched off"),
        (refusal(401, "Bad credentials"), "degraded", "not accepted"),
        (refusal(422, "Validation Failed"), "failed", "Validation Failed"),
        (
            refusal(403, "You have exceeded a secondary rate limit").insert_header("retry-after", "999999"),
            "failed",
            "limits",
        ),
        (refusal(429, "slow down").insert_header("retry-after", "999999"), "failed", "limits"),
        (refusal(200, "not a comment"), "failed", "something else than expected"),
    ];
    for (answer, expected, text) in rows {
        let github = Github::start().await.fault("POST", "/comments", 9, answer);
        let case = Case::own(samples::passed(), github_env("pull_request", &github.uri()));
        let (outcome, reason) = only(&case.publish(&[GithubComment]).await);
        assert!(outcome == expected && reason.contains(text), "{outcome} {reason}");
        assert!(!reason.contains(TOKEN) && !reason.contains('\n'), "{reason}");
    }
    let full = "Validation Failed: This SHA and context has reached the maximum number of statuses.";
    let github = Github::start().await.fault("POST", "/statuses", 9, refusal(422, full));
    let case = Case::own(samples::passed(), github_env("pull_request", &github.uri()));
    let (outcome, reason) = only(&case.publish(&[GithubStatus]).await);
    assert!(outcome == "degraded" && reason.contains("1,000 statuses"), "{reason}");
}

#[tokio::test]
async fn faults_that_pass_leave_no_trace() {
    let github = Github::start()
        .await
        .fault("POST", "/statuses", 1, ResponseTemplate::new(502))
        .fault("GET", "/comments", 1, refusal(429, "slow down").insert_header("retry-after", "0"))
        .fault("POST", "/comments", 1, refusal(403, "secondary rate limit").insert_header("retry-after", "0"));
    let case = Case::own(samples::passed(), github_env("pull_request", &github.uri()));
    let record = case.publish(&[GithubComment, GithubStatus]).await;
    assert_eq!((record.targets[0].outcome, record.targets[1].outcome), ("posted", "posted"), "{record:?}");
    assert_eq!(github.comments().len(), 1);
}

#[tokio::test]
async fn without_a_token_nothing_is_asked() {
    let github = Github::start().await;
    let case = Case::own(samples::passed(), github_env("pull_request", &github.uri())).set(Var::GithubToken, "");
    for target in [GithubComment, GithubStatus, GithubCheck] {
        let (outcome, reason) = only(&case.publish(&[target]).await);
        assert!(outcome == "degraded" && reason.contains("GITHUB_TOKEN is not set"), "{reason}");
    }
    assert!(github.asked().await.is_empty());
}

#[tokio::test]
async fn an_enterprise_server_has_its_api_below_a_path() {
    let github = Github::start().await;
    let api = format!("{}/api/v3/", github.uri());
    let case = Case::own(samples::passed(), github_env("pull_request", &api));
    case.publish(&[GithubStatus]).await;
    assert_eq!(github.asked().await, [format!("POST /api/v3/repos/octo/widgets/statuses/{HEAD}")]);
}

#[tokio::test]
async fn a_job_of_another_forge_publishes_nothing_here() {
    let github = Github::start().await;
    let mut case = Case::own(samples::passed(), github_env("pull_request", &github.uri()));
    case.what.context = None;
    assert_eq!(only(&case.publish(&[GithubStatus]).await).0, "skipped");
    assert!(github.asked().await.is_empty());
}
