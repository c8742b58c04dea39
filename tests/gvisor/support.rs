//! A step through the gate, from a few words.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::Duration;

use plimsoll::backend::channel::CancelSignal;
use plimsoll::backend::launcher::control::use_executable;
use plimsoll::backend::{Backend, Bounds, Engines, Output, Plan};
use plimsoll::evidence::{Fact, Tier};
use plimsoll::gate::{self, End, Passage, Request};
use plimsoll::image::rootfs::GUEST_USER;
use plimsoll_guest::{Dispatch, Filesystem, GuestLimits, GuestResult, OutputBudget, Program};
use tokio::sync::watch;

/// Why gVisor cannot be tested here, unless it must.
pub fn skipped() -> bool {
    static SETTLED: Once = Once::new();
    SETTLED.call_once(|| use_executable(Path::new(env!("CARGO_BIN_EXE_plimsoll"))).unwrap());
    let why = match runsc() {
        Some(_) => return false,
        None => "there is no runsc in PATH",
    };
    let must = std::env::var("PLIMSOLL_MUST_WORK").unwrap_or_default();
    assert!(!must.split(',').any(|w| w == "gvisor" || w == "all"), "gvisor must work here, but {why}");
    println!("skipped: {why}");
    true
}

pub fn runsc() -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?).map(|d| d.join("runsc")).find(|p| p.is_file())
}

pub fn root() -> bool {
    rustix::process::geteuid().is_root()
}

/// One step.
pub struct Step {
    pub script: String,
    pub shell: Vec<String>,
    pub env: Vec<(String, String)>,
    pub files: Vec<(String, Vec<u8>, u32)>,
    pub outputs: Vec<String>,
    pub bounds: Bounds,
    pub engines: Engines,
    pub floor: Tier,
    pub rootfs: Option<PathBuf>,
    pub mounts: Vec<(PathBuf, String)>,
    pub working_directory: String,
    pub cancel_after: Option<Duration>,
    /// Cancels as soon as the program prints something.
    pub cancel_on_output: bool,
    pub preparation: Option<fn(&Path)>,
}

/// What came of it.
pub struct Ran {
    pub passage: Passage,
    pub stdout: String,
    pub stderr: String,
    pub notices: Vec<String>,
    /// Bytes written to standard output, and kept of it.
    pub stdout_bytes: (u64, u64),
    pub id: String,
    pub directory: tempfile::TempDir,
}

pub fn step(script: &str) -> Step {
    Step {
        script: script.to_owned(),
        shell: ["sh", "-e", "{0}"].map(str::to_owned).into(),
        env: vec![
            ("PATH".to_owned(), "/usr/local/bin:/usr/bin:/bin".to_owned()),
            ("HOME".to_owned(), "/tmp".to_owned()),
        ],
        files: Vec::new(),
        outputs: Vec::new(),
        bounds: Bounds {
            memory_bytes: 512 << 20,
            cpu_millis: 2000,
            pids: 64,
            disk_bytes: 32 << 20,
            output_bytes: 1 << 20,
            deadline: Duration::from_secs(60),
        },
        engines: Engines::default(),
        floor: Tier::Kernel,
        rootfs: None,
        mounts: Vec::new(),
        working_directory: ".".to_owned(),
        cancel_after: None,
        cancel_on_output: false,
        preparation: None,
    }
}

impl Step {
    pub fn file(mut self, path: &str, content: impl AsRef<[u8]>, mode: u32) -> Self {
        self.files.push((path.to_owned(), content.as_ref().to_owned(), mode));
        self
    }

    /// Changes the unpacked artifact before the run.
    pub fn prepare(mut self, change: fn(&Path)) -> Self {
        self.preparation = Some(change);
        self
    }

    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    pub fn run(self) -> Ran {
        tokio::runtime::Runtime::new().unwrap().block_on(self.pass())
    }

