use super::*;

const MERGE: &str = "0a1b2c3d4e5f60718293a4b5c6d7e8f901234567";
const HEAD: &str = "3b18e512dba79e4c8300dd08aeb37f8e728b8dad";
const BASE: &str = "9c1185a5c5e9fc54612808977ee8f548b2258d31";

fn fixture(name: &str) -> String {
    format!("{}/tests/forge/events/{name}.json", env!("CARGO_MANIFEST_DIR"))
}

fn github(event: &str, extra: &[(Var, &str)]) -> Context {
    let path = fixture(event);
    let common = [
        (Var::GithubActions, "true"),
        (Var::GithubRepository, "octo/widgets"),
        (Var::GithubSha, MERGE),
        (Var::GithubJob, "unit"),
        (Var::GithubRunId, "30433642"),
        (Var::GithubRunAttempt, "2"),
        (Var::GithubServerUrl, "https://ghe.example/"),
        (Var::GithubEventPath, path.as_str()),
    ];
    Context::detect(&common.iter().chain(extra).copied().collect()).expect("a job of GitHub's")
}

fn gitlab(extra: &[(Var, &str)]) -> Context {
    let common = [
        (Var::GitlabCi, "true"),
        (Var::CiProjectPath, "group/sub/widgets"),
        (Var::CiCommitSha, MERGE),
        (Var::CiJobName, "unit: [3.12, $(id)]"),
        (Var::CiJobUrl, "https://example.com/gitlab/group/sub/widgets/-/jobs/7"),
    ];
    Context::detect(&common.iter().chain(extra).copied().collect()).expect("a job of GitLab's")
}

#[test]
fn outside_of_ci_there_is_no_context() {
    assert_eq!(Context::detect(&Env::default()), None);
    assert_eq!(Context::detect(&Env::from_iter([(Var::Ci, "true"), (Var::GitlabCi, "false")])), None);
}

#[test]
fn a_pull_request_from_the_same_repository() {
    let context = github("pull_request", &[]);
    assert_eq!(context.change, Change::Request { number: 31, fork: false });
    assert_eq!((context.sha.as_deref(), context.head_sha.as_deref()), (Some(MERGE), Some(HEAD)));
    assert_eq!(context.run_url.as_deref(), Some("https://ghe.example/octo/widgets/actions/runs/30433642/attempts/2"));
    assert_eq!((context.job.as_deref(), context.attempt, context.number()), (Some("unit"), Some(2), Some(31)));
    assert_eq!(context.remarks, [""; 0]);
}

#[test]
fn a_fork_and_a_fork_that_was_deleted() {
    assert_eq!(github("pull_request_fork", &[]).change, Change::Request { number: 27, fork: true });
    assert_eq!(github("pull_request_deleted_fork", &[]).change, Change::Request { number: 31, fork: true });
}

#[test]
fn a_merge_queue_whose_base_looks_like_an_entry() {
    let context = github("merge_group", &[]);
    assert_eq!(context.change, Change::Queued { number: 104, base: "release/pr-1-x".to_owned() });
    assert_eq!(context.head_sha.as_deref(), Some("c2b1e7f0a1d2c3b4a5968778695a4b3c2d1e0f00"));
}

#[test]
fn a_merge_queue_without_its_payload_is_told_by_its_ref() {
    let reference = format!("refs/heads/gh-readonly-queue/main/pr-7-{BASE}");
    let lost = [
        (Var::GithubEventPath, "/nonexistent/event.json"),
        (Var::GithubEventName, "merge_group"),
        (Var::GithubRef, reference.as_str()),
    ];
    let context = github("merge_group", &lost);
    assert_eq!(context.change, Change::Queued { number: 7, base: "main".to_owned() });
    assert_eq!(context.head_sha.as_deref(), Some(MERGE));
    assert_eq!(context.remarks.len(), 1, "the missing file is remarked");
}

#[test]
fn refs_that_only_look_like_a_merge_queue() {
    assert_eq!(queued(&format!("gh-readonly-queue/main/pr-7-{BASE}")), Some(("main".to_owned(), 7)));
    for hostile in [
        "refs/heads/gh-readonly-queue/main/pr-7-zz".to_owned(),
        format!("refs/heads/gh-readonly-queue/pr-7-{BASE}"),
        format!("refs/heads/gh-readonly-queue//pr-7-{BASE}"),
        format!("refs/heads/gh-readonly-queue/main/pr--7-{BASE}"),
        format!("refs/tags/gh-readonly-queue/main/pr-7-{BASE}"),
        format!("refs/heads/x/gh-readonly-queue/main/pr-7-{BASE}"),
    ] {
        assert_eq!(queued(&hostile), None, "{hostile}");
    }
}

