//! From a validated step to what is dispatched and what the boundary is built to.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use plimsoll_guest::{Dispatch, Filesystem, GuestLimits, OutputBudget, Program, WasmProgram as WireWasm};
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};

use crate::backend::Bounds;
use crate::backend::wasm::ModuleFile;
use crate::image::rootfs::GUEST_USER;
use crate::spec::{Command, FilesystemGrant, Step, WasmProgram};
use crate::time::millis;

/// Largest module, bytes. CPython for WASI is 26 MB.
const MAX_MODULE: u64 = 256 << 20;
/// Bounds on output files: as many as artifact stores take well, and as much as a job should move.
pub const OUTPUT_BUDGET: OutputBudget = OutputBudget { files: 10_000, bytes: 1 << 30 };

/// What a script's environment has beside what its step declares. A shell makes up a `PATH` for itself and does not pass
/// it on, so that a compiler would not find its linker; and much software wants a home.
const SCRIPT_ENV: [(&str, &str); 2] =
    [("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"), ("HOME", "/tmp")];

/// Why a step's program could not be read.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {
    /// The artifact has no such module.
    #[error("the artifact holds no module `{name}`: {source}")]
    Module {
        /// As the step names it.
        name: String,
        /// Why it could not be opened.
        #[source]
        source: io::Error,
    },
    /// It is too large.
    #[error("the module `{name}` has {bytes} bytes; {MAX_MODULE} is the most")]
    TooLarge {
        /// As the step names it.
        name: String,
        /// Its size.
        bytes: u64,
    },
    /// No such runtime is installed.
    #[error("no WebAssembly runtime `{name}` is installed")]
    Runtime {
        /// As the step names it.
        name: String,
        /// What to do.
        help: String,
    },
    /// The host has no randomness.
    #[error("the host gave no randomness")]
    Entropy,
}

impl PayloadError {
    /// What to do about it.
    #[must_use]
    pub fn help(&self) -> &str {
        match self {
            PayloadError::Module { .. } => "`run` names a module by its path in the artifact",
            PayloadError::TooLarge { .. } => "strip debug information from it (`wasm-tools strip`)",
            PayloadError::Runtime { help, .. } => help,
            PayloadError::Entropy => "",
        }
    }
}

/// The step's limits in the units that the host enforces.
#[must_use]
pub fn bounds(step: &Step) -> Bounds {
    Bounds {
        memory_bytes: step.limits.memory,
        cpu_millis: u64::from(step.limits.milli_cpus),
        pids: u64::from(step.limits.pids),
        disk_bytes: step.limits.disk,
        output_bytes: step.limits.output,
        deadline: step.limits.timeout,
    }
}

/// What a WebAssembly program sees of the workspace.
#[must_use]
pub const fn filesystem(step: &Step) -> Filesystem {
    match step.grants.filesystem {
        FilesystemGrant::None => Filesystem::None,
        FilesystemGrant::ReadOnly => Filesystem::ReadOnly,
        FilesystemGrant::Work => Filesystem::Work,
    }
}

/// The one message that starts the step's code, and the WebAssembly program to put into it, if it is one. `workspace` is
/// the unpacked artifact, in which a module is looked for. `runtimes` finds an installed WebAssembly runtime by name.
///
/// # Errors
/// If the module or runtime cannot be opened.
pub fn dispatch(
    step: &Step,
    workspace: &Path,
    runtimes: impl Fn(&str) -> Result<ModuleFile, String>,
) -> Result<(Dispatch, Option<ModuleFile>), PayloadError> {
    let mut file = None;
    let program = match &step.command {
        Command::Script { shell, text } => Program::Script { argv: shell.argv().to_vec(), text: text.clone() },
        Command::Wasm { program, args } => {
            let (name, module) = match program {
                WasmProgram::Module(path) => (path.display().to_string(), module(workspace, path)?),
                WasmProgram::Runtime(name) => {
                    let found = runtimes(name).map_err(|help| PayloadError::Runtime { name: name.clone(), help })?;
                    (name.clone(), found)
                }
            };
            file = Some(module);
            Program::Wasm(WireWasm {
                name,
                code: Vec::new(),
                precompiled: false,
                want_compiled: false,
                args: args.clone(),
                deterministic: step.deterministic,
                filesystem: filesystem(step),
            })
        }
    };
    let mut entropy = [0u8; 32];
    getrandom::fill(&mut entropy).map_err(|_| PayloadError::Entropy)?;
    let mut outputs = step.outputs.clone();
    if let Some(junit) = &step.junit {
        // A path is not a pattern.
        outputs.push(glob::Pattern::escape(&junit.to_string_lossy()));
    }
    let directory = &step.working_directory;
    let dispatch = Dispatch {
        program,
        env: environment(step, &[]),
        working_directory: if directory.as_os_str().is_empty() {
            ".".to_owned()
        } else {
            directory.display().to_string()
        },
        user: GUEST_USER,
        outputs,
        output_budget: OUTPUT_BUDGET,
        limits: GuestLimits {
            pids: u64::from(step.limits.pids),
            memory_bytes: step.limits.memory,
            disk_bytes: step.limits.disk,
            deadline_ms: millis(step.limits.timeout),
        },
        clock_ns: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)),
        entropy,
        drives: Vec::new(),
    };
    Ok((dispatch, file))
}

