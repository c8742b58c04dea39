//! What a step file says, and what is said about one that is wrong.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{help, message, step, steps};
use crate::evidence::{ControlId, Tier};
use crate::spec::step::*;
use crate::spec::{Limit, Sha256Digest, Shell};

const WHOLE: &str = r#"
version: 1
defaults: { sandbox: { backend: auto } }
steps:
  - name: Unit tests of the generated patch
    artifact: dist/patch.tar.zst
    run: python3 -m unittest -v
    shell: sh
    env: { PYTHONDONTWRITEBYTECODE: "1", VERSION: 3.10, DEBUG: true, EMPTY: }
    working-directory: .
    timeout-minutes: 2.5
    continue-on-error: false
    sandbox:
      backend: firecracker
      minimum-isolation: vm
      require: [memory-limit]
      image: oci-layout:build/python
      image-digest: sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855
      kernel: distro
      cpus: 1.5
      memory: 256MiB
      disk: 2GiB
      pids: 64
      output: 64KiB
      mounts: [{ path: ~/.cache/wheels, at: /wheels }]
      network: none
      grants: { filesystem: none }
      deterministic: false
    outputs: ["report.xml", "./out/**"]
    junit: report.xml
"#;

#[test]
fn the_designs_example_is_read_whole() {
    let steps = steps(WHOLE).unwrap();
    let [step] = steps.as_slice() else { panic!("one step") };
    assert_eq!((step.index, step.name.as_str()), (1, "Unit tests of the generated patch"));
    assert_eq!(step.directory(), "01-unit-tests-of-the-generated-patch");
    assert_eq!(step.origin.line_column(), Some((5, 5)));
    assert_eq!(step.artifact, ArtifactSource::Path("ci/dist/patch.tar.zst".into()));
    assert_eq!(step.command, Command::Script { shell: Shell::default(), text: "python3 -m unittest -v".into() });
    let env: Vec<_> = step.env.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    assert_eq!(env, [("DEBUG", "true"), ("EMPTY", ""), ("PYTHONDONTWRITEBYTECODE", "1"), ("VERSION", "3.10")]);
    assert_eq!(step.working_directory, PathBuf::new());
    assert_eq!(step.backend, BackendChoice::Firecracker);
    assert_eq!((step.minimum_isolation, step.floor()), (Some(Tier::Vm), Tier::Vm));
    assert_eq!(step.image, Some(ImageSource::OciLayout { path: "ci/build/python".into(), tag: None }));
    assert_eq!(step.image_digest, Some(Sha256Digest::of(b"")));
    assert_eq!(step.kernel, Kernel::Distro);
    assert_eq!(step.limits.milli_cpus, 1500);
    assert_eq!(step.limits.memory, 256 << 20);
    assert_eq!(step.limits.disk, 2 << 30);
    assert_eq!(step.limits.pids, 64);
    assert_eq!(step.limits.output, 64 << 10);
    assert_eq!(step.limits.timeout, Duration::from_secs(150));
    assert_eq!(step.limits.written, BTreeSet::from(Limit::ALL));
    assert_eq!(step.mounts, [Mount { path: "/home/me/.cache/wheels".into(), at: "/wheels".into(), sent_as: None }]);
    assert_eq!(step.network, Network::None);
    assert_eq!(step.outputs, ["report.xml", "out/**"]);
    assert_eq!(step.junit.as_deref(), Some(Path::new("report.xml")));
    assert!(!step.continue_on_error && !step.deterministic && !step.refuse_vulnerable_engines);
    assert_eq!(step.candidates(), [Backend::Firecracker]);
    assert!(step.required().contains(&ControlId::PidsLimit));
}

#[test]
fn a_step_that_says_nothing_has_the_defaults() {
    let step = step("").unwrap();
    assert_eq!(step.name, "make");
    assert_eq!(step.artifact, ArtifactSource::Path("ci".into()));
    assert_eq!((step.backend, step.floor()), (BackendChoice::Auto, Tier::Kernel));
    assert_eq!(step.candidates(), [Backend::Firecracker, Backend::Gvisor]);
    assert_eq!(step.limits, crate::spec::Limits::default());
    assert!(step.required().is_empty() && step.outputs.is_empty() && step.image.is_none());
}

