//! Whole jobs that install a release from a mirror on this machine.

use std::fs;
use std::path::Path;

use crate::common::{Ran, available, backend, binary, fixture, installed, program, repository};
use crate::install::{path_of, sha256};
use crate::project::Project;
use crate::server::Server;

/// A workflow whose one job installs a release twice, and copies its report.
fn workflow(url: &str, digest: &str) -> String {
    let uses = format!(
        r#"      - uses: ./
        id: plimsoll
        continue-on-error: true
        with: {{version: 9.8.7, sha256: "{digest}", download-url: "{url}", run: pass.wat, backend: wasm}}
"#
    );
    format!(
        r#"on: pull_request
permissions: {{}}
jobs:
  unit:
    runs-on: self-hosted
    steps:
      - uses: actions/checkout@v4
        with: {{persist-credentials: false}}
{uses}{}      - env:
          SAID: "${{{{ steps.plimsoll.outcome }}}} ${{{{ toJSON(steps.plimsoll.outputs) }}}}"
        run: |
          echo "outcome and outputs:" $SAID
          cp plimsoll-report/report.json "$COPY_TO" || true
"#,
        uses.replace("id: plimsoll", "id: again").replace("run: pass.wat", "run: pass.wat, report-dir: again")
    )
}

fn act(server: &Server, digest: &str, copy: &Path) -> Option<Ran> {
    if !available("act", installed("act")) || !backend("wasm") {
        return None;
    }
    let read = |path: &str| fs::read_to_string(repository().join(path)).unwrap();
    let project = Project::new(&[
        ("action.yml", &read("action.yml")),
        ("packaging/install.sh", &read("packaging/install.sh")),
        (".github/workflows/ci.yml", &workflow(&server.url(), digest)),
    ]);
    let out = tempfile::tempdir().unwrap();
    let ran = program("act")
        .args(["pull_request", "-P", "self-hosted=-self-hosted"])
        .args(["-e", fixture("forge/events/pull_request.json").to_str().unwrap()])
        .args(["--env", &format!("COPY_TO={}", copy.display())])
        .dir(project.root())
        .env("XDG_CACHE_HOME", out.path().join("cache"))
        .env("HOME", out.path())
        .run();
    Some(ran)
}

#[test]
fn the_action_installs_a_release_and_finds_it_again() {
    let server = Server::start();
    let program = fs::read(binary()).unwrap();
    server.put(&path_of("9.8.7"), &*program);
    let out = tempfile::tempdir().unwrap();
    let copy = out.path().join("report.json");
    let Some(ran) = act(&server, &sha256(&program), &copy) else { return };
    assert!(ran.stdout.contains("outcome and outputs: success "), "{}", ran.all());
    assert_eq!(server.asked(), [path_of("9.8.7")], "{}", ran.all());
    let report: serde_json::Value = serde_json::from_slice(&fs::read(copy).unwrap()).unwrap();
    assert_eq!((&report["verdict"], &report["tool"]["sha256"]), (&"passed".into(), &sha256(&program).into()));
}

#[test]
fn the_action_runs_nothing_that_has_another_digest() {
    let server = Server::start();
    let out = tempfile::tempdir().unwrap();
    let mark = out.path().join("pwned");
    server.put(&path_of("9.8.7"), format!("#!/bin/sh\ntouch {}\n", mark.display()));
    let Some(ran) = act(&server, &sha256(fs::read(binary()).unwrap()), &out.path().join("report.json")) else { return };
    assert!(
        ran.stdout.contains("outcome and outputs: failure ") && ran.stdout.contains("was not run"),
        "{}",
        ran.all()
    );
    assert!(ran.stdout.contains("\"exit-code\": \"12\""), "{}", ran.all());
    assert!(!mark.exists());
}

#[test]
fn the_component_installs_a_release() {
    if !available("gitlab-ci-local", installed("gitlab-ci-local").and_then(|()| installed("rsync"))) || !backend("wasm")
    {
        return;
    }
    let server = Server::start();
    let plimsoll = fs::read(binary()).unwrap();
    server.put(&path_of("9.8.7"), &*plimsoll);
    let include = format!(
        "include:\n  - local: templates/run.yml\n    inputs: {{run: pass.wat, backend: wasm, version: 9.8.7, sha256: \"{}\", download-url: \"{}\"}}\n",
        sha256(&plimsoll),
        server.url()
    );
    let template = fs::read_to_string(repository().join("templates/run.yml")).unwrap();
    let project = Project::new(&[("templates/run.yml", &template), (".gitlab-ci.yml", &include)]);
    let home = tempfile::tempdir().unwrap();
    let ran = program("gitlab-ci-local")
        .args(["--force-shell-executor", "plimsoll"])
        .dir(project.root())
        .env("HOME", home.path())
        .run()
        .exits(0);
    assert!(ran.all().contains("hello from inside"), "{}", ran.all());
    assert_eq!(server.asked(), [path_of("9.8.7")]);
}
