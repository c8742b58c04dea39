//! Reports of every kind, with logs, as a run would fill them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use plimsoll::backend::output::Output;
use plimsoll::backend::{BinaryRecord, EngineRecord};
use plimsoll::evidence::fact::{EngineKind, Identity, Namespace};
use plimsoll::evidence::judge::{ALWAYS_REQUIRED, row, weigh};
use plimsoll::evidence::{ControlId, Fact, Observation, Tier};
use plimsoll::exit::Exit;
use plimsoll::gate::Dispatched;
use plimsoll::report::json_v1::ReportV1;
use plimsoll::report::{
    ArtifactRecord, Ci, Host, ImageRecord, OutputsDir, PolicyRecord, RefusalRecord, Report, ReportDir, ReportOrigin,
    Resources, ResultRecord, StepReport, Tool, Verdict, controls, guest_junit,
};
use plimsoll_guest::{OutputBudget, Stream};

/// A report, what each step printed, and its output files.
pub struct Sample {
    pub report: Report,
    pub logs: Vec<(Vec<u8>, Vec<u8>)>,
    pub cap: u64,
    pub files: Vec<(&'static str, &'static [u8])>,
}

impl Sample {
    /// Writes it as a run does: claim, logs and outputs through the real writer, commit.
    pub fn commit(&mut self, root: &Path) -> ReportV1 {
        let dir = ReportDir::claim(&root.join("report")).unwrap();
        let outputs = OutputsDir::claim(&root.join("outputs")).unwrap();
        for (step, (stdout, stderr)) in self.report.steps.iter_mut().zip(&self.logs) {
            let directory = step.directory();
            let Some(result) = &mut step.result else { continue };
            let logs = dir.step(&directory).unwrap();
            let wanted = (step.index == 1 && !self.files.is_empty()).then(|| outputs.step(&directory).unwrap());
            let budget = OutputBudget { files: 100, bytes: 1 << 20 };
            let mut output = Output::create(&logs, wanted, self.cap, budget, None).unwrap();
            output.stream(Stream::Stdout, stdout);
            output.stream(Stream::Stderr, stderr);
            if step.index == 1 {
                for (path, bytes) in &self.files {
                    output.file_begin(path, bytes.len() as u64);
                    output.file_data(bytes);
                    output.file_end();
                }
            }
            let written = output.finish();
            (result.stdout, result.stderr, step.outputs) = (written.stdout, written.stderr, written.files);
        }
        outputs.commit().unwrap();
        dir.commit(&self.report).unwrap()
    }
}

pub fn hex64(c: char) -> String {
    c.to_string().repeat(64)
}

fn around(exit: Exit, steps: Vec<StepReport>) -> Report {
    Report {
        verdict: Verdict::of(exit),
        exit_code: exit,
        origin: ReportOrigin::Local,
        tool: Tool { version: "0.1.0".to_owned(), sha256: hex64('1') },
        policy: PolicyRecord { sha256: Some(hex64('2')), effect: "applied".to_owned() },
        host: Host {
            runner: "runner-7".to_owned(),
            kernel: "Linux 6.8.0-45-generic".to_owned(),
            cpu: "AMD EPYC 7763 64-Core Processor × 4".to_owned(),
            virtualization: "Microsoft Corporation Virtual Machine".to_owned(),
        },
        ci: Some(Ci {
            provider: "github".to_owned(),
            repository: Some("octo-org/agent-patches".to_owned()),
            sha: Some("4b825dc642cb6eb9a060e54bf8d69288fbee4904".to_owned()),
            head_sha: Some("9c1185a5c5e9fc54612808977ee8f548b2258d31".to_owned()),
            pull_request: Some(42),
            job: Some("sandboxed-tests".to_owned()),
            attempt: Some(1),
            matrix: BTreeMap::new(),
            run_url: Some("https://github.example/octo-org/agent-patches/actions/runs/1".to_owned()),
        }),
        started_at: "2026-03-04T09:15:02.125Z".parse().unwrap(),
        ended_at: "2026-03-04T09:15:04.75Z".parse().unwrap(),
        steps,
        request_sha256: hex64('3'),
    }
}

fn host(facts: Vec<Fact>) -> Vec<Observation> {
    facts.into_iter().map(Observation::host).collect()
}

