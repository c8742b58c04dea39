//! Diagnostic messages: what the program does and why, for whoever looks into a fault. Never guest text.

use std::io;

use tracing_subscriber::EnvFilter;

use crate::env::{Env, Var};

/// Sends diagnostics to standard error. Warnings by default; `--verbose`, else `PLIMSOLL_LOG`, asks for more.
pub fn init(env: &Env, verbose: bool, json: bool) {
    let filter = if verbose { "plimsoll=debug" } else { env.text(Var::Log).unwrap_or("warn") };
    let filter = EnvFilter::try_new(filter).unwrap_or_else(|_| EnvFilter::new("warn"));
    let colour = super::output::Style::of(env, &io::stderr()) != super::output::Style::PLAIN;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(colour);
    // A second call, as in tests, changes nothing.
    let _ = if json { builder.json().try_init() } else { builder.without_time().with_target(false).try_init() };
}
