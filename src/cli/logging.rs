//! Diagnostic messages: what the program does and why, for whoever looks into a fault. Never guest text.

use std::io;

use tracing_subscriber::EnvFilter;

use crate::env::{Env, Var};

/// Who reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Audience {
    /// Somebody who runs a command.
    Person {
        /// Everything.
        verbose: bool,
        /// One JSON object per line.
        json: bool,
    },
    /// A journal, which wants to know of each run, and puts times to lines by itself.
    Service,
}

/// Sends diagnostics to standard error. Warnings by default, for a service what it does as well; `--verbose`, else
/// `PLIMSOLL_LOG`, asks for more.
pub fn init(env: &Env, audience: Audience) {
    let (filter, json) = match audience {
        Audience::Person { verbose: true, json } => ("plimsoll=debug", json),
        Audience::Person { json, .. } => (env.text(Var::Log).unwrap_or("warn"), json),
        Audience::Service => (env.text(Var::Log).unwrap_or("info"), false),
    };
    let filter = EnvFilter::try_new(filter).unwrap_or_else(|_| EnvFilter::new("warn"));
    let colour = super::output::Style::of(env, &io::stderr()) != super::output::Style::PLAIN;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(colour);
    // A second call, as in tests, changes nothing.
    let _ = if json { builder.json().try_init() } else { builder.without_time().with_target(false).try_init() };
}
