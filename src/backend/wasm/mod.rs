//! The `wasm` backend: wasmtime in a worker process that jails itself.
//!
//! [`Wasm`] is the runner's side. It builds a jail ([`super::jail`]), observes the worker that waits in it, hands the
//! module over as the one dispatched message, and keeps compiled code between runs. Everything that parses, compiles,
//! loads or runs a guest's module is in [`worker`] and behind it, and only ever called in a jailed process.
//!
//! The boundary is a process with its own namespaces, ids, root, limits and filter (`container`); wasmtime's own
//! sandbox is a second line inside it and counts for nothing in the tier. Limits: the step's memory bounds the guest's
//! linear memories and tables together. The kernel bounds the process: to that and a fixed allowance for the compiler, and
//! once the code is compiled or loaded to little more than the step's memory.

use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use plimsoll_guest::{Dispatch, Filesystem, Program};
use sha2::{Digest, Sha256};
use tokio::net::unix::pipe::{Receiver, Sender};

use super::channel::{Cancel, Channel, Ended, Outcome};
use super::jail::{Access, Bind, Inside, Jail, JailError, JailedChild, Lease, Limits, Profile, Spec, own_sha256};
use super::process::{self, Child, on_spawner};
use super::{Backend, BinaryRecord, EngineRecord, Output, Phase, Plan, PrepareError, Usage};
use crate::env::Env;
use crate::evidence::observe::{Boundary, Expectation, Snapshot, holders};
use crate::evidence::{Admission, ControlId, Fact, Observation};
use crate::time::millis;

use cache::{Cache, Entry, Key};
use code::Handover;

pub use code::ModuleFile;

mod cache;
mod code;
mod engine;
mod limiter;
mod observe;
mod run;
pub mod runtimes;
mod wasi;
mod worker;

/// Internal word that a worker is started with.
pub const ENTRY: &str = "__worker";
/// What a worker may take on top of the step's memory, bytes: its own 10 MB, and compiling. CPython (26 MB of module)
/// takes 650 MB to compile, and so fits the default limit.
const COMPILER: u64 = 256 << 20;
/// How often a boundary is looked for while another process of ours is being forked elsewhere.
const FIND_TRIES: u32 = 20;
/// How long a killed worker may take to be gone.
const DEATH_PATIENCE: Duration = Duration::from_secs(2);

/// A worker's entry point, for [`super::jail::internal_entry`].
#[must_use]
pub fn worker(inside: Inside) -> ExitCode {
    worker::main(inside)
}

/// A prepared boundary: a jailed worker that waits.
#[derive(Debug)]
pub struct Wasm {
    channel: Channel,
    inodes: [u64; 2],
    plan: Plan,
    child: Child,
    diagnostics: std::process::ChildStderr,
    landlock: String,
    binds: Vec<String>,
    uid: u32,
    _lease: Lease,
    expected: Expectation,
    boundary: Option<Boundary>,
    cache: Result<Arc<Cache>, String>,
    fetching: Option<JoinHandle<io::Result<Code>>>,
    code: Option<Code>,
    code_origin: CodeOrigin,
    usage: Usage,
}

/// The guest's program, ready to be handed over.
#[derive(Debug)]
struct Code {
    /// SHA-256 of the module.
    module: [u8; 32],
    /// The key of its compiled code, unless there is no cache.
    key: Option<Key>,
    form: Form,
}

/// In which form a worker gets it.
#[derive(Debug)]
enum Form {
    /// The module itself, to be compiled.
    Module(Vec<u8>),
    /// Compiled, in the memory file that the worker can read.
    Compiled,
}

/// Where the guest's machine code comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CodeOrigin {
    /// Compiled by this run's worker, and not kept.
    Compiled,
    /// Compiled by this run's worker, and kept for later ones.
    Kept,
    /// Compiled by an earlier run's worker.
    Cached,
}

impl CodeOrigin {
    const fn words(self) -> &'static str {
        match self {
            Self::Compiled => "the guest's code was compiled by this worker",
            Self::Kept => "the guest's code was compiled by this worker, and kept for later runs",
            Self::Cached => "the guest's code was compiled by an earlier worker and came from the cache",
        }
    }
}

