//! The policy's rules, and what makes it untrusted.

use std::collections::BTreeSet;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use proptest::prelude::*;

use super::trust::is_identity;
use super::*;
use crate::evidence::ControlId;
use crate::spec::load::SpecFile;
use crate::spec::{Limits, Overrides, Surroundings};

/// A policy of this text that is in force, as if read from the fixed path.
fn policy(text: &str) -> Policy {
    Policy::of_text(text)
}

fn malformed(text: &str) -> String {
    let source = Source::from_bytes(Path::new(POLICY_FILE), text.as_bytes().to_vec()).unwrap();
    Rules::parse(&source).unwrap_err().to_string()
}

fn step(lines: &str) -> Step {
    let text = format!("version: 1\nsteps:\n  - run: make\n    name: It\n{lines}");
    let source = Source::from_bytes(Path::new("p.yml"), text.into_bytes()).unwrap();
    let flags = Overrides::default().to_raw().unwrap();
    SpecFile::parse(&source).unwrap().steps(&flags, 1, &Surroundings::default()).unwrap().remove(0)
}

fn sandbox(inside: &str) -> Step {
    step(&format!("    sandbox: {{ {inside} }}\n"))
}

fn refusal(policy: &Policy, step: &Step) -> String {
    let refusal = policy.apply(step).unwrap_err();
    assert!(refusal.help().is_some());
    refusal.to_string()
}

#[test]
fn without_a_policy_nothing_changes() {
    let step = sandbox("memory: 1GiB");
    assert_eq!(Policy::absent().apply(&step).unwrap(), step);
    assert_eq!((Policy::absent().effect().name(), Policy::absent().sha256()), ("none", None));
}

#[test]
fn a_step_may_tighten_the_floor_and_not_loosen_it() {
    let policy = policy("minimum-isolation: kernel\n");
    assert_eq!(policy.apply(&sandbox("minimum-isolation: vm")).unwrap().floor(), Tier::Vm);
    assert_eq!(policy.apply(&step("")).unwrap().floor(), Tier::Kernel);
    assert_eq!(
        refusal(&policy, &sandbox("minimum-isolation: container")),
        "step 1 (`It`) asks for isolation `container` (p.yml:5:35: steps[0].sandbox.minimum-isolation), \
         and the policy allows nothing below `kernel` (/etc/plimsoll/policy.yml:1:20: minimum-isolation)"
    );
    assert!(refusal(&policy, &sandbox("backend: wasm")).contains("the backend `wasm`, which reaches `container`"));
    let container = super::tests::policy("minimum-isolation: container\n");
    assert_eq!(container.apply(&sandbox("backend: wasm")).unwrap().floor(), Tier::Container);
    assert_eq!(container.apply(&sandbox("backend: gvisor")).unwrap().floor(), Tier::Kernel);
}

#[test]
fn backends_are_an_allow_list() {
    let policy = policy("backends: [gvisor]\n");
    assert_eq!(policy.apply(&step("")).unwrap().candidates(), [Backend::Gvisor]);
    assert_eq!(policy.apply(&sandbox("backend: gvisor")).unwrap().candidates(), [Backend::Gvisor]);
    assert!(refusal(&policy, &sandbox("backend: wasm")).contains("allows gvisor"));
    assert!(refusal(&policy, &sandbox("backend: firecracker")).contains("the backend `firecracker`"));
    let none = super::tests::policy("backends: []\n");
    assert!(refusal(&none, &step("")).contains("allows no backend"));
    let raised = super::tests::policy("backends: [gvisor]\nminimum-isolation: vm\n");
    assert!(refusal(&raised, &step("")).contains("reaches `kernel`"));
}

