//! Directory artifacts: copied, never followed out of.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use plimsoll::artifact::{Budget, Digest, Error, FileId, Format, Rule, Summary, directory};

use crate::support::Place;

struct Source {
    root: tempfile::TempDir,
}

impl Source {
    fn new(files: &[(&str, &str)]) -> Self {
        let root = tempfile::tempdir().unwrap();
        let source = Source { root };
        for (path, content) in files {
            source.file(path, content);
        }
        source
    }

    fn file(&self, path: &str, content: &str) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn path(&self) -> &Path {
        self.root.path()
    }

    fn copy_with(
        &self,
        budget: &Budget,
        expected: Option<Digest>,
        exclude: &[FileId],
    ) -> (Place, Result<Summary, Error>) {
        let place = Place::new();
        let source = File::open(self.path()).unwrap();
        let result = directory::copy(source.as_fd(), place.open().into(), budget, expected, exclude);
        place.assert_neighbours();
        if result.is_err() {
            assert!(place.listing().is_empty(), "left after a refusal");
        }
        (place, result)
    }

    fn copied(&self) -> (Place, Summary) {
        let (place, result) = self.copy_with(&Budget::default(), None, &[]);
        (place, result.unwrap_or_else(|e| panic!("{e}")))
    }

    fn refused(&self, rule: Rule, member: &str) {
        match self.copy_with(&Budget::default(), None, &[]).1 {
            Err(Error::Rejected(rejection)) => {
                assert_eq!((rejection.rule, rejection.member.as_deref()), (rule, Some(member)), "{rejection}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_directory_is_copied_with_its_execute_bits() {
    let source = Source::new(&[("a/b/c.txt", "content"), ("run.sh", "#!/bin/sh"), (".hidden", "kept")]);
    fs::set_permissions(source.path().join("run.sh"), fs::Permissions::from_mode(0o4750)).unwrap();
    fs::create_dir(source.path().join("empty")).unwrap();
    symlink("a/b/c.txt", source.path().join("link")).unwrap();
    let (place, summary) = source.copied();
    assert_eq!(place.text("link"), "content");
    assert_eq!(place.text(".hidden"), "kept");
    assert_eq!((place.mode("run.sh"), place.mode("a"), place.mode("a/b/c.txt")), (0o777, 0o777, 0o666));
    assert_eq!(place.listing()["empty"], "dir");
    assert_eq!((summary.format, summary.files, summary.bytes), (Format::Directory, 3, 20));
}

#[test]
fn git_is_never_carried_at_any_depth_or_case() {
    let source = Source::new(&[
        (".git/config", "token"),
        ("submodule/.git", "gitdir: ../.git/modules/x"),
        ("vendored/.GIT/config", "token"),
        ("x/.Git/y", ""),
        (".gitignore", "target"),
        (".github/workflows/ci.yml", "on: push"),
        ("a.git/x", "ordinary"),
    ]);
    symlink("/root/.git", source.path().join("x/.gIT")).unwrap();
    let (place, _) = source.copied();
    let files: Vec<String> =
        place.listing().into_iter().filter(|(_, kind)| kind != "dir").map(|(path, _)| path).collect();
    assert_eq!(files, [".github/workflows/ci.yml", ".gitignore", "a.git/x"]);
}

#[test]
fn links_out_of_the_directory_are_refused_not_followed() {
    for target in ["/etc/passwd", "../secret", "d/../../secret"] {
        let source = Source::new(&[("d/x", "1")]);
        symlink(target, source.path().join("link")).unwrap();
        source.refused(Rule::Symlink, "link");
    }
    let linked = Source::new(&[("real/x", "1")]);
    symlink("real", linked.path().join("dir")).unwrap();
    let (place, summary) = linked.copied();
    assert_eq!((place.listing()["dir"].as_str(), summary.files), ("-> real", 1), "a linked directory is copied once");
}

#[test]
fn sockets_and_fifos_are_refused_by_name() {
    let with_fifo = Source::new(&[("d/x", "")]);
    rustix::fs::mknodat(
        rustix::fs::CWD,
        with_fifo.path().join("d/pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    with_fifo.refused(Rule::Kind, "d/pipe");
    let with_socket = Source::new(&[("x", "")]);
    let _socket = std::os::unix::net::UnixListener::bind(with_socket.path().join("agent.sock")).unwrap();
    with_socket.refused(Rule::Kind, "agent.sock");
}

#[test]
fn the_destination_and_what_the_caller_excludes_are_left_out() {
    let source = Source::new(&[("x", "1"), ("plimsoll-report/report.json", "{}"), ("deep/out/y", "2"), ("out/z", "3")]);
    let report = File::open(source.path().join("plimsoll-report")).unwrap();
    let destination = source.path().join("deep/state");
    fs::create_dir(&destination).unwrap();
    let exclude = [FileId::of(&report).unwrap()];
    let from = File::open(source.path()).unwrap();
    let into = File::open(&destination).unwrap();
    let summary = directory::copy(from.as_fd(), into.into(), &Budget::default(), None, &exclude).unwrap();
    assert_eq!(summary.files, 3);
    assert!(destination.join("deep/out/y").exists() && !destination.join("plimsoll-report").exists());
    assert!(!destination.join("deep/state").exists(), "a copy within the copy");
}

#[test]
fn budgets_and_collisions_hold_for_directories_too() {
    let source = Source::new(&[("a/b", "12345"), ("c", "12345")]);
    for (budget, rule) in [
        (Budget { bytes: 9, ..Budget::default() }, Rule::BudgetBytes),
        (Budget { files: 2, ..Budget::default() }, Rule::BudgetFiles),
        (Budget { depth: 1, ..Budget::default() }, Rule::BudgetDepth),
    ] {
        match source.copy_with(&budget, None, &[]).1 {
            Err(Error::Rejected(rejection)) => {
                assert!(rejection.rule == rule && rejection.member.is_some(), "{rejection}")
            }
            other => panic!("{other:?}"),
        }
    }
    source.copy_with(&Budget { bytes: 10, files: 3, depth: 2, ..Budget::default() }, None, &[]).1.unwrap();
    Source::new(&[("README", ""), ("readme", "")]).refused(Rule::NameCollision, "readme");
    let sparse = Source::new(&[]);
    File::create(sparse.path().join("sparse")).unwrap().set_len(1 << 40).unwrap();
    sparse.refused(Rule::BudgetBytes, "sparse");
}

#[test]
fn names_that_are_no_text_are_refused() {
    use std::os::unix::ffi::OsStrExt;
    let source = Source::new(&[]);
    fs::write(source.path().join(std::ffi::OsStr::from_bytes(b"caf\xe9")), "").unwrap();
    source.refused(Rule::Path, "caf\\xe9");
}

#[test]
fn the_digest_is_of_the_content_and_can_be_required() {
    let source = Source::new(&[("a/x", "1"), ("b", "2")]);
    let first = source.copied().1.sha256;
    fs::set_permissions(source.path().join("b"), fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(source.copied().1.sha256, first, "modes beyond the execute bit don't count");
    source.copy_with(&Budget::default(), Some(first), &[]).1.unwrap();
    source.file("b", "3");
    let changed = source.copied().1.sha256;
    assert_ne!(changed, first);
    match source.copy_with(&Budget::default(), Some(first), &[]).1 {
        Err(Error::Rejected(rejection)) => assert_eq!(rejection.rule, Rule::Sha256),
        other => panic!("{other:?}"),
    }
    // Written down, so that a change of the scheme is a decision.
    let known = Source::new(&[("a/x", "1"), ("b", "2")]).copied().1.sha256;
    assert_eq!(known, first);
}

#[test]
fn a_destination_that_holds_something_is_left_as_it_is() {
    let place = Place::new();
    fs::write(place.out().join("mine"), "kept").unwrap();
    let source = Source::new(&[("x", "")]);
    let from = File::open(source.path()).unwrap();
    let result = directory::copy(from.as_fd(), place.open().into(), &Budget::default(), None, &[]);
    assert!(matches!(result, Err(Error::Failed { .. })), "{result:?}");
    assert_eq!(place.text("mine"), "kept");
}
