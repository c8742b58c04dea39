//! GitLab, as its documentation has it: notes (<https://docs.gitlab.com/api/notes/>) and commit statuses
//! (<https://docs.gitlab.com/api/commits/#set-the-commit-status>).

use std::sync::{Arc, Mutex};

use plimsoll::env::Var;
use plimsoll::publish::Target::{GitlabNote, GitlabStatus};
use plimsoll::publish::body::{self, MARKER};
use plimsoll::publish::{self, Publication};
use serde_json::{Value, json};
use wiremock::matchers::any;
use wiremock::{Mock, MockServer, Request, Respond, ResponseTemplate};

use crate::samples;
use crate::{Case, only, snapshot};

const SHA: &str = "0a1b2c3d4e5f60718293a4b5c6d7e8f901234567";
const HEAD: &str = "3b18e512dba79e4c8300dd08aeb37f8e728b8dad";
const TOKEN: &str = "glpat-hushHushHUSH0123456789";
const ME: u64 = 5;

#[derive(Default)]
pub struct State {
    /// Number, author, text.
    pub notes: Vec<(u64, u64, String)>,
    pub statuses: Vec<Value>,
    /// Answers to writes, before anything else.
    refuse: Option<(u16, Value)>,
}

pub struct Gitlab {
    pub server: MockServer,
    pub state: Arc<Mutex<State>>,
}

struct Answers(Arc<Mutex<State>>);

impl Gitlab {
    pub async fn start() -> Self {
        let server = MockServer::start().await;
        let state = Arc::new(Mutex::new(State::default()));
        Mock::given(any()).respond_with(Answers(state.clone())).mount(&server).await;
        Self { server, state }
    }

    async fn refusing(status: u16, body: Value) -> Self {
        let gitlab = Self::start().await;
        gitlab.state.lock().unwrap().refuse = Some((status, body));
        gitlab
    }

    /// A job below a sub-path, in a merge request's pipeline of a fork unless said otherwise.
    pub fn env(&self) -> Vec<(Var, String)> {
        let api = format!("{}/gitlab/api/v4", self.server.uri());
        [
            (Var::GitlabCi, "true"),
            (Var::CiApiV4Url, api.as_str()),
            (Var::GitlabToken, TOKEN),
            (Var::CiProjectPath, "mallory/widgets"),
            (Var::CiProjectId, "778"),
            (Var::CiCommitSha, SHA),
            (Var::CiJobName, "unit: [3.12]"),
            (Var::CiJobUrl, "https://example.com/gitlab/mallory/widgets/-/jobs/7"),
            (Var::CiPipelineId, "9001"),
            (Var::CiMergeRequestIid, "12"),
            (Var::CiMergeRequestProjectId, "555"),
            (Var::CiMergeRequestProjectPath, "group/widgets"),
            (Var::CiMergeRequestSourceProjectPath, "mallory/widgets"),
            (Var::CiMergeRequestSourceBranchSha, HEAD),
        ]
        .map(|(var, value)| (var, value.to_owned()))
        .to_vec()
    }

    async fn asked(&self) -> Vec<String> {
        let requests = self.server.received_requests().await.unwrap();
        requests.iter().map(|r| format!("{} {}", r.method, r.url.path())).collect()
    }
}

