//! Engines that are not what they seem, and runners that are killed.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use plimsoll::backend::AGENT;
use plimsoll::backend::cgroup;
use plimsoll::backend::family::Family;
use plimsoll::backend::traces::sweep;
use plimsoll::backend::{Engines, PrepareError};
use plimsoll::evidence::proc::hash;
use plimsoll::evidence::{ControlId, Status, Tier};
use plimsoll::gate::{Dispatched, End};

use crate::support::{Ran, chmod, runsc, skipped, step};

fn with_engine(path: &Path, trusted: &[String]) -> Ran {
    let engines =
        Engines { runsc: Some(path.to_owned()), trusted: trusted.iter().cloned().collect(), ..Engines::default() };
    step("echo ran").with(|s| s.engines = engines).run()
}

/// A directory that others can look into.
fn open_directory() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    chmod(directory.path(), 0o755);
    directory
}

fn altered_copy(directory: &Path) -> PathBuf {
    let path = directory.join("runsc");
    let mut bytes = fs::read(runsc().unwrap()).unwrap();
    bytes.push(0);
    fs::write(&path, bytes).unwrap();
    chmod(&path, 0o755);
    path
}

fn refused(ran: &Ran) {
    let End::Refused(refusal) = &ran.passage.end else { panic!("{}", ran.story()) };
    assert_eq!((refusal.floor, refusal.judgement.tier), (Some(Tier::Kernel), Tier::Process), "{}", ran.story());
    assert_eq!(ran.passage.dispatched, Dispatched::No);
    assert_eq!(ran.stdout, "");
}

#[test]
fn an_altered_engine_proves_only_a_process_unless_the_operator_trusts_it() {
    if skipped() {
        return;
    }
    let directory = open_directory();
    let engine = altered_copy(directory.path());
    refused(&with_engine(&engine, &[]));
    let digest = hash(&mut fs::File::open(&engine).unwrap()).unwrap();
    let ran = with_engine(&engine, &[digest]).passed();
    assert_eq!(ran.passage.judgement.as_ref().unwrap().grades[&ControlId::BinaryIdentity], Status::Enforced);
}

/// Compiles a C program; `None` where there is no compiler.
fn compile(directory: &Path, source: &str) -> Option<PathBuf> {
    let (from, to) = (directory.join("fake.c"), directory.join("runsc"));
    fs::write(&from, source).unwrap();
    let compiled = Command::new("cc").arg("-o").arg(&to).arg(&from).status();
    if compiled.is_ok_and(|s| s.success()) {
        return Some(to);
    }
    println!("skipped: there is no C compiler");
    None
}

/// Imitates everything that an engine says of itself: its commands, version, process names, even the agent.
const IMITATION: &str = r#"
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int main(int n, char **words) {
    for (int i = 1; i < n; i++) {
        if (!strcmp(words[i], "--version")) { puts("runsc version 0.0~20240729.0\nspec: 1.0.2-dev"); return 0; }
        if (!strcmp(words[i], "create") && fork() == 0) {
            setsid();
            char *argv[] = {"runsc-sandbox", "--network=none", "--platform=systrap", "boot", 0}, *env[] = {0};
            execve("AGENT", argv, env);
            return 1;
        }
    }
    return 0;
}"#;

#[test]
fn a_program_that_imitates_the_engine_is_refused() {
    if skipped() {
        return;
    }
    let directory = open_directory();
    let agent = directory.path().join("agent");
    fs::write(&agent, AGENT).unwrap();
    chmod(&agent, 0o755);
    let Some(engine) = compile(directory.path(), &IMITATION.replace("AGENT", agent.to_str().unwrap())) else { return };
    refused(&with_engine(&engine, &[]));
    // Not even where the operator trusts its digest: what holds the channel is another file.
    let digest = hash(&mut fs::File::open(&engine).unwrap()).unwrap();
    refused(&with_engine(&engine, &[digest]));
}

