//! One run of a guest inside the worker: compile or load, check imports, instantiate, start, and say how it ended.

use std::fs::File;

use plimsoll_guest::wire::write_message;
use plimsoll_guest::{Dispatch, FromGuest, GuestResult, LimitHit, MAX_CHUNK, WasmProgram};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use wasmtime::component::{Component, Linker as ComponentLinker, ResourceTable};
use wasmtime::{Engine, Linker, Module, Precompiled, Store, Trap, WasmBacktrace};
use wasmtime_wasi::p1::WasiP1Ctx;
use wasmtime_wasi::p2::bindings::CommandPre;
use wasmtime_wasi::{I32Exit, WasiCtx, WasiCtxView, WasiView};

use super::limiter::Budget;
use super::{code, engine, wasi};
use crate::backend::jail::{Inside, Wire};
use crate::backend::sys;

/// Fuel for each millisecond of the time limit: little enough that a host of any speed burns it before the time is over,
/// so that a deterministic run ends the same way everywhere.
const FUEL_PER_MS: u64 = 20_000;
/// What serving a guest takes, bytes: its stack, buffers, tables of open files, seeded randomness.
const SERVING: u64 = 32 << 20;
/// Longest message about a trap, bytes; names in it are the guest's.
const MAX_MESSAGE: usize = 2048;
/// First words of the message about compiled code that cannot be used, by which the runner knows to drop it.
pub const STALE: &str = "cached code does not load";

/// Compiled code, of one of the two kinds.
#[derive(Debug)]
pub enum Loaded {
    /// A core module (WASI preview 1).
    Module(Module),
    /// A component (WASI 0.2).
    Component(Component),
}

/// Why a run ended before, or other than, by the guest's own exit.
enum Fault {
    /// An import is not granted.
    Refused(String),
    /// Anything else.
    Other(wasmtime::Error),
}

impl From<wasmtime::Error> for Fault {
    fn from(error: wasmtime::Error) -> Self {
        Self::Other(error)
    }
}

/// State of a store.
struct State<W> {
    wasi: W,
    table: ResourceTable,
    budget: Budget,
}

impl WasiView for State<WasiCtx> {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        WasiCtxView { ctx: &mut self.wasi, table: &mut self.table }
    }
}

/// What a run used and whether memory was refused.
#[derive(Default)]
struct Used {
    peak: u64,
    refused: bool,
}

/// Runs the dispatched program to its end.
///
/// `handed` is the memory file with compiled code, if there is any.
pub fn run(inside: &Inside, dispatch: &Dispatch, program: &WasmProgram, handed: Option<File>) -> GuestResult {
    let mut used = Used::default();
    let ended = attempt(inside, dispatch, program, handed, &mut used);
    let mut result = GuestResult {
        exit_code: None,
        signal: None,
        limit_hit: None,
        refused: None,
        message: None,
        peak_memory_bytes: used.peak,
        cpu_ms: cpu_ms(),
    };
    match ended {
        Ok(code) => result.exit_code = Some(code),
        Err(Fault::Refused(what)) => result.refused = Some(what),
        Err(Fault::Other(error)) => {
            let trap = error.downcast_ref::<Trap>().copied();
            result.limit_hit = match trap {
                Some(Trap::OutOfFuel) => Some(LimitHit::Fuel),
                Some(Trap::Interrupt) => Some(LimitHit::Time),
                _ if used.refused => Some(LimitHit::Memory),
                _ => None,
            };
            result.message = Some(describe(&error, trap));
        }
    }
    // A program that was refused memory often ends itself: with an exit code, or by an `unreachable`.
    if used.refused && result.exit_code.is_some_and(|code| code != 0) {
        result.limit_hit = Some(LimitHit::Memory);
    }
    result
}

