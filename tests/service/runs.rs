//! Runs by a service for somebody who could not do them alone.

use std::fs;

use serde_json::Value;

use crate::common::{Ran, backend, busybox, plimsoll};
use crate::support::{Place, Service, USERS, two_users};

/// Checks exit code and verdict, and that the report is the service's and the caller's files.
#[track_caller]
fn served(place: &Place, ran: Ran, verdict: &str, code: i32) -> Ran {
    let ran = ran.exits(code);
    let report = place.report();
    assert_eq!(report["origin"], "service", "{}\n{report:#}", ran.all());
    assert_eq!(report["verdict"], verdict, "{}\n{report:#}", ran.all());
    place.owns("plimsoll-report");
    ran
}

#[test]
fn the_same_as_here_but_for_one_line() {
    if !backend("wasm") {
        return;
    }
    let (service, place) = (Service::start(), Place::new());
    place.write("src/pass.wat", &fs::read_to_string(place.path("pass.wat")).unwrap());
    place.write("src/deep/data", "data");
    let ran = place.run(&service, &["--artifact", "src", "--run", "pass.wat"]).run();
    let ran = served(&place, ran, "passed", 0).says("run by the service of this machine").says("│ hello from inside");
    place.owns("plimsoll-report");
    let step = &place.report()["steps"][0];
    assert_eq!(step["dispatched"], "yes");
    assert_eq!(step["artifact"]["format"], "directory");
    assert_eq!(step["artifact"]["source"], "src");

    let here = place.plimsoll(&["run", "--service", "never", "--artifact", "src", "--run", "pass.wat"]).run();
    // A plain user may not have what it takes; then there is nothing to compare.
    if here.code() == 0 {
        let report = place.report();
        assert_eq!(report["origin"], "local");
        assert_eq!(report["steps"][0]["artifact"], step["artifact"], "the same artifact, seen through a copy");
        let shape = |text: &str| -> Vec<String> {
            text.lines().map(|l| l.split_whitespace().next().unwrap_or_default().to_owned()).collect()
        };
        assert_eq!(shape(&ran.stdout), shape(&here.stdout));
    }
    let failing = place.run(&service, &["--run", "fail.wat"]).run();
    served(&place, failing, "failed", 10).prints("exit code 3");
    let floor = place.run(&service, &["--run", "pass.wat", "--minimum-isolation", "vm"]).run();
    served(&place, floor, "refused", 11).prints("nothing ran");
}

#[test]
fn outputs_and_several_steps_come_back_to_their_places() {
    if !backend("wasm") {
        return;
    }
    let (service, place) = (Service::start(), Place::new());
    let steps =
        "version: 1\nsteps:\n  - {name: one, run: pass.wat}\n  - {name: two, run: fail.wat, continue-on-error: true}\n";
    place.write("plimsoll.yml", steps);
    let ran = place.run(&service, &["--jobs", "2"]).run();
    served(&place, ran, "passed", 0).prints("1 of 2 steps passed");
    for step in ["01-one", "02-two"] {
        assert!(place.path("plimsoll-report/steps").join(step).join("stdout.log").exists());
    }
    let summary = fs::read_to_string(place.path("plimsoll-report/summary.md")).unwrap();
    assert!(summary.contains("one") && summary.contains("two"), "{summary}");
    // What the job says of itself, and what the service saw.
    let report = place.report();
    assert_eq!(report["steps"][1]["forgiven"], true);
    assert_eq!(report["digests"]["request_sha256"].as_str().map(str::len), Some(64));
    let again = place.run(&service, &["--jobs", "2"]).run();
    served(&place, again, "passed", 0);
    assert_eq!(place.report()["digests"]["request_sha256"], report["digests"]["request_sha256"]);
}

