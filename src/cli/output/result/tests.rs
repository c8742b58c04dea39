use std::collections::BTreeMap;

use super::*;
use crate::backend::output::{FileRecord, StreamRecord};
use crate::backend::{BinaryRecord, EngineRecord};
use crate::evidence::{ControlId, Fact, Observation, Tier};
use crate::report::{
    ArtifactRecord, ControlRecord, GuestTests, Host, PolicyRecord, RefusalRecord, ReportOrigin, Resources,
    ResultRecord, Tool,
};

/// A step as runs give it.
pub fn step(name: &str, verdict: Verdict, tier: Option<Tier>) -> StepReport {
    let control = |id, status, required| ControlRecord {
        id,
        status,
        required,
        observations: vec![Observation::host(Fact::Remark { control: id, what: "as it should be".to_owned() })],
    };
    let controls = if tier.is_some() {
        vec![
            control(ControlId::Seccomp, Status::Enforced, true),
            control(ControlId::Network, Status::Enforced, true),
            control(ControlId::BinaryIdentity, Status::Partial, true),
            control(ControlId::MemoryLimit, Status::Enforced, false),
            control(ControlId::CpuLimit, Status::NotEnforced, false),
            control(ControlId::Entropy, Status::Unknown, false),
        ]
    } else {
        Vec::new()
    };
    StepReport {
        index: 1,
        name: name.to_owned(),
        slug: "unit".to_owned(),
        verdict,
        exit: Exit::Passed,
        forgiven: false,
        dispatched: if tier.is_some() { Dispatched::Yes } else { Dispatched::No },
        command: "python3 -m unittest -v\necho done\n".to_owned(),
        image: None,
        grants: Vec::new(),
        engine: tier.map(|_| EngineRecord {
            name: "gvisor".to_owned(),
            engine_version: "runsc 20240729.0".to_owned(),
            binaries: vec![BinaryRecord {
                path: "/usr/bin/runsc".into(),
                version: String::new(),
                sha256: "ab".repeat(32),
            }],
            settings: BTreeMap::from([("platform".to_owned(), "systrap".to_owned())]),
        }),
        backend: Some("gvisor".to_owned()),
        floor: Tier::Kernel,
        tier,
        controls,
        artifact: None,
        result: tier.map(|_| ResultRecord {
            exit_code: Some(0),
            stdout: StreamRecord { bytes: 1_572_864, kept: 1_048_576, ..StreamRecord::default() },
            ..ResultRecord::default()
        }),
        resources: Resources {
            prepare_ms: 212,
            run_ms: 1_340,
            total_ms: 61_900,
            cpu_ms: tier.map(|_| 980),
            peak_memory_bytes: tier.map(|_| 104_857_600),
            boundary_memory_bytes: tier.map(|_| 31_457_280),
        },
        outputs: Vec::new(),
        guest_tests: None,
        guest_cases: Default::default(),
        refusal: None,
        notices: Vec::new(),
    }
}

/// A report of steps.
pub fn report(steps: Vec<StepReport>) -> Report {
    let exit = Exit::of_many(steps.iter().map(|s| s.exit));
    Report {
        verdict: Verdict::of(exit),
        exit_code: exit,
        origin: ReportOrigin::Local,
        tool: Tool { version: "0.1.0".to_owned(), sha256: "cd".repeat(32) },
        policy: PolicyRecord { sha256: None, effect: "none".to_owned() },
        host: Host::default(),
        ci: None,
        started_at: "2026-01-02T03:04:05Z".parse().unwrap(),
        ended_at: "2026-01-02T03:05:06Z".parse().unwrap(),
        steps,
        request_sha256: "ef".repeat(32),
    }
}

