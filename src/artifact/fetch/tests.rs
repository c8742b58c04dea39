//! Forges and stores made here.

use std::time::Duration;

use wiremock::matchers::{header, method, path, query_param};
use wiremock::{Mock, MockServer, Request as Asked, ResponseTemplate};

use super::*;
use crate::forge::http::Patience;

const TOKEN: &str = "ghs-s3cret";

fn quick(env: &Env) -> Http {
    let patience =
        Patience { pause: Duration::from_millis(1), limited: Duration::from_millis(1), ..Patience::default() };
    Http::new(env).unwrap().with_patience(patience)
}

fn github_env(api: &MockServer) -> Env {
    [
        (Var::GithubApiUrl, api.uri()),
        (Var::GithubToken, TOKEN.to_owned()),
        (Var::GithubRepository, "o/r".to_owned()),
        (Var::GithubRunId, "7".to_owned()),
    ]
    .into_iter()
    .collect()
}

async fn got(source: &ArtifactSource, env: &Env, most: u64) -> Result<(Fetched, Vec<u8>), FetchError> {
    let dir = tempfile::tempdir().unwrap();
    let fetched = fetch(source, &quick(env), env, dir.path(), most, &|_, _| ()).await?;
    let content = std::fs::read(&fetched.path).unwrap();
    Ok((fetched, content))
}

fn from_github(name: &str, run_id: Option<u64>) -> ArtifactSource {
    ArtifactSource::GitHub { name: name.to_owned(), run_id }
}

/// An API with a list of artifacts, and a store elsewhere that has the newest.
async fn github(list: serde_json::Value, stored: ResponseTemplate) -> (MockServer, MockServer) {
    let (api, store) = (MockServer::start().await, MockServer::start().await);
    Mock::given(method("GET"))
        .and(path("/repos/o/r/actions/runs/7/artifacts"))
        .and(query_param("name", "patch"))
        .and(header("authorization", format!("Bearer {TOKEN}").as_str()))
        .respond_with(ResponseTemplate::new(200).set_body_json(list))
        .mount(&api)
        .await;
    let signed = format!("{}/blob?signature=hush", store.uri());
    Mock::given(path("/repos/o/r/actions/artifacts/12/zip"))
        .respond_with(ResponseTemplate::new(302).insert_header("location", signed.as_str()))
        .mount(&api)
        .await;
    Mock::given(path("/blob")).respond_with(stored).mount(&store).await;
    (api, store)
}

fn artifacts(digest: Option<&str>) -> serde_json::Value {
    serde_json::json!({"total_count": 4, "artifacts": [
        {"id": 11, "name": "patch", "expired": false, "digest": "sha256:00"},
        {"id": 12, "name": "patch", "expired": false, "digest": digest},
        {"id": 13, "name": "patch", "expired": true},
        {"id": 14, "name": "patch-2", "expired": false},
    ]})
}

#[tokio::test]
async fn githubs_newest_artifact_comes_with_its_digest_and_the_store_sees_no_token() {
    let digest = format!("sha256:{}", Digest::of(b"PK-bytes"));
    let (api, store) =
        github(artifacts(Some(&digest)), ResponseTemplate::new(200).set_body_bytes(b"PK-bytes".as_slice())).await;
    let (fetched, content) = got(&from_github("patch", None), &github_env(&api), 100).await.unwrap();
    assert_eq!((content.as_slice(), fetched.announced, fetched.bytes), (b"PK-bytes".as_slice(), true, 8));
    let asked: Vec<Asked> = store.received_requests().await.unwrap();
    assert!(!asked.is_empty());
    for request in asked {
        assert!(!format!("{:?}", request.headers).contains(TOKEN), "{:?}", request.headers);
    }
}

#[tokio::test]
async fn another_content_or_length_than_said_is_refused() {
    let digest = format!("sha256:{}", Digest::of(b"PK-bytes"));
    let stored = || ResponseTemplate::new(200).set_body_bytes(b"PK-bytex".as_slice());
    let (api, _store) = github(artifacts(Some(&digest)), stored()).await;
    let error = got(&from_github("patch", None), &github_env(&api), 100).await.unwrap_err();
    assert!(matches!(error, FetchError::Digest { .. }), "{error}");
    assert_eq!(error.reason(), "sha256");
    let error = got(&from_github("patch", None), &github_env(&api), 7).await.unwrap_err();
    assert!(matches!(error, FetchError::Http(HttpError::TooLarge { .. })), "{error}");
    // An older server says none.
    let (api, _store) = github(artifacts(None), stored()).await;
    assert!(!got(&from_github("patch", None), &github_env(&api), 100).await.unwrap().0.announced);
    let (api, _store) = github(artifacts(Some("md5:00")), stored()).await;
    assert!(got(&from_github("patch", None), &github_env(&api), 100).await.is_err());
}

