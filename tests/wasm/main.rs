//! The `wasm` backend for real: a jailed worker for every guest, hostile ones beside harmless ones.
//!
//! The test program is also the worker: it is started again with an internal word, as the runner starts itself, so it
//! has a `main` of its own. As root everything runs a second time as a plain user.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::exit,
    reason = "tests"
)]

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};

mod backend;
mod files;
mod jail;
mod support;

/// Says that this process is the plain user's turn.
const PLAIN: &str = "--as-a-plain-user";

fn main() -> ExitCode {
    if let Some(code) = plimsoll::internal_entry() {
        return code;
    }
    if let Some(mode) = std::env::args().nth(1).filter(|a| a.starts_with(jail::PROBE)) {
        return jail::probe(&mode);
    }
    // A cache of the tests' own. Setting a variable is not for a process with threads, so it is set for another one.
    if std::env::var_os("XDG_CACHE_HOME").is_none_or(|place| !place.to_string_lossy().contains(CACHE)) {
        return with_a_cache_of_its_own();
    }
    let (plain, rest): (Vec<String>, Vec<String>) = std::env::args().partition(|a| a == PLAIN);
    let arguments = Arguments::from_iter(rest);
    if let Err(blocker) = plimsoll::backend::jail::userns_probe(plimsoll::backend::wasm::ENTRY) {
        return skipped(&format!("{blocker}; fix: {}", blocker.help));
    }
    let mut trials: Vec<Trial> = [backend::TESTS, files::TESTS, jail::TESTS]
        .into_iter()
        .flatten()
        // What takes long and has nothing to do with who the user is runs once.
        .filter(|(name, _)| plain.is_empty() || !(name.contains("gigabyte") || name.contains("python")))
        .map(|&(name, test)| {
            Trial::test(name, move || {
                std::panic::catch_unwind(test).map_err(|panic| {
                    let text = panic.downcast_ref::<String>().cloned();
                    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&s| s.to_owned()));
                    Failed::from(text.unwrap_or_else(|| "it panicked".to_owned()))
                })
            })
        })
        .collect();
    if plain.is_empty() && rustix::process::geteuid().is_root() {
        trials.push(Trial::test("everything_again_as_a_plain_user", as_a_plain_user));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Part of the name of the tests' own cache.
const CACHE: &str = "plimsoll-test-cache";

fn with_a_cache_of_its_own() -> ExitCode {
    let cache = tempfile::Builder::new().prefix(CACHE).tempdir().unwrap();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let ran = command.args(std::env::args_os().skip(1)).env("XDG_CACHE_HOME", cache.path()).status().unwrap();
    if ran.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A skip with its reason, or a failure where the backend must work.
fn skipped(reason: &str) -> ExitCode {
    let must = std::env::var("PLIMSOLL_MUST_WORK").unwrap_or_default();
    if must.split(',').any(|name| name == "wasm" || name == "all") {
        eprintln!("wasm must work here, but: {reason}");
        return ExitCode::FAILURE;
    }
    eprintln!("skipped: no jail on this host: {reason}");
    ExitCode::SUCCESS
}

fn as_a_plain_user() -> Result<(), Failed> {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    const USER: u32 = 54_321;
    let home = tempfile::tempdir()?;
    std::os::unix::fs::chown(home.path(), Some(USER), Some(USER))?;
    let program = home.path().join("tests");
    std::fs::copy(std::env::current_exe()?, &program)?;
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755))?;
    let mut command = std::process::Command::new(&program);
    command.arg(PLAIN).uid(USER).gid(USER).env("HOME", home.path()).env("TMPDIR", home.path());
    command.env_remove("XDG_CACHE_HOME").current_dir(home.path());
    let ran = command.output()?;
    let said = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    print!("{said}");
    if ran.status.success() { Ok(()) } else { Err(format!("failed as a plain user:\n{said}").into()) }
}
