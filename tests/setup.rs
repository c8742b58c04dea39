//! `plimsoll setup service`, into a directory in the place of a host, and the units by systemd's own judgement.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr, reason = "tests")]

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use common::{available, installed, plimsoll, program};
use plimsoll::report::sign::{PublicKey, SigningKey};

const UNITS: [&str; 2] = ["etc/systemd/system/plimsoll.service", "etc/systemd/system/plimsoll.socket"];

struct Host(tempfile::TempDir);

impl Host {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, below: &str) -> PathBuf {
        self.0.path().join(below)
    }

    fn setup(&self, arguments: &[&str]) -> common::Ran {
        let root = self.0.path().to_str().unwrap();
        plimsoll(["setup", "service", "--root", root]).args(arguments).run()
    }

    fn read(&self, below: &str) -> String {
        fs::read_to_string(self.path(below)).unwrap()
    }

    fn keys(&self) -> Vec<PublicKey> {
        PublicKey::load(&self.path("etc/plimsoll/service.pub")).unwrap()
    }

    fn key(&self) -> SigningKey {
        SigningKey::load(&self.path("etc/plimsoll/service.key")).unwrap()
    }

    fn files(&self) -> Vec<(PathBuf, Vec<u8>)> {
        fn walk(at: &Path, found: &mut Vec<(PathBuf, Vec<u8>)>) {
            for entry in fs::read_dir(at).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() { walk(&path, found) } else { found.push((path.clone(), fs::read(&path).unwrap())) }
            }
        }
        let mut found = Vec::new();
        walk(self.0.path(), &mut found);
        found.sort();
        found
    }
}

#[test]
fn it_makes_key_policy_and_units_and_doing_it_again_changes_nothing() {
    let host = Host::new();
    let ran = host.setup(&["--with-key"]).exits(0).prints("made ").prints("next, on each host");
    assert!(ran.stdout.contains("not there yet"), "the program is not in this image: {}", ran.stdout);
    let mode = |path: &str| fs::metadata(host.path(path)).unwrap().mode() & 0o7777;
    assert_eq!(mode("etc/plimsoll/service.key"), 0o600);
    for path in ["etc/plimsoll/service.pub", "etc/plimsoll/policy.yml", UNITS[0], UNITS[1]] {
        assert_eq!(mode(path), 0o644, "{path}");
    }
    assert_eq!(host.keys(), [host.key().public().clone()]);
    assert!(ran.stdout.contains(host.keys()[0].id()), "{}", ran.stdout);
    assert!(host.read(UNITS[0]).contains("\nExecStart=/usr/local/bin/plimsoll serve\n"));
    let before = host.files();
    assert_eq!(before.len(), 5, "{before:?}");
    let again = host.setup(&["--with-key"]).exits(0);
    assert!(!again.stdout.contains("made ") && !again.stdout.contains("replaced "), "{}", again.stdout);
    assert_eq!(host.files(), before);
}

/// What is in an image is in each of its copies.
#[test]
fn an_image_gets_no_key_unless_it_is_asked_for() {
    let host = Host::new();
    host.setup(&[]).exits(0).prints("plimsoll setup service && systemctl enable");
    assert!(!host.path("etc/plimsoll/service.key").exists() && !host.path("etc/plimsoll/service.pub").exists());
    assert!(host.path(UNITS[1]).exists());
    host.setup(&["--rotate-key"]).exits(2).says("an image has no key");
}

#[test]
fn a_dry_run_says_the_same_and_changes_nothing() {
    let host = Host::new();
    host.setup(&["--with-key", "--dry-run", "--group", "ci"]).exits(0).prints("would make").prints("the group ci");
    assert!(host.files().is_empty() && fs::read_dir(host.0.path()).unwrap().count() == 0);
    host.setup(&["--with-key"]).exits(0);
    let before = host.files();
    host.setup(&["--with-key", "--rotate-key", "--dry-run"]).exits(0).prints("would replace");
    assert_eq!(host.files(), before);
}