impl Wasm {
    /// See [`super::Sandbox::prepare`].
    ///
    /// # Errors
    /// As [`PrepareError`] says; nothing is left behind.
    pub async fn prepare(plan: &Plan) -> Result<Self, PrepareError> {
        let cache = match cache::place(&Env::process()) {
            Some(place) => Cache::at(&place).map_err(|e| format!("off: {e}")),
            None => Err("off: there is no cache directory".to_owned()),
        };
        let (handover, reader) = Handover::new().map_err(PrepareError::io("make a memory file"))?;
        let spec = Spec { inherit: vec![reader], ..spec(plan) };
        let cache = cache.map(Arc::new);
        // Meanwhile: a large module takes longer to hash than a jail to build and to observe.
        let fetching = plan.module.clone().map(|module| {
            let (deterministic, cache) = (plan.deterministic, cache.as_ref().ok().map(Arc::clone));
            std::thread::spawn(move || fetch(&module, deterministic, cache.as_deref(), &handover))
        });
        let jailed = tokio::task::spawn_blocking(move || Jail::spawn(spec))
            .await
            .map_err(|e| PrepareError::io("build the worker's jail")(io::Error::other(e)))?
            .map_err(unavailable)?;
        let JailedChild { child, to, from, diagnostics, channel: inodes, uid, lease, landlock, binds } = jailed;
        let channel = (|| {
            // A whole module or a flood of output goes through in fewer turns; where this is refused the default does.
            let _ = rustix::pipe::fcntl_setpipe_size(&to, 1 << 20);
            let _ = rustix::pipe::fcntl_setpipe_size(&from, 1 << 20);
            let reader = Receiver::from_owned_fd(from.into())?;
            let writer = Sender::from_owned_fd(to.into())?;
            Ok(Channel::new(reader, writer, inodes.to_vec()))
        })()
        .map_err(PrepareError::io("open the worker's channel"))?;
        Ok(Self {
            channel,
            inodes,
            expected: observe::expectation(plan, inodes),
            plan: plan.clone(),
            child,
            diagnostics,
            landlock,
            binds,
            uid,
            _lease: lease,
            boundary: None,
            cache,
            fetching,
            code: None,
            code_origin: CodeOrigin::Compiled,
            usage: Usage::default(),
        })
    }

    /// The channel into the boundary.
    pub fn channel(&mut self) -> &mut Channel {
        &mut self.channel
    }

    /// See [`super::Sandbox::observe`].
    ///
    /// # Errors
    /// If the boundary ended or is not the process that was observed first.
    pub fn observe(&mut self, phase: Phase, answered: Option<Duration>) -> io::Result<Vec<Observation>> {
        match (phase, &self.boundary) {
            (Phase::After, Some(boundary)) => {
                // Now, while the worker still waits: once it is released these figures are gone with it.
                self.usage.cpu_ms = observe::cpu_ms(boundary);
                self.usage.peak_memory_bytes = observe::memory(boundary).1;
                let later = Snapshot::take(&boundary.process)?;
                let mut seen = boundary.snapshot.changes(&later);
                let module =
                    self.code.as_ref().map(|code| format!(" (SHA-256 of the module: {})", hex::encode(code.module)));
                let what = format!("{}{}", self.code_origin.words(), module.unwrap_or_default());
                seen.push(Observation::host(Fact::Remark { control: ControlId::BinaryIdentity, what }));
                seen.extend(observe::memory_while_running(boundary));
                Ok(seen)
            }
            (Phase::After, None) => Err(io::Error::other("the boundary was not observed before")),
            (Phase::Before, _) => {
                let boundary = find(self.inodes)?;
                let mut seen = boundary.snapshot.observations(&self.expected);
                seen.push(boundary.challenge(answered));
                seen.extend(observe::worker(&boundary, &self.plan, &self.landlock, self.has_scratch()));
                self.usage.boundary_memory_bytes = observe::memory(&boundary).0;
                self.boundary = Some(boundary);
                self.have_code()?;
                Ok(seen)
            }
        }
    }

    /// Waits until the program is there to be handed over.
    fn have_code(&mut self) -> io::Result<()> {
        let Some(fetching) = self.fetching.take() else { return Ok(()) };
        let fetched = fetching.join().unwrap_or_else(|_| Err(io::Error::other("its reader broke")));
        let code = fetched.map_err(|e| io::Error::new(e.kind(), format!("the program cannot be read: {e}")))?;
        self.code_origin = match &code {
            Code { form: Form::Compiled, .. } => CodeOrigin::Cached,
            Code { key: Some(_), .. } => CodeOrigin::Kept,
            _ => CodeOrigin::Compiled,
        };
        self.code = Some(code);
        Ok(())
    }

