//! Builds the guest agent, which the runner embeds, into `OUT_DIR`.
//!
//! The agent is a package of this workspace, but it is built by a cargo of its own: it has to be static and small
//! whatever profile, wrapper (clippy) or flags the runner is being built with, and in a target directory of its own so
//! that the two builds do not wait for each other's lock. `PLIMSOLL_GUEST` names a prebuilt agent instead.

// A build script talks to cargo on standard output.
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The agent is unpacked into memory for every boundary.
const MAX_BYTES: usize = 2 * 1024 * 1024;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-env-changed=PLIMSOLL_GUEST");
    if env::var("CARGO_CFG_TARGET_OS")? != "linux" {
        println!("cargo::rerun-if-changed=build.rs");
        return Ok(());
    }
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let agent = match env::var_os("PLIMSOLL_GUEST") {
        Some(prebuilt) => {
            let prebuilt = PathBuf::from(prebuilt);
            println!("cargo::rerun-if-changed=build.rs");
            println!("cargo::rerun-if-changed={}", prebuilt.display());
            prebuilt
        }
        None => {
            for input in ["build.rs", "guest/src", "guest/Cargo.toml", "Cargo.toml", "Cargo.lock"] {
                println!("cargo::rerun-if-changed={input}");
            }
            build(&root, &out)?
        }
    };
    let bytes = fs::read(&agent).map_err(|e| format!("cannot read the guest agent {}: {e}", agent.display()))?;
    check(&bytes).map_err(|why| format!("the guest agent {} cannot be used: {why}", agent.display()))?;
    fs::write(out.join("plimsoll-guest"), bytes)?;
    Ok(())
}

fn build(root: &Path, out: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let target = env::var("TARGET")?;
    let target_dir = out.join("guest-target");
    let mut cargo = Command::new(env::var_os("CARGO").ok_or("cargo does not say where it is")?);
    cargo
        .args(["build", "--release", "--locked", "--package", "plimsoll-guest", "--bin", "plimsoll-guest"])
        .arg("--manifest-path")
        .arg(root.join("guest/Cargo.toml"))
        .args(["--target", &target])
        .arg("--target-dir")
        .arg(&target_dir);
    // What the outer build was told is not meant for the agent: clippy as the compiler, coverage flags, profiles, the
    // outer job server.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        let outer = ["CARGO_FEATURE_", "CARGO_CFG_", "CARGO_PROFILE_", "CARGO_BUILD_"];
        let exact = [
            "RUSTFLAGS",
            "RUSTC_WORKSPACE_WRAPPER",
            "CARGO_TARGET_DIR",
            "CARGO_MAKEFLAGS",
            "CARGO_INCREMENTAL",
            "CLIPPY_ARGS",
            "CLIPPY_CONF_DIR",
            "MAKEFLAGS",
            "MFLAGS",
        ];
        if outer.iter().any(|prefix| text.starts_with(prefix)) || exact.contains(&text.as_ref()) {
            cargo.env_remove(&name);
        }
    }
    cargo
        .env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static")
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "s")
        .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        .env("CARGO_PROFILE_RELEASE_LTO", "true")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1");
    let status = cargo.status().map_err(|e| format!("cannot start cargo for the guest agent: {e}"))?;
    if !status.success() {
        return Err("the guest agent does not build; its errors are above".into());
    }
    Ok(target_dir.join(target).join("release/plimsoll-guest"))
}

/// A static 64-bit ELF executable of a sensible size: inside a boundary there is no loader to ask for.
fn check(elf: &[u8]) -> Result<(), String> {
    const PT_INTERP: u64 = 3;
    if elf.len() > MAX_BYTES {
        return Err(format!("it is {} bytes long; {MAX_BYTES} are allowed", elf.len()));
    }
    let number = |at: usize, width: usize| -> Result<u64, String> {
        let bytes = elf.get(at..at + width).ok_or("it is cut short")?;
        Ok(bytes.iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte)))
    };
    if elf.get(..6) != Some(b"\x7fELF\x02\x01") {
        return Err("it is no 64-bit little-endian ELF file".to_owned());
    }
    let machine = match env::var("CARGO_CFG_TARGET_ARCH").as_deref() {
        Ok("x86_64") => 62,
        Ok("aarch64") => 183,
        other => return Err(format!("{other:?} is no supported architecture")),
    };
    if number(18, 2)? != machine {
        return Err("it is for another architecture".to_owned());
    }
    let (table, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for index in 0..count {
        let at = usize::try_from(table + index * size).map_err(|e| e.to_string())?;
        if number(at, 4)? == PT_INTERP {
            return Err("it is not static: it asks for a dynamic loader".to_owned());
        }
    }
    Ok(())
}
