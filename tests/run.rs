//! Whole runs from the command line: what is printed where, exit codes, directories, signals, what forges are handed.
//!
//! Boundaries are WebAssembly's where the test is about the command line, since that engine is always there.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{Ran, Run, backend, fixture, plimsoll};
use serde_json::Value;
use tempfile::TempDir;

/// A directory with the WebAssembly programs that the forge tests use.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        for name in ["pass.wat", "fail.wat", "hostile.wat"] {
            fs::copy(fixture("forge/project").join(name), place.path(name)).unwrap();
        }
        // The same as the one that passes, and then a loop.
        let pass = fs::read_to_string(place.path("pass.wat")).unwrap();
        let end = pass.trim_end().strip_suffix("))").unwrap();
        place.write("forever.wat", &format!("{end}\n    (loop (br 0))))\n"));
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(name), text).unwrap();
    }

    fn run(&self, arguments: &[&str]) -> Run {
        plimsoll(arguments).dir(self.0.path())
    }

    fn report(&self) -> Value {
        report(&self.path("plimsoll-report"))
    }
}

fn report(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join("report.json")).unwrap()).unwrap()
}

/// The verdict and exit code of a report agree with those of the process, and the report is consistent.
#[track_caller]
fn reported(place: &Place, ran: Ran, verdict: &str, code: i32) -> Ran {
    let ran = ran.exits(code);
    let report = place.report();
    assert_eq!(
        (report["verdict"].as_str(), report["exit_code"].as_i64()),
        (Some(verdict), Some(code.into())),
        "{report:#}"
    );
    place.run(&["verify", "plimsoll-report"]).run().exits(0);
    ran
}

#[test]
fn a_step_that_passes_prints_a_dozen_lines() {
    if !backend("wasm") {
        return;
    }
    let place = Place::new();
    let ran = reported(&place, place.run(&["run", "--run", "pass.wat"]).run(), "passed", 0);
    assert!(ran.stdout.starts_with("✓ 01 pass.wat passed behind a proven container boundary\n"), "{}", ran.stdout);
    assert!(ran.stdout.ends_with("passed, exit code 0; report: plimsoll-report/report.html\n"), "{}", ran.stdout);
    assert!((8..=16).contains(&ran.stdout.lines().count()), "{}", ran.stdout);
    for part in ["ran ", "container proven, floor container", "seccomp*", "exit code 0", "times ", "memory "] {
        assert!(ran.stdout.contains(part), "no {part:?} in {}", ran.stdout);
    }
    assert!(ran.stderr.contains("│ hello from inside"), "{}", ran.stderr);
    assert!(!ran.stdout.contains('\x1b') && !ran.stderr.contains('\x1b'), "nobody watches, so there is no colour");
}

#[test]
fn a_step_whose_code_fails() {
    if !backend("wasm") {
        return;
    }
    let place = Place::new();
    reported(&place, place.run(&["run", "--run", "fail.wat"]).run(), "failed", 10).prints("result        exit code 3");
    reported(&place, place.run(&["run", "--run", "fail.wat", "--continue-on-error"]).run(), "passed", 0)
        .prints("forgiven");
}

#[test]
fn a_floor_out_of_reach_is_refused_and_nothing_runs() {
    let place = Place::new();
    let ran = place.run(&["run", "--run", "pass.wat", "--minimum-isolation", "vm"]).run();
    let ran = reported(&place, ran, "refused", 11).prints("refused; nothing ran");
    assert!(!ran.stderr.contains("hello from inside"));
    assert_eq!(place.report()["steps"][0]["dispatched"], "no");
}

#[test]
fn a_deadline_ends_a_loop() {
    if !backend("wasm") {
        return;
    }
    let place = Place::new();
    let ran = place.run(&["run", "--run", "forever.wat", "--timeout", "1s"]).run();
    let ran = reported(&place, ran, "failed", 10).prints("ended at the deadline").prints("`timeout-minutes` (1s)");
    assert!(ran.stderr.contains("· running"), "{}", ran.all());
}

