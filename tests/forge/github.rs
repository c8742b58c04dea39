//! Whole jobs with the action, under `act` in self-hosted mode.

use std::fs;

use crate::common::{Ran, available, backend, fixture, installed, program, repository};
use crate::project::{Project, with_binary};

/// A workflow whose one job uses the action with inputs, and prints its outputs.
fn workflow(inputs: &str) -> String {
    with_binary(&format!(
        r#"on: pull_request
permissions: {{}}
jobs:
  unit:
    runs-on: self-hosted
    strategy:
      matrix: {{python: ["3.12"]}}
    steps:
      - uses: actions/checkout@v4
        with: {{persist-credentials: false}}
      - uses: ./
        id: plimsoll
        continue-on-error: true
        with:
          binary: "@BINARY@"
{inputs}
      - env:
          SAID: "${{{{ steps.plimsoll.outcome }}}} ${{{{ toJSON(steps.plimsoll.outputs) }}}}"
        run: |
          echo "outcome and outputs:" $SAID
          cp plimsoll-report/report.json "$COPY_TO"
"#
    ))
}

struct Job {
    ran: Ran,
    report: serde_json::Value,
}

fn act(inputs: &str) -> Option<Job> {
    if !available("act", installed("act")) || !backend("wasm") {
        return None;
    }
    let action = fs::read_to_string(repository().join("action.yml")).unwrap();
    let project = Project::new(&[("action.yml", &action), (".github/workflows/ci.yml", &workflow(inputs))]);
    let out = tempfile::tempdir().unwrap();
    let copy = out.path().join("report.json");
    let event = fixture("forge/events/pull_request.json");
    let ran = program("act")
        .args(["pull_request", "-P", "self-hosted=-self-hosted", "-e", event.to_str().unwrap()])
        .args(["--env", &format!("COPY_TO={}", copy.display())])
        .dir(project.root())
        // Its checkouts; ours must not be left behind.
        .env("XDG_CACHE_HOME", out.path().join("cache"))
        .run();
    let report = fs::read(&copy).map(|bytes| serde_json::from_slice(&bytes).unwrap()).unwrap_or_default();
    Some(Job { ran, report })
}

impl Job {
    fn says(self, text: &str) -> Self {
        assert!(self.ran.stdout.contains(text), "no {text:?} in {}", self.ran.all());
        self
    }

    fn outputs(self, outcome: &str, verdict: &str, tier: &str, code: u8) -> Self {
        let text = self.ran.stdout.clone();
        let line = text
            .lines()
            .find(|l| l.contains("| outcome and outputs: "))
            .unwrap_or_else(|| panic!("{}", self.ran.all()));
        assert!(line.contains(&format!("outputs: {outcome} ")), "{}", self.ran.all());
        for (name, value) in [
            ("verdict", verdict),
            ("tier", tier),
            ("exit-code", &code.to_string()),
            ("report-dir", "plimsoll-report"),
            ("outputs-dir", "plimsoll-outputs"),
        ] {
            assert!(line.contains(&format!("\"{name}\": \"{value}\"")), "no {name} {value} in {line}");
        }
        assert_eq!(self.report["verdict"], verdict, "{}", self.ran.all());
        self
    }
}

#[test]
fn a_step_that_passes() {
    let Some(job) = act("          run: pass.wat\n          backend: wasm") else { return };
    let job = job.outputs("success", "passed", "container", 0).says("hello from inside").says("Summary - ");
    let ci = &job.report["ci"];
    assert_eq!((ci["provider"].as_str(), ci["job"].as_str()), (Some("github"), Some("unit")), "{ci}");
    assert_eq!((ci["pull_request"].as_u64(), ci["matrix"]["python"].as_str()), (Some(31), Some("3.12")), "{ci}");
    assert_eq!(ci["head_sha"], "3b18e512dba79e4c8300dd08aeb37f8e728b8dad");
}

#[test]
fn a_step_whose_code_fails() {
    let Some(job) = act("          run: fail.wat\n          backend: wasm") else { return };
    job.outputs("failure", "failed", "container", 10).says("exit code 3").says("Summary - ");
}

#[test]
fn a_step_that_is_refused() {
    let Some(job) = act("          run: pass.wat\n          backend: wasm\n          minimum-isolation: kernel") else {
        return;
    };
    let text = job.ran.stdout.clone();
    job.outputs("failure", "refused", "", 11).says("Summary - ");
    assert!(!text.contains("hello from inside"), "{text}");
}

#[test]
fn hostile_text_in_the_log_commands_nothing() {
    let Some(job) = act("          run: hostile.wat\n          backend: wasm") else { return };
    let job = job.outputs("success", "passed", "container", 0).says("last hostile line");
    let log = &job.ran.stdout;
    // A mask would turn these words into stars.
    assert!(log.contains("passed behind a proven container boundary"), "{log}");
    assert!(!log.contains('\x1b') && !log.contains('\x07') && !log.contains('\u{202e}'), "{log:?}");
    // What act reads of the log begins with the job's name, and what it obeys would stand there without our bar. (It also
    // shows the summary, with no name in front, where the text is in a code block.)
    for line in log.lines().filter(|l| l.starts_with("[ci.yml/unit]")) {
        assert!(!(line.contains("pwned") || line.contains("hacked")) || line.contains('│'), "{log}");
    }
}

#[test]
fn a_value_with_an_expression_or_a_quote_stays_a_value() {
    let Some(job) = act("          run: \"pass.wat '$(id)' `id`\"\n          backend: wasm") else { return };
    job.outputs("success", "passed", "container", 0);
}