impl Respond for Answers {
    fn respond(&self, request: &Request) -> ResponseTemplate {
        let mut state = self.0.lock().unwrap();
        if request.headers.get("private-token").is_none_or(|t| t != TOKEN) {
            return ResponseTemplate::new(401).set_body_json(json!({"message": "401 Unauthorized"}));
        }
        let method = request.method.as_str();
        if let (Some((status, body)), true) = (&state.refuse, method != "GET") {
            return ResponseTemplate::new(*status).set_body_json(body.clone());
        }
        let body: Value = serde_json::from_slice(&request.body).unwrap_or_default();
        let text = || body["body"].as_str().unwrap_or_default().to_owned();
        let path = request.url.path().strip_prefix("/gitlab/api/v4/").unwrap_or("below no sub-path").to_owned();
        let parts: Vec<&str> = path.split('/').collect();
        let shown = |(id, author, text): &(u64, u64, String)| json!({"id": id, "body": text, "author": {"id": author, "username": "x"}, "system": false, "noteable_iid": 12});
        let ok = |status, value: Value| ResponseTemplate::new(status).set_body_json(value);
        let number = |name: &str| {
            request.url.query_pairs().find(|(n, _)| n == name).and_then(|(_, v)| v.parse::<usize>().ok()).unwrap()
        };
        match (method, parts.as_slice()) {
            ("GET", ["user"]) => ok(200, json!({"id": ME, "username": "project_555_bot"})),
            ("GET", ["projects", "555", "merge_requests", "12", "notes"]) => {
                let (page, size) = (number("page"), number("per_page"));
                ok(200, state.notes.iter().skip((page - 1) * size).take(size).map(shown).collect::<Vec<_>>().into())
            }
            ("POST", ["projects", "555", "merge_requests", "12", "notes"]) => {
                let note = (state.notes.len() as u64 + 1, ME, text().trim().to_owned());
                state.notes.push(note.clone());
                ok(201, shown(&note))
            }
            (_, ["projects", "555", "merge_requests", "12", "notes", id]) => {
                let Some(at) = state.notes.iter().position(|n| n.0.to_string() == *id) else {
                    return ok(404, json!({"message": "404 Note Not Found"}));
                };
                match method {
                    "PUT" => state.notes[at].2 = text().trim().to_owned(),
                    "DELETE" => {
                        state.notes.remove(at);
                        return ResponseTemplate::new(204);
                    }
                    _ => {}
                }
                ok(200, shown(&state.notes[at]))
            }
            ("POST", ["projects", "778", "statuses", sha]) => {
                if body["pipeline_id"] != 9001 && !body["pipeline_id"].is_null() {
                    return ok(404, json!({"message": "404 Pipeline Not Found"}));
                }
                let mut status = body.clone();
                status["sha"] = (*sha).into();
                state.statuses.push(status);
                ok(201, json!({"id": 93, "sha": sha, "status": body["state"]}))
            }
            _ => ok(404, json!({"error": "404 Not Found"})),
        }
    }
}

#[tokio::test]
async fn note_and_status_below_a_sub_path_from_a_fork() {
    let gitlab = Gitlab::start().await;
    let case = Case::own(samples::failed(), gitlab.env());
    let record = case.publish(&[GitlabNote, GitlabStatus]).await;
    assert_eq!((record.targets[0].outcome, record.targets[1].outcome), ("posted", "posted"), "{record:?}");
    let link = format!("{}/gitlab/group/widgets/-/merge_requests/12#note_1", gitlab.server.uri());
    assert_eq!(record.targets[0].url.as_deref(), Some(link.as_str()));
    let state = gitlab.state.lock().unwrap();
    let text = &state.notes[0].2;
    assert!(text.starts_with(&format!("{MARKER}\n### ❌ Plimsoll: failed\n")), "{text}");
    let status = &state.statuses[0];
    assert_eq!((status["state"].as_str(), status["name"].as_str()), (Some("failed"), Some("plimsoll / unit: [3.12]")));
    assert_eq!(
        (status["pipeline_id"].as_u64(), status["sha"].as_str()),
        (Some(9001), Some(SHA)),
        "the pipeline's commit"
    );
    assert_eq!(status["target_url"], "https://example.com/gitlab/mallory/widgets/-/jobs/7");
}

#[tokio::test]
async fn the_note_is_ours_by_author_and_stays_one() {
    let gitlab = Gitlab::start().await;
    gitlab.state.lock().unwrap().notes =
        (1..=120).map(|id| (id, 9, format!("{MARKER}\nfooled?"))).chain([(121, ME, MARKER.to_owned())]).collect();
    let case = Case::own(samples::passed(), gitlab.env());
    assert_eq!(only(&case.publish(&[GitlabNote]).await).0, "updated");
    assert_eq!(only(&case.publish(&[GitlabNote]).await).0, "unchanged");
    let other = Case::own(samples::refused(), gitlab.env()).set(Var::CiJobName, "lint");
    assert_eq!(only(&other.publish(&[GitlabNote]).await).0, "updated");
    let state = gitlab.state.lock().unwrap();
    assert_eq!(state.notes.len(), 121);
    assert_eq!(body::parse(&state.notes[120].2).len(), 2);
}

