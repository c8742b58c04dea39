//! Flags over files, flags alone, and what is selected.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use super::{around, help, message, steps, steps_with};
use crate::evidence::Tier;
use crate::spec::step::*;
use crate::spec::{Overrides, Sha256Digest, Shard, default_file, from_script, load, select};

fn some(text: &str) -> Option<String> {
    Some(text.to_owned())
}

fn flags() -> Overrides {
    Overrides { run: some("make"), ..Overrides::default() }
}

#[test]
fn a_flag_wins_over_step_and_defaults() {
    let text = "
version: 1
defaults: { timeout-minutes: 1, env: { A: default } }
steps:
  - run: old
    artifact: a.zip
    timeout-minutes: 2
    env: { A: step, B: step }
    outputs: [old]
    sandbox: { memory: 1GiB, require: [network], mounts: [{ path: x, at: /x }] }
";
    let flags = Overrides {
        run: some("new"),
        artifact: some("b.zip"),
        timeout: some("30s"),
        env: BTreeMap::from([("A".into(), "flag".into())]),
        memory: some("2GiB"),
        minimum_isolation: some("vm"),
        require: vec!["secrets".into()],
        mounts: vec!["/host/a:b:/inside".into()],
        outputs: vec!["new".into()],
        continue_on_error: Some(true),
        ..Overrides::default()
    };
    let step = steps_with(text, &flags).unwrap().remove(0);
    assert!(matches!(&step.command, Command::Script { text, .. } if text == "new"));
    // A flag's path starts from the current directory, a file's from the file.
    assert_eq!(step.artifact, ArtifactSource::Path("b.zip".into()));
    assert_eq!(step.limits.timeout, Duration::from_secs(30));
    assert_eq!((step.env["A"].as_str(), step.env["B"].as_str()), ("flag", "step"));
    assert_eq!((step.limits.memory, step.floor()), (2 << 30, Tier::Vm));
    assert_eq!(step.require.len(), 2);
    assert_eq!(step.mounts, [Mount { path: "/host/a:b".into(), at: "/inside".into(), sent_as: None }]);
    assert_eq!(step.outputs, ["new"]);
    assert!(step.continue_on_error);
    assert_eq!(step.origin.line(), Some(5));
}

#[test]
fn flags_alone_make_a_step() {
    let steps = load(&[], &flags(), &around()).unwrap();
    assert_eq!(steps.len(), 1);
    assert_eq!(steps[0].artifact, ArtifactSource::Path(".".into()));
    assert_eq!((steps[0].index, steps[0].name.as_str()), (1, "make"));
    assert!(message(load(&[], &Overrides::default(), &around())).starts_with("nothing to run"));
}

#[test]
fn a_flag_at_fault_is_named() {
    for (flags, expected) in [
        (Overrides { timeout: some("30"), ..flags() }, "--timeout: `30` is a duration without a unit"),
        (Overrides { memory: some("512MB"), ..flags() }, "--memory: `512MB` is ambiguous"),
        (
            Overrides { backend: some("gvizor"), ..flags() },
            "--backend: `gvizor` is none of auto, firecracker, gvisor, wasm (the nearest is `gvisor`)",
        ),
        (Overrides { require: vec!["x".into()], ..flags() }, "--require: `x` is none of "),
        (Overrides { mounts: vec!["x".into()], ..flags() }, "--mount: not a mount"),
        (Overrides { grants: vec!["network".into()], ..flags() }, "--grant: not a grant"),
        (Overrides { outputs: vec!["../x".into()], ..flags() }, "--outputs: `../x` leaves the artifact"),
        (Overrides { shell: some("zsh"), ..flags() }, "--shell: `zsh` is no shell"),
        (Overrides { env: BTreeMap::from([("".into(), "x".into())]), ..flags() }, "--env: `` can't name"),
        (Overrides { network: some("host"), ..flags() }, "--network: the network `host`"),
    ] {
        let message = message(load(&[], &flags, &around()));
        assert!(message.starts_with(expected), "{message}");
    }
}

#[test]
fn an_image_flag_does_not_inherit_the_digest_of_another_image() {
    let digest = "a".repeat(64);
    let text =
        format!("version: 1\nsteps:\n  - run: x\n    sandbox: {{ image: python, image-digest: 'sha256:{digest}' }}\n");
    assert!(steps(&text).unwrap()[0].image_digest.is_some());
    let flags = Overrides { image: some("node"), ..Overrides::default() };
    assert_eq!(steps_with(&text, &flags).unwrap()[0].image_digest, None);
    let flags = Overrides { image_digest: some(&"b".repeat(64)), ..Overrides::default() };
    assert_eq!(steps_with(&text, &flags).unwrap()[0].image_digest, Some(Sha256Digest::from_bytes([0xbb; 32])));
}