#[test]
fn a_limit_that_was_hit_is_named_with_its_value_wherever_it_is_told() {
    if !backend("wasm") {
        return;
    }
    let place = Place::new();
    place.write("bomb.wat", include_str!("fixtures/wasm/memory-bomb.wat"));
    let ran = place.run(&["run", "--run", "bomb.wat", "--memory", "64MiB"]).run();
    let words = "the limit `sandbox.memory` (64MiB) was reached";
    reported(&place, ran, "failed", 10).prints(words);
    assert!(place.report()["steps"][0]["result"]["message"].as_str().unwrap().contains(words));
    for file in ["summary.md", "junit.xml"] {
        let text = fs::read_to_string(place.path("plimsoll-report").join(file)).unwrap();
        assert!(text.contains("sandbox.memory") && text.contains("64MiB"), "{file}: {text}");
    }
}

#[test]
fn a_broken_step_file_is_named_by_line_and_leaves_no_old_report() {
    if !backend("wasm") {
        return;
    }
    let place = Place::new();
    place.run(&["run", "--run", "pass.wat"]).run().exits(0);
    place.write("plimsoll.yml", "version: 1\nsteps:\n  - run: pass.wat\n    sandbx: {}\n");
    let ran = place.run(&["run"]).run().exits(2);
    assert!(ran.stderr.contains("plimsoll.yml:4"), "{}", ran.all());
    assert!(ran.stderr.contains("sandbox") && ran.stderr.contains("help: "), "{}", ran.all());
    // The old report does not stand; the new one tells the fault, and does not look like a success anywhere.
    let report = place.report();
    assert_eq!((report["verdict"].as_str(), report["exit_code"].as_i64()), (Some("error"), Some(2)), "{report:#}");
    assert_eq!(report["steps"][0]["refusal"]["stage"], "spec");
    assert!(fs::read_to_string(place.path("plimsoll-report/junit.xml")).unwrap().contains("<error"));
    place.run(&["verify", "plimsoll-report"]).run().exits(0);
    let github = place.run(&["run"]).env("GITHUB_ACTIONS", "true").run().exits(2);
    assert!(github.stdout.contains("\n::error title=plimsoll,file=plimsoll.yml,line=4::"), "{}", github.all());
}

#[test]
fn nothing_to_run_is_a_usage_error() {
    let place = tempfile::tempdir().unwrap();
    plimsoll(["run"]).dir(place.path()).run().exits(2).says("error: ").says("help: ");
    plimsoll(["run", "--run", "x.wasm", "--env", "A"]).dir(place.path()).run().exits(2).says("--env");
    plimsoll(["run", "--run", "x.wasm", "--shard", "3/2"]).dir(place.path()).run().exits(2).says("--shard");
    plimsoll(["run", "--run", "x.wasm", "--jobs", "0"]).dir(place.path()).run().exits(2).says("--jobs");
}

#[test]
fn a_report_directory_that_is_not_ours_is_left_alone() {
    let place = Place::new();
    place.write("plimsoll-report/notes.txt", "mine");
    place.run(&["run", "--run", "pass.wat"]).run().exits(2).says("left alone").says("--report-dir");
    assert_eq!(fs::read_to_string(place.path("plimsoll-report/notes.txt")).unwrap(), "mine");
    std::os::unix::fs::symlink("/tmp", place.path("link")).unwrap();
    place.run(&["run", "--run", "pass.wat", "--report-dir", "link"]).run().exits(2).says("is a symbolic link");
}

