//! Artifacts that people really make, and those that attackers make, through the library's front door.
//!
//! Each hostile archive stands beside a harmless one of the same shape. After every refusal the harness checks that
//! nothing was written outside of the destination and nothing is left inside.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr, clippy::exit, reason = "tests")]

mod budget;
mod directory;
mod forge;
mod helper;
mod property;
mod support;
mod tar;
mod tools;
mod zip;
