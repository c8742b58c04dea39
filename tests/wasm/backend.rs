//! Guests without files: what they may compute, print, take, and how each ends.

use std::process::Command;
use std::time::Duration;

use plimsoll::backend::channel::CancelSignal;
use plimsoll::evidence::{ControlId, Status, Tier};
use plimsoll::gate::{Dispatched, End};
use plimsoll_guest::{Filesystem, LimitHit};
use sha2::{Digest, Sha256};

use crate::support::{Guest, OUTPUT_CAP, Ran, fixture};

pub const TESTS: &[(&str, fn())] = &[
    ("a_text_module_runs_behind_a_proven_container", a_text_module_runs_behind_a_proven_container),
    ("a_binary_module_runs_like_its_text", a_binary_module_runs_like_its_text),
    ("a_component_runs", a_component_runs),
    ("a_c_program_runs", a_c_program_runs),
    ("the_hello_example_says_hello", the_hello_example_says_hello),
    ("python_runs_a_test_suite_from_the_artifact", python_runs_a_test_suite_from_the_artifact),
    ("an_exit_code_comes_through", an_exit_code_comes_through),
    ("both_streams_come_through_and_standard_input_is_empty", both_streams_come_through_and_standard_input_is_empty),
    ("every_control_is_graded", every_control_is_graded),
    ("a_floor_that_is_not_proven_is_refused_and_nothing_runs", a_floor_that_is_not_proven_is_refused_and_nothing_runs),
    ("an_endless_loop_ends_at_the_deadline", an_endless_loop_ends_at_the_deadline),
    (
        "a_module_that_takes_for_ever_to_compile_ends_at_the_deadline",
        a_module_that_takes_for_ever_to_compile_ends_at_the_deadline,
    ),
    ("a_trap_is_told_in_words", a_trap_is_told_in_words),
    ("a_stack_overflow_is_a_trap", a_stack_overflow_is_a_trap),
    ("a_memory_bomb_hits_the_memory_limit", a_memory_bomb_hits_the_memory_limit),
    (
        "what_compiling_was_allowed_is_taken_back_before_the_code_starts",
        what_compiling_was_allowed_is_taken_back_before_the_code_starts,
    ),
    ("the_report_names_the_module_by_its_digest", the_report_names_the_module_by_its_digest),
    ("many_memories_share_the_memory_limit", many_memories_share_the_memory_limit),
    ("a_huge_table_is_refused", a_huge_table_is_refused),
    ("a_module_too_large_to_compile_within_the_limit_says_so", a_module_too_large_to_compile_within_the_limit_says_so),
    ("imports_that_nobody_grants_are_refused_by_name", imports_that_nobody_grants_are_refused_by_name),
    ("garbage_is_no_module", garbage_is_no_module),
    ("a_gigabyte_of_output_is_counted_and_not_kept", a_gigabyte_of_output_is_counted_and_not_kept),
    ("a_worker_that_is_killed_from_outside_is_gone", a_worker_that_is_killed_from_outside_is_gone),
    ("a_cancelled_run_ends_at_once", a_cancelled_run_ends_at_once),
    ("deterministic_runs_repeat_to_the_bit", deterministic_runs_repeat_to_the_bit),
    ("a_deterministic_loop_ends_by_fuel", a_deterministic_loop_ends_by_fuel),
    ("compiled_code_is_kept_and_a_damaged_entry_replaced", compiled_code_is_kept_and_a_damaged_entry_replaced),
];

/// What the run's observations say of where its machine code came from.
fn came_from_the_cache(ran: &Ran) -> bool {
    let words: Vec<String> = ran.passage.observations.iter().map(|o| o.fact.words()).collect();
    words.iter().any(|w| w.contains("came from the cache"))
}

fn a_text_module_runs_behind_a_proven_container() {
    let ran = Guest::fixture("hello.wat").run();
    assert_eq!(ran.boundary_held().exit_code(), 0);
    assert_eq!(ran.stdout, b"hello from inside\n");
    assert_eq!(ran.passage.dispatched, Dispatched::Yes);
    assert!(ran.passage.usage.boundary_memory_bytes.is_some_and(|bytes| bytes > 1 << 20));
    assert!(ran.passage.usage.peak_memory_bytes >= ran.passage.usage.boundary_memory_bytes);
    assert!(ran.passage.usage.cpu_ms.is_some());
}

