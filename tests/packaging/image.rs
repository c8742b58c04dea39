//! The image of the Dockerfile, really built.

use std::process::Command;

use crate::common::{available, backend, binary, fixture, installed};

/// What `tests/packaging/image` needs: it makes mounts and files of several owners.
fn buildable() -> Result<(), String> {
    ["buildah", "mmdebstrap", "setpriv", "pivot_root"].into_iter().try_for_each(installed)?;
    if rustix::process::geteuid().is_root() { Ok(()) } else { Err("it is built as root".to_owned()) }
}

#[test]
fn it_builds_both_ways_and_a_step_passes_in_it() {
    if !available("image", buildable()) || !backend("wasm") {
        return;
    }
    // Without this suite's patience: the base is made once (tests/install does it), and that takes its time.
    let base = Command::new(fixture("packaging/base")).output().unwrap();
    assert!(base.status.success(), "{}", String::from_utf8_lossy(&base.stderr));
    let base = String::from_utf8(base.stdout).unwrap();
    let built = Command::new(fixture("packaging/image")).arg(base.trim()).arg(binary()).output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&built.stdout), String::from_utf8_lossy(&built.stderr));
    assert!(built.status.success() && said.contains("a step passed in it"), "{said}");
}
