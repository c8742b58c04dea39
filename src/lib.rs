//! Plimsoll runs untrusted code behind an isolation boundary that it proves before anything starts.

pub mod evidence;

pub mod backend;
pub mod exit;
pub mod gate;
pub mod report;
pub mod run;
pub mod spec;
