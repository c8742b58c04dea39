//! The report, from the model to the directory on disk, and back through `verify`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr, reason = "tests")]

mod directory;
mod json;
mod render;
mod samples;
mod sign;
mod verify;

use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs a Python program on files; gives its output, or `None` (with the reason printed) if the module that it imports is missing
/// and not demanded.
pub fn python(module: &str, program: &str, files: &[PathBuf]) -> Option<String> {
    // Code 77 is for what could not be tried.
    let program = format!("import sys\ntry: import {module}\nexcept ImportError: sys.exit(77)\n{program}");
    let run = |python: &str| Command::new(python).args(["-c", &program]).args(files).output();
    // The one that tests/install made has the modules.
    let output = run("plimsoll-test-python").or_else(|_| run("python3"));
    match output {
        Ok(output) if output.status.success() => Some(String::from_utf8(output.stdout).unwrap()),
        Ok(output) if output.status.code() != Some(77) => panic!("{}", String::from_utf8_lossy(&output.stderr)),
        _ => {
            let must = std::env::var("PLIMSOLL_MUST_WORK").unwrap_or_default();
            assert!(!must.split(',').any(|m| m == "all" || m == module), "python3 has no module {module}");
            eprintln!("skipped: python3 has no module {module}");
            None
        }
    }
}

/// Every sample, committed below `root` under its name.
pub fn commit_all(root: &Path) -> Vec<(&'static str, samples::Sample)> {
    let mut all = samples::all();
    for (name, sample) in &mut all {
        let root = root.join(name);
        std::fs::create_dir_all(&root).unwrap();
        sample.commit(&root);
    }
    all
}

/// Writes every sample below `PLIMSOLL_SAMPLES`, to be looked at; does nothing without it.
#[test]
fn samples_can_be_written_for_people_to_look_at() {
    let Some(root) = std::env::var_os("PLIMSOLL_SAMPLES") else { return };
    commit_all(Path::new(&root));
}