/// Facts that prove `container`.
pub fn container_facts() -> Vec<Fact> {
    let limit =
        |control, wanted, place: &str| Fact::Limit { control, wanted, read: Some(wanted), place: place.to_owned() };
    vec![
        Fact::Namespaces { own: Namespace::ALL.into(), shared: BTreeSet::new() },
        Fact::Seccomp { threads: 1, filtered: 1 },
        Fact::NoNewPrivs { threads: 1, set: 1 },
        Fact::Capabilities { mask: "0000000000000000".to_owned(), own_user_namespace: true },
        Fact::HostIds { uids: vec![65534; 4], gids: vec![65534; 4], groups: vec![] },
        Fact::Root { root: "0:61:1".to_owned(), host_root: "8:1:2".to_owned(), mounts: 1, foreign: vec![] },
        Fact::Descriptors { total: 5, planned: vec![], unplanned: vec![] },
        Fact::Interfaces { names: vec!["lo".to_owned()], own_namespace: true },
        Fact::Environment { names: vec![], leaked: vec![] },
        Fact::Challenge { answered: true, micros: 184, pid: 4711, start_time: 881_233, stubs: 0, strangers: vec![] },
        Fact::Executable {
            engine: EngineKind::Worker,
            path: "/proc/self/exe".to_owned(),
            sha256: hex64('1'),
            identity: Identity::RootOwned,
        },
        limit(ControlId::TimeLimit, 300_000, "the runner's own timer, in milliseconds"),
        limit(ControlId::OutputLimit, 1_048_576, "the runner's own writer, in bytes per stream"),
        limit(ControlId::MemoryLimit, 268_435_456, "prlimit(2) RLIMIT_DATA of the worker"),
        limit(ControlId::PidsLimit, 1, "the seccomp filter, which allows no clone"),
        Fact::Configured { control: ControlId::Filesystem, what: "Landlock ruleset, ABI 5, no rule".to_owned() },
        Fact::Unlimited { control: ControlId::CpuLimit, reason: "no delegated cgroup".to_owned() },
        Fact::Entropy { source: "getrandom(2) of the host's kernel".to_owned(), fresh: true },
        Fact::Leftovers { looked_for: vec!["processes".to_owned(), "mounts".to_owned()], found: vec![] },
    ]
}

/// Facts that prove `kernel`.
pub fn kernel_facts() -> Vec<Fact> {
    let mut facts = container_facts();
    for fact in &mut facts {
        match fact {
            Fact::Namespaces { own, shared } => {
                own.remove(&Namespace::Pid);
                shared.insert(Namespace::Pid);
            }
            Fact::Seccomp { threads, filtered } => (*threads, *filtered) = (34, 34),
            Fact::NoNewPrivs { threads, set } => (*threads, *set) = (34, 34),
            Fact::Challenge { micros, stubs, .. } => (*micros, *stubs) = (912, 3),
            Fact::Descriptors { total, planned, .. } => {
                (*total, *planned) = (21, vec!["/usr".to_owned(), "/lib".to_owned()]);
            }
            Fact::Executable { engine, path, sha256, identity } => {
                *engine = EngineKind::Runsc;
                *path = "/usr/local/bin/runsc".to_owned();
                *sha256 = hex64('a');
                *identity = Identity::Release { version: "release-20260202.0".to_owned() };
            }
            Fact::Unlimited { .. } => {
                *fact = Fact::Limit {
                    control: ControlId::CpuLimit,
                    wanted: 1000,
                    read: Some(1000),
                    place: "/sys/fs/cgroup/plimsoll-9f/cpu.max".to_owned(),
                };
            }
            _ => {}
        }
    }
    facts
}

pub fn observe(step: &mut StepReport, observations: &[Observation]) {
    let whole = weigh(observations);
    let required: BTreeSet<ControlId> = ALWAYS_REQUIRED.into_iter().chain(row(step.floor).iter().copied()).collect();
    step.tier = Some(whole.tier);
    step.controls = controls(&whole.grades, &required, observations);
}

fn end(step: &mut StepReport, exit: Exit) {
    step.exit = exit;
    step.verdict = Verdict::of(exit);
}

fn ran(step: &mut StepReport, exit_code: i32) {
    step.dispatched = Dispatched::Yes;
    step.result = Some(ResultRecord { exit_code: Some(exit_code), ..ResultRecord::default() });
}

