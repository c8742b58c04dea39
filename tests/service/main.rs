//! Service mode with the real program on both sides: a root service and an unprivileged caller, hostile clients, and what a
//! job can do against the policy.
//!
//! As root the caller is a plain user of another id; without root, service and caller are the same user, and what needs two
//! is skipped with its reason.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;

mod bypass;
mod ends;
mod forges;
mod hostile;
mod queue;
mod runs;
mod sent;
#[path = "../registry/server.rs"]
#[allow(dead_code, reason = "the registry's own tests use the rest")]
mod server;
mod support;