fn attempt(
    inside: &Inside,
    dispatch: &Dispatch,
    program: &WasmProgram,
    handed: Option<File>,
    used: &mut Used,
) -> Result<i32, Fault> {
    let engine = engine::engine(program.deterministic)?;
    super::worker::tick(&engine)?;
    let loaded = match handed {
        Some(file) if program.precompiled => load(&engine, file).map_err(|e| e.context(STALE))?,
        _ => compile(&engine, program)?,
    };
    confine_memory(dispatch).map_err(wasmtime::Error::from)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .map_err(|e| wasmtime::Error::from(e).context("no runtime"))?;
    runtime.block_on(async {
        match loaded {
            Loaded::Module(module) => command(&engine, &module, inside, dispatch, program, used).await,
            Loaded::Component(component) => {
                component_command(&engine, &component, inside, dispatch, program, used).await
            }
        }
    })
}

/// What compiling was allowed is given back: from here on the kernel admits the step's memory and what this process needs
/// to serve it, on top of what is in use.
fn confine_memory(dispatch: &Dispatch) -> std::io::Result<()> {
    let before = getrlimit(Resource::Data);
    let enough = sys::data_in_use()?.saturating_add(dispatch.limits.memory_bytes).saturating_add(SERVING);
    let limit = before.maximum.map_or(enough, |maximum| maximum.min(enough));
    Ok(setrlimit(Resource::Data, Rlimit { current: Some(limit), maximum: Some(limit) })?)
}

/// Loads compiled code. A module's is mapped, so that only what runs is read.
fn load(engine: &Engine, file: File) -> wasmtime::Result<Loaded> {
    let again = file.try_clone()?;
    match sys::load_compiled(Module::deserialize_open_file, engine, file) {
        Ok(module) => Ok(Loaded::Module(module)),
        // It is a component, which cannot be loaded from an open file; or this host lets nobody map one to execute.
        Err(_) => {
            let code = code::read_handed_over(&again)?;
            match Engine::detect_precompiled(&code) {
                Some(Precompiled::Component) => {
                    sys::load_compiled(Component::deserialize, engine, code.as_slice()).map(Loaded::Component)
                }
                _ => sys::load_compiled(Module::deserialize, engine, code.as_slice()).map(Loaded::Module),
            }
        }
    }
}

/// Compiles what was sent, and sends compiled code back if the runner wants it.
fn compile(engine: &Engine, program: &WasmProgram) -> wasmtime::Result<Loaded> {
    let binary = wat::parse_bytes(&program.code).map_err(|e| wasmtime::Error::msg(format!("not a module: {e}")))?;
    // Bytes 4 to 8 are version and layer; layer 1 is a component (component-model/design/mvp/Binary.md).
    let loaded = if binary.get(6..8) == Some(&[1, 0]) {
        Loaded::Component(Component::from_binary(engine, &binary).map_err(|e| e.context("not a valid component"))?)
    } else {
        Loaded::Module(Module::from_binary(engine, &binary).map_err(|e| e.context("not a valid module"))?)
    };
    if program.want_compiled {
        let code = match &loaded {
            Loaded::Module(module) => module.serialize()?,
            Loaded::Component(component) => component.serialize()?,
        };
        let mut pieces = code.chunks(MAX_CHUNK).peekable();
        while let Some(piece) = pieces.next() {
            let message = FromGuest::Compiled { bytes: piece.to_vec(), last: pieces.peek().is_none() };
            write_message(&mut Wire, &message)?;
        }
    }
    Ok(loaded)
}

fn store<W>(engine: &Engine, wasi: W, dispatch: &Dispatch, program: &WasmProgram) -> wasmtime::Result<Store<State<W>>> {
    let budget = Budget::new(dispatch.limits.memory_bytes);
    let mut store = Store::new(engine, State { wasi, table: ResourceTable::new(), budget });
    store.limiter(|state| &mut state.budget);
    // The runner's deadline comes first; this one is for a runner that stands still.
    store.set_epoch_deadline((dispatch.limits.deadline_ms / engine::EPOCH_MS).saturating_add(10));
    if program.deterministic {
        store.set_fuel(dispatch.limits.deadline_ms.saturating_mul(FUEL_PER_MS))?;
    }
    Ok(store)
}

