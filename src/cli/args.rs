//! Flags that several commands share, and what they become.
//!
//! Values stay text here: the code that checks step files checks them too, so that a flag and a key have the same rules
//! and errors name the flag.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::failure::Failure;
use crate::backend::Engines;
use crate::env::Env;
use crate::spec::{self, Overrides, Shard, Step, Surroundings};

/// Which steps.
#[derive(Debug, Args)]
#[command(next_help_heading = "Steps")]
pub struct SelectArgs {
    /// Step files; without one and without --run, plimsoll.yml in the current directory
    #[arg(value_name = "SPEC", value_hint = ValueHint::FilePath, help_heading = "Arguments")]
    pub specs: Vec<PathBuf>,

    /// Only the steps of this name; repeat it for more
    #[arg(long, value_name = "NAME")]
    pub step: Vec<String>,

    /// Take one step of a GitHub workflow instead of a step file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "job", requires = "step", conflicts_with = "specs")]
    pub from_workflow: Option<PathBuf>,

    /// The job in that workflow; --step then is the step's id or name
    #[arg(long, value_name = "ID", requires = "from_workflow")]
    pub job: Option<String>,

    /// Every Nth step, beginning with the Ith: shares the steps among several jobs
    #[arg(long, value_name = "I/N")]
    pub shard: Option<String>,
}

/// What a step is, as flags; each wins over the step file.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "What runs (each flag wins over the step file)")]
pub struct StepArgs {
    /// The step's name
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// What to unpack at /workspace: a directory, zip, tar, tar.gz, tar.zst or tar.xz
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub artifact: Option<String>,

    /// The command: shell lines, or `module.wasm arg …`
    #[arg(long, value_name = "CMD", allow_hyphen_values = true)]
    pub run: Option<String>,

    /// What interprets it: sh, bash, python, or a command with {0}
    #[arg(long, value_name = "SHELL")]
    pub shell: Option<String>,

    /// A variable that the code sees; it sees no other of this environment. Repeatable
    #[arg(long, value_name = "K=V")]
    pub env: Vec<String>,

    /// Directory below the workspace to start in
    #[arg(long, value_name = "DIR")]
    pub working_directory: Option<String>,

    /// Files to bring back, as patterns; repeatable
    #[arg(long, value_name = "PATTERN")]
    pub outputs: Vec<String>,

    /// The guest's own JUnit report, to be merged into ours and marked unverified
    #[arg(long, value_name = "PATH")]
    pub junit: Option<String>,

    /// A failing step (exit 10) doesn't fail the run
    #[arg(long)]
    pub continue_on_error: bool,

    /// The engine: auto, firecracker, gvisor, wasm
    #[arg(long, value_name = "BACKEND", help_heading = "Boundary")]
    pub backend: Option<String>,

    /// The weakest tier that will do: process, container, kernel, vm
    #[arg(long, value_name = "TIER", help_heading = "Boundary")]
    pub minimum_isolation: Option<String>,

    /// A control that has to be enforced, such as memory-limit; repeatable
    #[arg(long, value_name = "CONTROL", value_delimiter = ',', help_heading = "Boundary")]
    pub require: Vec<String>,

    /// Root file system: host, dir:PATH, tar:PATH, oci-layout:PATH[:TAG], docker-archive:PATH, or a registry's image
    #[arg(long, value_name = "IMAGE", help_heading = "Boundary")]
    pub image: Option<String>,

    /// Digest that the image must have
    #[arg(long, value_name = "DIGEST", help_heading = "Boundary")]
    pub image_digest: Option<String>,

    /// A registry that may be asked without TLS; one on this host may be in any case. Repeatable
    #[arg(long, value_name = "HOST[:PORT]", help_heading = "Boundary")]
    pub insecure_registry: Vec<String>,

    /// Show a path of the host read-only inside; repeatable
    #[arg(long, value_name = "PATH:AT", help_heading = "Boundary")]
    pub mount: Vec<String>,

    /// What a WebAssembly program may do with the workspace: filesystem=none, read-only, work
    #[arg(long, value_name = "GRANT", help_heading = "Boundary")]
    pub grant: Vec<String>,

    /// The same result on every run (wasm): fixed clock, seeded randomness, fuel
    #[arg(long, help_heading = "Boundary")]
    pub deterministic: bool,

