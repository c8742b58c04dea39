//! The gVisor backend against a real `runsc`, through the gate.
//!
//! Tests skip, and say why, where runsc is missing; `PLIMSOLL_MUST_WORK=gvisor` (or `all`) turns that into a failure.
//! A plain user's side runs when these tests are run by a plain user; run by root, they show root's.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod attacks;
mod engines;
mod limits;
mod programs;
mod support;
