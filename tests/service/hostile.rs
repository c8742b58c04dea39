//! Clients that mean harm: none of them may crash the service, starve another, or see another's run.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::common::backend;
use crate::support::{Place, Raw, Service, frame, one_step, two_users};

/// Somebody else's run goes through as if nothing was.
#[track_caller]
fn others_are_served(service: &Service) {
    if backend("wasm") {
        let other = Place::of(1);
        other.run(service, &["--run", "pass.wat"]).run().exits(0).says("hello from inside");
    }
}

#[test]
fn bytes_that_are_no_protocol() {
    let service = Service::start();
    let hostile: [Vec<u8>; 9] = [
        vec![],
        vec![0],
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0xff; 100_000],
        frame(1, b"{"),
        frame(1, br#"{"protocol":"1"}"#),
        frame(2, one_step("x.wat", "file").as_bytes()),
        frame(65, br#"{"protocol":1}"#),
        [&[0xff, 0xff, 0xff, 0xff, 1][..], &[b'x'; 1000]].concat(),
    ];
    for bytes in hostile {
        let mut raw = service.connect();
        raw.say(&bytes);
        let _ = raw.0.shutdown(std::net::Shutdown::Write);
        assert_eq!(raw.hear(), None, "{:?}", &bytes[..bytes.len().min(20)]);
    }
    let mut other = service.connect();
    other.say(&frame(1, br#"{"protocol":2,"news":true}"#));
    let (kind, body) = other.last().unwrap();
    assert_eq!((kind, String::from_utf8(body).unwrap().contains("other-version")), (66, true));
    others_are_served(&service);
}

#[test]
fn requests_that_are_none() {
    let service = Service::start();
    let file = tempfile::tempfile().unwrap();
    for (json, fds, reason) in [
        ("{}", 0, "malformed"),
        (r#"{"steps":[],"jobs":1,"policy":"none"}"#, 0, "malformed"),
        (one_step("x.wat", "file").as_str(), 0, "malformed"),
        (one_step("x.wat", "pipe").as_str(), 1, "malformed"),
        (one_step("x.wat", "file").replace("x.wat\"}}", "../x\"}}").as_str(), 1, "malformed"),
        (&"[".repeat(100_000), 0, "malformed"),
    ] {
        let mut raw = service.connect();
        raw.hello();
        raw.request(json, &vec![file.as_fd(); fds]);
        let (kind, body) = raw.last().unwrap();
        let body = String::from_utf8(body).unwrap();
        assert!(kind == 66 && body.contains(reason), "{json:.80}: {kind} {body}");
    }
    others_are_served(&service);
}

#[test]
fn descriptors_that_are_no_files() {
    let service = Service::start();
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    let mode = rustix::fs::Mode::RWXU;
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let handle = rustix::fs::open("/etc/hostname", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty());
    let mut hostile: Vec<(&str, OwnedFd)> = vec![
        ("a FIFO that never ends", File::options().read(true).write(true).open(&fifo).unwrap().into()),
        ("a directory", File::open(dir.path()).unwrap().into()),
        ("an endless device", File::open("/dev/zero").unwrap().into()),
        ("its own memory", File::open("/proc/self/mem").unwrap().into()),
        ("a socket", UnixStream::pair().unwrap().0.into()),
        ("a pipe", std::io::pipe().unwrap().0.into()),
    ];
    hostile.extend(handle.ok().map(|fd| ("a handle without rights", fd)));
    for kind in ["file", "tree"] {
        for (what, fd) in &hostile {
            let mut raw = service.connect();
            raw.hello();
            raw.request(&one_step("x.wat", kind), &[fd.as_fd()]);
            let (kind, body) = raw.last().unwrap();
            let body = String::from_utf8(body).unwrap();
            assert!(kind == 66 && body.contains("not-usable"), "{what}: {kind} {body}");
        }
    }
    let null = File::open("/dev/null").unwrap();
    let mut many = service.connect();
    many.hello();
    many.request(&one_step("x.wat", "file"), &vec![null.as_fd(); 200]);
    assert_eq!(many.hear(), None, "too many");
    let mut early = service.connect();
    early.request("", &[null.as_fd()]);
    assert_eq!(early.hear(), None, "before hello");
    service.wait_until_idle();
    others_are_served(&service);
}

#[test]
fn a_tree_that_is_a_trap_is_unpacked_in_the_jail() {
    if !backend("wasm") {
        return;
    }
    let service = Service::start();
    let traps = [
        std::fs::read(crate::common::fixture("forge/project/pass.wat")).unwrap(),
        vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0],
        b"PK\x03\x04 and no more".to_vec(),
        vec![],
    ];
    for trap in traps {
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &trap).unwrap();
        let mut raw = service.connect();
        raw.hello();
        raw.request(&one_step("x.wat", "tree"), &[file.as_fd()]);
        let last = raw.last().unwrap();
        assert!([66, 76].contains(&last.0), "{last:?}");
    }
    service.wait_until_idle();
    others_are_served(&service);
}

#[test]
fn a_crowd_of_one_user_is_turned_away_and_others_are_not() {
    if !two_users() {
        return;
    }
    let service = Service::start();
    // All of this test's own connections are root's; the others' are a plain user's.
    let crowd: Vec<Raw> = (0..500).map(|_| service.connect()).collect();
    others_are_served(&service);
    let mut turned_away = 0;
    for mut raw in crowd {
        raw.0.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        turned_away += usize::from(raw.hear().is_some_and(|(kind, _)| kind == 66));
    }
    assert_eq!(turned_away, 500 - 16);
    let began = Instant::now();
    loop {
        let mut raw = service.connect();
        raw.say(&frame(1, br#"{"protocol":1}"#));
        if raw.hear().is_some_and(|(kind, _)| kind == 65) {
            break;
        }
        assert!(began.elapsed() < crate::support::PATIENCE, "those who left still count");
    }
}

#[test]
fn a_client_that_says_nothing_is_dropped() {
    let service = Service::start();
    let mut silent = service.connect();
    let mut slow = service.connect();
    slow.say(&[0, 0]);
    assert_eq!((silent.hear(), slow.hear()), (None, None));
    service.wait_for(|log| log.matches("took too long").count() == 2);
}

#[test]
fn a_client_that_does_not_read_holds_up_neither_its_run_nor_the_service() {
    if !backend("wasm") {
        return;
    }
    let (service, place) = (Service::start(), Place::new());
    let flood = std::fs::read_to_string(crate::common::fixture("fixtures/wasm/output-flood.wat")).unwrap();
    place.write("x.wat", &flood);
    let file = File::open(place.path("x.wat")).unwrap();
    let mut raw = service.connect();
    raw.hello();
    let request = one_step("x.wat", "file")
        .replace(r#""run":"x.wat""#, r#""run":"x.wat","timeout-minutes":"20s","sandbox":{"output":"64MiB"}"#);
    raw.request(&request, &[file.as_fd()]);
    // Nobody reads, and the run comes to its end all the same.
    service.wait_for(|log| log.contains("run ended"));
    others_are_served(&service);
    // And what was kept can still be had.
    assert_eq!(raw.last().unwrap().0, 76);
    service.wait_until_idle();
}