#[test]
fn gvisor_for_a_user_who_has_none_of_what_it_takes() {
    if !two_users() || !backend("gvisor") {
        return;
    }
    let (service, place) = (Service::start(), Place::new());
    place.write("src/hello.sh", "echo hello from $1; mkdir out; echo result > out/a.txt; id -u");
    let arguments = [
        "--artifact",
        "src",
        "--run",
        "sh hello.sh gvisor",
        "--backend",
        "gvisor",
        "--outputs",
        "out/**",
        "--memory",
        "256MiB",
        "--require",
        "memory-limit,cpu-limit",
    ];
    let ran = served(&place, place.run(&service, &arguments).run(), "passed", 0).says("│ hello from gvisor");
    assert!(!ran.stderr.contains("│ 0\n"), "guest code is not root: {}", ran.all());
    place.owns("plimsoll-outputs");
    assert_eq!(fs::read_to_string(place.path("plimsoll-outputs/01-sh-hello-sh-gvisor/out/a.txt")).unwrap(), "result\n");
    let report = place.report();
    assert_eq!(report["steps"][0]["isolation"]["tier"], "kernel");
    assert_eq!(report["steps"][0]["artifact"]["source"], "src");
    let limit = |id: &str| {
        let controls = report["steps"][0]["controls"].as_array().unwrap();
        controls.iter().find(|c| c["id"] == id).unwrap()["status"].clone()
    };
    assert_eq!(limit("memory-limit"), Value::from("enforced"), "the service has the cgroups that a plain user lacks");
    service.wait_for(|log| log.contains("run ended") && log.contains(&format!("uid={}", USERS[0].0)));
    assert!(!service.log().contains("hello from"), "no guest bytes in the journal:\n{}", service.log());
}

#[test]
fn an_image_of_files_is_sent_along() {
    if !two_users() || !backend("gvisor") {
        return;
    }
    let (service, place) = (Service::start(), Place::new());
    // A root file system of one static program.
    place.write("rootfs/bin/.keep", "");
    let Some(shell) = busybox("gvisor") else { return };
    fs::copy(shell, place.path("rootfs/bin/sh")).unwrap();
    place.write("src/x", "");
    let ran = place
        .run(
            &service,
            &["--artifact", "src", "--image", "dir:rootfs", "--backend", "gvisor", "--run", "echo from the image"],
        )
        .run();
    served(&place, ran, "passed", 0).says("│ from the image");
    assert_eq!(place.report()["steps"][0]["image"]["reference"], "dir:rootfs");
}

#[test]
fn nothing_is_read_that_the_caller_could_not_read() {
    if !two_users() {
        return;
    }
    let (service, place) = (Service::start(), Place::new());
    let secret = tempfile::tempdir().unwrap();
    fs::set_permissions(secret.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    fs::write(secret.path().join("x.wat"), "secret").unwrap();
    let path = secret.path().join("x.wat");
    let ran = place.run(&service, &["--artifact", path.to_str().unwrap(), "--run", "x.wat"]).run().exits(13);
    assert!(ran.stdout.contains("can't be read"), "{}", ran.all());
    let shadow = place.run(&service, &["--artifact", "/etc/shadow", "--run", "x.wat"]).run();
    shadow.exits(13);
    place.write("tree/ok", "");
    std::os::unix::fs::symlink("/etc/shadow", place.path("tree/link")).unwrap();
    let link = place.run(&service, &["--artifact", "tree", "--run", "x.wat"]).run().exits(13);
    assert!(link.stdout.contains("link"), "a link out of the artifact: {}", link.all());
}

#[test]
fn without_a_service_it_is_required_or_not() {
    let place = Place::new();
    let nowhere = place.path("none.sock");
    let nowhere = nowhere.to_str().unwrap();
    let ran = place.plimsoll(&["run", "--run", "pass.wat", "--service", "require", "--service-socket", nowhere]).run();
    let ran = ran.exits(12).prints("the service is required");
    assert!(ran.stdout.contains("setup service"), "the fix is named: {}", ran.all());
    assert_eq!(place.report()["steps"][0]["refusal"]["stage"], "service");
    let by_variable = place.plimsoll(&["run", "--run", "pass.wat", "--service-socket", nowhere]);
    by_variable.env("PLIMSOLL_SERVICE", "require").run().exits(12);
    if backend("wasm") {
        let auto = place.plimsoll(&["run", "--run", "pass.wat", "--service-socket", nowhere]).run();
        assert!(!auto.stderr.contains("service"), "nothing to say of what is not there: {}", auto.all());
        let listener = std::os::unix::net::UnixListener::bind(place.path("foreign.sock")).unwrap();
        let foreign = place.path("foreign.sock");
        std::os::unix::fs::chown(&foreign, Some(rustix::process::geteuid().as_raw()), None).unwrap();
        drop(listener);
        let arguments = ["run", "--run", "pass.wat", "--service-socket", foreign.to_str().unwrap()];
        let ran = place.plimsoll(&arguments).run();
        assert!(ran.stderr.contains("does not answer"), "one that is there and not used is told: {}", ran.all());
        assert_eq!(place.report()["origin"], "local");
    }
    plimsoll(["run", "--service", "perhaps"]).run().exits(2);
}