#[test]
fn several_steps_in_order_and_at_the_same_time() {
    if !backend("wasm") {
        return;
    }
    let place = Place::new();
    place.write(
        "plimsoll.yml",
        "version: 1\nsteps:\n  - {name: one, run: pass.wat}\n  - {name: two, run: fail.wat}\n  - {name: three, run: pass.wat}\n",
    );
    let ran = reported(&place, place.run(&["run"]).run(), "failed", 10);
    assert!(ran.stdout.contains("failed, 2 of 3 steps passed"), "{}", ran.stdout);
    let ran = reported(&place, place.run(&["run", "--jobs", "3"]).run(), "failed", 10);
    assert!(ran.stderr.contains("01│ hello") && ran.stderr.contains("03│ hello"), "{}", ran.stderr);
    let ran = reported(&place, place.run(&["run", "--step", "three", "--quiet"]).run(), "passed", 0);
    assert_eq!((ran.stdout.lines().count(), ran.stderr.as_str()), (2, ""), "{}", ran.all());
    let ran = reported(&place, place.run(&["run", "--shard", "4/4"]).run(), "skipped", 0);
    assert!(ran.stdout.contains("skipped, no steps"), "{}", ran.stdout);
    place.run(&["run", "--step", "thee"]).run().exits(2).says("three");
}

#[test]
fn a_mount_is_relative_to_the_file_that_has_it_and_a_flags_to_where_one_is() {
    if !backend("gvisor") {
        return;
    }
    let place = Place::new();
    place.write("project/src/x", "");
    place.write("project/data/a", "the file's\n");
    place.write("data/a", "the flag's\n");
    place.write(
        "project/plimsoll.yml",
        "version: 1\nsteps:\n  - run: cat /data/a\n    artifact: src\n    sandbox:\n      backend: gvisor\n      mounts: [{path: data, at: /data}]\n",
    );
    let ran = reported(&place, place.run(&["run", "project/plimsoll.yml"]).run(), "passed", 0);
    assert!(ran.stderr.contains("│ the file's"), "{}", ran.all());
    let ran = place.run(&["run", "project/plimsoll.yml", "--mount", "data:/data"]).run();
    assert!(reported(&place, ran, "passed", 0).stderr.contains("│ the flag's"));
    let arguments = ["run", "--backend", "gvisor", "--artifact", "project/src", "--run", "cat /data/a"];
    let ran = place.run(&arguments).args(["--mount", "./data:/data"]).run();
    assert!(reported(&place, ran, "passed", 0).stderr.contains("│ the flag's"));
}

#[test]
fn an_earlier_report_is_gone_where_the_flags_are_not_understood() {
    let place = Place::new();
    for (directory, flags) in [
        ("plimsoll-report", vec!["--memry", "1"]),
        ("mine", vec!["--report-dir", "mine", "--nonsense"]),
        ("mine", vec!["--jobs", "0", "--report-dir=mine"]),
    ] {
        // A run that fails early writes a report all the same.
        place.run(&["run", "nowhere.yml", "--report-dir", directory]).run().exits(2);
        let report = place.path(directory).join("report.json");
        assert!(report.exists());
        place.run(&[&["run"], &flags[..]].concat()).run().exits(2);
        assert!(!report.exists(), "{flags:?}");
    }
    place.write("others/report.json", "{}");
    place.run(&["run", "--report-dir", "others", "--nonsense"]).run().exits(2);
    assert!(place.path("others/report.json").exists(), "it is not plimsoll's");
}

#[test]
fn json_on_standard_error() {
    if !backend("wasm") {
        return;
    }
    let place = Place::new();
    let ran = place.run(&["run", "--run", "pass.wat", "--log-format", "json"]).run().exits(0);
    let events: Vec<Value> = ran.stderr.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert!(events.iter().any(|e| e["event"] == "output" && e["line"] == "hello from inside"), "{}", ran.stderr);
}

/// The variables of a GitHub job, with its files in a directory.
fn in_github(run: Run, files: &Path) -> Run {
    run.env("GITHUB_ACTIONS", "true")
        .env("GITHUB_STEP_SUMMARY", files.join("summary"))
        .env("GITHUB_OUTPUT", files.join("output"))
        .env("GITHUB_REPOSITORY", "octo/widgets")
        .env("GITHUB_EVENT_PATH", fixture("forge/events/pull_request_fork.json"))
}

