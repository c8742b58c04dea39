//! Takes one guest through the real gate and the real jail.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use plimsoll::backend::channel::CancelSignal;
use plimsoll::backend::output::Written;
use plimsoll::backend::wasm::ModuleFile;
use plimsoll::backend::{Backend, Bounds, Engines, Output, Plan};
use plimsoll::evidence::{ControlId, Status, Tier};
use plimsoll::gate::{End, Passage, Request, pass};
use plimsoll_guest::{Dispatch, Filesystem, GuestLimits, GuestResult, OutputBudget, Program, WasmProgram};
use tokio::sync::watch;

/// A guest and what it may do.
pub struct Guest {
    pub name: String,
    pub module: ModuleFile,
    pub args: Vec<String>,
    pub env: Vec<(String, String)>,
    pub memory: u64,
    pub disk: u64,
    pub deadline: Duration,
    pub filesystem: Filesystem,
    pub workspace: Option<PathBuf>,
    pub mounts: Vec<(PathBuf, String)>,
    pub working_directory: String,
    pub outputs: Vec<String>,
    pub deterministic: bool,
    pub floor: Tier,
}

/// What came of it.
pub struct Ran {
    pub passage: Passage,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub written: Written,
    pub outputs: tempfile::TempDir,
}

/// Bytes of output that are kept.
pub const OUTPUT_CAP: u64 = 64 << 10;

pub fn fixture(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/wasm").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

impl Guest {
    pub fn new(code: impl Into<Vec<u8>>) -> Self {
        Self::of_file(ModuleFile::of_bytes(&code.into()).unwrap())
    }

    pub fn of_file(module: ModuleFile) -> Self {
        Self {
            name: "guest.wasm".to_owned(),
            module,
            args: Vec::new(),
            env: Vec::new(),
            memory: 64 << 20,
            disk: 1 << 20,
            deadline: Duration::from_secs(60),
            filesystem: Filesystem::None,
            workspace: None,
            mounts: Vec::new(),
            working_directory: ".".to_owned(),
            outputs: Vec::new(),
            deterministic: false,
            floor: Tier::Container,
        }
    }

    pub fn fixture(name: &str) -> Self {
        Self::new(fixture(name))
    }

    pub fn args(mut self, args: &[&str]) -> Self {
        self.args = args.iter().map(|&a| a.to_owned()).collect();
        self
    }

    pub fn sees(mut self, workspace: &Path, filesystem: Filesystem) -> Self {
        self.workspace = Some(workspace.to_owned());
        self.filesystem = filesystem;
        self
    }

    pub fn plan(&self, scratch: &Path) -> Plan {
        Plan {
            id: "test".to_owned(),
            scratch: scratch.to_owned(),
            bounds: Bounds {
                memory_bytes: self.memory,
                cpu_millis: 1000,
                pids: 64,
                disk_bytes: self.disk,
                output_bytes: OUTPUT_CAP,
                deadline: self.deadline,
            },
            workspace: self.workspace.clone(),
            rootfs: None,
            machine: None,
            mounts: self.mounts.clone(),
            module: Some(self.module.clone()),
            filesystem: self.filesystem,
            deterministic: self.deterministic,
            engines: Engines::default(),
        }
    }

    pub fn dispatch(&self) -> Dispatch {
        Dispatch {
            program: Program::Wasm(WasmProgram {
                name: self.name.clone(),
                code: Vec::new(),
                precompiled: false,
                want_compiled: false,
                args: self.args.clone(),
                deterministic: self.deterministic,
                filesystem: self.filesystem,
            }),
            env: self.env.clone(),
            working_directory: self.working_directory.clone(),
            user: (1000, 1000),
            outputs: self.outputs.clone(),
            output_budget: OutputBudget { files: 100, bytes: 10 << 20 },
            limits: GuestLimits {
                pids: 64,
                memory_bytes: self.memory,
                disk_bytes: self.disk,
                deadline_ms: u64::try_from(self.deadline.as_millis()).unwrap(),
            },
            clock_ns: 0,
            entropy: [0; 32],
            drives: Vec::new(),
        }
    }

    pub fn run(&self) -> Ran {
        self.run_watched(|_| {})
    }

    /// Runs it; `meanwhile` is called on another thread with what cancels the run.
    pub fn run_watched(&self, meanwhile: impl FnOnce(watch::Sender<Option<CancelSignal>>) + Send + 'static) -> Ran {
        let scratch = tempfile::tempdir().unwrap();
        let logs = scratch.path().join("logs");
        std::fs::create_dir(&logs).unwrap();
        let outputs = tempfile::tempdir().unwrap();
        let directory = std::fs::File::open(outputs.path()).unwrap().into();
        let budget = OutputBudget { files: 100, bytes: 10 << 20 };
        let mut output = Output::create(&logs, Some(directory), OUTPUT_CAP, budget, None).unwrap();
        let (cancel, mut cancelled) = watch::channel(None);
        let watcher = std::thread::spawn(move || meanwhile(cancel));
        let plan = self.plan(scratch.path());
        let required = BTreeSet::new();
        let request = Request {
            backend: Backend::Wasm,
            plan: &plan,
            standby: None,
            floor: self.floor,
            required: &required,
            on_dispatch: &|| {},
        };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let passage = runtime.block_on(pass(request, self.dispatch(), &mut output, &mut cancelled));
        watcher.join().unwrap();
        let written = output.finish();
        let read = |name| std::fs::read(logs.join(name)).unwrap();
        Ran { stdout: read("stdout.log"), stderr: read("stderr.log"), passage, written, outputs }
    }
}

impl Ran {
    /// The guest's result, or a failure that says what came instead.
    pub fn result(&self) -> &GuestResult {
        match &self.passage.end {
            End::Result(result) => result,
            other => panic!("no result but {other:?}; notices {:?}", self.written.notices),
        }
    }

    pub fn exit_code(&self) -> i32 {
        let result = self.result();
        result.exit_code.unwrap_or_else(|| panic!("no exit code but {result:?}"))
    }

    pub fn grade(&self, control: ControlId) -> Status {
        self.passage.judgement.as_ref().expect("nothing was judged").grades[&control]
    }

    /// What holds for every run, whatever the guest did: the tier was proven, the boundary was the same at the end, and
    /// nothing is left.
    pub fn boundary_held(&self) -> &Self {
        assert_eq!(self.passage.judgement.as_ref().map(|j| j.tier), Some(Tier::Container), "{:#?}", self.passage);
        assert!(self.passage.changed.is_empty(), "{:?}", self.passage.changed);
        let left = self.passage.observations.iter().filter(|o| o.fact.control() == ControlId::Teardown);
        assert!(left.clone().count() > 0);
        for observation in left {
            assert_eq!(observation.fact.grade(), Some(Status::Enforced), "{}", observation.fact.words());
        }
        self
    }
}