/// Holds the channel itself and answers with a nonce of its own.
const WRONG_NONCE: &str = r#"
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int main(int n, char **words) {
    for (int i = 1; i < n; i++)
        if (!strcmp(words[i], "--version")) puts("runsc version 1");
        else if (!strcmp(words[i], "create") && fork() == 0) {
            char in[64], out[4 + 2 + 32 + 2] = {36, 0, 0, 0, 0, 1};
            setsid(); read(0, in, sizeof in); write(1, out, sizeof out); sleep(1000);
        }
    return 0;
}"#;

#[test]
fn a_wrong_nonce_proves_nothing() {
    if skipped() {
        return;
    }
    let directory = open_directory();
    let Some(engine) = compile(directory.path(), WRONG_NONCE) else { return };
    let ran = with_engine(&engine, &[]);
    assert!(matches!(&ran.passage.end, End::NotProven(why) if why.contains("nonce")), "{}", ran.story());
    assert_eq!(ran.passage.dispatched, Dispatched::No);
}

#[test]
fn an_engine_that_fails_leaves_nothing_and_says_what_it_said() {
    if skipped() {
        return;
    }
    let directory = open_directory();
    let source = "#include <stdio.h>\nint main(void) { fputs(\"no luck today\\n\", stderr); return 7; }";
    let Some(engine) = compile(directory.path(), source) else { return };
    let ran = with_engine(&engine, &[]);
    let End::NotPrepared(PrepareError::Unavailable { blocker, help, .. }) = &ran.passage.end else {
        panic!("{}", ran.story())
    };
    assert!(blocker.contains("no luck today") && blocker.contains("exit code 7") && !help.is_empty(), "{blocker}");
}

#[test]
fn a_script_cannot_be_the_engine() {
    if skipped() {
        return;
    }
    let directory = open_directory();
    let engine = directory.path().join("runsc");
    fs::write(&engine, format!("#!/bin/sh\nexec {} \"$@\"\n", runsc().unwrap().display())).unwrap();
    chmod(&engine, 0o755);
    let ran = with_engine(&engine, &[]);
    assert!(matches!(&ran.passage.end, End::NotPrepared(PrepareError::Unavailable { .. })), "{}", ran.story());
}

#[test]
fn the_ptrace_platform_proves_the_same() {
    if skipped() {
        return;
    }
    let engines = Engines { platform: Some("ptrace".to_owned()), ..Engines::default() };
    let ran = step("echo ran").with(|s| s.engines = engines).run().passed();
    assert_eq!(ran.passage.judgement.as_ref().unwrap().tier, Tier::Kernel);
    assert_eq!(ran.passage.engine.as_ref().unwrap().settings["platform"], "ptrace");
}

/// Not a test: the runner that the next one kills.
#[test]
fn victim() {
    if std::env::var_os("PLIMSOLL_TEST_VICTIM").is_none() || skipped() {
        return;
    }
    step("sleep 1000").run();
}

#[test]
fn nothing_outlives_a_killed_runner() {
    if skipped() {
        return;
    }
    let home = open_directory();
    chmod(home.path(), 0o777);
    let mut runner = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "engines::victim", "--nocapture"])
        .env("PLIMSOLL_TEST_VICTIM", "1")
        .env("TMPDIR", home.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(runner.stdout.take().unwrap()).lines();
    let _ = lines.next();
    // The sentry is up when the family has its gofer, sentry and stubs; the guest's own process comes with the dispatch.
    let mut family = Family::default();
    for _ in 0..600 {
        family = Family::of(runner.id());
        if family.len() >= 9 {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(family.len() >= 9, "{family:?}");
    runner.kill().unwrap();
    runner.wait().unwrap();
    let gone = (0..200).any(|_| {
        std::thread::sleep(Duration::from_millis(25));
        family.survivors().is_empty()
    });
    assert!(gone, "{:?}", family.survivors());
    // What is left on disk and in cgroups can be swept.
    let scratch = fs::read_dir(home.path()).unwrap().next().unwrap().unwrap().path().join("scratch");
    let id = fs::read_to_string(scratch.join("boundary.id")).unwrap();
    assert_eq!(sweep(home.path()), Vec::<String>::new());
    assert_eq!(cgroup::find(&id), Vec::<PathBuf>::new());
    assert_eq!(fs::read_dir(&scratch).unwrap().count(), 0);
}