#[test]
fn maxima_bound_what_is_written_and_lower_what_is_not() {
    let policy =
        policy("maxima: { memory: 256MiB, cpus: 4, pids: 64, disk: 2GiB, output: 1MiB, timeout-minutes: 1 }\n");
    let lowered = policy.apply(&step("")).unwrap();
    assert_eq!((lowered.limits.memory, lowered.limits.pids), (256 << 20, 64));
    assert_eq!((lowered.limits.timeout, lowered.limits.disk), (Duration::from_secs(60), Limits::default().disk));
    assert_eq!(lowered.limits.written, BTreeSet::from(Limit::ALL), "a maximum must be enforced");
    assert_eq!(policy.apply(&sandbox("memory: 128MiB")).unwrap().limits.memory, 128 << 20);
    assert_eq!(policy.apply(&sandbox("memory: 256MiB")).unwrap().limits.memory, 256 << 20);
    for (inside, asked) in [
        ("memory: 257MiB", "memory 257MiB (p.yml:5:24: steps[0].sandbox.memory), and the policy allows 256MiB at most"),
        ("cpus: 4.5", "CPUs 4.5"),
        ("pids: 65", "processes 65"),
        ("disk: 3GiB", "disk 3GiB"),
        ("output: 2MiB", "output per stream 2MiB"),
    ] {
        assert!(refusal(&policy, &sandbox(inside)).contains(asked), "{inside}");
    }
    assert!(
        refusal(&policy, &step("    timeout-minutes: 2\n"))
            .contains("the time limit 2m (p.yml:5:22: steps[0].timeout-minutes)")
    );
}

#[test]
fn requirements_add_up() {
    let policy = policy("require: [network, memory-limit]\nvulnerable-engines: refuse\n");
    let step = policy.apply(&sandbox("require: [secrets]")).unwrap();
    assert_eq!(step.require, BTreeSet::from([ControlId::Secrets, ControlId::Network, ControlId::MemoryLimit]));
    assert!(step.refuse_vulnerable_engines && policy.refuses_vulnerable_engines());
    assert!(!super::tests::policy("vulnerable-engines: warn\n").refuses_vulnerable_engines());
}

#[test]
fn grants_are_bounded_the_default_of_a_runtime_too() {
    let policy = policy("grants: { filesystem: read-only }\n");
    let wasm = |grant: &str| sandbox(&format!("backend: wasm{grant}"));
    assert!(policy.apply(&wasm(", grants: { filesystem: read-only }")).is_ok());
    assert!(refusal(&policy, &wasm(", grants: { filesystem: work }")).contains("the grant `filesystem: work`"));
    let none = super::tests::policy("grants: { filesystem: none }\n");
    assert!(refusal(&none, &wasm("")).contains("`filesystem: read-only`"), "`make` would be a runtime");
}

#[test]
fn a_kernel_by_path_needs_a_list() {
    let step = sandbox("backend: firecracker, kernel: /boot/vmlinux");
    assert!(refusal(&policy("require: []\n"), &step).contains("no kernel but `distro`"));
    assert!(refusal(&policy("kernels: []\n"), &step).contains("no kernel but `distro`"));
    let digest = "a".repeat(64);
    let listed = policy(&format!("kernels: ['{digest}']\n")).apply(&step).unwrap();
    assert!(matches!(listed.kernel, Kernel::Path { listed: Some(digests), .. } if digests.len() == 1));
    assert!(policy("kernels: []\n").apply(&sandbox("kernel: distro")).is_ok());
}

