//! Whole jobs with the component, under `gitlab-ci-local` with the shell executor.

use std::fs;

use crate::common::{Ran, available, backend, binary, installed, program, repository};
use crate::project::Project;

struct Job {
    ran: Ran,
    project: Project,
}

fn job(inputs: &[(&str, &str)]) -> Option<Job> {
    if !available("gitlab-ci-local", installed("gitlab-ci-local").and_then(|()| installed("rsync"))) || !backend("wasm")
    {
        return None;
    }
    let mut include = format!(
        "include:\n  - local: templates/run.yml\n    inputs:\n      binary: {}\n",
        quoted(binary().to_str().unwrap())
    );
    for (name, value) in inputs {
        include.push_str(&format!("      {name}: {}\n", quoted(value)));
    }
    let template = fs::read_to_string(repository().join("templates/run.yml")).unwrap();
    let project = Project::new(&[("templates/run.yml", &template), (".gitlab-ci.yml", &include)]);
    let home = tempfile::tempdir().unwrap();
    let ran = program("gitlab-ci-local")
        .args([
            "--force-shell-executor",
            "--variable",
            "GITLAB_CI=true",
            "--ignore-predefined-vars",
            "GITLAB_CI",
            "--variable",
            "CI_MERGE_REQUEST_IID=12",
            "plimsoll",
        ])
        .dir(project.root())
        .env("HOME", home.path())
        .env("XDG_CACHE_HOME", home.path())
        .run();
    Some(Job { ran, project })
}

/// A JSON string is a YAML one.
fn quoted(text: &str) -> String {
    serde_json::to_string(text).unwrap()
}

impl Job {
    /// Checks the end of the job and what it left as artifacts.
    fn ends(self, code: u8, verdict: &str) -> Self {
        let all = self.ran.all();
        assert_eq!(self.ran.code() == 0, code == 0, "{all}");
        if code != 0 {
            assert!(all.contains(&format!("FAIL {code} ")), "{all}");
        }
        let artifacts = self.project.path(".gitlab-ci-local/artifacts/plimsoll/plimsoll-report");
        let report = fs::read(artifacts.join("report.json")).unwrap_or_else(|e| panic!("{e}: {all}"));
        let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
        assert_eq!(
            (report["verdict"].as_str(), report["exit_code"].as_u64()),
            (Some(verdict), Some(code.into())),
            "{all}"
        );
        let ci = &report["ci"];
        assert_eq!((ci["provider"].as_str(), ci["pull_request"].as_u64()), (Some("gitlab"), Some(12)), "{ci}");
        assert_eq!(ci["job"], "plimsoll");
        assert!(artifacts.join("junit.xml").exists(), "{all}");
        self
    }

    fn says(self, text: &str) -> Self {
        let all = self.ran.all();
        assert!(all.contains(text), "no {text:?} in {all}");
        self
    }
}

#[test]
fn a_step_that_passes() {
    let Some(job) = job(&[("run", "pass.wat"), ("backend", "wasm")]) else { return };
    job.ends(0, "passed").says("hello from inside");
}

#[test]
fn a_step_whose_code_fails_keeps_its_artifacts() {
    let Some(job) = job(&[("run", "fail.wat"), ("backend", "wasm")]) else { return };
    job.ends(10, "failed");
}

#[test]
fn a_step_that_is_refused_keeps_its_artifacts() {
    let inputs = [("run", "pass.wat"), ("backend", "wasm"), ("minimum-isolation", "kernel")];
    let Some(job) = job(&inputs) else { return };
    let job = job.ends(11, "refused");
    assert!(!job.ran.all().contains("hello from inside"));
}

#[test]
fn hostile_text_opens_and_closes_no_section() {
    let Some(job) = job(&[("run", "hostile.wat"), ("backend", "wasm")]) else { return };
    let job = job.ends(0, "passed").says("last hostile line");
    let all = format!("{}{}", job.ran.stdout, job.ran.stderr);
    assert!(!all.contains("section_start:1:evil") && !all.contains("section_end:1:plimsoll_01"), "{all}");
    assert!(!all.contains("\x1b[31mred") && !all.contains('\x07') && !all.contains('\u{202e}'), "{all:?}");
}

#[test]
fn hostile_inputs_stay_values() {
    let values = crate::scripts::HOSTILE;
    let words: Vec<_> = values.iter().map(|v| shlex::try_quote(v).unwrap()).collect();
    let run = format!("pass.wat {}", words.join(" "));
    let env: Vec<_> = values.iter().enumerate().map(|(i, v)| format!("V{i}={v}")).collect();
    let Some(job) = job(&[("run", &run), ("backend", "wasm"), ("env", &env.join("\n"))]) else { return };
    let job = job.ends(0, "passed");
    assert!(!job.project.path("pwned").exists());
    // What arrived is what was written: nothing was expanded on the way.
    let report = fs::read(job.project.path("plimsoll-report/report.json")).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    let told = report["steps"][0]["command"].as_str().unwrap_or_default().to_owned();
    assert_eq!(shlex::split(&told).unwrap()[1..], values, "{told}");
}
