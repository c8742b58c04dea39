//! The report, from the model to the directory on disk, and back through `verify`.

mod directory;
mod json;
mod render;
mod samples;
mod verify;

use std::path::Path;
use std::process::Command;

/// Runs a Python program on a file; `None` (with the reason printed) if the module is missing and not demanded.
pub fn python(module: &str, program: &str, file: &Path) -> Option<String> {
    let run = |program: &str| Command::new("python3").args(["-c", program]).arg(file).output();
    let there = run(&format!("import {module}")).is_ok_and(|o| o.status.success());
    if !there {
        let must = std::env::var("PLIMSOLL_MUST_WORK").unwrap_or_default();
        assert!(!must.split(',').any(|m| m == "all" || m == module), "python3 has no module {module}");
        eprintln!("skipped: python3 has no module {module}");
        return None;
    }
    let output = run(program).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Writes every sample below `PLIMSOLL_SAMPLES`, to be looked at; does nothing without it.
#[test]
fn samples_can_be_written_for_people_to_look_at() {
    let Some(root) = std::env::var_os("PLIMSOLL_SAMPLES") else { return };
    for (name, mut sample) in samples::all() {
        let root = Path::new(&root).join(name);
        std::fs::create_dir_all(&root).unwrap();
        sample.commit(&root);
    }
}
