//! Limits hold, and what runs over them ends whole.

use std::time::Duration;

use plimsoll::backend::PrepareError;
use plimsoll::evidence::ControlId;
use plimsoll::gate::{Dispatched, End};
use plimsoll_guest::LimitHit;

use crate::support::{root, skipped, step};

#[test]
fn a_full_workspace_is_an_error_inside_and_a_limit_hit() {
    if skipped() {
        return;
    }
    for place in ["/workspace/big", "/tmp/big", "/dev/shm/big"] {
        let ran = step(&format!("dd if=/dev/zero of={place} bs=1M count=64")).run();
        assert_eq!(ran.result().limit_hit, Some(LimitHit::Disk), "{place} {}", ran.story());
        assert!(ran.stderr.contains("No space left"), "{}", ran.stderr);
    }
    // All of them together have one budget, and what fits fits.
    let ran = step("dd if=/dev/zero of=big bs=1M count=24 && dd if=/dev/zero of=/tmp/big bs=1M count=24").run();
    assert_eq!(ran.result().limit_hit, Some(LimitHit::Disk), "{}", ran.story());
    step("dd if=/dev/zero of=big bs=1M count=24").run().passed();
}

#[test]
fn a_fork_bomb_meets_the_limit_and_is_ended() {
    if skipped() {
        return;
    }
    let count = "import os, time
n = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(1000)
        n += 1
except OSError as e:
    print(n, e.errno)
    raise SystemExit(4)";
    let ran = step(count).with(|s| {
        s.shell = ["python3", "{0}"].map(str::to_owned).into();
        s.bounds.pids = 20;
    });
    let ran = ran.run();
    // Linux counts the program itself; gVisor lets one more through.
    assert!(["19 11\n", "20 11\n"].contains(&ran.stdout.as_str()), "{}", ran.story());
    assert_eq!(ran.result().limit_hit, Some(LimitHit::Pids), "{}", ran.story());
    let bomb = step("f() { f | f & }; f; sleep 1; echo survived").with(|s| s.bounds.pids = 24).run();
    assert!(matches!(bomb.passage.end, End::Result(_) | End::TimedOut), "{}", bomb.story());
}

#[test]
fn a_memory_bomb_is_ended_by_the_hosts_limit() {
    if skipped() {
        return;
    }
    if !root() {
        println!("skipped: a plain user's memory is limited in a delegated cgroup only");
        return;
    }
    let ran = step("x = bytearray(1 << 30)\nfor i in range(0, len(x), 4096): x[i] = 1\nprint('survived')")
        .with(|s| {
            s.shell = ["python3", "{0}"].map(str::to_owned).into();
            s.bounds.memory_bytes = 192 << 20;
        })
        .run();
    assert!(!ran.stdout.contains("survived"), "{}", ran.story());
    assert_eq!(ran.passage.limit_hit(), Some(LimitHit::Memory), "{}", ran.story());
    assert_eq!(ran.passage.dispatched, Dispatched::Yes);
}

#[test]
fn a_limit_that_is_too_small_for_the_engine_is_named() {
    if skipped() || !root() {
        return;
    }
    let ran = step("true").with(|s| s.bounds.memory_bytes = 4 << 20).run();
    let End::NotPrepared(PrepareError::Unavailable { blocker, help, .. }) = &ran.passage.end else {
        panic!("{}", ran.story())
    };
    assert!(blocker.contains("memory limit") && help.contains("sandbox.memory"), "{blocker}");
}

#[test]
fn a_flood_of_output_is_counted_and_not_kept() {
    if skipped() {
        return;
    }
    let ran = step("head -c 67108864 /dev/zero").run().passed();
    assert_eq!(ran.stdout_bytes, (64 << 20, 1 << 20));
}

#[test]
fn a_daemon_neither_survives_nor_holds_up_the_step() {
    if skipped() {
        return;
    }
    // It keeps both streams open, left its session, and ignores what can be ignored.
    let ran =
        step("setsid sh -c 'trap \"\" TERM HUP INT; echo daemon; sleep 1000' & sleep 0.3; echo main").run().passed();
    assert!(ran.stdout.contains("daemon") && ran.stdout.contains("main"), "{}", ran.story());
}

#[test]
fn at_the_deadline_the_whole_tree_ends_and_the_boundary_was_looked_at_before() {
    if skipped() {
        return;
    }
    let ran =
        step("echo begun; setsid sleep 1000 & sleep 1000").with(|s| s.bounds.deadline = Duration::from_secs(2)).run();
    assert!(matches!(ran.passage.end, End::TimedOut), "{}", ran.story());
    assert_eq!(ran.passage.limit_hit(), Some(LimitHit::Time));
    assert_eq!((ran.stdout.as_str(), ran.passage.unobserved.as_ref()), ("begun\n", None));
    assert_eq!(ran.passage.changed, []);
    assert!(ran.passage.observations.iter().any(|o| o.fact.control() == ControlId::Teardown));
}

#[test]
fn a_cancelled_step_ends_whole() {
    if skipped() {
        return;
    }
    let ran = step("echo begun; setsid sleep 1000 & sleep 1000").with(|s| s.cancel_on_output = true).run();
    assert!(matches!(ran.passage.end, End::Cancelled(_)), "{}", ran.story());
    // Before dispatch, while the engine starts.
    let early = step("sleep 1000").with(|s| s.cancel_after = Some(Duration::from_millis(60))).run();
    assert!(matches!(early.passage.end, End::CancelledBefore(_) | End::Cancelled(_)), "{}", early.story());
}
