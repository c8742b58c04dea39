//! How a run ends that somebody ends: the caller's signal, the caller gone, the service gone.

use std::fs;
use std::time::Instant;

use crate::common::backend;
use crate::support::{PATIENCE, Place, Service};

/// A run whose code says that it runs, and then goes on for a minute.
fn endless(place: &Place, service: &Service, name: &str) -> crate::common::Running {
    let code = match name {
        "wasm" => "forever.wat",
        _ => "echo hello from inside; sleep 60",
    };
    let mut running = place.run(service, &["--backend", name, "--run", code, "--timeout", "60s"]).start();
    running.wait_for_text("│ hello from inside");
    running
}

/// Waits until the service's runs are over, and looks whether their directories are gone.
#[track_caller]
fn gone(service: &Service) {
    service.wait_until_idle();
    let log = service.log();
    let runs: Vec<&str> = log.split_whitespace().filter_map(|word| word.strip_prefix("run=")).collect();
    assert!(!runs.is_empty(), "{log}");
    for run in runs {
        assert!(!fs::exists(format!("/var/lib/plimsoll/runs/{run}")).unwrap(), "{run} is left: {log}");
    }
}

#[test]
fn a_signal_of_the_callers_ends_the_run_over_there() {
    for name in ["wasm", "gvisor"] {
        if !backend(name) {
            continue;
        }
        let (service, place) = (Service::start(), Place::new());
        for (signal, code) in [("INT", 130), ("TERM", 143)] {
            let running = endless(&place, &service, name);
            running.signal(signal);
            let ran = running.wait().exits(code);
            let report = place.report();
            assert_eq!(
                (report["origin"].as_str(), report["verdict"].as_str()),
                (Some("service"), Some("cancelled")),
                "{}",
                ran.all()
            );
            assert_eq!(report["steps"][0]["dispatched"], "yes");
            service.wait_until_idle();
        }
    }
}

#[test]
fn a_caller_that_is_gone_takes_its_run_along() {
    for name in ["wasm", "gvisor"] {
        if !backend(name) {
            continue;
        }
        let (service, place) = (Service::start(), Place::new());
        let running = endless(&place, &service, name);
        assert_eq!(service.workers().len(), 1);
        running.signal("KILL");
        running.wait();
        gone(&service);
        service.wait_for(|log| log.contains("run ended"));
    }
}

#[test]
fn a_run_whose_process_crashes_is_an_error_and_the_service_goes_on() {
    if !backend("wasm") {
        return;
    }
    let (service, place) = (Service::start(), Place::new());
    let running = endless(&place, &service, "wasm");
    let worker = service.workers()[0];
    assert!(std::process::Command::new("kill").args(["-KILL", &worker.to_string()]).status().unwrap().success());
    let ran = running.wait().exits(1);
    let report = place.report();
    assert_eq!(
        (report["origin"].as_str(), report["verdict"].as_str()),
        (Some("local"), Some("error")),
        "{}",
        ran.all()
    );
    assert_eq!(report["steps"][0]["dispatched"], "unknown", "its code had been announced");
    assert_eq!(report["steps"][0]["refusal"]["reason"], "service-lost");
    place.plimsoll(&["verify", "plimsoll-report"]).run().exits(0);
    service.wait_for(|log| log.contains("a run's process broke"));
    place.run(&service, &["--run", "pass.wat"]).run().exits(0);
}

#[test]
fn the_end_of_the_service_ends_its_runs_and_is_told() {
    if !backend("wasm") {
        return;
    }
    let (service, place) = (Service::start(), Place::new());
    let running = endless(&place, &service, "wasm");
    service.signal("TERM");
    let ran = running.wait().exits(143);
    let report = place.report();
    assert_eq!(
        (report["origin"].as_str(), report["verdict"].as_str()),
        (Some("service"), Some("cancelled")),
        "{}",
        ran.all()
    );
    gone(&service);
}

#[test]
fn a_killed_service_leaves_nothing_and_no_success() {
    for name in ["wasm", "gvisor"] {
        if !backend(name) {
            continue;
        }
        let (mut service, place) = (Service::start(), Place::new());
        let running = endless(&place, &service, name);
        let worker = service.workers()[0];
        service.child.kill().unwrap();
        service.child.wait().unwrap();
        // The run's own process sees it, ends the run and can still say so.
        let ran = running.wait();
        assert!([1, 143].contains(&ran.code()), "{}", ran.all());
        assert_ne!(place.report()["verdict"], "passed");
        let began = Instant::now();
        while fs::exists(format!("/proc/{worker}")).unwrap() {
            assert!(began.elapsed() < PATIENCE, "{worker} outlives its service");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        gone(&service);
    }
}
