//! A step of a GitHub workflow, taken as it is: `--from-workflow .github/workflows/ci.yml --job test --step unit`.
//!
//! What is taken is what the runner would use: `run`, `shell`, `env`, `working-directory`, `timeout-minutes`,
//! `continue-on-error`, and what the workflow and the job have for their steps (`env`, `defaults.run`). What GitHub evaluates
//! can't be known here: an expression in one of these is an error, unless a flag says the value. Everything else of the
//! workflow is passed over: conditions, matrices, services, and the steps before.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use super::build::build;
use super::error::SpecError;
use super::merge::{Layer, Origin, Overrides, Surroundings};
use super::place::{KeyPath, Place, Source, nearest};
use super::raw::yaml::{Node, Scalar, ScalarKind};
use super::raw::{self, RawStep, Text};
use super::step::Step;

/// Reads one step of a workflow; flags win over it.
///
/// # Errors
/// When the file, the job or the step is not there, when the step runs no command (`uses:`), or when an expression stands
/// in something that it needs.
pub fn load(file: &Path, job: &str, step: &str, flags: &Overrides, around: &Surroundings) -> Result<Step, SpecError> {
    let source = Source::read(file)?;
    parse(&source, job, step, flags, around)
}

fn parse(
    source: &Arc<Source>,
    job: &str,
    step: &str,
    flags: &Overrides,
    around: &Surroundings,
) -> Result<Step, SpecError> {
    let flags = flags.to_raw()?;
    let root = raw::tree_with_expressions(source)?;
    let (job_node, job_path) = find_job(source, &root, job)?;
    let (step_node, step_path) = find_step(source, job_node, &job_path, step)?;
    if step_node.get("uses").is_some() {
        let place = Place::key(source, step_path.key("uses"));
        return Err(SpecError::invalid_help(
            &place,
            "the step is an action, and plimsoll runs commands",
            "name a step that has `run`",
        ));
    }

    let mut taken = Taken { source, wanted: Wanted::new(&flags) };
    let own = taken.step(step_node, &step_path)?;
    let of_job = taken.surroundings(job_node, &job_path)?;
    let of_workflow = taken.surroundings(&root, &KeyPath::root())?;
    let layers = [
        Layer { raw: &flags, origin: Origin::Flags },
        Layer { raw: &own, origin: Origin::WorkflowStep(Arc::clone(source), step_path) },
        Layer { raw: &of_job, origin: Origin::Workflow(Arc::clone(source), job_path) },
        Layer { raw: &of_workflow, origin: Origin::Workflow(Arc::clone(source), KeyPath::root()) },
    ];
    build(&layers, 1, around)
}

fn find_job<'n>(source: &Arc<Source>, root: &'n Node, job: &str) -> Result<(&'n Node, KeyPath), SpecError> {
    let Some(Node::Map(jobs)) = root.get("jobs") else {
        return Err(SpecError::MissingKey { place: Place::value(source, KeyPath::root()), key: "jobs".into() });
    };
    let path = KeyPath::root().key("jobs").key(job);
    let Some((_, node)) = jobs.iter().find(|(name, _)| name == job) else {
        return Err(not_there("--job", "job", job, jobs.iter().map(|(name, _)| name.clone()).collect()));
    };
    if node.get("uses").is_some() {
        let place = Place::key(source, path.key("uses"));
        return Err(SpecError::invalid_help(&place, "the job is a reusable workflow", "name a job that has `steps`"));
    }
    Ok((node, path))
}

/// Finds a step by its id, else by its name.
fn find_step<'n>(
    source: &Arc<Source>,
    job: &'n Node,
    job_path: &KeyPath,
    step: &str,
) -> Result<(&'n Node, KeyPath), SpecError> {
    let Some(Node::List(steps)) = job.get("steps") else {
        return Err(SpecError::MissingKey { place: Place::value(source, job_path.clone()), key: "steps".into() });
    };
    let word = |node: &Node, key: &str| match node.get(key) {
        Some(Node::Scalar(Scalar { text, .. })) => Some(text.clone()),
        _ => None,
    };
    for key in ["id", "name"] {
        let mut found = steps.iter().enumerate().filter(|(_, node)| word(node, key).as_deref() == Some(step));
        let Some((index, node)) = found.next() else { continue };
        let path = job_path.key("steps").item(index);
        if let Some((other, _)) = found.next() {
            let place = Place::value(source, job_path.key("steps").item(other));
            let reason = format!("a second step with this {key}, so `--step` names no one step");
            return Err(SpecError::invalid_help(&place, reason, "give the step an `id`"));
        }
        return Ok((node, path));
    }
    let names = steps.iter().flat_map(|node| word(node, "id").or_else(|| word(node, "name"))).collect();
    Err(not_there("--step", "step", step, names))
}