#[test]
fn defaults_yield_to_the_step_key_by_key() {
    let text = "
version: 1
defaults:
  shell: bash
  env: { A: default, B: default }
  outputs: [a]
  sandbox: { memory: 1GiB, pids: 7, require: [network] }
steps:
  - run: one
    env: { B: step }
    outputs: [b]
    sandbox: { memory: 2GiB, require: [secrets] }
  - run: two
";
    let steps = steps(text).unwrap();
    let [one, two] = steps.as_slice() else { panic!("two steps") };
    assert_eq!((one.env["A"].as_str(), one.env["B"].as_str()), ("default", "step"));
    assert_eq!((one.limits.memory, one.limits.pids), (2 << 30, 7));
    assert_eq!(one.require, BTreeSet::from([ControlId::Network, ControlId::Secrets]));
    assert_eq!(one.outputs, ["b"]);
    assert_eq!((two.index, two.limits.memory, two.outputs.len()), (2, 1 << 30, 1));
    assert!(matches!(&two.command, Command::Script { shell, .. } if shell.program() == "bash"));
}

#[test]
fn the_four_artifact_sources() {
    let digest = "0".repeat(64);
    let source = |text: &str| step(&format!("    artifact: {text}\n")).map(|step| step.artifact);
    assert_eq!(source("../x.zip").unwrap(), ArtifactSource::Path("ci/../x.zip".into()));
    assert_eq!(source("/abs/./x.zip").unwrap(), ArtifactSource::Path("/abs/x.zip".into()));
    assert_eq!(source("{path: x.zip}").unwrap(), ArtifactSource::Path("ci/x.zip".into()));
    assert_eq!(
        source(&format!("{{path: x.zip, sha256: {digest:?}}}")).unwrap(),
        ArtifactSource::PathWithDigest { path: "ci/x.zip".into(), sha256: Sha256Digest::from_bytes([0; 32]) }
    );
    assert_eq!(
        source("{github: patch, run-id: 12}").unwrap(),
        ArtifactSource::GitHub { name: "patch".into(), run_id: Some(12) }
    );
    assert_eq!(source("{gitlab: build}").unwrap(), ArtifactSource::GitLab { job: "build".into(), reference: None });
    assert_eq!(source("{gitlab: build, ref: main}").unwrap().to_string(), "gitlab:build@main");
    for bad in
        ["{}", "{path: x, github: y}", "{sha256: x}", "{run-id: 1}", "{github: x, ref: y}", "[x]", "true", "\"\""]
    {
        assert!(source(bad).is_err(), "{bad}");
    }
    assert_eq!(
        message(source("{path: x.zip, sha256: abc}")),
        "ci/plimsoll.yml:4:37: steps[0].artifact.sha256: `abc` is no SHA-256 digest"
    );
    assert_eq!(
        message(source("{path: x.zip, sha: abc}")),
        "ci/plimsoll.yml:4:29: steps[0].artifact.sha: unknown key (the nearest known key is `sha256`)"
    );
}

#[test]
fn a_module_chooses_wasm_and_is_split_like_a_shell_does() {
    let text = "version: 1\nsteps:\n  - run: ./bin/app.wasm arg \"another arg\" 'it''s' a\\ b\n";
    let step = steps(text).unwrap().remove(0);
    assert_eq!((step.backend, step.floor()), (BackendChoice::Wasm, Tier::Container));
    let args = ["arg", "another arg", "its", "a b"].map(str::to_owned).to_vec();
    assert_eq!(step.command, Command::Wasm { program: WasmProgram::Module("bin/app.wasm".into()), args });
    assert_eq!(step.grants, Grants { filesystem: FilesystemGrant::None });
}

#[test]
fn a_runtime_needs_the_backend_by_name_and_reads_the_artifact() {
    let step = |sandbox: &str| {
        steps(&format!("version: 1\nsteps:\n  - run: python main.py\n    sandbox: {{ {sandbox} }}\n"))
            .map(|mut s| s.remove(0))
    };
    assert!(matches!(step("backend: auto").unwrap().command, Command::Script { .. }));
    let python = step("backend: wasm").unwrap();
    let args = vec!["main.py".to_owned()];
    assert_eq!(python.command, Command::Wasm { program: WasmProgram::Runtime("python".into()), args });
    assert_eq!(python.grants.names(), ["filesystem:read-only"]);
    let none = step("backend: wasm, grants: { filesystem: none }").unwrap();
    assert!(none.grants.names().is_empty());
}

#[test]
fn what_webassembly_cannot_do_is_said() {
    let run = |run: &str, more: &str| {
        steps(&format!("version: 1\nsteps:\n  - run: {run}\n    sandbox: {{ backend: wasm }}\n{more}"))
            .map(|mut s| s.remove(0))
    };
    assert!(run("app.wasm '&&' x", "").is_ok());
    assert!(message(run("app.wasm && x", "")).contains("`&&` needs a shell"));
    assert!(message(run("|\n      a.wasm\n      b.wasm", "")).contains("one command"));
    assert!(message(run("app.wasm 'x", "")).contains("open quote"));
    assert!(message(run("bin/app x", "")).contains("no WebAssembly module"));
    assert!(message(run("../app.wasm", "")).contains("leaves the artifact"));
    assert!(message(run("/app.wasm", "")).contains("is absolute"));
    assert!(message(run("app.wasm", "    shell: bash\n")).contains("has no shell"));
}

