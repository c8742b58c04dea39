//! A service of the test's own, on a socket in a temporary directory, and callers of it.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use plimsoll::report::sign::SigningKey;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::{Run, available, binary, fixture, program};

/// How long something may take that takes no time.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A plain user's ids, and a second's.
pub const USERS: [(u32, u32); 2] = [(54_321, 54_321), (54_322, 54_322)];

/// Whether this is root, who alone can be somebody else.
pub fn two_users() -> bool {
    let root = rustix::process::geteuid().is_root();
    available("service", if root { Ok(()) } else { Err("it takes root to be two users".to_owned()) }) && reachable()
}

/// Whether a plain user can start the program where it was built.
fn reachable() -> bool {
    let (uid, gid) = USERS[0];
    let command = ["--clear-groups", "--"];
    let ran = program("setpriv")
        .args([format!("--reuid={uid}"), format!("--regid={gid}")])
        .args(command)
        .args([binary().as_os_str(), "--version".as_ref()])
        .run();
    let why = format!("a plain user can't start {}", binary().display());
    available("service", if ran.code() == 0 { Ok(()) } else { Err(why) })
}

/// A running service.
pub struct Service {
    pub dir: TempDir,
    pub child: Child,
}

impl Service {
    /// Starts one, and waits until it listens.
    pub fn start() -> Self {
        Self::start_with(|_| {})
    }