fn not_there(flag: &'static str, what: &'static str, name: &str, names: Vec<String>) -> SpecError {
    let nearest = nearest(name, names.iter().map(String::as_str)).map(str::to_owned);
    SpecError::NotThere { flag, what, name: name.to_owned(), names, nearest }
}

/// What no more specific layer has said yet: only that is looked at, so that a flag can stand in for an expression.
struct Wanted {
    seen: Vec<&'static str>,
    env: BTreeSet<String>,
}

impl Wanted {
    fn new(flags: &RawStep) -> Wanted {
        let given = [
            ("name", flags.name.is_some()),
            ("run", flags.run.is_some()),
            ("shell", flags.shell.is_some()),
            ("working-directory", flags.working_directory.is_some()),
            ("timeout-minutes", flags.timeout_minutes.is_some()),
            ("continue-on-error", flags.continue_on_error.is_some()),
        ];
        Wanted {
            seen: given.into_iter().filter_map(|(key, given)| given.then_some(key)).collect(),
            env: flags.env.iter().flatten().map(|(name, _)| name.clone()).collect(),
        }
    }

    fn take(&mut self, key: &'static str) -> bool {
        let wanted = !self.seen.contains(&key);
        self.seen.push(key);
        wanted
    }
}

struct Taken<'s> {
    source: &'s Arc<Source>,
    wanted: Wanted,
}