fn a_binary_module_runs_like_its_text() {
    let binary = wat::parse_bytes(&fixture("hello.wat")).unwrap().into_owned();
    let ran = Guest::new(binary).run();
    assert_eq!(ran.boundary_held().exit_code(), 0);
    assert_eq!(ran.stdout, b"hello from inside\n");
}

fn a_component_runs() {
    let ran = Guest::fixture("component.wat").run();
    assert_eq!(ran.boundary_held().exit_code(), 0);
    assert_eq!(ran.stdout, b"hello from a component\n");
}

fn a_c_program_runs() {
    let dir = tempfile::tempdir().unwrap();
    let (source, wasm) = (dir.path().join("sum.c"), dir.path().join("sum.wasm"));
    std::fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/wasm-c/sum.c"), &source).unwrap();
    let built = Command::new("clang").args(["--target=wasm32-wasi", "-O1", "-o"]).args([&wasm, &source]).output();
    if !built.as_ref().is_ok_and(|b| b.status.success()) {
        let must = std::env::var("PLIMSOLL_MUST_WORK").unwrap_or_default();
        assert!(!must.split(',').any(|n| n == "wasm-c" || n == "all"), "clang for wasm32-wasi must work: {built:?}");
        eprintln!("skipped: no clang for wasm32-wasi (apt-get install clang lld wasi-libc libclang-rt-dev-wasm32)");
        return;
    }
    let mut guest = Guest::new(std::fs::read(&wasm).unwrap()).args(&["40", "2"]);
    guest.env = vec![("GREETING".to_owned(), "the sum".to_owned())];
    let ran = guest.run();
    assert_eq!(ran.boundary_held().exit_code(), 0);
    assert_eq!((ran.stdout.as_slice(), ran.stderr.as_slice()), (&b"the sum: 42\n"[..], &b"2 arguments\n"[..]));
    guest.args.pop();
    assert_eq!(guest.run().exit_code(), 3);
}

fn an_exit_code_comes_through() {
    assert_eq!(Guest::fixture("exit-7.wat").run().boundary_held().exit_code(), 7);
}

fn both_streams_come_through_and_standard_input_is_empty() {
    let ran = Guest::fixture("both-streams.wat").run();
    assert_eq!(ran.boundary_held().exit_code(), 0, "bytes of standard input");
    assert_eq!((ran.stdout.as_slice(), ran.stderr.as_slice()), (&b"out"[..], &b"err"[..]));
}

fn every_control_is_graded() {
    use ControlId::{
        BinaryIdentity, Capabilities, Challenge, CpuLimit, DiskLimit, Entropy, Filesystem, GuestKernel, Hypervisor,
        MemoryLimit, Namespaces, Network, NoNewPrivs, NonRoot, OutputLimit, PidsLimit, RootIsolated, Seccomp, Secrets,
        TimeLimit,
    };
    let ran = Guest::fixture("hello.wat").run();
    ran.boundary_held();
    for control in [
        Seccomp,
        Namespaces,
        NoNewPrivs,
        Capabilities,
        NonRoot,
        RootIsolated,
        Network,
        Filesystem,
        MemoryLimit,
        CpuLimit,
        PidsLimit,
        DiskLimit,
        TimeLimit,
        OutputLimit,
        Secrets,
        Challenge,
        Entropy,
    ] {
        assert_eq!(ran.grade(control), Status::Enforced, "{control}: {:#?}", ran.passage.observations);
    }
    assert_eq!(ran.grade(BinaryIdentity), Status::Partial);
    assert_eq!(ran.grade(GuestKernel), Status::NotEnforced);
    assert_ne!(ran.grade(Hypervisor), Status::Enforced);
}

fn a_floor_that_is_not_proven_is_refused_and_nothing_runs() {
    let mut guest = Guest::fixture("hello.wat");
    guest.floor = Tier::Kernel;
    let ran = guest.run();
    assert!(matches!(ran.passage.end, End::Refused(_)), "{:?}", ran.passage.end);
    assert_eq!(ran.passage.dispatched, Dispatched::No);
    assert_eq!(ran.stdout, b"");
}

fn an_endless_loop_ends_at_the_deadline() {
    let mut guest = Guest::fixture("endless-loop.wat");
    guest.deadline = Duration::from_millis(500);
    let ran = guest.run();
    assert!(matches!(ran.passage.end, End::TimedOut), "{:?}", ran.passage.end);
    ran.boundary_held();
    assert_eq!(ran.passage.limit_hit(), Some(LimitHit::Time));
}

