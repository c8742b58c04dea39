//! Claiming, replacing and leaving alone.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use plimsoll::report::write::{ClaimError, Owner};
use plimsoll::report::{OutputsDir, ReportDir};

use crate::samples;

fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_run_leaves_its_files_and_nothing_beside() {
    let root = tempfile::tempdir().unwrap();
    samples::passed().commit(root.path());
    assert_eq!(names(root.path()), ["outputs", "report"]);
    let report = root.path().join("report");
    assert_eq!(names(&report), [".gitignore", "junit.xml", "report.html", "report.json", "steps", "summary.md"]);
    assert_eq!(names(&report.join("steps/01-unit-tests-of-the-generated-patch")), ["stderr.log", "stdout.log"]);
    assert!(fs::read_to_string(report.join(".gitignore")).unwrap().ends_with("\n*\n"));
    let outputs = root.path().join("outputs/01-unit-tests-of-the-generated-patch");
    assert_eq!(names(&outputs), ["out", "report.xml"]);
    assert_eq!(fs::metadata(outputs.join("report.xml")).unwrap().mode() & 0o111, 0);
}

#[test]
fn the_next_run_replaces_the_whole() {
    let root = tempfile::tempdir().unwrap();
    samples::passed().commit(root.path());
    let mut next = samples::refused();
    next.commit(root.path());
    assert_eq!(names(root.path()), ["report"], "outputs of the run before must be gone");
    assert!(!root.path().join("report/steps").exists());
    assert!(fs::read_to_string(root.path().join("report/report.json")).unwrap().contains("\"refused\""));
}

#[test]
fn an_old_report_is_invalid_from_the_claim_on() {
    let root = tempfile::tempdir().unwrap();
    samples::passed().commit(root.path());
    let path = root.path().join("report");
    let claimed = ReportDir::claim(&path).unwrap();
    assert_eq!(names(&path), [".gitignore"]);
    fs::write(claimed.step("01-x").unwrap().join("stdout.log"), "half").unwrap();
    assert!(claimed.staging().join("steps/01-x/stdout.log").exists());
    drop(claimed);
    assert_eq!(names(root.path()), ["outputs", "report"]);
    assert_eq!(names(&path), [".gitignore"], "dropped without a commit, no report may stand");
    samples::passed().commit(root.path());
}

#[test]
fn a_link_in_its_place_is_refused_and_what_it_names_is_untouched() {
    let root = tempfile::tempdir().unwrap();
    let victim = root.path().join("victim");
    fs::create_dir(&victim).unwrap();
    fs::write(victim.join("report.json"), "precious").unwrap();
    symlink(&victim, root.path().join("link")).unwrap();
    symlink(root.path().join("nowhere"), root.path().join("dangling")).unwrap();
    for name in ["link", "dangling"] {
        let error = ReportDir::claim(&root.path().join(name)).unwrap_err();
        assert!(error.to_string().contains("is a symbolic link"), "{error}");
        assert!(!error.help().is_empty());
        assert!(OutputsDir::claim(&root.path().join(name)).is_err());
    }
    assert_eq!(fs::read_to_string(victim.join("report.json")).unwrap(), "precious");
    assert_eq!(names(root.path()), ["dangling", "link", "victim"]);
}

#[test]
fn what_is_not_ours_is_left_alone() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    fs::write(at("file"), "x").unwrap();
    fs::create_dir_all(at("sources/src")).unwrap();
    fs::write(at("sources/report.json"), "mine").unwrap();
    // Our marker, and one file too many.
    samples::passed().commit(root.path());
    fs::write(at("report/notes.txt"), "mine").unwrap();
    fs::write(at("outputs/notes.txt"), "mine").unwrap();
    for (name, why) in [
        ("file", "is not a directory"),
        ("sources", "no .gitignore of plimsoll's"),
        ("report", "has `notes.txt` in it"),
    ] {
        let error = ReportDir::claim(&at(name)).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
    assert!(OutputsDir::claim(&at("outputs")).unwrap_err().to_string().contains("notes.txt"));
    assert!(OutputsDir::claim(&at("report")).is_err(), "a report directory is no outputs directory");
    assert!(at("report/report.json").exists() && at("sources/src").exists());
    assert!(matches!(ReportDir::claim(Path::new("/")), Err(ClaimError::Unusable(_))));
    assert!(matches!(ReportDir::claim(&at("..")), Err(ClaimError::Unusable(_))));
    // Harmless: an empty directory, and one in a place that is not there yet.
    fs::create_dir(at("empty")).unwrap();
    drop(ReportDir::claim(&at("empty")).unwrap());
    drop(ReportDir::claim(&at("new/deep/report")).unwrap());
}