#[test]
fn images_are_an_allow_list_and_symlinks_do_not_help() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    for name in ["good/a", "bad"] {
        std::fs::create_dir_all(root.join(name)).unwrap();
    }
    symlink("../bad", root.join("good/link")).unwrap();
    let policy =
        policy(&format!("images: ['dir:{}/good/*', 'ghcr.io/acme/*', 'sha256:{}']\n", root.display(), "a".repeat(64)));
    let image = |image: &str| sandbox(&format!("image: '{}'", image.replace("ROOT", root.to_str().unwrap())));
    assert!(policy.apply(&image("dir:ROOT/good/a")).is_ok());
    assert!(policy.apply(&image("dir:ROOT/good/../good/./a")).is_ok());
    assert!(policy.apply(&image("ghcr.io/acme/python:3")).is_ok());
    assert!(policy.apply(&sandbox(&format!("image: x, image-digest: 'sha256:{}'", "a".repeat(64)))).is_ok());
    assert!(policy.apply(&sandbox(&format!("image: 'r.example/x@sha256:{}'", "a".repeat(64)))).is_ok());
    assert!(policy.apply(&sandbox(&format!("image: 'r.example/x@sha256:{}'", "b".repeat(64)))).is_err());
    assert!(policy.apply(&sandbox("backend: wasm")).is_ok());
    for bad in [
        "dir:ROOT/bad",
        "dir:ROOT/good/../bad",
        "dir:ROOT/good/link",
        "dir:ROOT/good/none",
        "host",
        "ghcr.io/acme/a/b",
        "acme",
    ] {
        assert!(refusal(&policy, &image(bad)).contains("asks for the image"), "{bad}");
    }
    // Without an image gvisor takes the host's tree, so that must be listed too.
    assert!(refusal(&policy, &step("")).contains("the image `host`"));
    assert!(super::tests::policy("images: [host]\n").apply(&step("")).is_ok());
    assert!(refusal(&super::tests::policy("images: []\n"), &step("")).contains("allows none"));
}

#[test]
fn mounts_must_lie_below_a_listed_directory_and_come_back_resolved() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    for name in ["cache/wheels", "cache-of-others", "secret"] {
        std::fs::create_dir_all(root.join(name)).unwrap();
    }
    symlink("../secret", root.join("cache/link")).unwrap();
    symlink("cache", root.join("alias")).unwrap();
    let policy = policy(&format!("mounts: ['{}/cache']\n", root.display()));
    let mount = |path: &str| sandbox(&format!("mounts: [{{ path: '{}/{path}', at: /m }}]", root.display()));
    let resolved = |path: &str| policy.apply(&mount(path)).unwrap().mounts[0].path.clone();
    assert_eq!(resolved("cache/wheels"), root.join("cache/wheels"));
    assert_eq!(resolved("cache"), root.join("cache"));
    assert_eq!(resolved("alias/wheels"), root.join("cache/wheels"));
    for bad in ["secret", "cache/../secret", "cache/link", "cache-of-others", "cache/none"] {
        assert!(refusal(&policy, &mount(bad)).contains("asks for the mount"), "{bad}");
    }
    assert!(policy.apply(&step("")).is_ok());
    assert!(refusal(&super::tests::policy("mounts: []\n"), &mount("cache")).contains("allows none"));
}

#[test]
fn a_sent_mount_is_compared_by_the_name_that_its_sender_gives_it_and_nothing_is_looked_up() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    std::fs::create_dir_all(root.join("cache")).unwrap();
    std::fs::create_dir_all(root.join("secret")).unwrap();
    symlink("cache", root.join("alias")).unwrap();
    let sent = |claim: &str| {
        let mut step = sandbox("mounts: [{ path: /copy, at: /m }]");
        step.mounts[0].sent_as = Some(claim.replace("ROOT", &root.display().to_string()).into());
        step
    };
    for rule in ["cache", "alias"] {
        let policy = policy(&format!("mounts: ['{}/{rule}']\n", root.display()));
        // It need not exist here.
        for good in ["ROOT/cache", "ROOT/cache/none"] {
            assert_eq!(policy.apply(&sent(good)).unwrap().mounts[0].path, std::path::Path::new("/copy"), "{good}");
        }
        let refusals: Vec<String> = ["ROOT/secret", "ROOT/none"].map(|bad| refusal(&policy, &sent(bad))).into();
        assert_eq!(refusals[0].replace("secret", "none"), refusals[1], "no word of what exists");
        for bad in ["ROOT/cache/../secret", "cache", ""] {
            assert!(refusal(&policy, &sent(bad)).contains("no plain absolute path"), "{bad}");
        }
    }
    assert!(refusal(&policy("mounts: []\n"), &sent("ROOT/cache")).contains("allows none"));
    assert!(policy("network: none\n").apply(&sent("ROOT/cache")).is_ok());
}