#[test]
fn a_rotation_keeps_the_old_public_key_and_destroys_the_private_one() {
    let host = Host::new();
    host.setup(&["--with-key"]).exits(0);
    let first = host.key().public().clone();
    // Whoever holds the old file open, holds zeros.
    let held = fs::File::open(host.path("etc/plimsoll/service.key")).unwrap();
    host.setup(&["--with-key", "--rotate-key"]).exits(0).prints("the old private key is destroyed");
    assert_eq!(held.metadata().unwrap().len(), 0);
    let second = host.key().public().clone();
    assert_ne!(first, second);
    assert_eq!(host.keys(), [second.clone(), first.clone()]);
    let text = host.read("etc/plimsoll/service.pub");
    assert!(text.contains(&format!("# key {}, made ", second.id())), "{text}");
    let line = text.lines().find(|line| line.contains(first.id())).unwrap();
    assert!(line.contains("made ") && line.contains(", replaced "), "{line}");
    host.setup(&["--with-key", "--rotate-key"]).exits(0);
    assert_eq!(host.keys(), [host.key().public().clone(), second, first]);
    let text = host.read("etc/plimsoll/service.pub");
    assert_eq!(text.matches("replaced").count(), 2, "each was replaced once: {text}");
    assert_eq!(host.files().len(), 5, "nothing else is left");
}

#[test]
fn what_a_killed_set_up_left_is_put_right() {
    let host = Host::new();
    host.setup(&["--with-key"]).exits(0);
    let key = host.key().public().clone();
    // Killed after it named the new key in service.pub, and while it wrote the private one.
    let stray = SigningKey::generate().unwrap().public().clone();
    fs::write(host.path("etc/plimsoll/service.pub"), format!("{}{}", stray.pem(), key.pem())).unwrap();
    fs::write(host.path("etc/plimsoll/service.key.new"), "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQ").unwrap();
    host.setup(&["--with-key"]).exits(0);
    assert_eq!(host.keys()[0], key, "the one in use is first");
    assert!(!host.path("etc/plimsoll/service.key.new").exists());
    fs::remove_file(host.path("etc/plimsoll/service.pub")).unwrap();
    host.setup(&["--with-key"]).exits(0);
    assert_eq!(host.keys(), [key]);
}

#[test]
fn a_key_that_leaked_is_refused_until_it_is_rotated() {
    let host = Host::new();
    host.setup(&["--with-key"]).exits(0);
    let path = host.path("etc/plimsoll/service.key");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let ran = host.setup(&["--with-key"]).exits(1).says("mode 0644").says("--rotate-key");
    assert!(ran.stderr.contains(path.to_str().unwrap()), "the real name is said: {}", ran.stderr);
    let old = host.keys();
    host.setup(&["--with-key", "--rotate-key"]).exits(0);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    assert_eq!(host.keys()[1..], old);
    // A link is replaced, not followed.
    let elsewhere = host.path("elsewhere.key");
    fs::rename(&path, &elsewhere).unwrap();
    symlink(&elsewhere, &path).unwrap();
    host.setup(&["--with-key"]).exits(1).says("is a symbolic link");
    host.setup(&["--with-key", "--rotate-key"]).exits(0);
    assert!(fs::symlink_metadata(&path).unwrap().is_file() && fs::metadata(&elsewhere).unwrap().len() > 0);
    fs::write(&path, "").unwrap();
    host.setup(&["--with-key"]).exits(1).says("no Ed25519 private key");
    host.setup(&["--with-key", "--rotate-key"]).exits(0);
    assert_eq!(host.keys()[0], *host.key().public());
}