#[test]
fn links_inside_are_removed_and_never_followed() {
    let root = tempfile::tempdir().unwrap();
    samples::passed().commit(root.path());
    let victim = root.path().join("victim");
    fs::create_dir(&victim).unwrap();
    fs::write(victim.join("precious"), "x").unwrap();
    let report = root.path().join("report");
    fs::remove_file(report.join("report.json")).unwrap();
    symlink(victim.join("precious"), report.join("report.json")).unwrap();
    let step = fs::read_dir(report.join("steps")).unwrap().next().unwrap().unwrap().path();
    fs::remove_file(step.join("stdout.log")).unwrap();
    symlink(&victim, step.join("stdout.log")).unwrap();
    fs::remove_file(report.join("junit.xml")).unwrap();
    symlink(&victim, report.join("junit.xml")).unwrap();
    samples::passed().commit(root.path());
    assert!(victim.join("precious").exists());
    assert!(fs::symlink_metadata(report.join("report.json")).unwrap().is_file());
}

#[test]
fn a_strangers_file_among_the_logs_is_kept() {
    let root = tempfile::tempdir().unwrap();
    samples::passed().commit(root.path());
    let path = root.path().join("report");
    let theirs = path.join("steps/notes.txt");
    fs::write(&theirs, "x").unwrap();
    let error = ReportDir::claim(&path).unwrap_err();
    assert!(matches!(error, ClaimError::Refused { .. }) && error.to_string().contains("notes.txt"), "{error}");
    assert!(theirs.exists());
}

#[test]
fn a_second_run_in_the_same_directory_is_turned_away() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("report");
    let first = ReportDir::claim(&path).unwrap();
    let error = ReportDir::claim(&path).unwrap_err();
    assert!(matches!(error, ClaimError::Busy { .. }), "{error}");
    assert!(first.staging().exists());
    drop(first);
    drop(ReportDir::claim(&path).unwrap());
}

#[test]
fn what_a_killed_run_left_is_removed_and_a_namesake_is_not() {
    let root = tempfile::tempdir().unwrap();
    let stale = root.path().join(".report.plimsoll-0123456789abcdef");
    fs::create_dir_all(stale.join("steps/01-x")).unwrap();
    let namesakes = [".report.plimsoll-short", ".report.plimsoll-0123456789abcdeg", ".other.plimsoll-0123456789abcdef"];
    for name in namesakes {
        fs::create_dir(root.path().join(name)).unwrap();
    }
    drop(ReportDir::claim(&root.path().join("report")).unwrap());
    assert!(!stale.exists());
    assert!(namesakes.iter().all(|n| root.path().join(n).exists()));
}

#[test]
fn a_directory_that_changes_hands_during_the_run_is_not_replaced() {
    let root = tempfile::tempdir().unwrap();
    samples::passed().commit(root.path());
    let path = root.path().join("report");
    let claimed = ReportDir::claim(&path).unwrap();
    fs::rename(&path, root.path().join("moved")).unwrap();
    fs::create_dir(&path).unwrap();
    fs::write(path.join("precious"), "x").unwrap();
    let error = claimed.commit(&samples::passed().report).unwrap_err();
    assert!(error.to_string().contains("in place"), "{error}");
    assert!(path.join("precious").exists());
}

#[test]
fn steps_have_directories_of_their_own_names_only() {
    let root = tempfile::tempdir().unwrap();
    let report = ReportDir::claim(&root.path().join("report")).unwrap();
    let outputs = OutputsDir::claim(&root.path().join("outputs")).unwrap();
    for bad in ["", "..", "1-x", "01", "01-../x", "01-a/b", "x", "/01-x"] {
        assert!(report.step(bad).is_err() && outputs.step(bad).is_err(), "{bad:?}");
    }
    assert!(report.step("01-a").is_ok() && report.step("01-a").is_err());
    assert!(outputs.step("01-a").is_ok());
}

#[test]
fn files_belong_to_the_owner_in_the_end() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root gives files away");
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("report");
    let owner = Owner { uid: 12_345, gid: 12_346 };
    for _ in 0..2 {
        let dir = ReportDir::claim_for(&path, owner).unwrap();
        dir.step("01-a").unwrap();
        dir.commit(&samples::cancelled().report).unwrap();
        for name in ["", "report.json", "steps", "steps/01-a", ".gitignore"] {
            let meta = fs::symlink_metadata(path.join(name)).unwrap();
            assert_eq!((meta.uid(), meta.gid()), (12_345, 12_346), "{name}");
        }
    }
    // Another user's directory is refused, also by root.
    let error = ReportDir::claim(&path).unwrap_err();
    assert!(error.to_string().contains("belongs to another user"), "{error}");
    fs::set_permissions(root.path(), fs::Permissions::from_mode(0o700)).unwrap();
}