#[test]
fn defaults_for_other_kinds_of_steps_are_passed_over() {
    let text = "
version: 1
defaults:
  shell: bash
  sandbox: { image: host, deterministic: true, grants: { filesystem: work }, kernel: ./vmlinux }
steps:
  - run: app.wasm
  - run: make
    sandbox: { backend: gvisor }
";
    let steps = steps(text).unwrap();
    assert_eq!((steps[0].image.clone(), steps[0].deterministic), (None, true));
    assert_eq!(steps[0].grants.names(), ["filesystem:work"]);
    assert_eq!((steps[1].image.clone(), steps[1].deterministic), (Some(ImageSource::Host), false));
    assert!(steps[1].grants.names().is_empty());
    for key in ["deterministic: true", "grants: { filesystem: work }"] {
        assert!(step(&format!("    sandbox: {{ {key} }}\n")).is_err(), "{key}");
    }
    assert!(step("    sandbox: { backend: gvisor, kernel: ./vmlinux }\n").is_err());
}

#[test]
fn images() {
    let image = |text: &str| step(&format!("    sandbox: {{ image: {text:?} }}\n")).map(|step| step.image);
    let some = |source| Some(source);
    assert_eq!(image("host").unwrap(), some(ImageSource::Host));
    assert_eq!(image("dir:rootfs").unwrap(), some(ImageSource::Dir("ci/rootfs".into())));
    assert_eq!(image("tar:/x/r.tar").unwrap(), some(ImageSource::Tar("/x/r.tar".into())));
    assert_eq!(image("docker-archive:i.tar").unwrap(), some(ImageSource::DockerArchive("ci/i.tar".into())));
    for (text, path, tag) in [
        ("a/b", "ci/a/b", None),
        ("a/b:3.12", "ci/a/b", Some("3.12")),
        ("/a:b/c", "/a:b/c", None),
        ("/a:b/c:d", "/a:b/c", Some("d")),
    ] {
        let (text, tag) = (format!("oci-layout:{text}"), tag.map(str::to_owned));
        assert_eq!(image(&text).unwrap(), some(ImageSource::OciLayout { path: path.into(), tag }));
    }
    for reference in
        ["python", "python:3.12-slim", "ghcr.io/acme/py@sha256:".to_owned().as_str(), "localhost:5000/a/b:c", "dart:3"]
    {
        let reference = if reference.ends_with("sha256:") {
            format!("{reference}{}", "a".repeat(64))
        } else {
            reference.to_owned()
        };
        assert_eq!(image(&reference).unwrap(), some(ImageSource::Registry(reference)));
    }
    for bad in [
        "",
        "dir:",
        "oci-layout:",
        "oci-layout:x:",
        "Dir:x",
        "oci:./x",
        "https://x/y",
        "a b",
        "a:b:c",
        "../x",
        "/x",
        "A",
        "x@sha256:00",
        "x:99999/y",
        "-x",
        "x\u{1b}",
    ] {
        assert!(image(bad).is_err(), "{bad}");
    }
    assert!(message(step("    sandbox: { image-digest: x }\n")).contains("without an image"));
}

#[test]
fn paths_inside_stay_inside() {
    let directory = |text: &str| step(&format!("    working-directory: {text:?}\n")).map(|step| step.working_directory);
    assert_eq!(directory("./a/./b/").unwrap(), PathBuf::from("a/b"));
    assert_eq!(directory("/workspace/a").unwrap(), PathBuf::from("a"));
    for bad in ["", "..", "a/../../b", "/", "/workspaces", "/workspace/../etc", "a\0b"] {
        assert!(directory(bad).is_err(), "{bad}");
    }
    for bad in ["../x", "/x", "", ".", "a[", "***x"] {
        assert!(step(&format!("    outputs: [{bad:?}]\n")).is_err(), "{bad}");
        assert!(step(&format!("    junit: {bad:?}\n")).is_err() || bad.starts_with(['a', '*']), "{bad}");
    }
    for bad in ["/", "x", "/a/../b", "/workspace", "/workspace/x", "/proc/x", "/dev", "/etc/ssl"] {
        assert!(step(&format!("    sandbox: {{ mounts: [{{ path: x, at: {bad:?} }}] }}\n")).is_err(), "{bad}");
    }
    let two = "    sandbox: { mounts: [{ path: x, at: /w }, { path: y, at: /w/x }] }\n";
    assert!(message(step(two)).contains("overlaps"));
}

