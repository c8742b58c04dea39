//! Plimsoll runs untrusted code behind an isolation boundary that it proves before anything starts.
//!
//! The modules stand in the order of the flow, and each uses only those before it:
//!
//! ```text
//! spec -> artifact (+ image) -> GATE around a backend -> report -> publish
//! ```
//!
//! * [`evidence`]: what can be seen of a boundary, and the judge. Trusts only what the host sees.
//! * [`forge`]: what CI job this is. Claims of the environment.
//! * [`spec`]: step files, flags, workflows (hostile: they come with the pull request) and the operator's policy.
//! * [`artifact`]: the code to run, unpacked by a jailed helper.
//! * [`image`]: root file systems.
//! * [`backend`]: the engines. Everything that comes back out of one is hostile.
//! * [`gate`]: the seven calls around a backend.
//! * [`report`]: what is written down.
//! * [`run`]: a whole run, from steps to a report.
//! * [`publish`]: what a report says, told on GitHub and GitLab. Reports of other jobs are hostile.
//! * [`service`]: a root-owned service that runs steps for others, and its client. Trusts nothing that a client sends.
//! * [`setup`]: engines brought to this host. Executes nothing of them.
//! * [`cli`]: the command line; wiring only.
//!
//! [`text`], [`time`], [`env`], [`exit`] and [`lock`] serve all of them.

pub mod evidence;
pub mod forge;
pub mod spec;

pub mod artifact;

pub mod image;

pub mod backend;
pub mod gate;

pub mod report;
pub mod run;

pub mod setup;

pub mod publish;
pub mod service;

pub mod cli;

pub mod env;
pub mod exit;
pub mod lock;
pub mod text;
pub mod time;

/// What a copy of the runner does that was started under an internal word; `None` for the program that people start. To
/// be called first thing in `main`, while there is one thread and nothing is set up.
#[must_use]
pub fn internal_entry() -> Option<std::process::ExitCode> {
    if std::env::args_os().nth(1).is_some_and(|word| word == backend::launcher::ENTRY) {
        return Some(backend::launcher::main().into());
    }
    if std::env::args_os().nth(1).is_some_and(|word| word == image::oci::registry::helper::ENTRY) {
        return Some(image::oci::registry::helper::main());
    }
    if std::env::args_os().nth(1).is_some_and(|word| word == service::worker::ENTRY) {
        cli::logging::init(&env::Env::process(), cli::logging::Audience::Service);
        return Some(service::worker::main());
    }
    backend::jail::internal_entry(&[
        (backend::wasm::ENTRY, backend::wasm::worker),
        (run::unpacker::ENTRY, run::unpacker::main),
    ])
}
