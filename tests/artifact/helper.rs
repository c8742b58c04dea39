//! The unpacking helper as a process of its own: this test binary, started again, without a jail.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use plimsoll::artifact::helper::{Job, unpack_in_helper};
use plimsoll::artifact::{Acquire, Budget, Digest, Error, Purpose, Request, Rule, Summary, acquire};

use crate::support::{Place, Tar, request, zst};

/// Says to the started test binary which helper it is.
const ROLE: &str = "PLIMSOLL_TEST_HELPER";

/// Not a test: the helper's side, when started as one.
#[test]
fn helper_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let channel = io::stdin().as_fd().try_clone_to_owned().unwrap();
    if role == "mute" {
        return;
    }
    let babble = channel.try_clone().unwrap();
    let job = Job::receive(channel).unwrap();
    match role.as_str() {
        "honest" => job.run().unwrap(),
        "hangs" => std::thread::sleep(Duration::from_secs(600)),
        "dies" => {
            scribble(&job);
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
        }
        "leaves" => {
            scribble(&job);
            // Deep, and without permissions.
            let root = job.destination();
            let mut at =
                rustix::fs::openat(root, "deep0", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
            for _ in 0..2000 {
                rustix::fs::mkdirat(&at, "d", 0o700.into()).unwrap();
                let next = rustix::fs::openat(&at, "d", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
                rustix::fs::fchmod(&at, 0o000.into()).unwrap();
                at = next;
            }
        }
        "lies" | "escapes" | "setuid" => {
            let destination = job.destination().try_clone_to_owned().unwrap();
            job.run().unwrap();
            // Between the answer and the inspection; the parent waits for our end.
            match role.as_str() {
                "lies" => drop(create(&destination, "extra")),
                "escapes" => rustix::fs::symlinkat("/etc/passwd", &destination, "link").unwrap(),
                _ => {
                    let file =
                        rustix::fs::openat(&destination, "x", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty());
                    rustix::fs::fchmod(file.unwrap(), 0o4755.into()).unwrap();
                }
            }
        }
        "babbles" => {
            rustix::net::send(&babble, &[b'x'; 50_000], rustix::net::SendFlags::empty()).unwrap();
        }
        other => panic!("{other}"),
    }
    // The harness would print to the runner's output otherwise.
    std::process::exit(0);
}

fn create(at: &impl AsFd, name: &str) -> OwnedFd {
    let flags = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY;
    rustix::fs::openat(at, name, flags, rustix::fs::Mode::from_raw_mode(0o600)).unwrap()
}

fn scribble(job: &Job) {
    for n in 0..3 {
        rustix::fs::mkdirat(job.destination(), format!("deep{n}"), 0o755.into()).unwrap();
        create(&job.destination(), &format!("half-written{n}"));
    }
}

fn start(role: &'static str) -> impl FnOnce(OwnedFd, BorrowedFd<'_>) -> io::Result<Child> {
    move |channel, _| {
        Command::new(std::env::current_exe()?)
            .args(["--exact", "helper::helper_process", "--nocapture"])
            .env(ROLE, role)
            .stdin(Stdio::from(channel))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
    }
}

fn input(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file.rewind().unwrap();
    file
}

fn run(role: &'static str, bytes: &[u8], request: &Request, deadline: Duration) -> (Place, Result<Summary, Error>) {
    let place = Place::new();
    let result =
        unpack_in_helper(&input(bytes), place.open().as_fd(), request, deadline, &AtomicBool::new(false), start(role));
    place.assert_neighbours();
    if result.is_err() {
        assert!(place.listing().is_empty(), "{role}: left after a failure");
    }
    (place, result)
}

const LONG: Duration = Duration::from_secs(120);

fn archive() -> Vec<u8> {
    zst(&Tar::default().file("d/y", b"12").file("x", b"1").symlink("l", "x").hardlink("h", "x").end())
}

#[test]
fn an_honest_helper_unpacks() {
    let pinned = Request { sha256: Some(Digest::of(&archive())), ..request() };
    for request in [request(), pinned] {
        let (place, result) = run("honest", &archive(), &request, LONG);
        let summary = result.unwrap();
        assert_eq!((summary.files, summary.sha256), (3, Digest::of(&archive())));
        assert_eq!(place.text("l"), "1");
    }
}

#[test]
fn a_refusal_arrives_whole() {
    let bytes = Tar::default().file("ok", b"1").file("../evil", b"").end();
    match run("honest", &bytes, &request(), LONG).1 {
        Err(Error::Rejected(rejection)) => {
            assert_eq!((rejection.rule, rejection.member.as_deref()), (Rule::Path, Some("../evil")));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_wrong_digest_starts_no_helper() {
    let place = Place::new();
    let pinned = Request { sha256: Some(Digest::of(b"other")), ..request() };
    let start = |_: OwnedFd, _: BorrowedFd<'_>| -> io::Result<Child> { panic!("started") };
    let result =
        unpack_in_helper(&input(&archive()), place.open().as_fd(), &pinned, LONG, &AtomicBool::new(false), start);
    assert!(matches!(result, Err(Error::Rejected(r)) if r.rule == Rule::Sha256));
}

#[test]
fn what_a_dead_or_hijacked_helper_leaves_is_removed() {
    for role in ["mute", "dies", "leaves", "babbles"] {
        let (_, result) = run(role, &archive(), &request(), LONG);
        assert!(matches!(result, Err(Error::Failed { .. })), "{role}: {result:?}");
    }
    for (role, rule) in [("escapes", Rule::Symlink), ("setuid", Rule::Kind)] {
        let (_, result) = run(role, &archive(), &request(), LONG);
        assert!(matches!(&result, Err(Error::Rejected(r)) if r.rule == rule), "{role}: {result:?}");
    }
    let (_, result) = run("lies", &archive(), &request(), LONG);
    assert!(format!("{:?}", result.unwrap_err()).contains("holds 4 files"));
}

#[test]
fn a_helper_that_hangs_is_killed_at_the_deadline_or_when_cancelled() {
    match run("hangs", &archive(), &request(), Duration::from_millis(300)).1 {
        Err(Error::Rejected(rejection)) => assert_eq!(rejection.rule, Rule::Deadline),
        other => panic!("{other:?}"),
    }
    let place = Place::new();
    let cancelled = AtomicBool::new(true);
    let result =
        unpack_in_helper(&input(&archive()), place.open().as_fd(), &request(), LONG, &cancelled, start("hangs"));
    assert!(matches!(result, Err(Error::Failed { source, .. }) if source.kind() == io::ErrorKind::Interrupted));
}

#[test]
fn acquire_decides_by_what_the_path_is() {
    let root = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        std::fs::write(root.path().join(name), bytes).unwrap();
        root.path().join(name)
    };
    let get = |path: &std::path::Path| {
        let place = Place::new();
        let what = Acquire {
            path,
            purpose: Purpose::Artifact,
            sha256: None,
            budget: Budget::default(),
            deadline: LONG,
            exclude: &[],
        };
        let result = acquire(&what, place.open().as_fd(), &AtomicBool::new(false), start("honest"));
        (place, result)
    };
    // A name says nothing.
    let (place, result) = get(&write("really-a-tar.txt", &archive()));
    assert_eq!(result.unwrap().packing(), "tar.zst");
    assert_eq!(place.text("x"), "1");
    let (place, result) = get(&write("hello.wasm", b"\0asm\x01\0\0\0"));
    assert_eq!((result.unwrap().packing().as_str(), place.listing().len()), ("file", 1));
    let (_, result) = get(root.path());
    assert_eq!(result.unwrap().packing(), "directory");
    for (path, rule) in [(root.path().join("missing"), Rule::Missing), ("/dev/null".into(), Rule::Kind)] {
        let (_, result) = get(&path);
        assert!(matches!(&result, Err(Error::Rejected(r)) if r.rule == rule), "{result:?}");
    }
}
