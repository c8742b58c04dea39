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
//! * [`backend`]: the engines. Everything that comes back out of one is hostile.
//! * [`gate`]: the seven calls around a backend.
//! * [`report`]: what is written down.
//! * [`run`]: a whole run, from steps to a report.
//! * [`cli`]: the command line; wiring only.
//!
//! [`text`], [`env`] and [`exit`] serve all of them.

pub mod evidence;
pub mod forge;
pub mod spec;

pub mod backend;
pub mod cli;
pub mod env;
pub mod exit;
pub mod gate;
pub mod report;
pub mod run;
pub mod text;
