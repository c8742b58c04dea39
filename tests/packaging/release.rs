//! `packaging/release`, and the workflow that calls it.

use std::fs;
use std::path::Path;

use crate::common::{Ran, binary, program, repository};
use crate::install::sha256;

fn release(arguments: &[&str]) -> Ran {
    program(repository().join("packaging/release")).args(arguments).run()
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn the_tag_is_cargos_version_or_there_is_no_release() {
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(release(&["version"]).exits(0).stdout.trim(), version);
    release(&["version", &format!("v{version}")]).exits(0);
    for wrong in [version, "v99.0.0", "v", ""] {
        let ran = release(&["version", wrong]);
        assert!(ran.code() == 1 && ran.stdout.is_empty(), "{wrong:?}: {}", ran.all());
    }
}

#[test]
fn the_archive_has_the_program_its_completions_and_its_papers() {
    let out = tempfile::tempdir().unwrap();
    release(&["pack", binary().to_str().unwrap(), out.path().to_str().unwrap()]).exits(0);
    let name = format!("plimsoll-{}-{}-linux", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH);
    assert_eq!(names(out.path()), [name.clone(), format!("{name}.tar.gz")]);

    let lines = release(&["sums", out.path().to_str().unwrap()]).exits(0);
    let digest = sha256(fs::read(binary()).unwrap());
    assert_eq!(lines.stdout, format!("{} {} {digest}\n", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH));
    program("sha256sum").args(["--check", "--strict", "SHA256SUMS"]).dir(out.path()).run().exits(0);

    program("tar").args(["xzf", &format!("{name}.tar.gz")]).dir(out.path()).run().exits(0);
    let unpacked = out.path().join(&name);
    assert_eq!(names(&unpacked), ["CHANGELOG.md", "LICENSE", "README.md", "SECURITY.md", "completions", "plimsoll"]);
    assert_eq!(fs::read(unpacked.join("plimsoll")).unwrap(), fs::read(binary()).unwrap());
    let completions = unpacked.join("completions");
    assert_eq!(names(&completions), ["_plimsoll", "plimsoll.bash", "plimsoll.fish"]);
    // The shell itself takes it, and completes with it.
    let script = "source \"$1\"; COMP_WORDS=(plimsoll verif); COMP_CWORD=1; _plimsoll plimsoll verif plimsoll; echo \"${COMPREPLY[@]}\"";
    program("bash")
        .args(["--norc", "-c", script, "bash", completions.join("plimsoll.bash").to_str().unwrap()])
        .run()
        .exits(0)
        .prints("verify");
}

#[test]
fn a_program_that_is_not_static_or_of_another_version_is_not_packed() {
    let out = tempfile::tempdir().unwrap();
    let out = out.path().to_str().unwrap();
    let ran = release(&["pack", "/bin/sh", out]);
    assert!(ran.code() == 1 && ran.stderr.contains("not static"), "{}", ran.all());
    let ran = release(&["pack", "/etc/passwd", out]);
    assert!(ran.code() == 1 && ran.stderr.contains("neither x86-64 nor aarch64"), "{}", ran.all());
}