#[test]
fn several_files_number_their_steps_through() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let files = [
        write("a.yml", "version: 1\nsteps: [{ run: one }, { run: two }]"),
        write("b.yml", "version: 1\nsteps: [{ run: three }]"),
    ];
    let steps = load(&files, &Overrides::default(), &around()).unwrap();
    let seen: Vec<_> = steps.iter().map(|step| (step.index, step.name.as_str(), step.file().unwrap())).collect();
    assert_eq!(seen, [(1, "one", files[0].as_path()), (2, "two", &files[0]), (3, "three", &files[1])]);
    let bad = write("c.yml", "version: 1\nsteps: [{ rum: three }]");
    let all = [files[0].clone(), bad.clone()];
    let error = message(load(&all, &Overrides::default(), &around()));
    assert!(
        error.starts_with(&format!(
            "{}:2:11: steps[0].rum: unknown key (the nearest known key is `run`)",
            bad.display()
        )),
        "{error}"
    );
}

#[test]
fn a_directory_may_have_a_file_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(default_file(directory.path()), None);
    std::fs::write(directory.path().join("plimsoll.yaml"), "").unwrap();
    assert_eq!(default_file(directory.path()), Some(directory.path().join("plimsoll.yaml")));
}

#[test]
fn steps_are_chosen_by_name_then_by_shard() {
    let all = || {
        steps("version: 1\nsteps: [{ run: a, name: x }, { run: b, name: y }, { run: c, name: x }, { run: d }]").unwrap()
    };
    let chosen = |names: &[&str], shard: Option<&str>| {
        let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
        let steps = select(all(), &names, shard.map(|shard| shard.parse().unwrap()))?;
        Ok(steps.iter().map(|step| step.index).collect::<Vec<_>>())
    };
    assert_eq!(chosen(&[], None).unwrap(), [1, 2, 3, 4]);
    assert_eq!(chosen(&["x"], None).unwrap(), [1, 3]);
    assert_eq!(chosen(&["d", "y"], None).unwrap(), [2, 4]);
    assert_eq!(chosen(&[], Some("1/3")).unwrap(), [1, 4]);
    assert_eq!(chosen(&["x"], Some("2/2")).unwrap(), [3]);
    assert!(chosen(&["y"], Some("2/2")).unwrap().is_empty());
    assert_eq!(message(chosen(&["xx"], None)), "--step: there is no step `xx` (the nearest is `x`)");
    assert!(help(chosen(&["xx"], None)).contains("`x`, `y`, `x`, `d`"));
}

#[test]
fn shards_share_everything_and_nothing_twice() {
    let all = || steps("version: 1\nsteps: [{ run: a }, { run: b }, { run: c }, { run: d }, { run: e }]").unwrap();
    for count in 1..8 {
        let mut seen = Vec::new();
        for index in 1..=count {
            let shard: Shard = format!("{index}/{count}").parse().unwrap();
            seen.extend(select(all(), &[], Some(shard)).unwrap().iter().map(|step| step.index));
        }
        seen.sort_unstable();
        assert_eq!(seen, [1, 2, 3, 4, 5]);
    }
    for bad in ["", "0/1", "2/1", "1", "1/", "/1", "1/0", "-1/2", "+1/2", "1/2/3", "a/b"] {
        assert!(bad.parse::<Shard>().is_err(), "{bad}");
    }
}

#[test]
fn a_script_of_githubs_is_a_step() {
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("0b7c.sh");
    std::fs::write(&script, "echo ${{ is fine here }}\nmake test\n").unwrap();
    let bash = Overrides { shell: some("bash"), ..Overrides::default() };
    let step = from_script(&script, &bash, &around()).unwrap();
    assert!(
        matches!(&step.command, Command::Script { shell, text } if shell.program() == "bash" && text.ends_with("make test\n"))
    );
    assert_eq!(step.artifact, ArtifactSource::Path(PathBuf::from(".")));
    std::fs::write(&script, "app.wasm x\n").unwrap();
    assert_eq!(from_script(&script, &Overrides::default(), &around()).unwrap().backend, BackendChoice::Wasm);
    std::fs::write(&script, "\n").unwrap();
    assert!(message(from_script(&script, &bash, &around())).contains("is empty"));
}
