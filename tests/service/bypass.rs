//! The policy binds here: a job may edit its step file, its workflow, its environment and `PATH`, and ship its own
//! `plimsoll`. It then has a weaker or forged report of its own, and never one that the service signed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::common::{Ran, backend, binary};
use crate::support::{Place, Service, two_users};

/// Whoever reads the report has the service's public key from its owner.
fn verified(place: &Place, service: &Service) -> Ran {
    let key = service.dir.path().join("service.pub");
    place.plimsoll(&["verify", "plimsoll-report", "--key"]).args([key]).run()
}

/// What a job that was bound has: a signed report of a run that passed.
fn honest(service: &Service) -> Place {
    let place = Place::new();
    place.run(service, &["--run", "pass.wat"]).run().exits(0);
    let ran = verified(&place, service).exits(0);
    assert!(ran.stdout.contains("signed by the service"), "{}", ran.all());
    place
}

#[test]
fn a_report_is_signed_and_says_what_is_only_claimed() {
    if !backend("wasm") {
        return;
    }
    let service = Service::start();
    let place = honest(&service);
    let ran = verified(&place, &service);
    let claimed = ran.stdout.lines().find(|l| l.contains("claimed by the job")).unwrap().to_owned();
    for pointer in ["/ci", "/steps/0/name", "/steps/0/artifact/source", "/host/runner"] {
        assert!(claimed.contains(pointer), "{claimed}");
    }
    for seen in ["result", "controls", "sha256", "command"] {
        assert!(!claimed.contains(seen), "{claimed}");
    }
}

#[test]
fn an_edited_report_keeps_no_signature() {
    if !backend("wasm") {
        return;
    }
    let service = Service::start();
    let place = honest(&service);
    let signed = fs::read(place.path("plimsoll-report/report.dsse.json")).unwrap();
    // Another run's report under this one's signature.
    place.run(&service, &["--run", "fail.wat"]).run().exits(10);
    fs::write(place.path("plimsoll-report/report.dsse.json"), signed).unwrap();
    verified(&place, &service).exits(15);
    // A run that failed, as one that passed.
    place.run(&service, &["--run", "fail.wat"]).run().exits(10);
    let record = place.path("plimsoll-report/report.json");
    let forged = fs::read_to_string(&record).unwrap().replace("\"failed\"", "\"passed\"");
    fs::write(record, forged).unwrap();
    verified(&place, &service).exits(15);
}

#[test]
fn a_job_that_goes_without_the_service_has_no_report_of_it() {
    if !backend("wasm") {
        return;
    }
    let service = Service::start();
    let place = honest(&service);
    for without in [&["--service", "never"][..], &["--service-socket", "/nonexistent/socket"]] {
        let _ = place.plimsoll(&[&["run", "--run", "pass.wat"], without].concat()).run();
        assert_eq!(place.report()["origin"], "local");
        verified(&place, &service).exits(15);
    }
    let _ = place.plimsoll(&["run", "--run", "pass.wat"]).env("PLIMSOLL_SERVICE", "never").run();
    verified(&place, &service).exits(15);
}

#[test]
fn a_plimsoll_of_the_jobs_own_can_write_anything_but_a_signature() {
    if !two_users() || !backend("wasm") {
        return;
    }
    let service = Service::start();
    let place = honest(&service);
    // A key of the job's own, through a service of its own, on a socket of its own: it is a copy of the program.
    place.write("bin/.keep", "");
    fs::copy(binary(), place.path("bin/plimsoll")).unwrap();
    let socket = place.path("own.sock");
    let key = place.path("own.key");
    plimsoll::report::sign::SigningKey::generate().unwrap().save(&key).unwrap();
    let owner = fs::metadata(place.path("bin/.keep")).unwrap();
    use std::os::unix::fs::MetadataExt;
    std::os::unix::fs::chown(&key, Some(owner.uid()), Some(owner.gid())).unwrap();
    let serve = place.program(&place.path("bin/plimsoll"));
    let mut own = serve
        .args(["serve".as_ref(), "--socket".as_ref(), socket.as_os_str(), "--key".as_ref(), key.as_os_str()])
        .start();
    own.wait_for_text("serving on");
    let arguments = ["run", "--run", "pass.wat", "--service-socket", socket.to_str().unwrap()];
    let _ = place.program(&place.path("bin/plimsoll")).args(arguments).run();
    verified(&place, &service).exits(15);
    // Somebody else does not take it for the machine's service.
    let other = Place::of(1);
    let arguments = ["run", "--run", "pass.wat", "--service", "require", "--service-socket", socket.to_str().unwrap()];
    let ran = other.plimsoll(&arguments).run().exits(12);
    assert!(ran.stdout.contains("is not used") || ran.stdout.contains("does not answer"), "{}", ran.all());
    own.signal("TERM");
    own.wait().exits(0);
}

#[test]
fn the_services_key_and_policy_are_nothing_that_a_request_can_name() {
    if !two_users() || !backend("wasm") {
        return;
    }
    let service = Service::start();
    let place = Place::new();
    let key = service.dir.path().join("service.key");
    assert_eq!(fs::metadata(&key).unwrap().permissions().mode() & 0o077, 0);
    let read = |path: &Path| place.program(Path::new("cat")).args([path]).run().code();
    assert_ne!(read(&key), 0, "the job can't read the key");
    // A step file that asks for less than the service's rules is a request like any other, under the same rules.
    place.write("plimsoll.yml", "version: 1\npolicy: none\nsteps: [{run: pass.wat}]\n");
    place.run(&service, &[]).run().exits(2);
    place.write("plimsoll.yml", "version: 1\nsteps: [{run: pass.wat, sandbox: {minimum-isolation: process}}]\n");
    // Variables of the job's, its `PATH` among them, reach no engine of the service's.
    place.write("bin/runsc", "#!/bin/sh\ntouch pwned\n");
    fs::set_permissions(place.path("bin/runsc"), fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", place.path("bin").display(), std::env::var("PATH").unwrap());
    let run = place.run(&service, &[]).env("PATH", path).env("PLIMSOLL_RUNSC", place.path("bin/runsc"));
    run.run().exits(0);
    verified(&place, &service).exits(0);
    assert!(!place.path("pwned").exists());
}