fn resources(prepare: u64, run: u64, total: u64, cpu: u64, peak: u64, own: u64) -> Resources {
    Resources {
        prepare_ms: prepare,
        run_ms: run,
        total_ms: total,
        cpu_ms: Some(cpu),
        peak_memory_bytes: Some(peak),
        boundary_memory_bytes: Some(own),
    }
}

const PYTEST: &str = r#"<testsuites><testsuite name="pytest" tests="4"><testcase classname="test_patch.TestParser"
 name="test_round_trip" time="0.012"/><testcase classname="test_patch.TestParser" name="test_unicode" time="0.004"/>
 <testcase classname="test_patch.TestNet" name="test_offline" time="0.001"><skipped message="no network here"/></testcase>
 <testcase classname="test_patch.TestLimits" name="test_large" time="0.318"/></testsuite></testsuites>"#;

fn gvisor_step(index: u32) -> StepReport {
    let mut step = StepReport::untried(
        index,
        "Unit tests of the generated patch",
        "unit-tests-of-the-generated-patch",
        Tier::Kernel,
    );
    step.command = "python3 -m unittest -v".to_owned();
    step.image = Some(ImageRecord { reference: "host".to_owned(), digest: None });
    step.backend = Some("gvisor".to_owned());
    step.engine = Some(EngineRecord {
        name: "gvisor".to_owned(),
        engine_version: "release-20260202.0".to_owned(),
        binaries: vec![BinaryRecord {
            path: "/usr/local/bin/runsc".to_owned(),
            version: "release-20260202.0".to_owned(),
            sha256: hex64('a'),
        }],
        settings: BTreeMap::from([
            ("platform".to_owned(), "systrap".to_owned()),
            ("network".to_owned(), "none".to_owned()),
        ]),
    });
    step.artifact = Some(ArtifactRecord {
        source: "dist/patch.tar.zst".to_owned(),
        format: "tar.zst".to_owned(),
        sha256: hex64('b'),
        files: 214,
        bytes: 1_893_376,
    });
    observe(&mut step, &host(kernel_facts()));
    step.resources = resources(268, 1_940, 2_291, 1_420, 96_468_992, 35_651_584);
    step
}

pub fn passed() -> Sample {
    let mut step = gvisor_step(1);
    ran(&mut step, 0);
    end(&mut step, Exit::Passed);
    let cases = guest_junit::parse(PYTEST.as_bytes()).unwrap();
    step.guest_tests = Some(cases.counts());
    step.guest_cases = cases;
    let stderr = b"test_round_trip (test_patch.TestParser.test_round_trip) ... ok\ntest_unicode \
        (test_patch.TestParser.test_unicode) ... ok\ntest_offline (test_patch.TestNet.test_offline) ... skipped 'no network \
        here'\ntest_large (test_patch.TestLimits.test_large) ... ok\n\n\
        ----------------------------------------------------------------------\nRan 4 tests in 0.335s\n\nOK (skipped=1)\n";
    Sample {
        report: around(Exit::Passed, vec![step]),
        logs: vec![(b"collecting from /workspace\n".to_vec(), stderr.to_vec())],
        cap: 1 << 20,
        files: vec![("report.xml", PYTEST.as_bytes()), ("out/summary.txt", b"4 tests, 0 failures\n")],
    }
}

fn wasm_step(index: u32, name: &str, slug: &str) -> StepReport {
    let mut step = StepReport::untried(index, name, slug, Tier::Kernel);
    step.floor = Tier::Container;
    step.backend = Some("wasm".to_owned());
    step.command = "hello.wasm --check".to_owned();
    step.engine = Some(EngineRecord {
        name: "wasm".to_owned(),
        engine_version: "wasmtime 48.0.8".to_owned(),
        binaries: vec![BinaryRecord {
            path: "/proc/self/exe".to_owned(),
            version: "0.1.0".to_owned(),
            sha256: hex64('1'),
        }],
        settings: BTreeMap::from([("epochs".to_owned(), "10 ms".to_owned())]),
    });
    observe(&mut step, &host(container_facts()));
    step.resources = resources(14, 31, 52, 28, 12_582_912, 6_291_456);
    step
}

