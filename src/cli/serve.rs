//! `plimsoll serve`: the service, in the foreground.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::failure::Failure;
use super::signals;
use crate::env::Env;
use crate::exit::Exit;
use crate::service;
use crate::service::server::ServeError;

/// Arguments.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Where to listen, unless systemd hands over a socket
    #[arg(long, value_name = "PATH", default_value = service::SOCKET, value_hint = ValueHint::FilePath)]
    pub socket: PathBuf,

    /// The private key that reports are signed with; `plimsoll setup service` makes it
    #[arg(long, value_name = "FILE", default_value = service::KEY, value_hint = ValueHint::FilePath)]
    pub key: PathBuf,
}

/// Serves until SIGTERM or SIGINT. That is how a service ends, so it is no failure.
pub fn serve(args: &ServeArgs, env: &Env) -> Result<Exit, Failure> {
    super::runtime()?.block_on(async {
        let stop = signals::listen().map_err(|e| Failure::from_error(Exit::Internal, &e))?;
        service::server::serve(&args.socket, &args.key, env, stop).await.map_err(|error| failure(&error))
    })?;
    Ok(Exit::Passed)
}

fn failure(error: &ServeError) -> Failure {
    let failure = Failure::from_error(Exit::Internal, error);
    match error {
        ServeError::Listen(_) => failure.with_help("`--socket PATH` chooses another place; the default needs root"),
        ServeError::State(error) => failure.with_help(error.help()),
        ServeError::Io(_) => failure,
    }
}