#[test]
fn what_is_the_operators_is_left_alone() {
    let host = Host::new();
    fs::create_dir_all(host.path("etc/plimsoll")).unwrap();
    fs::write(host.path("etc/plimsoll/policy.yml"), "minimum-isolation: vm\n").unwrap();
    host.setup(&["--with-key"]).exits(0).prints("unchanged");
    assert_eq!(host.read("etc/plimsoll/policy.yml"), "minimum-isolation: vm\n");
    // A unit of somebody else's; one of ours is replaced.
    fs::write(host.path(UNITS[0]), "[Service]\nExecStart=/bin/true\n").unwrap();
    host.setup(&["--with-key"]).exits(1).says("was not made by").says("drop-in");
    assert_eq!(host.read(UNITS[0]), "[Service]\nExecStart=/bin/true\n");
    fs::remove_file(host.path(UNITS[0])).unwrap();
    host.setup(&["--exec", "/opt/plimsoll"]).exits(0);
    host.setup(&[]).exits(0).prints("replaced ");
    assert!(host.read(UNITS[0]).contains("ExecStart=/usr/local/bin/plimsoll serve"));
    // A file of keys that is none: nothing is thrown away.
    fs::write(host.path("etc/plimsoll/service.pub"), "not a key\n").unwrap();
    host.setup(&["--with-key"]).exits(1).says("holds no public key").says("service.pub.old");
    assert_eq!(host.read("etc/plimsoll/service.pub"), "not a key\n");
}

#[test]
fn a_socket_for_a_group_stays_one() {
    let host = Host::new();
    // As `--group ci` writes it, without making a group on this machine.
    host.setup(&[]).exits(0);
    let unit = host.read(UNITS[1]);
    assert!(unit.contains("\nSocketMode=0666\n"));
    let grouped = unit.replace("SocketMode=0666\n", "SocketMode=0660\nSocketGroup=ci\n");
    fs::write(host.path(UNITS[1]), &grouped).unwrap();
    host.setup(&[]).exits(0);
    assert_eq!(host.read(UNITS[1]), grouped, "not opened to everybody by doing it again");
    host.setup(&["--group", "x\nSocketMode=0777", "--dry-run"]).exits(2).says("no group's name");
}

#[test]
fn links_in_an_image_do_not_lead_out_of_it() {
    let host = Host::new();
    let outside = tempfile::tempdir().unwrap();
    fs::create_dir(host.path("etc")).unwrap();
    symlink(outside.path(), host.path("etc/plimsoll")).unwrap();
    let ran = host.setup(&["--with-key"]);
    assert_ne!(ran.code(), 0, "{}", ran.all());
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    // One that stays inside is followed, as the image's own system would.
    fs::remove_file(host.path("etc/plimsoll")).unwrap();
    fs::create_dir_all(host.path("usr/etc/plimsoll")).unwrap();
    symlink("/usr/etc/plimsoll", host.path("etc/plimsoll")).unwrap();
    host.setup(&["--with-key"]).exits(0);
    assert!(host.path("usr/etc/plimsoll/service.key").exists());
}

#[test]
fn a_directory_that_others_can_write_is_refused() {
    let host = Host::new();
    fs::create_dir_all(host.path("etc/plimsoll")).unwrap();
    fs::set_permissions(host.path("etc/plimsoll"), fs::Permissions::from_mode(0o777)).unwrap();
    host.setup(&["--with-key"]).exits(1).says("can be written by others");
    assert!(!host.path("etc/plimsoll/service.key").exists());
}

#[test]
fn the_example_policy_is_one_and_sets_no_rule() {
    let host = Host::new();
    host.setup(&[]).exits(0);
    let text = host.read("etc/plimsoll/policy.yml");
    let rules: Vec<&str> = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).collect();
    assert_eq!(rules, ["version: 1"]);
    // What is commented out are rules that a policy may have.
    let schema: serde_json::Value =
        serde_json::from_str(&plimsoll(["schema", "policy"]).run().exits(0).stdout).unwrap();
    for line in text.lines() {
        let Some((key, _)) = line.strip_prefix("# ").and_then(|rule| rule.split_once(": ")) else { continue };
        if !key.contains(' ') {
            assert!(schema["properties"][key].is_object(), "{key} is no key of a policy");
        }
    }
}

