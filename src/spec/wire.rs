//! A step on its way to a service: from the checked [`Step`] back to the form that a file has, and from there, by the code
//! that checks files, to a [`Step`] again.
//!
//! [`to_raw`] is the sender's side, where files, flags and defaults are merged already. [`from_raw`] is the receiver's: it
//! believes nothing. Paths come along as text that says what something is called over there; the receiver opens none of
//! them, and puts its own in their place ([`Step`]'s fields are public).

use super::build::build;
use super::error::SpecError;
use super::limits::Limit;
use super::merge::{Layer, Origin, Surroundings};
use super::raw::{RawArtifact, RawGrants, RawMount, RawSandbox, RawStep, Text};
use super::shell::Shell;
use super::step::{ArtifactSource, BackendChoice, Command, Kernel, Step};

/// The step as a file would have it, with nothing left to a default that a file or a flag decided.
#[must_use]
pub fn to_raw(step: &Step) -> RawStep {
    let text = |text: &str| Some(Text(text.to_owned()));
    let texts = |all: &[String]| (!all.is_empty()).then(|| all.iter().cloned().map(Text).collect());
    let limit = |limit: Limit| {
        let written = step.limits.written.contains(&limit);
        written.then(|| Text(limit.show(step.limits.amount(limit))))
    };
    let wasm = step.backend == BackendChoice::Wasm;
    let (run, shell) = match &step.command {
        Command::Script { text, shell } if *shell == Shell::default() => (text.clone(), None),
        Command::Script { text, shell } => (text.clone(), template(shell)),
        Command::Wasm { .. } => (step.command.to_string(), None),
    };
    RawStep {
        // One that a default gave may hold nothing that can be written; then the default gives it again.
        name: text(step.name.trim()).filter(|name| !name.0.is_empty()),
        artifact: Some(artifact(&step.artifact)),
        run: Some(Text(run)),
        shell,
        env: (!step.env.is_empty())
            .then(|| step.env.iter().map(|(name, value)| (name.clone(), Some(Text(value.clone())))).collect()),
        working_directory: text(&step.working_directory.to_string_lossy()).filter(|path| !path.0.is_empty()),
        timeout_minutes: limit(Limit::Timeout),
        continue_on_error: Some(step.continue_on_error),
        sandbox: Some(RawSandbox {
            backend: text(step.backend.name()),
            minimum_isolation: step.minimum_isolation.and_then(|tier| text(tier.name())),
            require: (!step.require.is_empty())
                .then(|| step.require.iter().map(|control| Text(control.name().to_owned())).collect()),
            image: step.image.as_ref().map(|image| Text(image.to_string())),
            image_digest: step.image_digest.map(|digest| Text(format!("sha256:{digest}"))),
            kernel: match &step.kernel {
                Kernel::Distro => None,
                Kernel::Path { path, .. } => text(&path.to_string_lossy()),
            },
            cpus: limit(Limit::Cpus),
            memory: limit(Limit::Memory),
            disk: limit(Limit::Disk),
            pids: limit(Limit::Pids),
            output: limit(Limit::Output),
            mounts: (!step.mounts.is_empty()).then(|| {
                let mount = |path: &std::path::Path| Text(path.to_string_lossy().into_owned());
                step.mounts.iter().map(|m| RawMount { path: mount(&m.path), at: mount(&m.at) }).collect()
            }),
            network: text("none"),
            grants: wasm.then(|| RawGrants { filesystem: text(step.grants.filesystem.name()) }),
            deterministic: step.deterministic.then_some(true),
        }),
        outputs: texts(&step.outputs),
        junit: step.junit.as_ref().and_then(|path| text(&path.to_string_lossy())),
    }
}

fn template(shell: &Shell) -> Option<Text> {
    // A word of one's own can hold no NUL, the one thing that can't be quoted.
    shlex::try_join(shell.argv().iter().map(String::as_str)).ok().map(Text)
}

fn artifact(source: &ArtifactSource) -> RawArtifact {
    let text = |text: &str| Some(Text(text.to_owned()));
    let path = |path: &std::path::Path| text(&path.to_string_lossy());
    match source {
        ArtifactSource::Path(at) => RawArtifact { path: path(at), ..RawArtifact::default() },
        ArtifactSource::PathWithDigest { path: at, sha256 } => {
            RawArtifact { path: path(at), sha256: text(&sha256.to_string()), ..RawArtifact::default() }
        }
        ArtifactSource::GitHub { name, run_id } => {
            RawArtifact { github: text(name), run_id: run_id.map(|id| Text(id.to_string())), ..RawArtifact::default() }
        }
        ArtifactSource::GitLab { job, reference } => {
            RawArtifact { gitlab: text(job), reference: reference.clone().map(Text), ..RawArtifact::default() }
        }
    }
}

