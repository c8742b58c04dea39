//! The program: what a run publishes, what `plimsoll publish` does, and that no token appears anywhere.

use std::fs;
use std::path::Path;

use wiremock::ResponseTemplate;

use crate::common::{Run, backend, fixture, plimsoll};
use crate::fake::{Github, refusal};
use crate::samples;
use crate::{HEAD, TOKEN, github_env};

pub fn in_github(mut run: Run, github: &Github, event: &str, files: &Path) -> Run {
    for (var, value) in github_env(event, &github.uri()) {
        run = run.env(var.name(), value);
    }
    run.env("GITHUB_STEP_SUMMARY", files.join("summary")).env("GITHUB_OUTPUT", files.join("output"))
}

/// A directory with the programs of the forge tests.
pub fn place() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    for name in ["pass.wat", "fail.wat"] {
        fs::copy(fixture("forge/project").join(name), place.path().join(name)).unwrap();
    }
    place
}

fn published(place: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(place.join("plimsoll-report/publish.json")).unwrap()).unwrap()
}

/// The server answers on threads of its own, while the program runs.
pub fn server() -> (tokio::runtime::Runtime, Github) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let github = runtime.block_on(Github::start());
    (runtime, github)
}

#[test]
fn a_run_says_that_it_has_begun_and_what_came_of_it() {
    if !backend("wasm") {
        return;
    }
    let (_runtime, github) = server();
    let (place, files) = (place(), tempfile::tempdir().unwrap());
    let arguments = ["run", "--run", "fail.wat", "--publish", "auto", "--github-output"];
    let ran = in_github(plimsoll(arguments), &github, "pull_request", files.path()).dir(place.path()).run().exits(10);
    let states: Vec<_> = github.statuses().iter().map(|s| s["state"].clone()).collect();
    assert_eq!(states, ["pending", "failure"], "{}", ran.all());
    assert!(github.statuses().iter().all(|s| s["sha"] == HEAD && s["context"] == "plimsoll / unit"));
    assert!(github.comments()[0].body.contains("### ❌ Plimsoll: failed"));
    assert!(ran.stdout.contains("Published to github-comment: posted: https://github.com/"), "{}", ran.all());
    let record = published(place.path());
    assert_eq!((record["schema"].as_str(), record["standing"].as_str()), (Some("plimsoll.publish.v1"), Some("own")));
    assert_eq!(record["targets"].as_array().unwrap().len(), 3);
    assert!(fs::read_to_string(files.path().join("summary")).unwrap().contains("Plimsoll: failed"));
    // What was written beside the report is known to whoever looks at it, and to the next run.
    plimsoll(["verify", "plimsoll-report"]).dir(place.path()).run().exits(0);
    plimsoll(["run", "--run", "pass.wat"]).dir(place.path()).run().exits(0);
}

#[test]
fn a_verdict_stands_whatever_publishing_comes_to_and_14_is_for_those_who_ask() {
    if !backend("wasm") {
        return;
    }
    let (_runtime, github) = server();
    let github = github.fault("POST", "", 99, refusal(403, "Resource not accessible by integration"));
    let place = place();
    let rows = [("pass.wat", false, 0), ("pass.wat", true, 14), ("fail.wat", false, 10), ("fail.wat", true, 10)];
    for (program, required, code) in rows {
        let files = tempfile::tempdir().unwrap();
        let mut arguments =
            vec!["run", "--run", program, "--publish", "github-comment,github-status", "--github-output"];
        arguments.extend(required.then_some("--publish-required"));
        let ran =
            in_github(plimsoll(arguments), &github, "pull_request", files.path()).dir(place.path()).run().exits(code);
        assert!(ran.stdout.contains("::notice title=plimsoll::github-status: "), "{}", ran.all());
        assert!(ran.stdout.contains("permissions: {statuses: write}"), "{}", ran.all());
        let outputs = fs::read_to_string(files.path().join("output")).unwrap();
        assert!(outputs.contains(&format!("exit-code={code}\n")), "{outputs}");
        let verdict = if program == "pass.wat" { "verdict=passed\n" } else { "verdict=failed\n" };
        assert!(outputs.contains(verdict), "{outputs}");
    }
}

#[test]
fn steps_that_cannot_be_read_are_published_as_an_error() {
    let (_runtime, github) = server();
    let (place, files) = (place(), tempfile::tempdir().unwrap());
    let arguments = ["run", "absent.yml", "--publish", "github-status"];
    in_github(plimsoll(arguments), &github, "pull_request", files.path()).dir(place.path()).run().exits(2);
    let states: Vec<_> = github.statuses().iter().map(|s| s["state"].clone()).collect();
    assert_eq!(states, ["pending", "error"]);
}

