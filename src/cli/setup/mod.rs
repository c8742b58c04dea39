//! `plimsoll setup …`: what an owner of a host sets up once, a file for each thing.
//!
//! Every one of them can be done again without harm, says what it did and what to do next, and changes nothing with
//! `--dry-run`. Files appear whole or not at all. Engines and what they need are fetched, verified and put in place by
//! [`crate::setup`].

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueHint};

use super::CommonArgs;
use super::failure::Failure;
use super::output::Log;
use crate::env::{Env, Var};
use crate::exit::Exit;
use crate::setup::source::Pin;
use crate::setup::{Place, Plan, SetupError, Source};
use crate::spec::Sha256Digest;

pub mod firecracker;
pub mod guest_kernel;
pub mod gvisor;
mod keys;
mod root;
pub mod service;
mod units;
pub mod userns;
pub mod wasm_python;

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
    /// gVisor's runsc, from its releases
    Gvisor(gvisor::GvisorArgs),
    /// Firecracker and its jailer, from a release
    Firecracker(firecracker::FirecrackerArgs),
    /// A readable copy of this host's kernel for guests, or another one
    GuestKernel(guest_kernel::GuestKernelArgs),
    /// The AppArmor profile that lets a plain user's plimsoll make user namespaces
    Userns(userns::UsernsArgs),
    /// CPython for the wasm backend: `run: python …`
    WasmPython(wasm_python::WasmPythonArgs),
}

/// Options of all.
#[derive(Debug, Args)]
pub struct PlaceArgs {
    /// Say what would be done; fetch and verify, but write nothing
    #[arg(long)]
    pub dry_run: bool,

    /// Put everything below this directory: the tree of a machine that is being built
    #[arg(long, value_name = "DIR", default_value = "/", hide_default_value = true, value_hint = ValueHint::DirPath)]
    pub root: PathBuf,
}

/// Options of what comes from a release.
#[derive(Debug, Args)]
pub struct FromArgs {
    /// A directory with the release's files, the file itself, or an address that they are below
    #[arg(long, value_name = "DIR|FILE|URL")]
    pub from: Option<String>,

    /// SHA-256 of what is fetched; otherwise the release's own checksum file is compared
    #[arg(long, value_name = "DIGEST")]
    pub sha256: Option<String>,
}

impl FromArgs {
    /// Where from: as said, else the project's own.
    fn source(&self, official: Result<Source, SetupError>) -> Result<Source, Failure> {
        match &self.from {
            Some(text) => Source::parse(text).map_err(|e| failure(&e.into())),
            None => official.map_err(|e| failure(&e)),
        }
    }

    fn pin(&self) -> Result<Option<Pin>, Failure> {
        let Some(text) = &self.sha256 else { return Ok(None) };
        let digest: Sha256Digest = text.parse().map_err(|e| Failure::usage(format!("--sha256: {e}")))?;
        Ok(Some(Pin::Sha256(digest.to_string(), "--sha256".to_owned())))
    }
}

impl PlaceArgs {
    /// Root's places, or this user's own.
    fn place(&self, env: &Env) -> Result<Place, Failure> {
        let root = std::path::absolute(&self.root).map_err(|e| Failure::from_error(Exit::Usage, &e))?;
        if rustix::process::geteuid().is_root() || root != Path::new("/") {
            return Ok(Place { root, user: None });
        }
        let home = env.path(Var::Home).filter(|home| home.is_absolute());
        let home = home.ok_or_else(|| Failure::usage("this user has no home directory").with_help("set HOME"))?;
        let data = env.path(Var::XdgDataHome).filter(|p| p.is_absolute()).unwrap_or_else(|| home.join(".local/share"));
        Ok(Place { root, user: Some((home.join(".local/bin"), data)) })
    }

    /// Does it, and says what was done.
    fn carry_out(&self, plan: &Plan, place: &Place, common: &CommonArgs, env: &Env) -> Result<Exit, Failure> {
        let mut lines = plan.carry_out(place, self.dry_run).map_err(|e| failure(&e))?;
        let programs = place.programs();
        let found = env.os(Var::Path).is_some_and(|path| std::env::split_paths(path).any(|dir| dir == programs));
        if !found && place.root == Path::new("/") && plan.files.iter().any(|file| file.engine.is_some()) {
            lines.push(format!("{} is not in PATH: add it", programs.display()));
        }
        let mut out = Log::data();
        for line in lines.iter().filter(|_| !common.quiet) {
            out.line(line);
        }
        Ok(Exit::Passed)
    }
}

/// What can't be verified is rejected; what is not for this machine or this user is not available.
fn failure(error: &SetupError) -> Failure {
    let exit = match error {
        SetupError::Source(_) => Exit::Rejected,
        SetupError::Unfit(_) | SetupError::Root(_) => Exit::Usage,
        SetupError::Io { .. } => Exit::Internal,
    };
    Failure::from_error(exit, error).with_help(error.help())
}

/// Sets it up.
pub fn setup(args: &SetupArgs, common: &CommonArgs, env: &Env) -> Result<Exit, Failure> {
    match &args.what {
        What::Service(args) => service::service(args, common, env),
        What::Gvisor(args) => gvisor::set_up(args, common, env),
        What::Firecracker(args) => firecracker::set_up(args, common, env),
        What::GuestKernel(args) => guest_kernel::set_up(args, common, env),
        What::Userns(args) => userns::set_up(args, common, env),
        What::WasmPython(args) => wasm_python::set_up(args, common, env),
    }
}