#[test]
fn github_gets_its_summary_and_outputs_and_reads_one_stream() {
    if !backend("wasm") {
        return;
    }
    let (place, files) = (Place::new(), tempfile::tempdir().unwrap());
    let arguments = ["run", "--run", "hostile.wat", "--publish", "github-summary", "--github-output"];
    let ran = reported(&place, in_github(place.run(&arguments), files.path()).run(), "passed", 0);
    assert_eq!(ran.stderr, "", "GitHub's runner would mix a second stream in");
    let outputs = fs::read_to_string(files.path().join("output")).unwrap();
    let expected =
        "verdict=passed\ntier=container\nexit-code=0\nreport-dir=plimsoll-report\noutputs-dir=plimsoll-outputs\n";
    assert_eq!(outputs, expected);
    let summary = fs::read_to_string(files.path().join("summary")).unwrap();
    assert_eq!(summary.trim_end(), fs::read_to_string(place.path("plimsoll-report/summary.md")).unwrap().trim_end());
    let ci = &place.report()["ci"];
    assert_eq!((ci["provider"].as_str(), ci["pull_request"].as_u64()), (Some("github"), Some(27)));

    // Between the guards, nothing of the guest's begins like a command; outside of them, every command is ours.
    let mut lines = ran.stdout.lines();
    let token = lines.by_ref().find_map(|l| l.strip_prefix("::stop-commands::")).unwrap();
    let guarded: Vec<_> = lines.by_ref().take_while(|l| *l != format!("::{token}::")).collect();
    assert!(guarded.iter().any(|l| l.contains("last hostile line")), "{}", ran.stdout);
    assert!(guarded.iter().all(|l| !l.trim_start().starts_with("::") && !l.contains("##[")), "{}", ran.stdout);
    let ours: Vec<_> = lines.filter(|l| l.starts_with("::")).collect();
    assert_eq!(ours, ["::endgroup::"]);
}

#[test]
fn github_gets_outputs_and_an_annotation_for_what_failed_or_never_began() {
    let (place, files) = (Place::new(), tempfile::tempdir().unwrap());
    let output = || {
        let text = fs::read_to_string(files.path().join("output")).unwrap_or_default();
        let _ = fs::remove_file(files.path().join("output"));
        text
    };
    let refused = ["run", "--run", "pass.wat", "--minimum-isolation", "vm", "--github-output"];
    let ran = in_github(place.run(&refused), files.path()).run().exits(11);
    assert!(ran.stdout.contains("\n::error title=plimsoll::pass.wat refused; nothing ran: "), "{}", ran.stdout);
    assert!(output().starts_with("verdict=refused\ntier=\nexit-code=11\n"));
    in_github(place.run(&["run", "--github-output", "nothing.yml"]), files.path()).run().exits(2);
    assert!(output().starts_with("verdict=error\ntier=\nexit-code=2\n"));
    in_github(place.run(&["run", "--github-output", "--no-such-flag"]), files.path()).run().exits(2);
    assert!(output().starts_with("verdict=error\ntier=\nexit-code=2\n"));
    // Outside of GitHub the flag is told and changes nothing.
    place.run(&refused).run().exits(11).says("GITHUB_OUTPUT is not set");
}

/// A run whose code says that it runs, and then goes on for a minute.
fn endless(place: &Place, name: &str) -> Run {
    let code = match name {
        "wasm" => "forever.wat",
        _ => "echo hello from inside; sleep 60",
    };
    place.run(&["run", "--backend", name, "--run", code, "--timeout", "60s"])
}

#[test]
fn signals_end_a_run_cleanly() {
    for name in ["wasm", "gvisor"] {
        if !backend(name) {
            continue;
        }
        for (signal, code) in [("INT", 130), ("TERM", 143), ("HUP", 143)] {
            // Below `nohup` it is ignored, here and in what is started here.
            if signal == "HUP" && hangup_is_ignored() {
                continue;
            }
            let place = Place::new();
            let mut running = endless(&place, name).start();
            running.wait_for_text("│ hello from inside");
            running.signal(signal);
            reported(&place, running.wait(), "cancelled", code);
            assert_eq!(place.report()["steps"][0]["dispatched"], "yes");
        }
    }
}