    fn has_scratch(&self) -> bool {
        self.plan.filesystem == Filesystem::Work && self.plan.workspace.is_some()
    }

    /// See [`super::Sandbox::dispatch`].
    pub async fn dispatch(
        &mut self,
        _admission: Admission,
        mut dispatch: Dispatch,
        output: &mut Output,
        deadline: Duration,
        cancel: &mut Cancel,
    ) -> Outcome {
        if let Program::Wasm(program) = &mut dispatch.program {
            match self.code.as_mut().map(|code| &mut code.form) {
                Some(Form::Module(module)) => program.code = std::mem::take(module),
                Some(Form::Compiled) => program.precompiled = true,
                None => {}
            }
            program.want_compiled = self.code_origin == CodeOrigin::Kept;
        }
        let key = self.code.as_ref().and_then(|code| code.key);
        let mut keeping: Option<Entry> = match (&key, self.code_origin) {
            (Some(key), CodeOrigin::Kept) => self.cache.as_ref().ok().and_then(|cache| cache.begin(*key).ok()),
            _ => None,
        };
        let keep = |piece: &[u8], last: bool| {
            let Some(mut entry) = keeping.take() else { return };
            match entry.write(piece) {
                Ok(()) if last => drop(entry.finish()),
                Ok(()) => keeping = Some(entry),
                // Without it the next run compiles again.
                Err(_) => {}
            }
        };
        let outcome = self.channel.converse(dispatch, output, deadline, cancel, keep).await;
        match (&outcome.ended, key) {
            (Ended::Result(result), Some(key))
                if result.exit_code.is_none() && result.message.as_ref().is_some_and(|m| m.starts_with(run::STALE)) =>
            {
                if let Ok(cache) = &self.cache {
                    cache.remove(&key);
                }
            }
            (Ended::Gone, _) => output.notice(self.obituary()),
            _ => {}
        }
        outcome
    }

    /// How a worker that is gone ended, as far as the host can tell.
    fn obituary(&mut self) -> String {
        let exit = self.child.wait_for(DEATH_PATIENCE).ok().flatten();
        // The process between passes a signal on as a shell does.
        let how = match exit.and_then(|e| e.status.code()) {
            Some(code @ 129..) if code - 128 == libc::SIGSYS => {
                "the worker was killed by its seccomp filter: it made a system call that the jail forbids".to_owned()
            }
            Some(code @ 129..) => format!("the worker was killed by signal {}", code - 128),
            Some(code) => format!("the worker ended with exit code {code}, without a result"),
            None => "the worker ended without a result".to_owned(),
        };
        match String::from_utf8_lossy(&process::available(&mut self.diagnostics, 1024)).trim() {
            "" => how,
            said => format!("{how}; it said: {said}"),
        }
    }

    /// See [`super::Sandbox::usage`].
    #[must_use]
    pub fn usage(&mut self) -> Usage {
        // A worker that ended by itself was not seen after its run; then the kernel's account of it has to do.
        if self.usage.cpu_ms.is_none()
            && let Ok(Some(exit)) = self.child.try_wait()
        {
            self.usage.cpu_ms = Some(millis(exit.cpu));
            self.usage.peak_memory_bytes = Some(exit.peak_memory_bytes);
        }
        self.usage
    }

    /// See [`super::Sandbox::engine`].
    #[must_use]
    pub fn engine(&self) -> EngineRecord {
        let path = crate::evidence::identity::own_path().map(|p| p.display().to_string()).unwrap_or_default();
        let cache = self.cache.as_ref().err().cloned().unwrap_or_else(|| "on".to_owned());
        let mut settings = std::collections::BTreeMap::from([
            ("code-cache".to_owned(), cache),
            ("host-uid".to_owned(), self.uid.to_string()),
        ]);
        for bind in &self.binds {
            if let Some((at, how)) = bind.split_once(": ") {
                settings.insert(format!("mount {at}"), how.to_owned());
            }
        }
        EngineRecord {
            name: Backend::Wasm.name().to_owned(),
            engine_version: engine::VERSION.to_owned(),
            binaries: vec![BinaryRecord {
                path,
                version: env!("CARGO_PKG_VERSION").to_owned(),
                sha256: own_sha256().unwrap_or_default(),
            }],
            settings,
        }
    }