    async fn pass(self) -> Ran {
        let directory = tempfile::Builder::new().prefix("plimsoll-test-").tempdir().unwrap();
        let at = |name: &str| {
            let path = directory.path().join(name);
            std::fs::create_dir(&path).unwrap();
            path
        };
        let (scratch, workspace, logs, outputs) = (at("scratch"), at("workspace"), at("logs"), at("outputs"));
        // As the unpacker leaves it: the guest's uid is another one.
        chmod(&workspace, 0o777);
        for (path, content, mode) in &self.files {
            let path = workspace.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, content).unwrap();
            chmod(&path, *mode);
        }
        if let Some(change) = self.preparation {
            change(&workspace);
        }
        let mut random = [0u8; 6];
        getrandom::fill(&mut random).unwrap();
        let plan = Plan {
            id: format!("t{}", hex::encode(random)),
            scratch,
            bounds: self.bounds,
            workspace: Some(workspace),
            rootfs: self.rootfs,
            mounts: self.mounts,
            machine: None,
            module: None,
            filesystem: Filesystem::None,
            deterministic: false,
            engines: self.engines,
        };
        let budget = OutputBudget { files: 20, bytes: 1 << 20 };
        let dispatch = Dispatch {
            program: Program::Script { argv: self.shell, text: self.script },
            env: self.env,
            working_directory: self.working_directory,
            user: GUEST_USER,
            outputs: self.outputs,
            output_budget: budget,
            limits: GuestLimits {
                pids: self.bounds.pids,
                memory_bytes: self.bounds.memory_bytes,
                disk_bytes: self.bounds.disk_bytes,
                deadline_ms: self.bounds.deadline.as_millis().try_into().unwrap(),
            },
            clock_ns: 0,
            entropy: [0; 32],
            drives: Vec::new(),
        };
        let folder = std::fs::File::open(&outputs).unwrap().into();
        let (live, mut pieces) = tokio::sync::mpsc::unbounded_channel();
        let mut output = Output::create(&logs, Some(folder), self.bounds.output_bytes, budget, Some(live)).unwrap();
        let (sender, mut cancel) = watch::channel(None);
        if self.cancel_on_output {
            let sender = sender.clone();
            tokio::spawn(async move {
                pieces.recv().await;
                let _ = sender.send(Some(CancelSignal::Interrupt));
                std::future::pending::<()>().await;
            });
        }
        if let Some(after) = self.cancel_after {
            tokio::spawn(async move {
                tokio::time::sleep(after).await;
                let _ = sender.send(Some(CancelSignal::Terminate));
                std::future::pending::<()>().await;
            });
        }
        let required = BTreeSet::new();
        let request = Request {
            backend: Backend::Gvisor,
            plan: &plan,
            standby: None,
            floor: self.floor,
            required: &required,
            on_dispatch: &|| {},
        };
        let passage = gate::pass(request, dispatch, &mut output, &mut cancel).await;
        let written = output.finish();
        let text = |name: &str| String::from_utf8_lossy(&std::fs::read(logs.join(name)).unwrap()).into_owned();
        let ran = Ran {
            passage,
            stdout: text("stdout.log"),
            stderr: text("stderr.log"),
            notices: written.notices,
            stdout_bytes: (written.stdout.bytes, written.stdout.kept),
            id: plan.id.clone(),
            directory,
        };
        ran.nothing_is_left();
        ran
    }
}

pub fn chmod(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

impl Ran {
    /// The guest's result; fails with everything that is known if there is none.
    pub fn result(&self) -> &GuestResult {
        match &self.passage.end {
            End::Result(result) => result,
            _ => panic!("{}", self.story()),
        }
    }

    /// The program's exit code was 0.
    pub fn passed(self) -> Self {
        assert_eq!(self.result().exit_code, Some(0), "{}", self.story());
        assert_eq!(self.passage.changed, [], "{}", self.story());
        assert_eq!(self.passage.unobserved, None);
        self
    }

    pub fn story(&self) -> String {
        let facts: Vec<String> =
            self.passage.observations.iter().map(|o| format!("  {}: {}", o.fact.control(), o.fact.words())).collect();
        format!(
            "end: {:?}\njudgement: {:?}\n{}\nstdout: {}\nstderr: {}\nnotices: {:?}",
            self.passage.end,
            self.passage.judgement,
            facts.join("\n"),
            self.stdout,
            self.stderr,
            self.notices
        )
    }

    /// Path of an output file, as written.
    pub fn output(&self, name: &str) -> PathBuf {
        self.directory.path().join("outputs").join(name)
    }

    pub fn workspace(&self) -> PathBuf {
        self.directory.path().join("workspace")
    }

    fn nothing_is_left(&self) {
        for observation in &self.passage.observations {
            if let Fact::Leftovers { found, .. } = &observation.fact {
                assert!(found.is_empty(), "{found:?}");
            }
        }
        assert_eq!(plimsoll::backend::cgroup::find(&self.id), Vec::<PathBuf>::new());
        let scratch: Vec<_> = std::fs::read_dir(self.directory.path().join("scratch")).unwrap().collect();
        assert!(scratch.is_empty(), "{scratch:?}");
    }
}