/// The step that somebody sent, checked like one on the command line (whose `--timeout` has a unit). Nothing is taken from
/// this machine: a `~` stands for nothing.
///
/// # Errors
/// As for a step file.
pub fn from_raw(raw: &RawStep, index: usize) -> Result<Step, SpecError> {
    build(&[Layer { raw, origin: Origin::Flags }], index, &Surroundings::default())
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::spec::place::Source;
    use crate::spec::{Overrides, SpecFile, load};

    /// What is left when a step has gone over, without the places of its keys, which are the sender's.
    #[track_caller]
    fn goes_over(step: &Step) {
        let json = serde_json::to_string(&to_raw(step)).unwrap();
        let raw: RawStep = serde_json::from_str(&json).unwrap();
        let mut back = from_raw(&raw, step.index).unwrap_or_else(|e| panic!("{json}: {e}"));
        back.places.clone_from(&step.places);
        back.origin = step.origin.clone();
        // How a script's file would be called decides nothing.
        if let (Command::Script { shell: new, .. }, Command::Script { shell: old, .. }) =
            (&mut back.command, &step.command)
        {
            assert_eq!(new.argv(), old.argv());
            new.clone_from(old);
        }
        assert_eq!(&back, step, "{json}");
    }

    fn of_file(text: &str) -> Vec<Step> {
        let source = Source::from_bytes(Path::new("plimsoll.yml"), text.as_bytes().to_vec()).unwrap();
        SpecFile::parse(&source).unwrap().steps(&RawStep::default(), 1, &Surroundings::default()).unwrap()
    }

    #[test]
    fn a_step_is_the_same_on_the_other_side() {
        let text = r#"
version: 1
defaults: { env: { A: "1", EMPTY: } }
steps:
  - run: |
      echo 'one'
      echo two
  - name: all of it
    artifact: { path: dist/a.tar.zst, sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 }
    run: python3 -m unittest
    shell: bash
    env: { B: "two words" }
    working-directory: sub/dir
    timeout-minutes: 0.0251
    continue-on-error: true
    sandbox:
      backend: firecracker
      minimum-isolation: vm
      require: [memory-limit, secrets]
      image: oci-layout:build/python:3
      image-digest: sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
      kernel: boot/vmlinuz
      cpus: 0.5
      memory: 300MiB
      disk: 1GiB
      pids: 99
      output: 1000
      mounts: [{ path: wheels, at: /wheels }]
    outputs: ["out/**", "report.xml"]
    junit: report.xml
  - { name: perl, run: print 1, shell: "perl -w '{0}'" }
  - { run: "'a b.wasm' x 'y z'", sandbox: { backend: wasm, deterministic: true, grants: { filesystem: work } } }
  - { run: python main.py, sandbox: { backend: wasm } }
  - { run: x, artifact: { github: patch, run-id: 17 } }
  - { run: x, artifact: { gitlab: build, ref: main } }
  - { run: x, sandbox: { image: ghcr.io/acme/python:3 } }
"#;
        for step in of_file(text) {
            goes_over(&step);
        }
    }

    #[test]
    fn flags_and_workflows_go_over_too() {
        for timeout in ["1ms", "1500ms", "59s", "1h30m"] {
            let flags = Overrides {
                run: Some("make".to_owned()),
                timeout: Some(timeout.to_owned()),
                artifact: Some("/abs/x".to_owned()),
                ..Overrides::default()
            };
            goes_over(&load(&[], &flags, &Surroundings::default()).unwrap()[0]);
        }
        let mut step =
            load(&[], &Overrides { run: Some("x".into()), ..Overrides::default() }, &Surroundings::default())
                .unwrap()
                .remove(0);
        step.command = Command::Script { shell: Shell::of_a_workflow(), text: "x".to_owned() };
        goes_over(&step);
    }

    #[test]
    fn what_is_sent_is_checked_like_a_file() {
        let raw = |json: &str| serde_json::from_str::<RawStep>(json);
        assert!(raw(r#"{"run":"x","sandbx":{}}"#).is_err());
        assert!(raw(r#"{"run":["x"]}"#).is_err());
        for hostile in [
            r#"{}"#,
            r#"{"run":""}"#,
            r#"{"run":"x\u0000"}"#,
            r#"{"run":"x","working-directory":"../up"}"#,
            r#"{"run":"x","outputs":["/etc/shadow"]}"#,
            r#"{"run":"x","sandbox":{"network":"host"}}"#,
            r#"{"run":"x","sandbox":{"memory":"99999TiB"}}"#,
            r#"{"run":"x","artifact":"~/secrets"}"#,
            r#"{"run":"x","sandbox":{"mounts":[{"path":"/","at":"/workspace"}]}}"#,
        ] {
            assert!(from_raw(&raw(hostile).unwrap(), 1).is_err(), "{hostile}");
        }
        let harmless = from_raw(&raw(r#"{"run":"x"}"#).unwrap(), 3).unwrap();
        assert_eq!((harmless.index, harmless.artifact), (3, ArtifactSource::Path(PathBuf::from("."))));
    }
}