#[test]
fn messages_name_file_line_key_and_the_nearest_word() {
    for (lines, expected) in [
        (
            "    sandbox:\n      memroy: 1GiB\n",
            "ci/plimsoll.yml:5:7: steps[0].sandbox.memroy: unknown key (the nearest known key is `memory`)",
        ),
        ("    banana: 1\n", "ci/plimsoll.yml:4:5: steps[0].banana: unknown key"),
        (
            "    sandbox: { backend: gvizor }\n",
            "ci/plimsoll.yml:4:25: steps[0].sandbox.backend: `gvizor` is none of auto, firecracker, gvisor, wasm (the nearest is `gvisor`)",
        ),
        (
            "    sandbox: { minimum-isolation: strong }\n",
            "ci/plimsoll.yml:4:35: steps[0].sandbox.minimum-isolation: `strong` is none of process, container, kernel, vm",
        ),
        (
            "    sandbox:\n      require:\n        - network\n        - memory\n",
            "ci/plimsoll.yml:7:11: steps[0].sandbox.require[1]: `memory` is none of ",
        ),
        ("    sandbox:\n      memory: 512MB\n", "ci/plimsoll.yml:5:15: steps[0].sandbox.memory: `512MB` is ambiguous"),
        (
            "    timeout-minutes: 30s\n",
            "ci/plimsoll.yml:4:22: steps[0].timeout-minutes: `30s` is not a number of minutes",
        ),
        ("    env: [A]\n", "ci/plimsoll.yml:4:10: steps[0].env: expected a mapping, found a list"),
        ("    env: { A=B: c }\n", "ci/plimsoll.yml:4:12: steps[0].env.A=B: `A=B` can't name an environment variable"),
        ("    name: [x]\n", "ci/plimsoll.yml:4:11: steps[0].name: expected a string, found a list"),
        (
            "    continue-on-error: 'yes'\n",
            "ci/plimsoll.yml:4:24: steps[0].continue-on-error: expected true or false, found `yes`",
        ),
        (
            "    sandbox: { network: bridge }\n",
            "ci/plimsoll.yml:4:25: steps[0].sandbox.network: the network `bridge` is not supported",
        ),
        (
            "    sandbox: { mounts: [{ path: x }] }\n",
            "ci/plimsoll.yml:4:25: steps[0].sandbox.mounts[0]: the key `at` is missing",
        ),
        ("    shell: zsh\n", "ci/plimsoll.yml:4:12: steps[0].shell: `zsh` is no shell that is built in"),
        ("    name: \"two\\nlines\"\n", "ci/plimsoll.yml:4:11: steps[0].name: a name is one line"),
    ] {
        let message = message(step(lines));
        assert!(message.starts_with(expected), "{message}\nexpected: {expected}");
    }
}

#[test]
fn keys_that_github_has_are_explained() {
    assert!(help(step("    uses: actions/checkout@v4\n")).contains("an action can't run inside"));
    assert!(help(step("    if: always()\n")).contains("condition"));
    assert!(help(step("    memory: 1GiB\n")).contains("under `sandbox`"));
    assert!(help(step("    banana: 1\n")).contains("working-directory"));
}

#[test]
fn the_whole_file_must_make_sense() {
    assert_eq!(message(steps("steps: [{ run: x }]")), "ci/plimsoll.yml:1:1: the key `version` is missing");
    assert!(message(steps("version: 2\nsteps: 5")).contains("version `2` is not known"));
    assert!(steps("version: '1'\nsteps: [{ run: x }]").is_ok());
    assert!(message(steps("")).contains("empty"));
    assert!(message(steps("# only a comment\n")).contains("empty"));
    assert!(message(steps("version: 1\nsteps: []")).contains("no steps"));
    assert!(message(steps("version: 1\nsteps:\n")).contains("no steps"));
    assert!(message(steps("[1, 2]")).contains("expected a mapping, found a list"));
    assert_eq!(
        message(steps("version: 1\nsteps:\n  - name: x\n")),
        "ci/plimsoll.yml:3:5: steps[0]: the key `run` is missing"
    );
    assert!(message(steps("version: 1\nsteps:\n  - run: '  '\n")).contains("steps[0].run: empty"));
    assert!(message(steps("version: 1\nsteps:\n  - make\n")).contains("steps[0]: expected a mapping, found `make`"));
    assert!(message(steps("version: 1\nsteps: [{ run: x }]\njobs: {}\n")).contains("jobs: unknown key"));
}

#[test]
fn names_may_repeat_and_indices_tell_them_apart() {
    let steps = steps("version: 1\nsteps: [{ run: x, name: same }, { run: y, name: same }]").unwrap();
    assert_eq!([steps[0].directory(), steps[1].directory()], ["01-same", "02-same"]);
}
