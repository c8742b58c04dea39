//! Every call that GitHub gets, against GitHub's own description of its API: Prism answers with the description's examples, and
//! refuses what the description does not allow.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use plimsoll::forge::Http;
use plimsoll::forge::github::Github;
use plimsoll::publish::Target::{GithubCheck, GithubComment, GithubStatus};
use serde_json::{Value, json};

use crate::common::{available, installed};
use crate::samples;
use crate::{Case, HEAD, github_env, snapshot};

/// What of the description is served: the whole has 13 MB, which takes Prism long to read. Anything else is not found.
const PATHS: [&str; 10] = [
    "/user",
    "/repos/{owner}/{repo}/issues/{issue_number}/comments",
    "/repos/{owner}/{repo}/issues/comments/{comment_id}",
    "/repos/{owner}/{repo}/statuses/{sha}",
    "/repos/{owner}/{repo}/check-runs",
    "/repos/{owner}/{repo}/check-runs/{check_run_id}",
    "/repos/{owner}/{repo}/pulls",
    "/repos/{owner}/{repo}/pulls/{pull_number}",
    "/repos/{owner}/{repo}/commits/{commit_sha}/pulls",
    "/repos/{owner}/{repo}",
];

struct Prism {
    process: Child,
    uri: String,
    _directory: tempfile::TempDir,
}

impl Drop for Prism {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn description() -> Result<PathBuf, String> {
    let directory = std::env::var_os("PLIMSOLL_TEST_OPENAPI").ok_or("PLIMSOLL_TEST_OPENAPI is not set")?;
    let path = PathBuf::from(directory).join("github.json");
    if path.exists() { Ok(path) } else { Err(format!("there is no {}", path.display())) }
}

fn prism() -> Option<Prism> {
    if !available("prism", installed("prism").and_then(|()| description().map(|_| ()))) {
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut api: Value = serde_json::from_slice(&fs::read(description().unwrap()).unwrap()).unwrap();
    let paths = api["paths"].as_object_mut().unwrap();
    paths.retain(|path, _| PATHS.contains(&path.as_str()));
    assert_eq!(paths.len(), PATHS.len(), "the description has them all");
    let file = directory.path().join("github.json");
    fs::write(&file, api.to_string()).unwrap();
    // Free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let log = fs::File::create(directory.path().join("log")).unwrap();
    // Without `--errors`, which refuses GitHub's own examples too: its schemas reject some of them.
    let process = Command::new("prism")
        .args(["mock", "--host", "127.0.0.1", "--port", &port.to_string()])
        .arg(&file)
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    let mut prism = Prism { process, uri: format!("http://127.0.0.1:{port}"), _directory: directory };
    let began = Instant::now();
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        let log = fs::read_to_string(prism._directory.path().join("log")).unwrap_or_default();
        assert!(prism.process.try_wait().unwrap().is_none(), "{log}");
        assert!(began.elapsed() < Duration::from_secs(120), "{log}");
        std::thread::sleep(Duration::from_millis(100));
    }
    Some(prism)
}

#[tokio::test]
async fn githubs_own_description_allows_every_call() {
    let Some(prism) = prism() else { return };
    let env = snapshot(&github_env("pull_request", &prism.uri));
    let github = Github::new(&env, Http::new(&env).unwrap()).unwrap();

    assert!(github.me().await.unwrap().is_some());
    assert!(!github.comments(31, 1).await.unwrap().is_empty());
    github.comment(1).await.unwrap();
    github.create_comment(31, "text").await.unwrap();
    github.update_comment(1, "text").await.unwrap();
    github.delete_comment(1).await.unwrap();
    github.pull(31).await.unwrap();
    github.pulls_of_commit(HEAD).await.unwrap();
    assert!(!github.pulls_from("mallory:fast").await.unwrap().is_empty());

    // Whole publications, in every form that they have.
    for sample in [samples::passed(), samples::failed(), samples::refused(), samples::mixed(), samples::hostile()] {
        let mut case = Case::own(sample, github_env("pull_request", &prism.uri));
        case.what.options.step_statuses = true;
        for believed in [true, false] {
            if !believed {
                case.what.standing = plimsoll::publish::Standing::Unverified(vec!["of a test".to_owned()]);
            }
            let record = case.publish(&[GithubStatus, GithubCheck]).await;
            assert!(record.targets.iter().all(|t| t.outcome == "posted"), "{record:?}");
        }
        // The example's comment is not ours and never changes: one is made each time, and the end is that it is lost.
        let record = case.publish(&[GithubComment]).await;
        let reason = record.targets[0].reason.as_deref().unwrap_or_default();
        assert!(reason.contains("other jobs wrote over it"), "{record:?}");
    }

    // And what it does not allow is refused, so that all of this shows something.
    for status in [json!({"state": "great"}), json!({"context": "x"}), json!({"state": "success", "context": 7})] {
        let error = github.create_status(HEAD, &status).await.unwrap_err();
        assert_eq!(error.status().map(|s| s.as_u16()), Some(422), "{status}: {error}");
    }
    let error = github.create_check(&json!({"name": "x"})).await.unwrap_err();
    assert_eq!(error.status().map(|s| s.as_u16()), Some(422), "{error}");
}