fn shown(report: &Report, change: impl FnOnce(&mut Options<'_>)) -> String {
    let mut options = Options {
        style: Style::PLAIN,
        target: LogTarget::Plain,
        quiet: false,
        verbose: false,
        report_dir: Path::new("plimsoll-report"),
        outputs_dir: Path::new("plimsoll-outputs"),
    };
    change(&mut options);
    render(report, options)
}

#[test]
fn a_step_that_passed() {
    let mut one = step("unit", Verdict::Passed, Some(Tier::Kernel));
    one.artifact = Some(ArtifactRecord {
        source: "dist/patch.tar.zst".to_owned(),
        format: "tar.zst".to_owned(),
        sha256: "0123456789abcdef".repeat(4),
        files: 12,
        bytes: 34_567,
    });
    one.outputs = vec![FileRecord { path: "report.xml".to_owned(), bytes: 2048, sha256: String::new() }];
    one.guest_tests = Some(GuestTests { total: 4, failed: 0, errors: 0, skipped: 1 });
    one.grants = vec!["mount: /cache at /wheels (read-only)".to_owned()];
    insta::assert_snapshot!(shown(&report(vec![one]), |_| ()), @r"
    ✓ 01 unit passed behind a proven kernel boundary
      ran           python3 -m unittest -v (and 1 more line)
      backend       gvisor, runsc 20240729.0, platform systrap
      artifact      dist/patch.tar.zst (tar.zst, 12 files, 33.7 KiB, sha256 0123456789ab…)
      isolation     kernel proven, floor kernel
      enforced      seccomp* network* memory-limit
      partial       binary-identity*
      not enforced  cpu-limit
      unknown       entropy
                    * required: the step would have been refused without it
      result        exit code 0, stdout 1.5 MiB (1.0 MiB kept)
      tests         4 tests by the guest's own count: 0 failed, 0 errors, 1 skipped (unverified)
      outputs       1 file, 2.0 KiB in plimsoll-outputs/01-unit (untrusted)
      times         prepare 212 ms, run 1.3 s, total 1 min 1 s; cpu 980 ms
      memory        peak 100.0 MiB; the boundary itself 30.0 MiB
      granted       mount: /cache at /wheels (read-only)
    passed, exit code 0; report: plimsoll-report/report.html
    ");
}

#[test]
fn a_step_that_was_refused_says_why_and_what_to_do() {
    let mut one = step("unit", Verdict::Refused, Some(Tier::Container));
    one.exit = Exit::Refused;
    one.dispatched = Dispatched::No;
    one.result = None;
    one.controls.truncate(2);
    one.refusal = Some(RefusalRecord {
        stage: "judge".to_owned(),
        reason: "floor-not-proven".to_owned(),
        message: "the floor is `kernel`, but only `container` is proven".to_owned(),
        help: Some("use `backend: gvisor`".to_owned()),
    });
    insta::assert_snapshot!(shown(&report(vec![one]), |_| ()), @r"
    ⊘ 01 unit refused; nothing ran
      did not run   python3 -m unittest -v (and 1 more line)
      backend       gvisor, runsc 20240729.0, platform systrap
      isolation     only container proven, floor kernel
      enforced      seccomp* network*
                    * required: the step would have been refused without it
      because       the floor is `kernel`, but only `container` is proven (judge)
      help          use `backend: gvisor`
      times         prepare 212 ms, run 1.3 s, total 1 min 1 s; cpu 980 ms
      memory        peak 100.0 MiB; the boundary itself 30.0 MiB
    refused, exit code 11; report: plimsoll-report/report.html
    ");
}

#[test]
fn several_steps_in_quiet_are_a_line_each() {
    let mut failed = step("lint", Verdict::Failed, Some(Tier::Kernel));
    failed.index = 2;
    failed.exit = Exit::GuestFailed;
    let both = report(vec![step("unit", Verdict::Passed, Some(Tier::Vm)), failed]);
    insta::assert_snapshot!(shown(&both, |o| o.quiet = true), @r"
    ✓ 01 unit passed behind a proven vm boundary
    ✗ 02 lint failed behind a proven kernel boundary
    failed, 1 of 2 steps passed, exit code 10; report: plimsoll-report/report.html
    ");
}

#[test]
fn an_empty_shard_and_a_missing_backend() {
    let mut empty = report(Vec::new());
    empty.verdict = Verdict::Skipped;
    insta::assert_snapshot!(shown(&empty, |_| ()), @"skipped, no steps, exit code 0; report: plimsoll-report/report.html");
    let mut missing = step("unit", Verdict::Error, None);
    missing.exit = Exit::Unavailable;
    let text = shown(&report(vec![missing]), |o| o.quiet = true);
    assert!(text.starts_with("✗ 01 unit could not run: the backend is not available here\n"), "{text}");
}

#[test]
fn verbose_shows_every_fact() {
    let text = shown(&report(vec![step("unit", Verdict::Passed, Some(Tier::Kernel))]), |o| o.verbose = true);
    assert!(text.contains("seccomp           enforced      host saw: as it should be"), "{text}");
}

#[test]
fn hostile_names_commands_and_messages_stay_in_their_line() {
    let mut one = step("a\n::error::b\x1b[31m", Verdict::Failed, Some(Tier::Kernel));
    one.command = "\n  ::set-output name=x::y\x1b]0;t\x07".to_owned();
    one.notices = vec!["x\r\n##[error]y\u{202e}".to_owned()];
    for target in [LogTarget::GitHub, LogTarget::GitLab, LogTarget::Plain] {
        let text = shown(&report(vec![one.clone()]), |o| o.target = target);
        assert!(!text.contains(['\x1b', '\r', '\x07', '\u{202e}']), "{text:?}");
        assert!(text.lines().all(|l| !l.trim_start().starts_with("::")), "{text}");
        assert!(target != LogTarget::GitHub || !text.contains("##["), "{text}");
    }
}

#[test]
fn sizes_and_times_for_people() {
    assert_eq!(
        [bytes(0), bytes(1023), bytes(1024), bytes(1_048_576 - 1), bytes(u64::MAX)],
        ["0 B", "1023 B", "1.0 KiB", "1023.9 KiB", "16777215.9 TiB"]
    );
    assert_eq!(
        [millis(999), millis(1000), millis(59_999), millis(3_600_000)],
        ["999 ms", "1.0 s", "59.9 s", "60 min 0 s"]
    );
}