/// `verify` says what it found; with a key that is the wrong one too.
#[test]
fn keys_that_are_none_are_usage_errors() {
    let dir = tempfile::tempdir().unwrap();
    let report = dir.path().to_str().unwrap();
    plimsoll(["verify", report, "--key", "/nonexistent.pub"]).run().exits(2).says("failed to read the key");
    let host = Host::new();
    host.setup(&["--with-key"]).exits(0);
    let private = host.path("etc/plimsoll/service.key");
    plimsoll(["verify", report, "--key", private.to_str().unwrap()]).run().exits(2).says("is a private key");
    let public = host.path("etc/plimsoll/service.pub");
    plimsoll(["verify", report, "--key", public.to_str().unwrap()]).run().exits(15).prints("report.json");
}

/// The units, in a directory where their program is.
fn units() -> Option<(Host, String)> {
    if !available("systemd-analyze", installed("systemd-analyze")) {
        return None;
    }
    let host = Host::new();
    host.setup(&["--exec", "/bin/true"]).exits(0);
    let directory = host.path("etc/systemd/system").to_str().unwrap().to_owned();
    Some((host, directory))
}

#[test]
fn systemd_finds_no_fault_in_the_units() {
    let Some((_host, directory)) = units() else { return };
    let units = ["plimsoll.service", "plimsoll.socket"].map(|unit| format!("{directory}/{unit}"));
    let ran = program("systemd-analyze").args(["verify", "--man=no", "--recursive-errors=no"]).args(&units).run();
    // It names faults and may still exit with 0.
    let about_ours: Vec<&str> = ran.stderr.lines().filter(|line| line.contains("plimsoll")).collect();
    assert!(about_ours.is_empty() && ran.code() == 0, "{}", ran.all());
}

/// A service that lacked one would refuse every step; the firecracker backend's are tried in the KVM lab.
#[test]
fn the_capabilities_that_the_unit_leaves_are_enough() {
    let root = rustix::process::geteuid().is_root();
    let why = if root { installed("setpriv") } else { Err("it takes root to have capabilities".to_owned()) };
    if !available("service", why) {
        return;
    }
    let host = Host::new();
    host.setup(&[]).exits(0);
    let unit = host.read(UNITS[0]);
    let lines = unit.lines().filter_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    let left: Vec<String> =
        lines.flat_map(str::split_whitespace).map(|c| c.replace("CAP_", "+").to_lowercase()).collect();
    assert_eq!(left.len(), 16, "docs/signing.md says how many");
    let set = format!("-all,{}", left.join(","));
    fs::create_dir(host.path("artifact")).unwrap();
    fs::write(host.path("artifact/x.wat"), "(module (memory (export \"memory\") 1) (func (export \"_start\")))")
        .unwrap();
    for (backend, run) in [("wasm", "x.wat"), ("gvisor", "id")] {
        if common::backend(backend) {
            let plimsoll = [common::binary().to_str().unwrap(), "run", "--service", "never", "--artifact", "artifact"];
            let ran = program("setpriv").args(["--bounding-set", &set]).args(plimsoll);
            ran.args(["--backend", backend, "--run", run]).dir(host.0.path()).run().exits(0);
        }
    }
}

/// The exposure that docs/signing.md states; not a goal in itself, see the unit on what stays off.
const EXPOSURE: f64 = 7.9;

#[test]
fn the_exposure_is_what_the_documentation_says() {
    let Some((_host, directory)) = units() else { return };
    let unit = format!("{directory}/plimsoll.service");
    let ran = program("systemd-analyze").args(["security", "--offline=true", "--no-pager", &unit]).run();
    let line = ran.stdout.lines().find(|line| line.contains("Overall exposure level")).unwrap_or_default().to_owned();
    let score = line.rsplit(": ").next().and_then(|rest| rest.split(' ').next()).and_then(|n| n.parse::<f64>().ok());
    let score = score.unwrap_or_else(|| panic!("no score: {}", ran.all()));
    assert!(score <= EXPOSURE, "{line}");
    let page = fs::read_to_string(common::repository().join("docs/signing.md")).unwrap();
    assert!(page.contains(&format!("at most {EXPOSURE}")), "docs/signing.md does not say {EXPOSURE}");
}