    /// See [`super::Sandbox::teardown`].
    pub async fn teardown(mut self) -> Vec<Observation> {
        // The worker first: the process between then reaps it and ends with its status.
        if let Some(boundary) = &self.boundary {
            let _ = rustix::process::pidfd_send_signal(boundary.process.pidfd(), rustix::process::Signal::KILL);
        } else {
            self.child.kill_tree();
        }
        let mut found = Vec::new();
        if tokio::time::timeout(DEATH_PATIENCE, self.child.wait()).await.is_err() {
            self.child.kill_tree();
            if !matches!(self.child.wait_for(DEATH_PATIENCE), Ok(Some(_))) {
                found.push(format!("process {} does not end", self.child.pid()));
            }
        }
        if let Some(boundary) = self.boundary.as_ref().filter(|b| b.process.alive()) {
            found.push(format!("worker {} still runs", boundary.process.pid()));
        }
        let inodes = self.inodes;
        match on_spawner(move || holders(&inodes)) {
            Ok(Ok(holders)) => {
                found.extend(holders.iter().map(|h| format!("process {} holds the channel", h.process.pid())));
            }
            Ok(Err(e)) | Err(e) => found.push(format!("the holders of the channel could not be listed: {e}")),
        }
        let looked_for = ["the worker and its parent", "processes that hold the channel"].map(str::to_owned).to_vec();
        vec![Observation::host(Fact::Leftovers { looked_for, found })]
    }
}

/// Gets the program ready: compiled code out of the cache if it is there, or else the module. The key is of what is
/// dispatched.
fn fetch(module: &ModuleFile, deterministic: bool, cache: Option<&Cache>, handover: &Handover) -> io::Result<Code> {
    // Building an engine here parses nothing; it only tells what the worker's engine will be.
    let fingerprint = engine::engine(deterministic).ok().map(|engine| engine::fingerprint(&engine));
    let known = cache.zip(fingerprint);
    if let Some((cache, fingerprint)) = known {
        let module = module.sha256()?;
        let key = Key::new(&module, &fingerprint);
        if cache.load(&key, handover.file()) {
            handover.seal()?;
            return Ok(Code { module, key: Some(key), form: Form::Compiled });
        }
    }
    let bytes = module.read()?;
    let module: [u8; 32] = Sha256::digest(&bytes).into();
    let key = known.map(|(_, fingerprint)| Key::new(&module, &fingerprint));
    Ok(Code { module, key, form: Form::Module(bytes) })
}

/// Finds the worker by its channel. Another part of the runner may be forking just now: such a copy holds every
/// descriptor for a moment, so a look that finds more than the worker is repeated.
fn find(inodes: [u64; 2]) -> io::Result<Boundary> {
    let mut tries = 0;
    loop {
        let found = on_spawner(move || Boundary::find(&inodes))?;
        tries += 1;
        match found {
            Ok(boundary) if boundary.strangers.is_empty() || tries == FIND_TRIES => return Ok(boundary),
            Err(e) if tries == FIND_TRIES => return Err(e),
            _ => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// What the plan means for the jail.
fn spec(plan: &Plan) -> Spec {
    let granted = plan.filesystem != Filesystem::None;
    let mut binds = Vec::new();
    if granted {
        if let Some(workspace) = &plan.workspace {
            let access = match plan.filesystem {
                Filesystem::Work => Access::Scratch { bytes: plan.bounds.disk_bytes },
                _ => Access::ReadOnly,
            };
            binds.push(Bind { source: workspace.clone(), target: wasi::WORKSPACE.to_owned(), access });
        }
        for (source, target) in &plan.mounts {
            binds.push(Bind { source: source.clone(), target: target.clone(), access: Access::ReadOnly });
        }
    }
    // A little more than fits, so that it is the full file system that says no, and the limit only a second line.
    let file_bytes =
        if plan.filesystem == Filesystem::Work { plan.bounds.disk_bytes.saturating_add(1 << 20) } else { 0 };
    Spec {
        entry: ENTRY,
        profile: if granted { Profile::Files } else { Profile::Compute },
        limits: Limits { data_bytes: plan.bounds.memory_bytes.saturating_add(COMPILER), file_bytes, threads: 1 },
        binds,
        inherit: Vec::new(),
        give: Vec::new(),
    }
}

fn unavailable(error: JailError) -> PrepareError {
    match error {
        JailError::Blocked(blocker) => {
            PrepareError::Unavailable { backend: Backend::Wasm, blocker: blocker.what, help: blocker.help }
        }
        JailError::Runner { action, source } => PrepareError::Io { action, source },
        step @ JailError::Step { .. } => {
            PrepareError::Io { action: "build the worker's jail".to_owned(), source: io::Error::other(step) }
        }
    }
}
