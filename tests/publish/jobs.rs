//! Whole jobs with the action and the component, under `act` and `gitlab-ci-local`, that publish to forges played here.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use plimsoll::env::Var;

use crate::common::{available, backend, binary, fixture, installed, program, repository};
use crate::fake::Github;
use crate::gitlab::Gitlab;
use crate::project::Project;
use crate::{HEAD, TOKEN};

#[test]
fn the_action_publishes_with_the_jobs_token() {
    if !available("act", installed("act")) || !backend("wasm") {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let github = runtime.block_on(Github::start());
    // act sets the address of GitHub's API itself; on a runner of an Enterprise server it is another.
    let script = "#!/bin/sh\nGITHUB_API_URL=@API@ GITHUB_REPOSITORY=octo/widgets exec @BINARY@ \"$@\"\n";
    let script = script.replace("@API@", &github.uri()).replace("@BINARY@", binary().to_str().unwrap());
    let workflow = "on: pull_request
permissions: {}
jobs:
  unit:
    runs-on: self-hosted
    permissions: {pull-requests: write, statuses: write}
    strategy:
      matrix: {python: ['3.12', '3.13']}
      max-parallel: 1
    steps:
      - uses: actions/checkout@v4
        with: {persist-credentials: false}
      - uses: ./
        with:
          binary: ./plimsoll.sh
          run: pass.wat
          backend: wasm
          publish: auto
          publish-required: true
";
    let action = fs::read_to_string(repository().join("action.yml")).unwrap();
    let project =
        Project::new(&[("action.yml", &action), (".github/workflows/ci.yml", workflow), ("plimsoll.sh", &script)]);
    fs::set_permissions(project.path("plimsoll.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    let out = tempfile::tempdir().unwrap();
    let ran = program("act")
        .args(["pull_request", "-P", "self-hosted=-self-hosted", "-s", &format!("GITHUB_TOKEN={TOKEN}")])
        .args(["-e", fixture("forge/events/pull_request.json").to_str().unwrap()])
        .dir(project.root())
        .env("XDG_CACHE_HOME", out.path().join("cache"))
        .run()
        .exits(0);
    let shown: Vec<_> = github.statuses().iter().map(|s| format!("{} {}", s["context"], s["state"])).collect();
    for python in ["3.12", "3.13"] {
        for state in ["pending", "success"] {
            let status = format!("\"plimsoll / unit ({python})\" \"{state}\"");
            assert!(shown.contains(&status), "no {status} in {shown:?}: {}", ran.all());
        }
    }
    assert!(github.statuses().iter().all(|s| s["sha"] == HEAD), "{}", ran.all());
    let comments = github.comments();
    assert_eq!(comments.len(), 1, "{}", ran.all());
    assert!(comments[0].body.contains("2 jobs: 2 passed."), "{}", comments[0].body);
    assert!(!ran.stdout.contains(TOKEN) && !ran.stderr.contains(TOKEN), "{}", ran.all());
}

#[test]
fn the_component_publishes_with_the_projects_token() {
    let tools = installed("gitlab-ci-local").and_then(|()| installed("rsync"));
    if !available("gitlab-ci-local", tools) || !backend("wasm") {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let gitlab = runtime.block_on(Gitlab::start());
    let include = format!(
        "include:\n  - local: templates/run.yml\n    inputs: {{binary: '{}', run: pass.wat, backend: wasm, publish: auto}}\n",
        binary().display()
    );
    let template = fs::read_to_string(repository().join("templates/run.yml")).unwrap();
    let project = Project::new(&[("templates/run.yml", &template), (".gitlab-ci.yml", &include)]);
    let home = tempfile::tempdir().unwrap();
    let mut run = program("gitlab-ci-local").args(["--force-shell-executor"]);
    let mut known = Vec::new();
    for (var, value) in gitlab.env() {
        if !matches!(var, Var::CiCommitSha | Var::CiJobName | Var::CiJobUrl | Var::CiProjectPath) {
            run = run.args(["--variable", &format!("{}={value}", var.name())]);
            known.push(var.name());
        }
    }
    run = run.args(["--ignore-predefined-vars", &known.join(",")]);
    let ran =
        run.args(["plimsoll"]).dir(project.root()).env("HOME", home.path()).env("XDG_CACHE_HOME", home.path()).run();
    assert_eq!(ran.code(), 0, "{}", ran.all());
    let state = gitlab.state.lock().unwrap();
    let states: Vec<_> = state.statuses.iter().map(|s| s["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["running", "success"], "{}", ran.all());
    assert_eq!(state.notes.len(), 1, "{}", ran.all());
    assert!(state.notes[0].2.contains("### ✅ Plimsoll: passed"), "{}", state.notes[0].2);
    let record = project.path(".gitlab-ci-local/artifacts/plimsoll/plimsoll-report/publish.json");
    assert!(fs::read_to_string(&record).unwrap().contains("plimsoll.publish.v1"));
}