/// One function of several megabytes: the host does not see when its compilation would end.
fn slow_to_compile() -> Vec<u8> {
    let mut body = String::from("(local i64 i64 i64 i64)\n");
    for i in 0..60_000 {
        let (a, b) = (i % 4, (i * 7 + 1) % 4);
        body.push_str(&format!(
            "(if (i64.eq (local.get {a}) (i64.const {i})) (then (local.set {b} (i64.mul (local.get {a}) (local.get {b})))) \
             (else (local.set {a} (i64.add (local.get {b}) (i64.const {i})))))\n"
        ));
    }
    format!("(module (memory (export \"memory\") 1) (func (export \"_start\") {body}))").into_bytes()
}

fn a_module_that_takes_for_ever_to_compile_ends_at_the_deadline() {
    let mut guest = Guest::new(slow_to_compile());
    guest.memory = 2 << 30;
    guest.deadline = Duration::from_millis(400);
    let ran = guest.run();
    assert!(matches!(ran.passage.end, End::TimedOut), "{:?}", ran.passage.end);
    ran.boundary_held();
}

fn a_trap_is_told_in_words() {
    let ran = Guest::fixture("trap.wat").run();
    let result = ran.boundary_held().result();
    assert_eq!((result.exit_code, result.limit_hit), (None, None));
    assert_eq!(result.message.as_deref(), Some("wasm trap: integer divide by zero in `divide`"));
}

fn a_stack_overflow_is_a_trap() {
    let ran = Guest::fixture("stack-overflow.wat").run();
    let result = ran.boundary_held().result();
    assert_eq!(result.exit_code, None);
    assert!(result.message.as_ref().is_some_and(|m| m.contains("call stack exhausted")), "{result:?}");
}

fn a_memory_bomb_hits_the_memory_limit() {
    let ran = Guest::fixture("memory-bomb.wat").run();
    let result = ran.boundary_held().result();
    assert_eq!((result.exit_code, result.limit_hit), (None, Some(LimitHit::Memory)), "{result:?}");
    assert!(result.peak_memory_bytes <= 64 << 20);
    assert!(ran.passage.usage.peak_memory_bytes.is_some_and(|peak| peak < 128 << 20), "{:?}", ran.passage.usage);
}

/// Bytes of memory that the kernel let the worker have when the guest's code had run.
fn memory_at_the_end(ran: &Ran) -> u64 {
    let words = ran.passage.observations.iter().map(|o| o.fact.words());
    let mut numbers =
        words.filter_map(|w| w.strip_suffix(" bytes")?.rsplit_once("RLIMIT_DATA of the worker was ")?.1.parse().ok());
    numbers.next().expect("the limit is observed")
}

fn what_compiling_was_allowed_is_taken_back_before_the_code_starts() {
    let guest = Guest::new(unique_module());
    for turn in ["compiled", "cached"] {
        let ran = guest.run();
        // The limits have changed since they were judged, and only downwards.
        assert_eq!(ran.boundary_held().exit_code(), 0);
        assert!(ran.passage.changed.is_empty(), "{:?}", ran.passage.changed);
        let limit = memory_at_the_end(&ran);
        assert!((guest.memory..guest.memory + (128 << 20)).contains(&limit), "{turn}: {limit}");
    }
}

fn the_report_names_the_module_by_its_digest() {
    let module = unique_module();
    let digest = hex::encode(Sha256::digest(&module));
    let guest = Guest::new(module);
    for _ in 0..2 {
        let ran = guest.run();
        let words: Vec<String> = ran.passage.observations.iter().map(|o| o.fact.words()).collect();
        assert!(words.iter().any(|w| w.contains(&digest)), "{words:#?}");
    }
}

fn many_memories_share_the_memory_limit() {
    let ran = Guest::fixture("many-memories-bomb.wat").run();
    let result = ran.boundary_held().result();
    assert_eq!((result.exit_code, result.limit_hit), (None, Some(LimitHit::Memory)), "{result:?}");
}

fn a_huge_table_is_refused() {
    let ran = Guest::fixture("huge-table.wat").run();
    let result = ran.boundary_held().result();
    assert_eq!((result.exit_code, result.limit_hit), (None, Some(LimitHit::Memory)), "{result:?}");
}