pub fn failed() -> Sample {
    let mut step = wasm_step(1, "Check the generated parser", "check-the-generated-parser");
    ran(&mut step, 1);
    end(&mut step, Exit::GuestFailed);
    let junit = r#"<testsuite name="parser"><testcase name="accepts"/><testcase name="rejects" time="0.2"><failure
        message="expected an error">at parser.c:118</failure></testcase></testsuite>"#;
    let cases = guest_junit::parse(junit.as_bytes()).unwrap();
    step.guest_tests = Some(cases.counts());
    step.guest_cases = cases;
    let mut stdout = Vec::new();
    for i in 0..400 {
        stdout.extend_from_slice(format!("case {i:03}: input of {} bytes parsed\n", i * 37 % 991).as_bytes());
    }
    Sample {
        report: around(Exit::GuestFailed, vec![step]),
        logs: vec![(stdout, b"parser.c:118: assertion failed: rc != 0\n".to_vec())],
        cap: 8192,
        files: vec![],
    }
}

pub fn refused() -> Sample {
    let mut step = gvisor_step(1);
    step.floor = Tier::Vm;
    let mut facts = kernel_facts();
    facts.retain(|f| !matches!(f, Fact::Environment { .. }));
    facts.push(Fact::Environment {
        names: vec!["PATH".to_owned(), "GITHUB_TOKEN".to_owned()],
        leaked: vec!["GITHUB_TOKEN".to_owned()],
    });
    observe(&mut step, &host(facts));
    step.resources = Resources { prepare_ms: 251, total_ms: 283, ..Resources::default() };
    step.refusal = Some(RefusalRecord {
        stage: "judge".to_owned(),
        reason: "floor-not-proven".to_owned(),
        message: "the floor is `vm`, but only `kernel` is proven; required but not satisfied: secrets is not-enforced"
            .to_owned(),
        help: Some(
            "see the controls that are not enforced; `plimsoll doctor` says what this host can prove".to_owned(),
        ),
    });
    end(&mut step, Exit::Refused);
    Sample { report: around(Exit::Refused, vec![step]), logs: vec![], cap: 1, files: vec![] }
}

/// Nothing came up at all.
pub fn unavailable() -> Sample {
    let mut step = StepReport::untried(1, "Unit tests", "unit-tests", Tier::Kernel);
    step.backend = Some("gvisor".to_owned());
    step.command = "make test".to_owned();
    step.resources.total_ms = 3;
    step.refusal = Some(RefusalRecord {
        stage: "prepare".to_owned(),
        reason: "backend-unavailable".to_owned(),
        message: "gvisor is not available on this host: no `runsc` in PATH".to_owned(),
        help: Some("plimsoll setup gvisor".to_owned()),
    });
    end(&mut step, Exit::Unavailable);
    Sample { report: around(Exit::Unavailable, vec![step]), logs: vec![], cap: 1, files: vec![] }
}

/// One of each.
pub fn mixed() -> Sample {
    let mut first = gvisor_step(1);
    ran(&mut first, 0);
    end(&mut first, Exit::Passed);
    let mut second = wasm_step(2, "Hello from WebAssembly", "hello-from-webassembly");
    ran(&mut second, 0);
    end(&mut second, Exit::Passed);
    let mut third = wasm_step(3, "Fuzz the parser for a while", "fuzz-the-parser-for-a-while");
    ran(&mut third, 0);
    if let Some(result) = &mut third.result {
        (result.exit_code, result.timed_out, result.limit_hit) = (None, true, Some("time".to_owned()));
        result.message = Some("the deadline passed; everything inside was killed".to_owned());
    }
    end(&mut third, Exit::GuestFailed);
    third.forgiven = true;
    let mut fourth = gvisor_step(4);
    (fourth.name, fourth.slug) = ("Build the documentation".to_owned(), "build-the-documentation".to_owned());
    ran(&mut fourth, 2);
    end(&mut fourth, Exit::GuestFailed);
    let mut fifth = wasm_step(5, "Left over", "left-over");
    (fifth.controls, fifth.tier, fifth.engine) = (Vec::new(), None, None);
    fifth.resources = Resources::default();
    fifth.verdict = Verdict::Skipped;
    fifth.exit = Exit::Passed;
    let mut refused = refused().report.steps.remove(0);
    (refused.index, refused.name) = (6, "Deploy preview in a microVM".to_owned());
    refused.slug = "deploy-preview-in-a-microvm".to_owned();
    let logs = vec![
        (b"ok\n".to_vec(), vec![]),
        (b"Hello, world!\n".to_vec(), vec![]),
        (b"seed 1\nseed 2\n".to_vec(), vec![]),
        (vec![], b"sphinx-build: error: no such file\n".to_vec()),
        (vec![], vec![]),
        (vec![], vec![]),
    ];
    let steps = vec![first, second, third, fourth, fifth, refused];
    Sample { report: around(Exit::Refused, steps), logs, cap: 1 << 20, files: vec![] }
}