/// Runs a core module's `_start`.
async fn command(
    engine: &Engine,
    module: &Module,
    inside: &Inside,
    dispatch: &Dispatch,
    program: &WasmProgram,
    used: &mut Used,
) -> Result<i32, Fault> {
    let mut linker: Linker<State<WasiP1Ctx>> = Linker::new(engine);
    wasmtime_wasi::p1::add_to_linker_async(&mut linker, |state| &mut state.wasi)?;
    let wasi = wasi::builder(inside, dispatch, program)?.build_p1();
    let mut store = store(engine, wasi, dispatch, program)?;
    for import in module.imports() {
        if linker.get_by_import(&mut store, &import).is_none() {
            return Err(Fault::Refused(format!("import `{}` `{}` is not granted", import.module(), import.name())));
        }
    }
    let ended = async {
        let instance = linker.instantiate_async(&mut store, module).await?;
        let start = instance
            .get_typed_func::<(), ()>(&mut store, "_start")
            .map_err(|e| e.context("the module is no WASI command"))?;
        start.call_async(&mut store, ()).await
    }
    .await;
    *used = Used { peak: store.data().budget.peak(), refused: store.data().budget.refused };
    exit_code(ended.map(|()| 0))
}

/// Runs a component's `wasi:cli/run`.
async fn component_command(
    engine: &Engine,
    component: &Component,
    inside: &Inside,
    dispatch: &Dispatch,
    program: &WasmProgram,
    used: &mut Used,
) -> Result<i32, Fault> {
    for (name, _) in component.component_type().imports(engine) {
        // The interfaces exist in the linker and would fail when called; said beforehand it is clearer.
        if name.starts_with("wasi:sockets/") {
            return Err(Fault::Refused(format!("import `{name}` is not granted")));
        }
    }
    let mut linker: ComponentLinker<State<WasiCtx>> = ComponentLinker::new(engine);
    wasmtime_wasi::p2::add_to_linker_async(&mut linker)?;
    let ready =
        linker.instantiate_pre(component).map_err(|e| Fault::Refused(format!("an import is not granted: {e:#}")))?;
    let ready = CommandPre::new(ready).map_err(|e| e.context("the component is no WASI command"))?;
    let wasi = wasi::builder(inside, dispatch, program)?.build();
    let mut store = store(engine, wasi, dispatch, program)?;
    let ended = async {
        let command = ready.instantiate_async(&mut store).await?;
        command.wasi_cli_run().call_run(&mut store).await
    }
    .await;
    *used = Used { peak: store.data().budget.peak(), refused: store.data().budget.refused };
    exit_code(ended.map(|run| i32::from(run.is_err())))
}

/// An explicit exit comes as an error.
fn exit_code(ended: wasmtime::Result<i32>) -> Result<i32, Fault> {
    ended.or_else(|error| match error.downcast_ref::<I32Exit>() {
        Some(exit) => Ok(exit.0),
        None => Err(Fault::Other(error)),
    })
}

/// A fault in words: the trap and the function it happened in, or the chain of causes.
fn describe(error: &wasmtime::Error, trap: Option<Trap>) -> String {
    let mut text = match trap {
        Some(trap) => {
            let frame = error.downcast_ref::<WasmBacktrace>().and_then(|b| b.frames().first());
            match frame.and_then(|f| f.func_name()) {
                Some(name) => format!("{trap} in `{name}`"),
                None => trap.to_string(),
            }
        }
        None => {
            // The backtrace that wasmtime adds as context says where, not what.
            let causes: Vec<String> = error.chain().map(ToString::to_string).collect();
            let kept = causes.iter().filter(|c| !c.starts_with("error while executing"));
            kept.cloned().collect::<Vec<_>>().join(": ")
        }
    };
    let end = (0..=MAX_MESSAGE.min(text.len())).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
    text.truncate(end);
    text
}

/// CPU time of this process so far, milliseconds.
fn cpu_ms() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1000 + u64::try_from(time.tv_nsec).unwrap_or(0) / 1_000_000
}