/// From `SigIgn` (proc(5)), whose lowest bit is SIGHUP.
fn hangup_is_ignored() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap().trim();
    u64::from_str_radix(mask, 16).unwrap() & 1 == 1
}

/// Processes below a process.
fn descendants(pid: u32) -> Vec<u32> {
    let mut found = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
        for child in children.split_whitespace().map(|c| c.parse().unwrap()) {
            found.push(child);
            found.extend(descendants(child));
        }
    }
    found
}

#[test]
fn a_killed_runner_leaves_no_worker_and_the_next_start_is_clean() {
    if !backend("wasm") {
        return;
    }
    let place = Place::new();
    let mut running = endless(&place, "wasm").start();
    running.wait_for_text("│ hello from inside");
    let below = descendants(running.pid());
    assert!(!below.is_empty(), "there is a worker");
    running.signal("KILL");
    running.wait();
    // A zombie that init has not reaped yet runs nothing.
    let lives = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
    };
    let mut looks = 0;
    while below.iter().any(lives) {
        looks += 1;
        assert!(looks < 1000, "still there: {below:?}");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let unfinished = || -> Vec<_> {
        let names = fs::read_dir(place.0.path()).unwrap().map(|e| e.unwrap().file_name());
        names.filter(|n| n.to_string_lossy().starts_with(".plimsoll")).collect()
    };
    assert!(!unfinished().is_empty(), "a killed run cannot remove what it was building");
    place.run(&["clean"]).run().exits(0);
    assert!(unfinished().is_empty(), "{:?}", unfinished());
    reported(&place, place.run(&["run", "--run", "pass.wat"]).run(), "passed", 0);
    assert!(unfinished().is_empty(), "{:?}", unfinished());
}

#[test]
fn a_second_signal_makes_no_mess() {
    if !backend("wasm") {
        return;
    }
    let place = Place::new();
    let mut running = endless(&place, "wasm").start();
    running.wait_for_text("│ hello from inside");
    running.signal("INT");
    // It may be over by now; the signal then meets nobody.
    let _ = std::process::Command::new("kill").args(["-INT", &running.pid().to_string()]).output();
    reported(&place, running.wait(), "cancelled", 130);
}

#[test]
fn a_step_of_a_workflow_and_a_shell() {
    if !backend("gvisor") {
        return;
    }
    let place = Place::new();
    place.write(
        ".github/workflows/ci.yml",
        "on: push\njobs:\n  test:\n    runs-on: x\n    steps:\n      - uses: actions/checkout@v4\n      - id: unit\n        run: |\n          echo from the workflow\n          false\n          echo not reached\n",
    );
    let from = [
        "run",
        "--from-workflow",
        ".github/workflows/ci.yml",
        "--job",
        "test",
        "--step",
        "unit",
        "--backend",
        "gvisor",
    ];
    let ran = reported(&place, place.run(&from).run(), "failed", 10).says("│ from the workflow");
    assert!(!ran.stderr.contains("│ not reached"), "sh -e, as GitHub does");
    place.write("script.sh", "echo \"from a script in $(pwd)\"\n");
    let ran = place.run(&["shell", "--backend", "gvisor", "script.sh"]).run();
    reported(&place, ran, "passed", 0).says("│ from a script in /workspace");
    place.run(&["run", "--from-workflow", ".github/workflows/ci.yml", "--job", "test"]).run().exits(2).says("--step");
    place.run(&["shell", "--run", "true", "script.sh"]).run().exits(2).says("a shell runs its script");
}

#[test]
fn check_runs_nothing_of_the_users() {
    if !backend("wasm") {
        return;
    }
    let place = Place::new();
    place.write("plimsoll.yml", "version: 1\nsteps:\n  - {name: one, run: hostile.wat, sandbox: {backend: wasm}}\n");
    let ran = place.run(&["check"]).run().exits(0);
    assert!(ran.stdout.contains("✓ 01 one would run in wasm: container proven, floor container"), "{}", ran.all());
    assert!(!ran.all().contains("hostile line"));
    assert!(!place.path("plimsoll-report").exists(), "check writes no report");
    place.run(&["check", "--minimum-isolation", "vm"]).run().exits(11).prints("would not run");
}