    /// The same, with more in its environment.
    pub fn start_with(more: impl FnOnce(&mut Command)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let log = fs::File::create(dir.path().join("log")).unwrap();
        let mut command = Command::new(binary());
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(crate::common::is_ambient) {
                command.env_remove(&name);
            }
        }
        let key = SigningKey::generate().unwrap();
        key.save(&dir.path().join("service.key")).unwrap();
        fs::write(dir.path().join("service.pub"), key.public().pem()).unwrap();
        command.arg("serve").arg("--socket").arg(dir.path().join("plimsoll.sock"));
        command.arg("--key").arg(dir.path().join("service.key"));
        command.env("NO_COLOR", "1").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        more(&mut command);
        let child = command.spawn().unwrap();
        let service = Self { dir, child };
        service.wait_for(|log| log.contains("serving on"));
        service
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("plimsoll.sock")
    }

    /// What it said so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    /// Waits until its log says something.
    #[track_caller]
    pub fn wait_for(&self, said: impl Fn(&str) -> bool) {
        let began = Instant::now();
        while !said(&self.log()) {
            assert!(began.elapsed() < PATIENCE, "the service did not say it:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([format!("-{name}"), pid]).status().unwrap().success());
    }

    /// Processes that serve its runs.
    pub fn workers(&self) -> Vec<u32> {
        let children = format!("/proc/{0}/task", self.child.id());
        let mut found = Vec::new();
        for task in fs::read_dir(children).into_iter().flatten().flatten() {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            found.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
        found
    }

    /// Waits until no run's process is left.
    #[track_caller]
    pub fn wait_until_idle(&self) {
        let began = Instant::now();
        while !self.workers().is_empty() {
            assert!(began.elapsed() < PATIENCE, "{:?} still run:\n{}", self.workers(), self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Connects as a client that speaks for itself.
    pub fn connect(&self) -> Raw {
        let stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Raw(stream)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if self.child.try_wait().unwrap().is_none() {
            self.signal("TERM");
            let began = Instant::now();
            while self.child.try_wait().unwrap().is_none() {
                if began.elapsed() > PATIENCE {
                    let _ = self.child.kill();
                    let _ = self.child.wait();
                    return;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// A directory of a caller's, with its programs in it.
pub struct Place {
    pub dir: TempDir,
    user: Option<(u32, u32)>,
}

impl Place {
    /// The first plain user's, or one's own without root.
    pub fn new() -> Self {
        Self::of(0)
    }

    pub fn of(user: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let user = rustix::process::geteuid().is_root().then_some(USERS[user]);
        for name in ["pass.wat", "fail.wat"] {
            fs::copy(fixture("forge/project").join(name), dir.path().join(name)).unwrap();
        }
        // The same as the one that passes, and then a loop.
        let pass = fs::read_to_string(dir.path().join("pass.wat")).unwrap();
        let end = pass.trim_end().strip_suffix("))").unwrap();
        fs::write(dir.path().join("forever.wat"), format!("{end}\n    (loop (br 0))))\n")).unwrap();
        if let Some((uid, gid)) = user {
            for entry in fs::read_dir(dir.path()).unwrap() {
                chown(entry.unwrap().path(), Some(uid), Some(gid)).unwrap();
            }
            chown(dir.path(), Some(uid), Some(gid)).unwrap();
        }
        Self { dir, user }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        if let Some((uid, gid)) = self.user {
            for path in path.ancestors().take_while(|p| *p != self.dir.path()) {
                chown(path, Some(uid), Some(gid)).unwrap();
            }
        }
    }

    /// `plimsoll` as this user, in this directory.
    pub fn plimsoll(&self, arguments: &[&str]) -> Run {
        self.program(binary()).args(arguments)
    }

    /// A program as this user.
    pub fn program(&self, name: &Path) -> Run {
        let run = match self.user {
            Some((uid, gid)) => program("setpriv")
                .args([format!("--reuid={uid}"), format!("--regid={gid}")])
                .args(["--clear-groups", "--"])
                .args([name]),
            None => program(name),
        };
        run.dir(self.dir.path()).env("TMPDIR", self.dir.path()).env("HOME", self.dir.path())
    }

    /// The same after some preparation as root, in a mount namespace of its own: a line of shell, and its arguments.
    pub fn program_after(&self, prepare: &str, arguments: &[&Path], name: &Path) -> Run {
        let (uid, gid) = self.user.expect("it takes root to be somebody else");
        let script = format!(
            "{prepare} || exit 1; shift {}; exec setpriv --reuid={uid} --regid={gid} --clear-groups -- \"$@\"",
            arguments.len() - 1
        );
        let run = program("unshare").args(["--mount", "sh", "-c", &script]).args(arguments).args([name]);
        run.dir(self.dir.path()).env("TMPDIR", self.dir.path()).env("HOME", self.dir.path())
    }

    /// `plimsoll run` by a service that must be there.
    pub fn run(&self, service: &Service, arguments: &[&str]) -> Run {
        let socket = service.socket();
        self.plimsoll(&["run", "--service", "require", "--service-socket"]).args([socket]).args(arguments)
    }

    pub fn report(&self) -> Value {
        serde_json::from_slice(&fs::read(self.path("plimsoll-report/report.json")).unwrap()).unwrap()
    }

    /// Every file below a directory belongs to the caller.
    #[track_caller]
    pub fn owns(&self, name: &str) {
        use std::os::unix::fs::MetadataExt;
        let uid = self.user.map_or_else(|| rustix::process::geteuid().as_raw(), |(uid, _)| uid);
        let mut rest = vec![self.path(name)];
        let mut files = 0;
        while let Some(path) = rest.pop() {
            let meta = fs::symlink_metadata(&path).unwrap();
            assert_eq!(meta.uid(), uid, "{}", path.display());
            if meta.is_dir() {
                rest.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
            } else {
                files += 1;
            }
        }
        assert!(files > 0);
    }
}

/// A connection that is spoken to by hand.
pub struct Raw(pub UnixStream);

impl Raw {
    /// Sends whatever; that the service has closed already is no fault.
    pub fn say(&mut self, bytes: &[u8]) -> bool {
        self.0.write_all(bytes).is_ok()
    }

    pub fn hello(&mut self) {
        self.say(&frame(1, br#"{"protocol":1}"#));
        assert_eq!(self.hear().unwrap().0, 65, "welcome");
    }

    /// The next frame; `None` at the end.
    pub fn hear(&mut self) -> Option<(u8, Vec<u8>)> {
        let mut head = [0; 5];
        self.0.read_exact(&mut head).ok()?;
        let mut body = vec![0; u32::from_be_bytes(head[..4].try_into().unwrap()) as usize];
        self.0.read_exact(&mut body).ok()?;
        Some((head[4], body))
    }

    /// Sends a request with descriptors.
    pub fn request(&mut self, json: &str, fds: &[std::os::fd::BorrowedFd<'_>]) {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        let frame = frame(2, json.as_bytes());
        let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(250))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(fds)));
        let flags = SendFlags::NOSIGNAL;
        let sent = sendmsg(&self.0, &[std::io::IoSlice::new(&frame)], &mut ancillary, flags).unwrap();
        self.say(&frame[sent..]);
    }

    /// Everything until the end; the last frame.
    pub fn last(&mut self) -> Option<(u8, Vec<u8>)> {
        let mut last = None;
        while let Some(frame) = self.hear() {
            last = Some(frame);
        }
        last
    }
}

pub fn frame(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut frame = u32::try_from(body.len()).unwrap().to_be_bytes().to_vec();
    frame.push(kind);
    frame.extend_from_slice(body);
    frame
}

/// A request of one step whose artifact is the first descriptor.
pub fn one_step(run: &str, kind: &str) -> String {
    format!(
        r#"{{"steps":[{{"index":1,"step":{{"run":"{run}"}},"artifact":{{"fd":0,"kind":"{kind}","name":"x.wat"}}}}],"jobs":1}}"#
    )
}