#[test]
fn publish_shows_another_jobs_report_as_what_it_is() {
    let (_runtime, github) = server();
    let github = github.with(|state| {
        state.pulls = vec![serde_json::json!({"number": 27, "state": "open", "head": {"sha": HEAD}})];
    });
    let (place, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    samples::passed().commit(place.path());
    let publish = |more: &[&str]| {
        let arguments = ["publish", "report", "github-status", "github-comment"].iter().chain(more);
        in_github(plimsoll(arguments), &github, "workflow_run_fork", files.path()).dir(place.path())
    };
    let ran = publish(&[]).run().exits(0);
    assert!(ran.stdout.contains("unverified: claimed by the pull request's own job"), "{}", ran.all());
    assert_eq!(github.statuses()[0]["state"], "error");
    assert_eq!(github.comments().len(), 1);
    let record: serde_json::Value =
        serde_json::from_slice(&fs::read(place.path().join("report/publish.json")).unwrap()).unwrap();
    assert_eq!(record["standing"], "unverified");
    // A report that is not there is told, and is a fault of the call.
    let arguments = ["publish", "absent", "github-status"];
    in_github(plimsoll(arguments), &github, "workflow_run_fork", files.path()).dir(place.path()).run().exits(2);
    assert!(github.statuses()[1]["description"].as_str().unwrap().starts_with("No report"));
    publish(&["--spec", "absent.yml"]).run().exits(2);
    publish(&["--key", "absent.pem"]).run().exits(2);
}

/// Every text that comes out of the program: streams, report, summary, outputs, and what was sent as a body.
fn everything(
    ran: &crate::common::Ran,
    places: &[&Path],
    runtime: &tokio::runtime::Runtime,
    github: &Github,
) -> String {
    fn walk(path: &Path, into: &mut String) {
        if path.is_dir() {
            fs::read_dir(path).unwrap().for_each(|entry| walk(&entry.unwrap().path(), into));
        } else {
            into.push_str(&String::from_utf8_lossy(&fs::read(path).unwrap()));
        }
    }
    let mut text = format!("{}{}", ran.stdout, ran.stderr);
    places.iter().for_each(|place| walk(place, &mut text));
    for request in runtime.block_on(github.server.received_requests()).unwrap() {
        text.push_str(request.url.as_str());
        text.push_str(&String::from_utf8_lossy(&request.body));
    }
    text
}

#[test]
fn no_token_appears_in_any_output_report_or_error() {
    if !backend("wasm") {
        return;
    }
    let faults = [
        None,
        Some(refusal(401, &format!("Bad credentials: {TOKEN} is not a token"))),
        Some(refusal(403, "Resource not accessible by integration")),
        Some(refusal(422, "Validation Failed")),
        Some(ResponseTemplate::new(307).insert_header("location", "https://elsewhere.invalid/?token=x")),
        Some(ResponseTemplate::new(200).set_body_string("{")),
    ];
    for (i, fault) in faults.into_iter().enumerate() {
        let (runtime, github) = server();
        let echoes = i == 1;
        let github = match fault {
            Some(answer) => github.fault("POST", "", 99, answer),
            None => github,
        };
        let (place, files) = (place(), tempfile::tempdir().unwrap());
        let arguments = [
            "run",
            "--run",
            "pass.wat",
            "--publish",
            "auto,github-check",
            "--github-output",
            "--verbose",
            "--log-format",
            "json",
        ];
        let run = in_github(plimsoll(arguments), &github, "pull_request", files.path()).env("PLIMSOLL_LOG", "trace");
        let ran = run.env("GITLAB_TOKEN", "glpat-hush").env("CI_JOB_TOKEN", "glcbt-hush").dir(place.path()).run();
        let text = everything(&ran, &[place.path(), files.path()], &runtime, &github);
        assert!(text.contains("plimsoll.publish.v1"), "{}", ran.all());
        for token in [TOKEN, "glpat-hush", "glcbt-hush"] {
            assert!(!text.contains(token), "{i} {echoes}: {token} in {text}");
        }
    }
    // No answer at all, through a proxy whose password is wrong.
    let (runtime, github) = server();
    let (place, files) = (place(), tempfile::tempdir().unwrap());
    let arguments = ["run", "--run", "pass.wat", "--publish", "auto", "--publish-required", "--verbose"];
    let run = in_github(plimsoll(arguments), &github, "pull_request", files.path()).dir(place.path());
    let ran = run.env("HTTP_PROXY", "http://user:hushproxy@127.0.0.1:9").run().exits(14);
    let text = everything(&ran, &[place.path(), files.path()], &runtime, &github);
    assert!(text.contains("no answer to") && text.contains("efused"), "the cause chain: {}", ran.all());
    assert!(!text.contains(TOKEN) && !text.contains("hushproxy"), "{text}");
}