#[test]
fn a_malformed_policy_is_an_error_that_names_its_place() {
    for (text, expected) in [
        ("", "/etc/plimsoll/policy.yml:1:1: empty"),
        ("minimum-isolation: strong\n", "/etc/plimsoll/policy.yml:1:20: minimum-isolation: `strong` is none of"),
        (
            "minimum_isolation: vm\n",
            "/etc/plimsoll/policy.yml:1:1: minimum_isolation: unknown key (the nearest known key is `minimum-isolation`)",
        ),
        ("maxima: { memory: lots }\n", "/etc/plimsoll/policy.yml:1:19: maxima.memory: `lots` is not a size"),
        ("engines: [abc]\n", "/etc/plimsoll/policy.yml:1:11: engines[0]: `abc` is no SHA-256 digest"),
        ("mounts: [relative]\n", "/etc/plimsoll/policy.yml:1:10: mounts[0]: not an absolute path"),
        ("network: host\n", "/etc/plimsoll/policy.yml:1:10: network: `host` is none of none"),
        ("backends: [auto]\n", "/etc/plimsoll/policy.yml:1:12: backends[0]: `auto` is none of"),
        ("vulnerable-engines: ignore\n", "/etc/plimsoll/policy.yml:1:21: vulnerable-engines: `ignore` is none of"),
        ("images: ['a[']\n", "/etc/plimsoll/policy.yml:1:10: images[0]: not a pattern"),
        ("require: network\n", "/etc/plimsoll/policy.yml:1:10: require: expected a list, found `network`"),
        ("version: 2\n", "/etc/plimsoll/policy.yml:1:10: version: version `2`"),
        ("a: [\n", "/etc/plimsoll/policy.yml:2:1: "),
    ] {
        let message = malformed(text);
        assert!(message.starts_with(expected), "{message}\nexpected {expected}");
    }
}

/// One of several lines of YAML, or nothing.
fn one_of_lines(lines: &'static [&'static str]) -> impl Strategy<Value = String> {
    prop::option::of(prop::sample::select(lines))
        .prop_map(|line| line.map(|line| format!("{line}\n")).unwrap_or_default())
}

proptest! {
    #[test]
    fn a_policy_only_ever_tightens(
        rules in (
            one_of_lines(&["minimum-isolation: container", "minimum-isolation: kernel", "minimum-isolation: vm"]),
            one_of_lines(&["backends: [gvisor]", "backends: [wasm, gvisor]", "backends: [firecracker]", "backends: []"]),
            one_of_lines(&["maxima: { memory: 256MiB, pids: 7 }", "maxima: { cpus: 0.5, timeout-minutes: 1, output: 0 }"]),
            one_of_lines(&["require: [network]", "require: [pids-limit, secrets]"]),
            one_of_lines(&["grants: { filesystem: none }", "grants: { filesystem: read-only }"]),
            one_of_lines(&["images: [host]", "images: []"]),
        ),
        keys in prop::sample::subsequence(
            vec!["memory: 300MiB", "pids: 5", "cpus: 2", "require: [teardown]", "minimum-isolation: kernel", "output: 1MiB"], 0..6),
        backend in prop::sample::select(vec!["auto", "wasm", "gvisor", "firecracker"]),
    ) {
        let rules = format!("version: 1\n{}{}{}{}{}{}", rules.0, rules.1, rules.2, rules.3, rules.4, rules.5);
        let policy = policy(&rules);
        let asked = sandbox(&format!("backend: {backend}, {}", keys.join(", ")));
        if let Ok(held) = policy.apply(&asked) {
            let rules = &policy.loaded.as_ref().unwrap().rules;
            prop_assert!(held.floor() >= asked.floor() && Some(held.floor()) >= rules.minimum_isolation);
            prop_assert!(held.required().is_superset(&asked.required()) && held.required().is_superset(&rules.require));
            prop_assert!(!held.candidates().is_empty());
            prop_assert!(held.candidates().iter().all(|backend| asked.candidates().contains(backend)));
            prop_assert!(held.grants.filesystem <= asked.grants.filesystem);
            for limit in Limit::ALL {
                prop_assert!(held.limits.amount(limit) <= asked.limits.amount(limit));
            }
            for (limit, most) in &rules.maxima {
                prop_assert!(held.limits.amount(*limit) <= *most && held.limits.written.contains(limit));
            }
            let again = policy.apply(&held).unwrap();
            prop_assert_eq!(again, held, "applying twice changes nothing");
        }
    }
}