#[test]
fn a_program_that_is_no_engine_is_not_available() {
    if !common::available("gvisor", common::installed("runsc")) {
        return;
    }
    let place = Place::new();
    let ran = place.run(&["run", "--backend", "gvisor", "--runsc", "/bin/true", "--run", "true"]).run().exits(12);
    ran.prints("does not say that it is runsc");
}

#[test]
fn doctor_names_a_blocker_and_a_fix() {
    let ran = plimsoll(["doctor", "--backend", "gvisor", "--runsc", "/nonexistent/runsc"]).run().exits(12);
    assert!(
        ran.stdout.contains("gvisor      not usable") && ran.stdout.contains("/nonexistent/runsc"),
        "{}",
        ran.all()
    );
    assert!(ran.stdout.contains("fix: "), "{}", ran.all());
    let ran = plimsoll(["doctor", "--backend", "firecracker", "--json"]).run().exits(12);
    let value: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(value["backends"][0]["backend"], "firecracker");
    assert_eq!(value["backends"][0]["usable"], false);
    assert!(value["backends"][0]["blocker"].is_string() && value["backends"][0]["help"].is_string(), "{value:#}");
}

#[test]
fn root_without_cap_sys_admin_is_told_what_to_set() {
    if !rustix::process::geteuid().is_root() || !backend("gvisor") {
        return;
    }
    let ran = std::process::Command::new("setpriv")
        .args(["--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", env!("CARGO_BIN_EXE_plimsoll")])
        .args(["doctor", "--backend", "gvisor", "--quiet"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert_eq!(ran.status.code(), Some(11), "{said}");
    assert!(said.contains("only `process` is proven") && said.contains("--cap-add SYS_ADMIN"), "{said}");
}

#[test]
fn doctor_says_when_it_found_out_and_tries_again_when_asked() {
    if !backend("wasm") {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let doctor = |more: &[&str]| {
        let arguments = ["doctor", "--backend", "wasm"].iter().chain(more).copied();
        plimsoll(arguments).env("XDG_CACHE_HOME", cache.path()).run().exits(0).stdout
    };
    let json = |more: &[&str]| -> Value {
        let text = doctor(&[&["--json"], more].concat());
        serde_json::from_str::<Value>(&text).unwrap()["backends"][0].clone()
    };
    let first = json(&[]);
    assert!(first["usable"] == true && first["cached"] == false, "{first:#}");
    let mut again = json(&[]);
    assert_eq!(again["cached"].take(), true);
    again["cached"] = false.into();
    assert_eq!(first, again);
    assert!(doctor(&[]).contains("(found out "));
    assert!(!doctor(&["--verbose"]).contains("(found out "));
    let fresh = json(&["--fresh"]);
    assert!(fresh["cached"] == false && fresh["found_at"].as_str() > first["found_at"].as_str(), "{fresh:#}");
    // Another setting of the process is another host.
    let patient = plimsoll(["doctor", "--backend", "wasm"]).env("XDG_CACHE_HOME", cache.path());
    assert!(!patient.env("PLIMSOLL_BOOT_TIMEOUT", "77").run().exits(0).stdout.contains("(found out "));
}

#[test]
fn verify_finds_a_changed_report_and_names_what_it_can_not_prove() {
    let place = Place::new();
    place.run(&["run", "--run", "pass.wat", "--minimum-isolation", "vm"]).run().exits(11);
    place.run(&["verify", "plimsoll-report"]).run().exits(0).prints("consistent; origin not proven");
    let path = place.path("plimsoll-report/report.json");
    let forged = fs::read_to_string(&path).unwrap().replace("\"refused\"", "\"passed\"");
    fs::write(&path, forged).unwrap();
    place.run(&["verify", "plimsoll-report"]).run().exits(15).prints("fault: ");
    place.run(&["verify", "nowhere"]).run().exits(2).says("error: failed to open nowhere");
}