/// Takes over what an image says of who its program is and what it has in its environment.
pub fn adopt(dispatch: &mut Dispatch, step: &Step, env: &[(String, String)], user: Option<(u32, u32)>) {
    dispatch.env = environment(step, env);
    dispatch.user = user.unwrap_or(GUEST_USER);
}

/// What the step declares; where it says nothing, what its image has; and for a script, [`SCRIPT_ENV`] where neither does.
fn environment(step: &Step, image: &[(String, String)]) -> Vec<(String, String)> {
    let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    let defaults: &[_] = if matches!(step.command, Command::Script { .. }) { &SCRIPT_ENV } else { &[] };
    let in_image = |name: &str| image.iter().any(|(known, _)| known == name);
    let defaults = defaults.iter().filter(|(name, _)| !in_image(name)).map(own);
    let below = defaults.chain(image.iter().cloned()).filter(|(name, _)| !step.env.contains_key(name));
    below.chain(step.env.iter().map(|(name, value)| (name.clone(), value.clone()))).collect()
}

/// Opens a module of the artifact. The tree was unpacked by us, but its links are the guest's: none is followed out of it.
fn module(workspace: &Path, path: &Path) -> Result<ModuleFile, PayloadError> {
    let name = path.display().to_string();
    let open = || -> io::Result<ModuleFile> {
        let root = OwnedFd::from(File::open(workspace)?);
        let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = File::from(openat2(&root, path, flags, Mode::empty(), beneath)?);
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        ModuleFile::new(file)
    };
    match open() {
        Ok(module) if module.bytes() > MAX_MODULE => Err(PayloadError::TooLarge { name, bytes: module.bytes() }),
        Ok(module) => Ok(module),
        Err(source) => Err(PayloadError::Module { name, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{Overrides, Surroundings, load};

    #[test]
    fn a_script_has_a_path_and_a_home_that_its_step_may_change_and_a_module_has_neither() {
        let environment = |run: &str, env: &[(&str, &str)], image: &[(&str, &str)]| {
            let image: Vec<_> = image.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            let env = env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            let flags = Overrides { run: Some(run.to_owned()), env, ..Overrides::default() };
            environment(&load(&[], &flags, &Surroundings::default()).unwrap()[0], &image)
        };
        let pair = |(k, v): (&str, &str)| (k.to_owned(), v.to_owned());
        assert_eq!(environment("make", &[], &[]), SCRIPT_ENV.map(pair));
        let changed = [("HOME", "/tmp"), ("A", "b"), ("PATH", "/x")];
        assert_eq!(environment("make", &[("PATH", "/x"), ("A", "b")], &[]), changed.map(pair));
        let image = [("PATH", "/image"), ("A", "image"), ("B", "image")];
        let both = [("HOME", "/tmp"), ("PATH", "/image"), ("B", "image"), ("A", "b")];
        assert_eq!(environment("make", &[("A", "b")], &image), both.map(pair));
        assert_eq!(environment("x.wasm", &[("A", "b")], &[]), [pair(("A", "b"))]);
    }
}