#[tokio::test]
async fn what_is_missing_expired_or_forbidden_is_said_without_the_token() {
    let gone = serde_json::json!({"artifacts": [{"id": 1, "name": "patch", "expired": true}]});
    let (api, _store) = github(gone, ResponseTemplate::new(200)).await;
    let source = from_github("patch", None);
    let error = got(&source, &github_env(&api), 100).await.unwrap_err();
    assert!(error.to_string().contains("expired"), "{error}");
    let forbidden = from_github("patch", Some(8));
    Mock::given(path("/repos/o/r/actions/runs/8/artifacts")).respond_with(ResponseTemplate::new(403)).mount(&api).await;
    let error = got(&forbidden, &github_env(&api), 100).await.unwrap_err();
    assert!(error.help(&forbidden).contains("actions: read") && !error.to_string().contains(TOKEN), "{error}");
    let error = got(&source, &Env::default(), 100).await.unwrap_err();
    assert!(error.help(&source).contains("permissions"), "{error}");
}

#[tokio::test]
async fn a_store_that_is_busy_is_asked_again() {
    let (api, store) = (MockServer::start().await, MockServer::start().await);
    Mock::given(path("/repos/o/r/actions/runs/7/artifacts"))
        .respond_with(ResponseTemplate::new(200).set_body_json(artifacts(None)))
        .mount(&api)
        .await;
    let to = format!("{}/blob", store.uri());
    Mock::given(path("/repos/o/r/actions/artifacts/12/zip"))
        .respond_with(ResponseTemplate::new(302).insert_header("location", to.as_str()))
        .mount(&api)
        .await;
    Mock::given(path("/blob")).respond_with(ResponseTemplate::new(503)).up_to_n_times(2).mount(&store).await;
    Mock::given(path("/blob")).respond_with(ResponseTemplate::new(200).set_body_string("x")).mount(&store).await;
    assert_eq!(got(&from_github("patch", None), &github_env(&api), 100).await.unwrap().1, b"x");
}

fn gitlab_env(api: &MockServer, token: (Var, &str)) -> Env {
    [
        (Var::CiApiV4Url, format!("{}/sub/api/v4", api.uri())),
        (Var::CiProjectId, "5".to_owned()),
        (Var::CiPipelineId, "9".to_owned()),
        (token.0, token.1.to_owned()),
    ]
    .into_iter()
    .collect()
}

fn from_gitlab(job: &str, reference: Option<&str>) -> ArtifactSource {
    ArtifactSource::GitLab { job: job.to_owned(), reference: reference.map(str::to_owned) }
}

#[tokio::test]
async fn gitlabs_artifacts_come_by_ref_with_the_jobs_own_token() {
    let api = MockServer::start().await;
    Mock::given(path("/sub/api/v4/projects/5/jobs/artifacts/feature%2Fx/download"))
        .and(query_param("job", "build all"))
        .and(header("job-token", "j-s3cret"))
        .respond_with(ResponseTemplate::new(200).set_body_string("zip"))
        .mount(&api)
        .await;
    let env = gitlab_env(&api, (Var::CiJobToken, "j-s3cret"));
    assert_eq!(got(&from_gitlab("build all", Some("feature/x")), &env, 100).await.unwrap().1, b"zip");
    let source = from_gitlab("other", Some("feature/x"));
    let error = got(&source, &env, 100).await.unwrap_err();
    assert!(matches!(error, FetchError::Status { status: 404, .. }), "{error}");
}

#[tokio::test]
async fn gitlabs_artifacts_of_this_pipeline_are_those_of_the_newest_job_of_the_name() {
    let api = MockServer::start().await;
    let first: Vec<_> =
        (0..100).map(|n| serde_json::json!({"id": n, "name": format!("j{n}"), "status": "success"})).collect();
    let second = serde_json::json!([
        {"id": 200, "name": "build", "status": "failed"}, {"id": 201, "name": "build", "status": "success"},
        {"id": 202, "name": "slow", "status": "running"},
    ]);
    for (page, list) in [("1", serde_json::json!(first)), ("2", second)] {
        Mock::given(path("/sub/api/v4/projects/5/pipelines/9/jobs"))
            .and(query_param("page", page))
            .and(header("private-token", "g-s3cret"))
            .respond_with(ResponseTemplate::new(200).set_body_json(list))
            .mount(&api)
            .await;
    }
    Mock::given(path("/sub/api/v4/projects/5/jobs/201/artifacts"))
        .respond_with(ResponseTemplate::new(200).set_body_string("zip"))
        .mount(&api)
        .await;
    let env = gitlab_env(&api, (Var::GitlabToken, "g-s3cret"));
    assert_eq!(got(&from_gitlab("build", None), &env, 100).await.unwrap().1, b"zip");
    for (job, why) in [("slow", "running"), ("none", "no job")] {
        let error = got(&from_gitlab(job, None), &env, 100).await.unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
}