fn a_module_too_large_to_compile_within_the_limit_says_so() {
    let mut guest = Guest::new(format!("(module (func (export \"_start\") {}))", "nop ".repeat(8_000_000)));
    guest.memory = 1 << 20;
    let ran = guest.run();
    let result = ran.boundary_held().result();
    assert_eq!((result.exit_code, result.limit_hit), (None, Some(LimitHit::Memory)), "{result:?}");
    assert!(result.message.as_ref().is_some_and(|m| m.contains("out of memory")), "{result:?}");
}

fn imports_that_nobody_grants_are_refused_by_name() {
    for (guest, name) in [
        ("wants-a-socket.wat", "sock_open"),
        ("wants-a-process.wat", "fork"),
        ("component-wants-a-socket.wat", "wasi:sockets/instance-network@0.2.0"),
    ] {
        let ran = Guest::fixture(guest).run();
        let result = ran.boundary_held().result();
        let refused = result.refused.as_ref().unwrap_or_else(|| panic!("{guest}: {result:?}"));
        assert!(refused.contains(name) && refused.ends_with("is not granted"), "{refused}");
    }
}

fn garbage_is_no_module() {
    for garbage in
        [&b"\0asm\x01\0\0\0\xff\xff\xff"[..], b"\0asm", b"", b"#!/bin/sh", &[0xff; 4096], b"\0asm\x0d\0\x01\0\x07"]
    {
        let ran = Guest::new(garbage).run();
        let result = ran.boundary_held().result();
        assert_eq!(result.exit_code, None);
        assert!(result.message.is_some(), "{garbage:?}: {result:?}");
    }
}

fn a_gigabyte_of_output_is_counted_and_not_kept() {
    let before = peak_of_this_process();
    let mut guest = Guest::fixture("output-flood.wat");
    guest.deadline = Duration::from_secs(300);
    let ran = guest.run();
    assert_eq!(ran.boundary_held().exit_code(), 0);
    assert_eq!((ran.written.stdout.bytes, ran.written.stdout.kept), (1 << 30, OUTPUT_CAP));
    assert_eq!(ran.stdout.len() as u64, OUTPUT_CAP);
    let grown = peak_of_this_process().saturating_sub(before);
    assert!(grown < 64 << 20, "the runner grew by {grown} bytes");
    assert!(ran.passage.usage.peak_memory_bytes.is_some_and(|peak| peak < 128 << 20), "{:?}", ran.passage.usage);
}

fn peak_of_this_process() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Jailed workers on this host.
fn jailed_workers() -> Vec<u32> {
    let own = std::fs::read_link("/proc/self/ns/pid").unwrap();
    let mut found = Vec::new();
    for pid in plimsoll::evidence::proc::all_pids().unwrap() {
        let namespace = std::fs::read_link(format!("/proc/{pid}/ns/pid"));
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if namespace.is_ok_and(|n| n != own) && command.ends_with(b"__worker\0") {
            found.push(pid);
        }
    }
    found
}

fn a_worker_that_is_killed_from_outside_is_gone() {
    // Other tests' workers may run beside it, so this one is told by the scratch mount that its grant gives it.
    let workspace = tempfile::tempdir().unwrap();
    let ran = Guest::fixture("endless-loop.wat").sees(workspace.path(), Filesystem::Work).run_watched(|_cancel| {
        for _ in 0..600 {
            std::thread::sleep(Duration::from_millis(50));
            let busy = jailed_workers().into_iter().find(|pid| {
                let mounts = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
                let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
                let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
                let ticks: u64 = fields.get(11).and_then(|t| t.parse().ok()).unwrap_or_default();
                mounts.contains("/.scratch ") && ticks > 50
            });
            if let Some(pid) = busy {
                Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap();
                return;
            }
        }
    });
    assert!(matches!(ran.passage.end, End::Gone), "{:?}", ran.passage.end);
    assert_eq!(ran.passage.dispatched, Dispatched::Yes);
    assert!(ran.written.notices.iter().any(|n| n.contains("killed by signal 9")), "{:?}", ran.written.notices);
    ran.boundary_held();
}

fn a_cancelled_run_ends_at_once() {
    let ran = Guest::fixture("endless-loop.wat").run_watched(|cancel| {
        std::thread::sleep(Duration::from_millis(700));
        cancel.send(Some(CancelSignal::Interrupt)).unwrap();
    });
    assert!(
        matches!(
            ran.passage.end,
            End::Cancelled(CancelSignal::Interrupt) | End::CancelledBefore(CancelSignal::Interrupt)
        ),
        "{:?}",
        ran.passage.end
    );
}