impl Taken<'_> {
    fn step(&mut self, node: &Node, path: &KeyPath) -> Result<RawStep, SpecError> {
        // The name is only for people: one with an expression is replaced by the id, or by the command.
        let name = match self.text(node, path, "name") {
            Err(SpecError::Expression { .. }) => node.get("id").and_then(|id| match id {
                Node::Scalar(Scalar { text, .. }) => Some(Text(text.clone())),
                _ => None,
            }),
            other => other?,
        };
        Ok(RawStep {
            name,
            run: self.text(node, path, "run")?,
            shell: self.text(node, path, "shell")?,
            working_directory: self.text(node, path, "working-directory")?,
            timeout_minutes: self.text(node, path, "timeout-minutes")?,
            continue_on_error: self.flag(node, path, "continue-on-error")?,
            env: self.env(node, path)?,
            ..RawStep::default()
        })
    }

    /// What a workflow or a job has for its steps.
    fn surroundings(&mut self, node: &Node, path: &KeyPath) -> Result<RawStep, SpecError> {
        let empty = Node::Map(Vec::new());
        let run = node.get("defaults").and_then(|defaults| defaults.get("run")).unwrap_or(&empty);
        let run_path = path.keys("defaults.run");
        Ok(RawStep {
            shell: self.text(run, &run_path, "shell")?,
            working_directory: self.text(run, &run_path, "working-directory")?,
            env: self.env(node, path)?,
            ..RawStep::default()
        })
    }

    fn text(&mut self, node: &Node, path: &KeyPath, key: &'static str) -> Result<Option<Text>, SpecError> {
        let Some(value) = node.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
        if !self.wanted.take(key) {
            return Ok(None);
        }
        self.scalar(value, &path.key(key)).map(Some)
    }

    fn flag(&mut self, node: &Node, path: &KeyPath, key: &'static str) -> Result<Option<bool>, SpecError> {
        let Some(text) = self.text(node, path, key)? else { return Ok(None) };
        match node.get(key) {
            Some(Node::Scalar(Scalar { kind: ScalarKind::Bool(value), .. })) => Ok(Some(*value)),
            _ => Err(SpecError::unknown_word(&Place::value(self.source, path.key(key)), &text.0, ["true", "false"])),
        }
    }

    fn env(&mut self, node: &Node, path: &KeyPath) -> Result<Option<BTreeMap<String, Option<Text>>>, SpecError> {
        let Some(value) = node.get("env").filter(|value| !value.is_null()) else { return Ok(None) };
        let path = path.key("env");
        let Node::Map(entries) = value else {
            // `env: ${{ fromJSON(…) }}` says so; anything else is the wrong type.
            self.scalar(value, &path)?;
            let reason = format!("expected a mapping, found {}", value.describe());
            return Err(SpecError::invalid(&Place::value(self.source, path), reason));
        };
        let mut env = BTreeMap::new();
        for (name, value) in entries {
            if !self.wanted.env.insert(name.clone()) {
                continue;
            }
            let value = if value.is_null() { None } else { Some(self.scalar(value, &path.key(name))?) };
            env.insert(name.clone(), value);
        }
        Ok(Some(env))
    }

    fn scalar(&self, value: &Node, path: &KeyPath) -> Result<Text, SpecError> {
        let place = || Place::value(self.source, path.clone());
        match value {
            Node::Scalar(Scalar { text, .. }) => match raw::expression(text) {
                Some(found) => Err(raw::left_over(self.source, place(), found)),
                None => Ok(Text(text.clone())),
            },
            other => Err(SpecError::invalid(&place(), format!("expected text, found {}", other.describe()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::spec::Command;
    use crate::spec::step::ArtifactSource;

    const WORKFLOW: &str = "
on: { push: { branches: [main] } }
name: ci ${{ github.ref }}
env: { A: workflow, B: workflow, C: workflow }
defaults: { run: { shell: bash, working-directory: from-workflow } }
jobs:
  test:
    runs-on: ${{ matrix.os }}
    strategy: { matrix: { os: [ubuntu-latest] } }
    env: { B: job, C: job }
    defaults: { run: { working-directory: from-job } }
    steps:
      - uses: actions/checkout@v4
      - id: unit
        name: Unit tests on ${{ matrix.os }}
        run: |
          make test
        env: { C: step, N: 3.10, E: }
        timeout-minutes: 7
        continue-on-error: true
      - name: plain
        run: make
        shell: sh
        working-directory: here
      - name: secret
        run: deploy
        env: { TOKEN: '${{ secrets.TOKEN }}' }
      - name: expression
        run: |
          echo
          echo ${{ github.head_ref }}
      - name: twice
        run: a
      - name: twice
        run: b
      - id: late
        run: x
        timeout-minutes: ${{ fromJSON('5') }}
        continue-on-error: ${{ matrix.soft }}
  reused:
    uses: ./.github/workflows/other.yml
  dynamic:
    env: ${{ fromJSON(needs.x.outputs.env) }}
    steps: [{ id: a, run: x }]
";

    fn take(job: &str, step: &str, flags: &Overrides) -> Result<Step, SpecError> {
        let file = Path::new(".github/workflows/ci.yml");
        let source = Source::from_bytes(file, WORKFLOW.as_bytes().to_vec())?;
        parse(&source, job, step, flags, &Surroundings::default())
    }

    fn fails(job: &str, step: &str) -> String {
        take(job, step, &Overrides::default()).unwrap_err().to_string()
    }

    #[test]
    fn a_step_is_taken_with_what_surrounds_it() {
        let step = take("test", "unit", &Overrides::default()).unwrap();
        assert_eq!(step.name, "unit", "its own name has an expression");
        assert!(matches!(&step.command, Command::Script { shell, text }
            if shell.template() == "bash --noprofile --norc -eo pipefail {0}" && text == "make test\n"));
        let env: Vec<_> = step.env.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        assert_eq!(env, [("A", "workflow"), ("B", "job"), ("C", "step"), ("E", ""), ("N", "3.10")]);
        assert_eq!(step.working_directory, Path::new("from-job"));
        assert_eq!(step.limits.timeout.as_secs(), 420);
        assert!(step.continue_on_error);
        // Paths of a workflow start from the checkout, not from `.github/workflows`.
        assert_eq!(step.artifact, ArtifactSource::Path(".".into()));
        assert_eq!(step.origin.to_string(), ".github/workflows/ci.yml:14:9: jobs.test.steps[1]");
    }

    #[test]
    fn the_step_wins_over_job_and_workflow_and_a_flag_over_all() {
        let step = take("test", "plain", &Overrides::default()).unwrap();
        assert_eq!((step.name.as_str(), step.working_directory.as_path()), ("plain", Path::new("here")));
        assert!(matches!(&step.command, Command::Script { shell, .. } if shell.program() == "sh"));
        let flags = Overrides {
            shell: Some("python".into()),
            env: BTreeMap::from([("A".into(), "flag".into())]),
            ..Overrides::default()
        };
        let step = take("test", "plain", &flags).unwrap();
        assert_eq!(step.env["A"], "flag");
        assert!(matches!(&step.command, Command::Script { shell, .. } if shell.program() == "python3"));
    }

    #[test]
    fn a_step_without_a_shell_gets_githubs_choice() {
        let text = "jobs: { j: { steps: [{ id: s, run: x }] } }";
        let source = Source::from_bytes(Path::new("w.yml"), text.as_bytes().to_vec()).unwrap();
        let step = parse(&source, "j", "s", &Overrides::default(), &Surroundings::default()).unwrap();
        assert!(
            matches!(&step.command, Command::Script { shell, .. } if *shell == crate::spec::Shell::of_a_workflow())
        );
    }

    #[test]
    fn what_github_evaluates_is_an_error_that_names_it() {
        for (job, step, expected) in [
            (
                "test",
                "secret",
                "ci.yml:27: jobs.test.steps[3].env.TOKEN: the expression `${{ secrets.TOKEN }}` is left over",
            ),
            (
                "test",
                "expression",
                "ci.yml:31: jobs.test.steps[4].run: the expression `${{ github.head_ref }}` is left over",
            ),
            (
                "test",
                "late",
                "ci.yml:38: jobs.test.steps[7].timeout-minutes: the expression `${{ fromJSON('5') }}` is left over",
            ),
            (
                "dynamic",
                "a",
                "ci.yml:43: jobs.dynamic.env: the expression `${{ fromJSON(needs.x.outputs.env) }}` is left over",
            ),
        ] {
            assert_eq!(fails(job, step), format!(".github/workflows/{expected}"));
        }
    }

    #[test]
    fn a_flag_can_stand_in_for_an_expression() {
        let flags = Overrides { env: BTreeMap::from([("TOKEN".into(), "none".into())]), ..Overrides::default() };
        assert_eq!(take("test", "secret", &flags).unwrap().env["TOKEN"], "none");
        let flags = Overrides { timeout: Some("5m".into()), continue_on_error: Some(false), ..Overrides::default() };
        assert_eq!(take("test", "late", &flags).unwrap().limits.timeout.as_secs(), 300);
    }

    #[test]
    fn what_is_not_there_or_runs_no_command() {
        assert_eq!(fails("tset", "unit"), "--job: there is no job `tset` (the nearest is `test`)");
        assert_eq!(fails("test", "units"), "--step: there is no step `units` (the nearest is `unit`)");
        assert!(fails("reused", "x").contains("jobs.reused.uses: the job is a reusable workflow"));
        assert!(fails("test", "twice").contains("steps[6]: a second step with this name"));
        let source = |text: &str| Source::from_bytes(Path::new("w.yml"), text.as_bytes().to_vec()).unwrap();
        let fails = |text: &str| {
            parse(&source(text), "j", "s", &Overrides::default(), &Surroundings::default()).unwrap_err().to_string()
        };
        let action = "jobs: { j: { steps: [{ id: s, uses: actions/checkout@v4 }] } }";
        assert!(fails(action).contains("w.yml:1:31: jobs.j.steps[0].uses: the step is an action"));
        assert!(fails("jobs: { j: { steps: [{ id: s }] } }").contains("jobs.j.steps[0]: the key `run` is missing"));
        assert!(fails("steps: []").contains("the key `jobs` is missing"));
        assert!(fails("jobs: { j: {} }").contains("the key `steps` is missing"));
        assert!(
            fails("jobs: { j: { steps: [{ id: s, run: [x] }] } }")
                .contains("steps[0].run: expected text, found a list")
        );
        let bad = "jobs: { j: { steps: [{ id: s, run: x, continue-on-error: maybe }] } }";
        assert!(fails(bad).contains("`maybe` is none of true, false"));
        let bad = "jobs: { j: { defaults: { run: { shell: zsh } }, steps: [{ id: s, run: x }] } }";
        assert!(fails(bad).contains("w.yml:1:40: jobs.j.defaults.run.shell: `zsh` is no shell"));
    }
}