/// A directory that stands for `/`, owned by whoever runs the test.
struct Root {
    directory: tempfile::TempDir,
    owner: u32,
}

impl Root {
    fn new() -> Root {
        let directory = tempfile::tempdir().unwrap();
        let root = Root { directory, owner: rustix::process::getuid().as_raw() };
        root.mode("", 0o755);
        std::fs::create_dir_all(root.path("etc/plimsoll")).unwrap();
        std::fs::write(root.path("etc/plimsoll/policy.yml"), "backends: [gvisor]\n").unwrap();
        root.mode("etc", 0o755);
        root.mode("etc/plimsoll", 0o755);
        root.mode("etc/plimsoll/policy.yml", 0o644);
        root
    }

    fn path(&self, below: &str) -> PathBuf {
        self.directory.path().join(below)
    }

    fn mode(&self, below: &str, mode: u32) {
        std::fs::set_permissions(self.path(below), PermissionsExt::from_mode(mode)).unwrap();
    }

    fn replace_policy_by_link(&self, target: &str) {
        let file = self.path("etc/plimsoll/policy.yml");
        std::fs::remove_file(&file).unwrap();
        symlink(target, file).unwrap();
    }

    fn load(&self) -> Result<Policy, PolicyRefusal> {
        self.load_as(Some(self.owner))
    }

    fn load_as(&self, owner: Option<u32>) -> Result<Policy, PolicyRefusal> {
        Policy::load_from(Path::new(POLICY_FILE), &Trust::for_test(self.directory.path(), owner))
    }

