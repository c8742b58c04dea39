//! `plimsoll setup …`: what an owner of a host sets up once, a file for each thing.
//!
//! Every one of them can be done again without harm, says what it did and what to do next, and changes nothing with
//! `--dry-run`. Files appear whole or not at all.

use clap::{Args, Subcommand};

use super::CommonArgs;
use super::failure::Failure;
use crate::env::Env;
use crate::exit::Exit;

mod keys;
mod root;
pub mod service;
mod units;

/// Arguments.
#[derive(Debug, Args)]
pub struct SetupArgs {
    /// What to set up
    #[command(subcommand)]
    pub what: What,
}

/// What can be set up.
#[derive(Debug, Subcommand)]
pub enum What {
    /// The service: its key, its systemd units, an example policy (as root)
    Service(service::ServiceArgs),
}

/// Sets it up.
pub fn setup(args: &SetupArgs, common: &CommonArgs, env: &Env) -> Result<Exit, Failure> {
    match &args.what {
        What::Service(args) => service::service(args, common, env),
    }
}
