//! The whole way of a fork's report: a service signs what it ran, and the second job shows green what is proven.

use std::fs;

use plimsoll::report::sign::SigningKey;
use serde_json::json;

use crate::HEAD;
use crate::binary::{in_github, place, server};
use crate::common::{backend, plimsoll};
use crate::support::Service;

const STEPS: &str = "version: 1\nsteps:\n  - {name: Hello, run: pass.wat, artifact: pass.wat, timeout-minutes: 1}\n";

#[test]
fn what_a_service_signed_about_the_steps_of_the_base_branch_is_green() {
    if !backend("wasm") {
        return;
    }
    let service = Service::start();
    let (_runtime, github) = server();
    let github = github.with(|state| {
        state.pulls = vec![json!({"number": 27, "state": "open", "head": {"sha": HEAD}})];
    });
    let (place, files) = (place(), tempfile::tempdir().unwrap());
    fs::write(place.path().join("plimsoll.yml"), STEPS).unwrap();
    let socket = service.socket();
    let run = ["run", "--service", "require", "--service-socket", socket.to_str().unwrap()];
    in_github(plimsoll(run), &github, "pull_request_fork", files.path()).dir(place.path()).run().exits(0);

    let key = service.dir.path().join("service.pub");
    let publish = |key: &str, more: &[&str]| {
        let all =
            ["publish", "plimsoll-report", "github-status", "github-comment", "--key", key, "--spec", "plimsoll.yml"];
        let run = plimsoll(all.iter().chain(more));
        in_github(run, &github, "workflow_run_fork", files.path()).dir(place.path()).run().exits(0)
    };
    let state = || github.statuses().pop().unwrap()["state"].clone();
    let ran = publish(key.to_str().unwrap(), &["--artifact", "pass.wat"]);
    assert_eq!(state(), "success", "{}", ran.all());
    let text = github.comments()[0].body.clone();
    assert!(text.contains("### ✅ Plimsoll: passed") && text.contains("Signed by the service on"), "{text}");
    assert!(text.contains("Steps and artifact are those that were given to compare."), "{text}");

    // Another artifact, another step file, another key: each by itself is enough.
    publish(key.to_str().unwrap(), &["--artifact", "fail.wat"]);
    assert_eq!(state(), "error");
    let other = files.path().join("other.pub");
    fs::write(&other, SigningKey::generate().unwrap().public().pem()).unwrap();
    publish(other.to_str().unwrap(), &[]);
    assert_eq!(state(), "error");
    fs::write(place.path().join("plimsoll.yml"), STEPS.replace("timeout-minutes: 1", "timeout-minutes: 2")).unwrap();
    publish(key.to_str().unwrap(), &[]);
    assert_eq!(state(), "error");
    assert!(github.comments()[0].body.contains("### ❔ Plimsoll: unverified"));
}
