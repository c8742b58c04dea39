//! Runs that wait for each other.

use crate::common::backend;
use crate::support::{Place, Service};

#[test]
fn a_request_waits_for_room_and_its_place_is_shown() {
    if !backend("wasm") {
        return;
    }
    let (service, first, second) = (Service::start(), Place::new(), Place::of(1));
    // As many CPUs as there are, so that nothing else fits.
    let cpus = std::thread::available_parallelism().unwrap().to_string();
    let mut running = first.run(&service, &["--run", "forever.wat", "--timeout", "60s", "--cpus", &cpus]).start();
    running.wait_for_text("│ hello from inside");
    let mut waiting = second.run(&service, &["--run", "pass.wat"]).start();
    waiting.wait_for_text("number 1 of 1 in the queue");
    running.signal("INT");
    running.wait().exits(130);
    waiting.wait().exits(0).says("hello from inside");

    // One who gives up leaves the queue.
    let mut running = first.run(&service, &["--run", "forever.wat", "--timeout", "60s", "--cpus", &cpus]).start();
    running.wait_for_text("│ hello from inside");
    let mut waiting = second.run(&service, &["--run", "pass.wat"]).start();
    waiting.wait_for_text("number 1 of 1 in the queue");
    waiting.signal("TERM");
    waiting.wait().exits(143);
    assert_eq!(second.report()["steps"][0]["dispatched"], "no");
    // And one that the service's end finds waiting is told.
    let mut waiting = second.run(&service, &["--run", "pass.wat"]).start();
    waiting.wait_for_text("number 1 of 1 in the queue");
    service.signal("TERM");
    let ran = waiting.wait().exits(1);
    assert!(ran.stdout.contains("the service is ending"), "{}", ran.all());
    running.wait().exits(143);
}

#[test]
fn what_this_machine_never_has_is_refused_at_once() {
    let (service, place) = (Service::start(), Place::new());
    let ran = place.run(&service, &["--run", "pass.wat", "--memory", "15TiB"]).run().exits(11);
    assert!(ran.stdout.contains("memory 15TiB"), "{}", ran.all());
    assert_eq!(place.report()["steps"][0]["refusal"]["reason"], "over-ceiling");
}