    fn untrusted(&self) -> String {
        match self.load() {
            Err(refusal @ PolicyRefusal::Untrusted { .. }) => refusal.to_string(),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_policy_of_the_owner_is_applied() {
    let policy = Root::new().load().unwrap();
    assert_eq!(policy.effect().name(), "applied");
    assert_eq!(policy.sha256(), Some(Sha256Digest::of(b"backends: [gvisor]\n")));
}

#[test]
fn an_absent_policy_is_none_whatever_its_directory_is() {
    let root = Root::new();
    std::fs::remove_file(root.path("etc/plimsoll/policy.yml")).unwrap();
    root.mode("etc/plimsoll", 0o777);
    assert_eq!(root.load().unwrap().effect().name(), "none");
    std::fs::remove_dir(root.path("etc/plimsoll")).unwrap();
    assert_eq!(root.load().unwrap().effect().name(), "none");
}

#[test]
fn a_policy_that_others_can_write_is_refused() {
    for below in ["", "etc", "etc/plimsoll", "etc/plimsoll/policy.yml"] {
        for bits in [0o020, 0o002] {
            let root = Root::new();
            root.mode(below, 0o755 | bits);
            assert!(root.untrusted().contains("can be written by others"), "{below} {bits:o}");
        }
    }
    // The sticky bit keeps others from replacing files, not from being there first.
    let root = Root::new();
    root.mode("etc", 0o1777);
    assert!(root.untrusted().contains("/etc can be written by others (mode 1777)"));
}

#[test]
fn a_policy_of_somebody_else_is_refused() {
    let root = Root::new();
    let refusal = root.load_as(Some(root.owner + 1)).unwrap_err();
    assert!(refusal.to_string().contains("belongs to uid"), "{refusal}");
}

#[test]
fn links_are_followed_only_through_what_is_safe() {
    let root = Root::new();
    std::fs::create_dir(root.path("srv")).unwrap();
    root.mode("srv", 0o755);
    std::fs::write(root.path("srv/policy.yml"), "require: [network]\n").unwrap();
    root.mode("srv/policy.yml", 0o644);
    for target in ["../../srv/policy.yml", "/srv/policy.yml", "../../../../../srv/./policy.yml"] {
        root.replace_policy_by_link(target);
        assert_eq!(root.load().unwrap().effect().name(), "applied", "{target}");
    }
    root.mode("srv", 0o777);
    assert!(root.untrusted().contains("/srv can be written by others"));
}

#[test]
fn a_link_to_nowhere_or_in_a_circle_is_no_absence() {
    let root = Root::new();
    for target in ["nowhere.yml", "policy.yml", "/none/policy.yml"] {
        root.replace_policy_by_link(target);
        assert!(matches!(root.load(), Err(PolicyRefusal::Unreadable { .. })), "{target}");
    }
}

#[test]
fn a_policy_that_is_no_regular_file_is_refused() {
    let root = Root::new();
    let file = root.path("etc/plimsoll/policy.yml");
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    root.mode("etc/plimsoll/policy.yml", 0o755);
    assert!(root.untrusted().contains("not a regular file"));
    std::fs::remove_dir(&file).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, 0o644.into(), 0).unwrap();
    assert!(root.untrusted().contains("not a regular file"), "and a pipe does not hang");
    std::fs::remove_file(&file).unwrap();
    std::fs::remove_dir(root.path("etc/plimsoll")).unwrap();
    std::fs::write(root.path("etc/plimsoll"), "").unwrap();
    assert!(root.untrusted().contains("/etc/plimsoll is not a regular file"));
}

#[test]
fn a_damaged_record_of_engines_is_told_from_a_policy() {
    let root = Root::new();
    std::fs::write(root.path("etc/plimsoll/engines.json"), "{").unwrap();
    root.mode("etc/plimsoll/engines.json", 0o644);
    let error =
        recorded(Path::new(ENGINES_FILE), &Trust::for_test(root.directory.path(), Some(root.owner))).unwrap_err();
    assert_eq!(error.reason(), "policy-malformed");
    assert!(crate::text::chain(&error).contains("engines.json, is malformed: EOF"), "{error:?}");
    assert!(error.help().unwrap().contains("set up the engines again"));
}

#[test]
fn a_policy_that_this_user_cannot_read_is_refused() {
    if rustix::process::getuid().is_root() {
        println!("skipped: root reads everything; a plain user's run of the tests covers it");
        return;
    }
    let root = Root::new();
    root.mode("etc/plimsoll/policy.yml", 0o200);
    assert!(matches!(root.load(), Err(PolicyRefusal::Unreadable { .. })));
    root.mode("etc/plimsoll/policy.yml", 0o644);
    root.mode("etc/plimsoll", 0o600);
    assert!(matches!(root.load(), Err(PolicyRefusal::Unreadable { .. })));
    root.mode("etc/plimsoll", 0o755);
}

#[test]
fn malformed_long_and_binary_policies_are_refused() {
    let root = Root::new();
    for bytes in
        [b"".to_vec(), b"\xff".to_vec(), b"unknown: 1\n".to_vec(), vec![b'#'; (1 << 20) + 1], b"a: ${{ x }}\n".to_vec()]
    {
        std::fs::write(root.path("etc/plimsoll/policy.yml"), bytes).unwrap();
        assert!(matches!(root.load(), Err(PolicyRefusal::Malformed(_))));
    }
}

#[test]
fn under_a_foreign_user_namespace_everything_is_unverified() {
    let root = Root::new();
    let policy = root.load_as(None).unwrap();
    assert_eq!((policy.effect().name(), policy.sha256().is_some()), ("unverified", true));
    assert!(policy.apply(&sandbox("backend: wasm")).is_err(), "its rules still hold");
    root.mode("etc", 0o777);
    assert!(root.load_as(None).is_err());
    std::fs::remove_file(root.path("etc/plimsoll/policy.yml")).unwrap();
    assert_eq!(root.load_as(None).unwrap().effect().name(), "unverified");
}

#[test]
fn only_the_whole_identity_map_is_one() {
    assert!(is_identity("         0          0 4294967295\n"));
    for map in
        ["", "0 1000 1\n", "0 0 65536\n", "0 100000 65536\n", "0 0 4294967295\n1 1 1\n", "1 1 4294967294\n", "garbage"]
    {
        assert!(!is_identity(map), "{map}");
    }
}