/// Everything that a guest or a pull request can write is an attack on whoever reads it.
pub const HOSTILE: &str = "x\u{1b}[31m\u{9b}2J\u{202e}evil\u{200b} @octocat Fixes #1 GH-12 owner/repo#3 https://evil.example \
    </pre></td><script>alert(1)</script><img src=x onerror=alert(1)><details><!--<object> ]]> ``` `` ` | \\| \r\n::error::pwned\n\
    ##[add-mask]e\nsection_start:1:x\r\u{1b}[0K\n/close\n\u{0}\u{b}\u{e0041}'\"&amp;";

pub fn hostile() -> Sample {
    let bad = || HOSTILE.to_owned();
    let mut step = gvisor_step(1);
    ran(&mut step, 0);
    if let Some(result) = &mut step.result {
        (result.exit_code, result.message, result.limit_hit) = (Some(3), Some(bad()), Some(bad()));
    }
    end(&mut step, Exit::GuestFailed);
    step.name = bad();
    step.command = bad();
    step.grants = vec![bad()];
    step.notices = vec![bad(); 3];
    step.image = Some(ImageRecord { reference: bad(), digest: Some(bad()) });
    step.artifact = Some(ArtifactRecord { source: bad(), format: bad(), sha256: hex64('b'), files: 1, bytes: 1 });
    step.refusal = Some(RefusalRecord { stage: bad(), reason: bad(), message: bad(), help: Some(bad()) });
    if let Some(engine) = &mut step.engine {
        engine.engine_version = bad();
        engine.settings.insert(bad(), bad());
    }
    let escaped: String = HOSTILE
        .chars()
        .filter(|c| !matches!(c, '\u{0}' | '\u{b}' | '\u{1b}'))
        .map(|c| match c {
            '<' => "&lt;".to_owned(),
            '&' => "&amp;".to_owned(),
            '\'' => "&apos;".to_owned(),
            '>' => "&gt;".to_owned(),
            c => c.to_string(),
        })
        .collect();
    let junit = format!(
        "<testsuite name='{escaped}'><testcase name='{escaped}' classname='{escaped}' time='NaN'><failure \
         message='{escaped}'>{escaped}</failure><error/></testcase><testcase name='' time='-1'/></testsuite>"
    );
    let cases = guest_junit::parse(junit.as_bytes()).unwrap();
    step.guest_tests = Some(cases.counts());
    step.guest_cases = cases;
    observe(
        &mut step,
        &[host(kernel_facts()), vec![Observation::guest(Fact::Denied { control: ControlId::Entropy, what: bad() })]]
            .concat(),
    );
    let mut report = around(Exit::GuestFailed, vec![step]);
    report.host = Host { runner: bad(), kernel: bad(), cpu: bad(), virtualization: bad() };
    report.policy.effect = bad();
    if let Some(ci) = &mut report.ci {
        ci.repository = Some(bad());
        ci.sha = Some(bad());
        ci.job = Some(bad());
        ci.matrix.insert(bad(), bad());
        ci.run_url = Some(format!("javascript:alert(1)//{HOSTILE}"));
    }
    let raw = [HOSTILE.as_bytes(), b"\xff\xfe\x9b1m\n", &b"A".repeat(5000), b"\n", HOSTILE.as_bytes()].concat();
    Sample { report, logs: vec![(raw.clone(), raw)], cap: 1 << 20, files: vec![("a:b<c>.txt", b"x")] }
}

/// The job was cancelled before the first step.
pub fn cancelled() -> Sample {
    Sample { report: around(Exit::Terminated, vec![]), logs: vec![], cap: 1, files: vec![] }
}

pub fn all() -> Vec<(&'static str, Sample)> {
    vec![
        ("passed", passed()),
        ("failed", failed()),
        ("refused", refused()),
        ("unavailable", unavailable()),
        ("mixed", mixed()),
        ("hostile", hostile()),
        ("cancelled", cancelled()),
    ]
}
