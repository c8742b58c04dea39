//! What integration tests share: the built binary in a clean environment, and honest skips.
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long a command may take before the test gives it up. Generous: it only ends what hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// The binary under test.
pub fn binary() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_plimsoll"))
}

/// The repository.
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A fixture below `tests/`.
pub fn fixture(name: &str) -> PathBuf {
    repository().join("tests").join(name)
}

/// Whether a variable is one that CI systems, a shell or a proxy set, and that would change what a test sees.
pub fn is_ambient(name: &str) -> bool {
    const PREFIXES: [&str; 8] = ["CI_", "GITHUB_", "GITLAB_", "RUNNER_", "INPUT_", "ACTIONS_", "PLIMSOLL_", "XDG_"];
    // Where engines and runtimes are is the machine's, not the job's.
    const KEPT: [&str; 2] = ["PLIMSOLL_RUNSC", "PLIMSOLL_WASM_PATH"];
    const NAMES: [&str; 7] = ["CI", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "FORCE_COLOR", "COLUMNS", "LINES"];
    !KEPT.contains(&name) && PREFIXES.iter().any(|p| name.starts_with(p))
        || NAMES.contains(&name)
        || name.to_lowercase().ends_with("_proxy")
}

/// A command in a clean environment.
pub struct Run {
    command: Command,
    shown: String,
}

/// `plimsoll` with arguments.
pub fn plimsoll<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Run {
    program(binary()).args(arguments)
}

/// Any other program, in the same clean environment.
pub fn program(program: impl AsRef<OsStr>) -> Run {
    let mut command = Command::new(&program);
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(is_ambient) {
            command.env_remove(&name);
        }
    }
    command.env("TERM", "dumb").stdin(Stdio::null());
    Run { command, shown: program.as_ref().to_string_lossy().into_owned() }
}

impl Run {
    /// Adds arguments.
    pub fn args<A: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        for argument in arguments {
            self.shown.push(' ');
            self.shown.push_str(&argument.as_ref().to_string_lossy());
            self.command.arg(argument);
        }
        self
    }

    /// Sets a variable.
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Starts in a directory.
    pub fn dir(mut self, directory: impl AsRef<Path>) -> Self {
        self.command.current_dir(directory);
        self
    }

    /// Starts it, with its output going to files.
    pub fn start(mut self) -> Running {
        let out = tempfile::NamedTempFile::new().unwrap();
        let err = tempfile::NamedTempFile::new().unwrap();
        self.command.stdout(out.reopen().unwrap()).stderr(err.reopen().unwrap());
        let child = self.command.spawn().unwrap_or_else(|e| panic!("failed to start {}: {e}", self.shown));
        Running { child, out, err, shown: self.shown }
    }

    /// Runs it to its end.
    pub fn run(self) -> Ran {
        self.start().wait()
    }
}

/// A command that runs.
pub struct Running {
    child: Child,
    out: tempfile::NamedTempFile,
    err: tempfile::NamedTempFile,
    shown: String,
}

impl Running {
    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal by kill(1).
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([format!("-{name}"), self.pid().to_string()]).status().unwrap();
        assert!(sent.success(), "{} was gone before SIG{name}", self.shown);
    }

    /// What it printed so far, both streams.
    pub fn printed(&self) -> String {
        read(self.out.path()) + &read(self.err.path())
    }

    /// Waits until it printed something, as long as it lives.
    pub fn wait_for_text(&mut self, text: &str) {
        let began = Instant::now();
        while !self.printed().contains(text) {
            assert!(began.elapsed() < PATIENCE, "{}: no {text:?} in:\n{}", self.shown, self.printed());
            if let Some(status) = self.child.try_wait().unwrap() {
                let printed = self.printed();
                assert!(printed.contains(text), "{} ended ({status}) without {text:?}:\n{printed}", self.shown);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits for its end.
    pub fn wait(mut self) -> Ran {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                let (stdout, stderr) = (read(self.out.path()), read(self.err.path()));
                return Ran { status, stdout, stderr, shown: self.shown };
            }
            if began.elapsed() > PATIENCE {
                let _ = self.child.kill();
                let _ = self.child.wait();
                panic!("{} did not end:\n{}", self.shown, self.printed());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn read(path: &Path) -> String {
    let mut bytes = Vec::new();
    File::open(path).unwrap().read_to_end(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A command that ended.
#[derive(Debug)]
pub struct Ran {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
    shown: String,
}

impl Ran {
    /// Its exit code; -1 if a signal ended it.
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or(-1)
    }

    /// Everything that it is and printed.
    pub fn all(&self) -> String {
        format!("{} ({})\n--- stdout\n{}\n--- stderr\n{}", self.shown, self.status, self.stdout, self.stderr)
    }

    /// Checks its exit code.
    #[track_caller]
    pub fn exits(self, code: i32) -> Self {
        assert_eq!(self.code(), code, "{}", self.all());
        self
    }

    /// Checks that standard error holds a text.
    #[track_caller]
    pub fn says(self, text: &str) -> Self {
        assert!(self.stderr.contains(text), "no {text:?} on standard error: {}", self.all());
        self
    }

    /// Checks that standard output holds a text.
    #[track_caller]
    pub fn prints(self, text: &str) -> Self {
        assert!(self.stdout.contains(text), "no {text:?} on standard output: {}", self.all());
        self
    }
}

/// Whether `what` must work here: `PLIMSOLL_MUST_WORK` names it, or all.
pub fn must_work(what: &str) -> bool {
    let list = std::env::var("PLIMSOLL_MUST_WORK").unwrap_or_default();
    list.split(',').map(str::trim).any(|word| word == what || word == "all")
}

/// Whether a test can go on. If not, says why; and fails if it must work.
pub fn available(what: &str, check: Result<(), String>) -> bool {
    match check {
        Ok(()) => true,
        Err(why) => {
            assert!(!must_work(what), "{what} must work here (PLIMSOLL_MUST_WORK), but {why}");
            eprintln!("skipped: {what}: {why}");
            false
        }
    }
}

/// Whether a program is in `PATH`.
pub fn installed(name: &str) -> Result<(), String> {
    let found =
        std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(name).is_file()));
    if found { Ok(()) } else { Err(format!("{name} is not installed (tests/install does it)")) }
}

/// A shell for images that hold nothing else: busybox, for tests of `what`.
pub fn busybox(what: &str) -> Option<&'static Path> {
    let found = ["/bin/busybox", "/usr/bin/busybox"].map(Path::new).into_iter().find(|path| path.is_file());
    let missing = "busybox is not installed (tests/install does it)".to_owned();
    available(what, found.map(drop).ok_or(missing)).then_some(found).flatten()
}

/// Whether `plimsoll doctor` says that a backend works here.
pub fn backend(name: &str) -> bool {
    let ran = plimsoll(["doctor", "--backend", name]).run();
    available(name, if ran.code() == 0 { Ok(()) } else { Err(format!("doctor says otherwise: {}", ran.all())) })
}