fn deterministic_runs_repeat_to_the_bit() {
    let digest = |deterministic| {
        let mut guest = Guest::fixture("time-and-chance.wat");
        guest.deterministic = deterministic;
        let ran = guest.run();
        assert_eq!(ran.boundary_held().exit_code(), 0);
        assert_eq!(ran.stdout.len(), 48);
        assert_eq!(ran.grade(ControlId::Entropy), if deterministic { Status::NotEnforced } else { Status::Enforced });
        hex::encode(Sha256::digest(&ran.stdout))
    };
    assert_eq!(digest(true), digest(true));
    assert_ne!(digest(false), digest(false));
}

fn a_deterministic_loop_ends_by_fuel() {
    let mut guest = Guest::fixture("endless-loop.wat");
    guest.deterministic = true;
    guest.deadline = Duration::from_secs(60);
    let ran = guest.run();
    let result = ran.boundary_held().result();
    assert_eq!((result.exit_code, result.limit_hit), (None, Some(LimitHit::Fuel)), "{result:?}");
}

fn compiled_code_is_kept_and_a_damaged_entry_replaced() {
    for guest in [Guest::new(unique_module()), Guest::fixture("component.wat")] {
        let first = guest.run();
        assert_eq!(first.boundary_held().exit_code(), 0);
        let second = guest.run();
        assert_eq!(second.boundary_held().exit_code(), 0);
        assert!(came_from_the_cache(&second), "{:#?}", second.passage.observations);
        assert_eq!(first.stdout, second.stdout);
    }
    let guest = Guest::new(unique_module());
    assert!(!came_from_the_cache(&guest.run()));
    damage_every_entry();
    let after_damage = guest.run();
    assert_eq!(after_damage.boundary_held().exit_code(), 0);
    assert!(!came_from_the_cache(&after_damage));
    assert!(came_from_the_cache(&guest.run()), "the damaged entry was replaced");
}

/// A module that no other test compiles.
fn unique_module() -> String {
    let mut random = [0u8; 8];
    getrandom::fill(&mut random).unwrap();
    let unique = u64::from_le_bytes(random);
    format!("(module (memory (export \"memory\") 1) (func (export \"_start\") (drop (i64.const {unique}))))")
}

/// Flips one bit in the middle of everything that is cached.
fn damage_every_entry() {
    let directory = std::path::PathBuf::from(std::env::var_os("XDG_CACHE_HOME").unwrap()).join("plimsoll/wasm");
    for entry in std::fs::read_dir(directory).unwrap().map(|e| e.unwrap().path()) {
        let Ok(mut bytes) = std::fs::read(&entry) else { continue };
        let middle = bytes.len() / 2;
        if let Some(byte) = bytes.get_mut(middle) {
            *byte ^= 0x10;
            std::fs::write(&entry, &bytes).unwrap();
        }
    }
}

fn the_hello_example_says_hello() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/hello/hello.wat");
    let ran = Guest::new(std::fs::read(path).unwrap()).run();
    assert_eq!(ran.boundary_held().exit_code(), 0);
    assert!(String::from_utf8(ran.stdout).unwrap().to_lowercase().contains("hello"));
}

/// CPython, 26 MB of module: compiled once within a runtime's default memory, then from the cache. The suite is an artifact's.
fn python_runs_a_test_suite_from_the_artifact() {
    let module = match plimsoll::backend::wasm::runtimes::open("python") {
        Ok(module) => module,
        Err(help) => {
            let must = std::env::var("PLIMSOLL_MUST_WORK").unwrap_or_default();
            assert!(!must.split(',').any(|n| n == "wasm-python" || n == "all"), "python.wasm must be there: {help}");
            eprintln!("skipped: no python.wasm; {help}");
            return;
        }
    };
    let suite = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/wasm-python"));
    let mut guest = Guest::of_file(module).args(&["-m", "unittest", "-v"]).sees(suite, Filesystem::ReadOnly);
    guest.name = "python".to_owned();
    guest.memory = 1 << 30;
    guest.deadline = Duration::from_secs(600);
    for turn in ["compiled", "cached"] {
        let ran = guest.run();
        let said = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert_eq!(ran.boundary_held().result().exit_code, Some(0), "{:?}\n{said}", ran.result());
        assert!(said.contains("Ran 3 tests") && said.contains("\nOK\n"), "{said}");
        assert_eq!(came_from_the_cache(&ran), turn == "cached");
        eprintln!("python, {turn}: {:?}, {:?}", ran.passage.times, ran.passage.usage);
    }
}