#[tokio::test]
async fn work_that_has_begun_runs() {
    let gitlab = Gitlab::start().await;
    let case = Case::own(samples::passed(), gitlab.env());
    let begun = Publication::begun(case.what.context.clone(), case.options.clone());
    publish::pending(&begun, &[GitlabNote, GitlabStatus], &snapshot(&case.env)).await;
    let state = gitlab.state.lock().unwrap();
    assert_eq!((state.statuses.len(), state.statuses[0]["state"].as_str()), (1, Some("running")));
    assert!(state.notes.is_empty());
}

#[tokio::test]
async fn a_branch_pipeline_finds_its_one_merge_request_or_skips() {
    let gitlab = Gitlab::start().await;
    let branch = |open: &str| {
        let mut env = gitlab.env();
        env.retain(|(var, _)| !var.name().starts_with("CI_MERGE_REQUEST"));
        env.retain(|(var, _)| !matches!(var, Var::CiProjectId | Var::CiProjectPath));
        env.extend([
            (Var::CiProjectId, "555".to_owned()),
            (Var::CiProjectPath, "group/widgets".to_owned()),
            (Var::CiOpenMergeRequests, open.to_owned()),
        ]);
        Case::own(samples::passed(), env)
    };
    assert_eq!(only(&branch("group/widgets!12").publish(&[GitlabNote]).await).0, "posted");
    for none in ["", "group/widgets!12,group/widgets!13", "other/widgets!12"] {
        assert_eq!(only(&branch(none).publish(&[GitlabNote]).await).0, "skipped", "{none}");
    }
}

#[tokio::test]
async fn an_empty_token_is_no_fault_and_says_which_to_set() {
    let gitlab = Gitlab::start().await;
    let case = Case::own(samples::passed(), gitlab.env()).set(Var::GitlabToken, "").set(Var::CiJobToken, "glcbt-hush");
    for target in [GitlabNote, GitlabStatus] {
        let (outcome, reason) = only(&case.publish(&[target]).await);
        assert_eq!(outcome, "degraded");
        for word in ["GITLAB_TOKEN", "project access token", "`api`", "protected", "CI_JOB_TOKEN can't write"] {
            assert!(reason.contains(word), "{word}: {reason}");
        }
    }
    assert!(gitlab.asked().await.is_empty());
}

#[tokio::test]
async fn refusals_are_told_apart() {
    let same = "Cannot transition status via :drop from :failed (Reason(s): Status cannot transition via \"drop\")";
    let other = "Cannot transition status via :drop from :success (Reason(s): Status cannot transition via \"drop\")";
    let rows = [
        (GitlabNote, 403, json!({"message": "403 Forbidden"}), "degraded", "role Reporter"),
        (GitlabStatus, 403, json!({"error": "insufficient_scope"}), "degraded", "role Developer"),
        (GitlabNote, 404, json!({"message": "404 Not found"}), "degraded", "`api`"),
        (GitlabNote, 400, json!({"message": {"note": ["is too long"]}}), "failed", "is too long"),
        (GitlabStatus, 400, json!({"message": same}), "unchanged", ""),
        (GitlabStatus, 400, json!({"message": other}), "failed", "Cannot transition"),
    ];
    for (target, status, body, expected, text) in rows {
        let gitlab = Gitlab::refusing(status, body).await;
        let case = Case::own(samples::failed(), gitlab.env());
        let (outcome, reason) = only(&case.publish(&[target]).await);
        assert!(outcome == expected && reason.contains(text), "{outcome} {reason}");
        assert!(!reason.contains(TOKEN), "{reason}");
    }
    let gitlab = Gitlab::start().await;
    let case = Case::own(samples::failed(), gitlab.env()).set(Var::GitlabToken, "wrong");
    let (outcome, reason) = only(&case.publish(&[GitlabNote]).await);
    assert!(outcome == "degraded" && reason.contains("not accepted"), "{reason}");
}

#[tokio::test]
async fn what_gitlab_would_refuse_is_not_sent() {
    let gitlab = Gitlab::start().await;
    let long = format!("https://example.com/{}", "x".repeat(300));
    let case = Case::own(samples::mixed(), gitlab.env()).set(Var::CiJobUrl, &long);
    assert_eq!(only(&case.publish(&[GitlabStatus]).await).0, "posted");
    let state = gitlab.state.lock().unwrap();
    assert!(state.statuses[0].get("target_url").is_none());
    assert!(state.statuses[0]["description"].as_str().unwrap().chars().count() <= 255);
}
