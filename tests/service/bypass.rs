//! A job that doesn't want to be bound: it edits what is its own, and gets at most a statement of its own.

use crate::common::backend;
use crate::support::{Place, Service, two_users};

#[test]
fn a_job_can_go_without_the_service_and_then_has_no_report_of_it() {
    if !two_users() || !backend("wasm") {
        return;
    }
    let (service, place) = (Service::start(), Place::new());
    place.run(&service, &["--run", "pass.wat"]).run().exits(0);
    assert_eq!(place.report()["origin"], "service");
    // A report that says it is the service's takes an editor; it does not take a key.
    let path = place.path("plimsoll-report/report.json");
    let forged = std::fs::read_to_string(&path).unwrap();
    let _ = place.plimsoll(&["run", "--service", "never", "--run", "pass.wat"]).run();
    assert_eq!(place.report()["origin"], "local");
    std::fs::write(&path, forged.replace("pass.wat", "fail.wat")).unwrap();
    place.plimsoll(&["verify", "plimsoll-report"]).run().exits(15);
}

#[test]
fn neither_variable_nor_path_nor_socket_makes_another_service_of_it() {
    if !two_users() {
        return;
    }
    // A service of the job's own, on a socket of its own: not root's, so only where the job chose it.
    let place = Place::new();
    let socket = place.path("own.sock");
    let mut own = place.plimsoll(&["serve", "--socket", socket.to_str().unwrap()]).env("PLIMSOLL_LOG", "info").start();
    own.wait_for_text("serving on");
    // Somebody else, root included, does not take it for a service.
    let other = Place::of(1);
    let arguments = ["run", "--run", "pass.wat", "--service", "require", "--service-socket", socket.to_str().unwrap()];
    let ran = other.plimsoll(&arguments).run().exits(12);
    assert!(ran.stdout.contains("not used") || ran.stdout.contains("does not answer"), "{}", ran.all());
    own.signal("TERM");
    own.wait().exits(0);
}