    /// The runsc to use, otherwise PLIMSOLL_RUNSC or the one in PATH
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath, help_heading = "Boundary")]
    pub runsc: Option<PathBuf>,

    /// The firecracker to use, otherwise PLIMSOLL_FIRECRACKER or the one in PATH
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath, help_heading = "Boundary")]
    pub firecracker: Option<PathBuf>,

    /// How gVisor intercepts system calls: systrap, ptrace, kvm
    #[arg(long, value_name = "PLATFORM", value_parser = ["systrap", "ptrace", "kvm"], help_heading = "Boundary")]
    pub platform: Option<String>,

    /// Time from start to kill: 30s, 5m, 1h30m
    #[arg(long, value_name = "DURATION", help_heading = "Limits")]
    pub timeout: Option<String>,

    /// Memory for the code: 512MiB
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    pub memory: Option<String>,

    /// CPUs, decimals allowed
    #[arg(long, value_name = "N", help_heading = "Limits")]
    pub cpus: Option<String>,

    /// How much the workspace may grow
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    pub disk: Option<String>,

    /// Processes and threads
    #[arg(long, value_name = "N", help_heading = "Limits")]
    pub pids: Option<String>,

    /// What is kept of each output stream; the rest is counted
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    pub output_limit: Option<String>,
}

impl StepArgs {
    /// What the flags say of a step.
    pub fn overrides(&self) -> Result<Overrides, Failure> {
        let mut env = BTreeMap::new();
        for pair in &self.env {
            let (name, value) = pair.split_once('=').filter(|(name, _)| !name.is_empty()).ok_or_else(|| {
                Failure::usage(format!("--env: `{}` is no variable", spec::place::shown(pair))).with_help(
                    "write --env NAME=VALUE; a variable of this environment is passed with --env \"NAME=$NAME\"",
                )
            })?;
            env.insert(name.to_owned(), value.to_owned());
        }
        Ok(Overrides {
            name: self.name.clone(),
            artifact: self.artifact.clone(),
            run: self.run.clone(),
            shell: self.shell.clone(),
            env,
            working_directory: self.working_directory.clone(),
            timeout: self.timeout.clone(),
            continue_on_error: self.continue_on_error.then_some(true),
            backend: self.backend.clone(),
            minimum_isolation: self.minimum_isolation.clone(),
            require: self.require.clone(),
            image: self.image.clone(),
            image_digest: self.image_digest.clone(),
            cpus: self.cpus.clone(),
            memory: self.memory.clone(),
            disk: self.disk.clone(),
            pids: self.pids.clone(),
            output: self.output_limit.clone(),
            mounts: self.mount.clone(),
            grants: self.grant.clone(),
            deterministic: self.deterministic.then_some(true),
            outputs: self.outputs.clone(),
            junit: self.junit.clone(),
            ..Overrides::default()
        })
    }
}

/// Reads the steps that the flags name, under the flags that describe them.
pub fn steps(select: &SelectArgs, step: &StepArgs, around: &Surroundings) -> Result<Vec<Step>, Failure> {
    let flags = step.overrides()?;
    let shard = match &select.shard {
        Some(text) => Some(text.parse::<Shard>().map_err(|e| Failure::usage(format!("--shard: {e}")))?),
        None => None,
    };
    if let (Some(file), Some(job)) = (&select.from_workflow, &select.job) {
        let mut steps = Vec::new();
        for name in &select.step {
            let mut one = spec::workflow::load(file, job, name, &flags, around)?;
            one.index = steps.len() + 1;
            steps.push(one);
        }
        return Ok(spec::select(steps, &[], shard)?);
    }
    let mut files = select.specs.clone();
    if files.is_empty() && step.run.is_none() {
        files.extend(spec::default_file(std::path::Path::new(".")));
    }
    Ok(spec::select(spec::load(&files, &flags, around)?, &select.step, shard)?)
}

impl StepArgs {
    /// The engine executables that flags and the environment name.
    #[must_use]
    pub fn engines(&self, env: &Env) -> Engines {
        engines(self.runsc.clone(), self.platform.clone(), self.firecracker.clone(), env)
    }
}

/// Engine executables: a flag, else the environment.
#[must_use]
pub fn engines(runsc: Option<PathBuf>, platform: Option<String>, firecracker: Option<PathBuf>, env: &Env) -> Engines {
    let named = Engines::of_environment(env);
    let (runsc, firecracker) = (runsc.or(named.runsc.clone()), firecracker.or(named.firecracker.clone()));
    Engines { runsc, firecracker, platform, ..named }
}