#[test]
fn a_workflow_run_for_a_fork_names_no_pull_request() {
    let context = github("workflow_run_fork", &[]);
    assert_eq!((context.change, context.head_sha.as_deref()), (Change::None, Some(HEAD)));
    assert_eq!(github("workflow_run", &[]).change, Change::Request { number: 31, fork: false });
}

#[test]
fn a_comment_on_a_pull_request_counts_as_a_fork() {
    let context = github("issue_comment", &[]);
    assert_eq!(context.change, Change::Request { number: 27, fork: true });
    assert_eq!(context.head_sha.as_deref(), Some(MERGE));
}

#[test]
fn a_push_is_its_own_head() {
    let context = github("push", &[]);
    assert_eq!((context.change, context.head_sha.as_deref()), (Change::None, Some(MERGE)));
}

#[test]
fn an_event_that_is_no_file_or_no_json_is_remarked() {
    for path in ["/dev/zero", "/", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")] {
        let context = github("push", &[(Var::GithubEventPath, path)]);
        assert_eq!(context.remarks.len(), 1, "{path}");
        assert_eq!(context.head_sha.as_deref(), Some(MERGE));
    }
}

#[test]
fn claims_with_control_characters_or_of_wrong_form_are_left_out() {
    let long = "x".repeat(600);
    let context = github(
        "push",
        &[(Var::GithubSha, "HEAD"), (Var::GithubJob, "a\n::error::b"), (Var::GithubRepository, long.as_str())],
    );
    assert_eq!((context.sha, context.job, context.repository, context.run_url), (None, None, None, None));
}

#[test]
fn matrix_values_come_as_json() {
    let of = |text: &str| github("push", &[(Var::Matrix, text)]);
    let context = of(r#"{"os": "linux", "python": 3.12, "full": true, "nested": {"a": [1]}}"#);
    let pairs: Vec<_> = context.matrix.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    assert_eq!(pairs, [("full", "true"), ("nested", r#"{"a":[1]}"#), ("os", "linux"), ("python", "3.12")]);
    assert!(of("null").matrix.is_empty() && of("null").remarks.is_empty(), "a job without a matrix");
    for bad in ["[1]", "{", &format!("{{\"a\":\"{}\"}}", "x".repeat(600))] {
        assert_eq!(of(bad).remarks.len(), 1, "{bad}");
    }
}

#[test]
fn gitlab_names_its_merge_request_and_forks() {
    let own = gitlab(&[
        (Var::CiMergeRequestIid, "12"),
        (Var::CiMergeRequestProjectPath, "group/sub/widgets"),
        (Var::CiMergeRequestSourceProjectPath, "group/sub/widgets"),
        (Var::CiMergeRequestSourceBranchSha, HEAD),
    ]);
    assert_eq!(own.change, Change::Request { number: 12, fork: false });
    assert_eq!((own.sha.as_deref(), own.head_sha.as_deref()), (Some(MERGE), Some(HEAD)));
    assert_eq!(own.run_url.as_deref(), Some("https://example.com/gitlab/group/sub/widgets/-/jobs/7"));
    let fork = gitlab(&[
        (Var::CiMergeRequestIid, "13"),
        (Var::CiMergeRequestProjectPath, "group/sub/widgets"),
        (Var::CiMergeRequestSourceProjectPath, "mallory/widgets"),
    ]);
    assert_eq!(fork.change, Change::Request { number: 13, fork: true });
    assert_eq!(fork.head_sha.as_deref(), Some(MERGE), "no source head is given outside merged results");
}

#[test]
fn gitlab_branch_pipelines_name_open_merge_requests() {
    let of = |list: &str| gitlab(&[(Var::CiOpenMergeRequests, list)]);
    assert_eq!(of("group/sub/widgets!3").change, Change::Request { number: 3, fork: false });
    assert_eq!(of("group/sub/widgets!3,other/widgets!4").number(), Some(3));
    let several = of("group/sub/widgets!3,group/sub/widgets!4");
    assert_eq!((several.change, several.remarks.len()), (Change::None, 1));
    assert_eq!(of("garbage").change, Change::None);
}
