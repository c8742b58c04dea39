//! The scripts in `action.yml` and `templates/run.yml`, with a stand-in for plimsoll that writes down its arguments.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use serde_yaml::Value;
use tempfile::TempDir;

use crate::common::{Ran, program, repository};

/// Values that would do harm if any of them were read as script, and that must arrive as they are.
pub const HOSTILE: [&str; 8] = [
    "$(touch pwned)",
    "`touch pwned`",
    "'; touch pwned; '",
    "\"; touch pwned; \"",
    "${HOME} $CI_JOB_TOKEN %s \\n",
    "-x --run=other",
    "* ? [a] ~",
    "END_OF_LINES",
];

struct Script {
    text: String,
    dir: TempDir,
}

impl Script {
    fn of(file: &str, text: &str) -> Self {
        let script = Self { text: text.to_owned(), dir: tempfile::tempdir().unwrap() };
        // The process id shows whether the shell was replaced.
        let stand_in = "#!/bin/sh\nprintf '%s\\0' \"$$\" \"$@\" > arguments\nexit 42\n";
        fs::write(script.path("plimsoll"), stand_in).unwrap();
        fs::set_permissions(script.path("plimsoll"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(script.path("script"), &script.text).unwrap();
        assert!(!script.text.contains("${{") && !script.text.contains("$[["), "{file}: a value is read as script");
        script
    }

    fn action() -> Self {
        let action = yaml("action.yml", 0);
        let step = &action["runs"]["steps"][0];
        Self::of("action.yml", step["run"].as_str().unwrap())
    }

    fn component() -> Self {
        let template = yaml("templates/run.yml", 1);
        Self::of("templates/run.yml", template["$[[ inputs.job ]]"]["script"][0].as_str().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs it as the forge does. Every variable of the file is set, empty unless given.
    fn run(&self, shell: &[&str], names: &[String], values: &[(&str, &str)]) -> Ran {
        let path = format!("{}:{}", self.dir.path().display(), std::env::var("PATH").unwrap());
        let mut run =
            program(shell[0]).args(&shell[1..]).args([self.path("script")]).dir(self.dir.path()).env("PATH", path);
        for name in names {
            run = run.env(name, "");
        }
        run = run.env("GITHUB_OUTPUT", self.path("output"));
        for (name, value) in values {
            run = run.env(name, value);
        }
        let running = run.start();
        let pid = running.pid().to_string();
        let ran = running.wait();
        assert!(!self.path("pwned").exists(), "a value was read as script: {}", ran.all());
        if ran.code() == 42 {
            assert_eq!(self.arguments()[0], pid, "the shell must be replaced, so that signals arrive");
        }
        ran
    }

    fn arguments(&self) -> Vec<String> {
        let bytes = fs::read(self.path("arguments")).unwrap();
        let text = String::from_utf8(bytes).unwrap();
        text.strip_suffix('\0').unwrap().split('\0').map(str::to_owned).collect()
    }
}

/// A document of a YAML file.
pub fn yaml(file: &str, document: usize) -> Value {
    let text = fs::read_to_string(repository().join(file)).unwrap();
    let text = text.split("\n---\n").nth(document).unwrap();
    serde_yaml::from_str(text).unwrap()
}

fn names(map: &Value) -> Vec<String> {
    map.as_mapping().unwrap().iter().map(|(k, _)| k.as_str().unwrap().to_owned()).collect()
}

const BASH: [&str; 5] = ["bash", "--noprofile", "--norc", "-eo", "pipefail"];

fn action_names() -> Vec<String> {
    names(&yaml("action.yml", 0)["runs"]["steps"][0]["env"])
}

fn component_names() -> Vec<String> {
    names(&yaml("templates/run.yml", 1)["$[[ inputs.job ]]"]["variables"])
}

#[test]
fn the_action_hands_every_input_on_as_one_argument() {
    let script = Script::action();
    for hostile in HOSTILE {
        let two = format!("A={hostile}\n\nB=2");
        let ran = script.run(
            &BASH,
            &action_names(),
            &[
                ("INPUT_PUBLISH", hostile),
                ("INPUT_STATUS_CONTEXT", hostile),
                ("INPUT_PUBLISH_REQUIRED", "true"),
                ("INPUT_STEP_STATUSES", hostile),
                ("INPUT_RUN", hostile),
                ("INPUT_ARTIFACT", hostile),
                ("INPUT_ENV", &two),
                ("INPUT_STEP", hostile),
                ("INPUT_SPEC", hostile),
                ("INPUT_ARGS", "--jobs=2\n"),
                ("INPUT_REPORT_DIR", "r d"),
            ],
        );
        assert_eq!(ran.code(), 42, "{}", ran.all());
        assert_eq!(
            script.arguments()[1..],
            [
                "run".to_owned(),
                "--github-output".to_owned(),
                format!("--publish={hostile}"),
                format!("--status-context={hostile}"),
                "--publish-required".to_owned(),
                format!("--artifact={hostile}"),
                format!("--run={hostile}"),
                "--report-dir=r d".to_owned(),
                format!("--step={hostile}"),
                format!("--env=A={hostile}"),
                "--env=B=2".to_owned(),
                "--jobs=2".to_owned(),
                "--".to_owned(),
                hostile.to_owned(),
            ]
        );
    }
}

#[test]
fn the_action_without_inputs_runs_the_default_step_file() {
    let script = Script::action();
    script.run(&BASH, &action_names(), &[]).exits(42);
    assert_eq!(script.arguments()[1..], ["run", "--github-output", "--"]);
}

#[test]
fn the_action_says_where_it_looked_for_the_binary() {
    let script = Script::action();
    let ran = script.run(&BASH, &action_names(), &[("INPUT_BINARY", "/nonexistent/plimsoll")]);
    assert!(ran.stdout.starts_with("::error title=plimsoll::the input binary names no program"), "{}", ran.all());
    assert_eq!(fs::read_to_string(script.path("output")).unwrap(), "verdict=error\ntier=\nexit-code=12\n");
    assert_eq!(ran.code(), 12);
    let bare = script.run(&BASH, &action_names(), &[("PATH", "/usr/bin:/bin")]);
    assert!(bare.stdout.contains("no plimsoll is in the PATH"), "{}", bare.all());
}

#[test]
fn every_input_of_the_action_reaches_the_script_and_every_output_has_a_value() {
    let action = yaml("action.yml", 0);
    let env = &action["runs"]["steps"][0]["env"];
    let used: Vec<&str> = env.as_mapping().unwrap().iter().map(|(_, v)| v.as_str().unwrap()).collect();
    for input in names(&action["inputs"]) {
        assert!(used.contains(&format!("${{{{ inputs.{input} }}}}").as_str()), "{input} is declared and not used");
        assert!(action["inputs"][input.as_str()].get("default").is_some(), "{input} has no default");
    }
    assert_eq!(used.len(), names(&action["inputs"]).len());
    assert_eq!(names(&action["outputs"]), ["verdict", "tier", "exit-code", "report-dir", "outputs-dir"]);
    assert_eq!(action["runs"]["steps"].as_sequence().unwrap().len(), 1);
    assert!(action["runs"]["steps"][0].get("uses").is_none(), "no nested actions");
}

#[test]
fn the_component_hands_every_input_on_as_one_argument_in_any_shell() {
    let script = Script::component();
    for shell in [&["sh", "-e"][..], &["bash", "-eo", "pipefail"]] {
        for hostile in HOSTILE {
            let two = format!("A={hostile}\n\nB=2");
            let ran = script.run(
                shell,
                &component_names(),
                &[
                    ("PLIMSOLL_INPUT_BINARY", "plimsoll"),
                    ("PLIMSOLL_INPUT_PUBLISH", hostile),
                    ("PLIMSOLL_INPUT_STATUS_CONTEXT", hostile),
                    ("PLIMSOLL_INPUT_STEP_STATUSES", "true"),
                    ("PLIMSOLL_INPUT_PUBLISH_REQUIRED", hostile),
                    ("PLIMSOLL_INPUT_RUN", hostile),
                    ("PLIMSOLL_INPUT_ENV", &two),
                    ("PLIMSOLL_INPUT_SPEC", hostile),
                    ("PLIMSOLL_INPUT_ARGS", "--jobs=2"),
                    ("PLIMSOLL_INPUT_REPORT_DIR", "r d"),
                ],
            );
            assert_eq!(ran.code(), 42, "{}", ran.all());
            assert_eq!(
                script.arguments()[1..],
                [
                    "run".to_owned(),
                    format!("--publish={hostile}"),
                    format!("--status-context={hostile}"),
                    "--step-statuses".to_owned(),
                    format!("--run={hostile}"),
                    "--report-dir=r d".to_owned(),
                    format!("--env=A={hostile}"),
                    "--env=B=2".to_owned(),
                    "--jobs=2".to_owned(),
                    "--".to_owned(),
                    hostile.to_owned(),
                ]
            );
        }
    }
}

#[test]
fn the_component_says_when_there_is_no_binary() {
    let script = Script::component();
    let ran = script.run(&["sh", "-e"], &component_names(), &[("PLIMSOLL_INPUT_BINARY", "/nonexistent/plimsoll")]);
    ran.exits(12).says("plimsoll is not in the PATH");
}

#[test]
fn every_input_of_the_component_has_a_default_and_no_variable_is_expanded() {
    let (spec, template) = (yaml("templates/run.yml", 0), yaml("templates/run.yml", 1));
    let inputs = &spec["spec"]["inputs"];
    let body = fs::read_to_string(repository().join("templates/run.yml")).unwrap();
    for input in names(inputs) {
        assert!(inputs[input.as_str()].get("default").is_some(), "{input} has no default");
        assert!(body.contains(&format!("$[[ inputs.{input} ]]")), "{input} is declared and not used");
    }
    let job = &template["$[[ inputs.job ]]"];
    for (name, variable) in job["variables"].as_mapping().unwrap() {
        assert_eq!(variable["expand"], Value::Bool(false), "{name:?}");
    }
    assert_eq!(job["artifacts"]["when"], "always");
    assert!(job["artifacts"]["reports"].get("junit").is_some());
}
