//! From a VMM that was started to a guest that answers: the machine is built over the VMM's API, read back, started, and
//! its agent reached over vsock. [`Trouble`] is what may go wrong on the way.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use plimsoll_guest::agent::machine::PORT;
use rustix::fs::{Mode, OFlags, open};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::api::{self, Api};
use super::config::{API, Machine, VSOCK};
use super::{raise, unavailable};
use crate::backend::channel::Channel;
use crate::backend::launcher::control::Launched;
use crate::backend::launcher::{EngineEnd, Request, Stage, Work};
use crate::backend::{Backend, Plan, PrepareError, fix};
use crate::evidence::proc::ProcDir;

/// How long the VMM may take to listen for requests.
const API_PATIENCE: Duration = Duration::from_secs(5);
/// How long a microVM may take to boot, unless the operator gives it longer. A host without usable virtualisation is
/// told from a slow one by this: the former takes minutes.
const BOOT_PATIENCE: Duration = Duration::from_secs(10);
/// Between two attempts to reach the guest, at first. Each attempt is work for a guest that is booting, so they become
/// rarer: after a time, a hundredth of it.
const RETRY: Duration = Duration::from_millis(5);

/// Why a machine did not come up.
pub enum Trouble {
    /// The launcher could not start the VMM.
    Failed { stage: Stage, what: String, errno: Option<i32>, log: String },
    /// The VMM refused a request, or built something else.
    Told(String),
    /// It started, and no guest answered.
    Silent(Duration),
    /// The VMM ended while its guest was booting.
    Ended,
    /// A system call of our own failed.
    Io(&'static str, io::Error),
}

impl Trouble {
    /// In the terms of a backend that is not available. `last_words` are the end of what the VMM wrote: hostile; `end` is
    /// how its process ended, where the launcher is its parent.
    pub fn explain(self, last_words: &str, end: Option<EngineEnd>, rootful: bool) -> PrepareError {
        // The last line says most.
        let log = |text: &str| {
            let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
            let last = crate::text::Untrusted::new(last.to_owned()).for_terminal(300);
            if last.is_empty() { String::new() } else { format!(" ({last})") }
        };
        match self {
            Self::Silent(patience) => PrepareError::Unfit {
                backend: Backend::Firecracker,
                blocker: format!(
                    "/dev/kvm opens, but a microVM did not boot within {} s: this host's virtualisation cannot run a guest{}",
                    patience.as_secs(),
                    log(last_words)
                ),
                help: fix::KVM_USELESS.to_owned(),
            },
            Self::Ended => unavailable(
                format!(
                    "the VMM ended{} while its guest was booting{}",
                    match end {
                        Some(EngineEnd { signal: Some(signal), .. }) => format!(" by signal {signal}"),
                        Some(EngineEnd { code: Some(code), .. }) => format!(" with exit code {code}"),
                        _ => String::new(),
                    },
                    log(last_words)
                ),
                "run on bare metal or with working nested virtualisation; the kernel's log (`dmesg`) may say more",
            ),
            Self::Told(what) => unavailable(
                format!("{}{}", crate::text::Untrusted::new(what).for_terminal(600), log(last_words)),
                "see what the VMM says; `plimsoll doctor --backend firecracker` tries again",
            ),
            Self::Failed { stage: Stage::Namespaces, what, errno, .. } if !rootful => unavailable(
                format!(
                    "namespaces cannot be made: {what}{}",
                    errno.map_or(String::new(), |n| format!(" (errno {n})"))
                ),
                "allow user namespaces to plain users: `sysctl -w user.max_user_namespaces=15000`; on Ubuntu 24.04 or \
                 newer also an AppArmor profile with `userns,` for plimsoll",
            ),
            Self::Failed { what, log: said, .. } => unavailable(
                format!("{what}{}", log(&said)),
                "see what the engine says; as root the jailer has to be able to mount, chroot and make device nodes",
            ),
            Self::Io(action, source) => PrepareError::Io { action: action.to_owned(), source },
        }
    }
}

/// Builds the machine over the VMM's API, starts it, and connects to the agent in it: the channel, and the VMM's pid.
pub async fn raise_machine(
    launched: &Launched,
    request: &Request,
    machine: &Machine,
    plan: &Plan,
) -> Result<(Channel, u32), Trouble> {
    let Work::Firecracker(work) = &request.work else {
        return Err(Trouble::Told("no microVM was asked for".to_owned()));
    };
    let root = raise::root(&work.base, &work.id);
    tracing::debug!("the VMM is started");
    let sockets =
        Sockets::open(launched.launcher.pid(), &root).map_err(|e| Trouble::Io("open the VMM's directory", e))?;
    let mut api = sockets.api().await?;
    let pid =
        api.peer().ok().flatten().ok_or_else(|| Trouble::Told("nobody listens on the VMM's socket".to_owned()))?;
    let refused = |e: api::ApiError| Trouble::Told(crate::text::chain(&e));
    for (path, body) in machine.requests() {
        api.put(&path, &body).await.map_err(refused)?;
    }
    let built = api.get("/vm/config").await.map_err(refused)?;
    if let Some(difference) = machine.differs(&built) {
        return Err(Trouble::Told(format!("the VMM says it built something else: {difference}")));
    }
    let patience = plan.engines.boot_patience.unwrap_or(BOOT_PATIENCE);
    let began = Instant::now();
    let until = began + patience;
    api.put("/actions", &json!({"action_type": "InstanceStart"})).await.map_err(refused)?;
    tracing::debug!("the machine is started");
    let process = ProcDir::open(pid).map_err(|_| Trouble::Ended)?;
    // The observation asks for this digest, and finds it known.
    if let Ok(same) = ProcDir::open(pid) {
        drop(tokio::task::spawn_blocking(move || same.exe_sha256()));
    }
    loop {
        let attempt = tokio::time::timeout_at(until.into(), sockets.guest()).await;
        match attempt {
            Err(_) => return Err(Trouble::Silent(patience)),
            Ok(Ok((stream, peer))) if peer == Some(pid) => {
                tracing::debug!("the agent listens");
                let (reader, writer) = stream.into_split();
                return Ok((Channel::new(reader, writer, Vec::new()), pid));
            }
            Ok(Ok((_, peer))) => {
                let peer = peer.map_or("nobody".to_owned(), |pid| format!("pid {pid}"));
                return Err(Trouble::Told(format!("{peer} answers on the vsock socket, not the VMM (pid {pid})")));
            }
            Ok(Err(_)) if !process.alive() => return Err(Trouble::Ended),
            Ok(Err(_)) if Instant::now() > until => return Err(Trouble::Silent(patience)),
            // Nobody listens in the guest yet.
            Ok(Err(_)) => tokio::time::sleep(RETRY.max(began.elapsed() / 100)).await,
        }
    }
}

/// The directory of the VMM's sockets, reached through the launcher's mount namespace.
struct Sockets(OwnedFd);

impl Sockets {
    fn open(launcher: u32, root: &Path) -> io::Result<Self> {
        let inner = root.strip_prefix("/").unwrap_or(root).join("run");
        let path = PathBuf::from(format!("/proc/{launcher}/root")).join(inner);
        Ok(Self(open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?))
    }

    /// A short name for a socket: a socket's address holds 108 bytes (unix(7)).
    fn path(&self, inside: &str) -> PathBuf {
        let name = Path::new(inside).file_name().unwrap_or_default();
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_fd().as_raw_fd())).join(name)
    }

    async fn api(&self) -> Result<Api, Trouble> {
        let until = Instant::now() + API_PATIENCE;
        loop {
            match Api::connect(&self.path(API)).await {
                Ok(api) => return Ok(api),
                Err(_) if Instant::now() < until => tokio::time::sleep(Duration::from_millis(1)).await,
                Err(e) => return Err(Trouble::Told(format!("the VMM takes no requests: {e}"))),
            }
        }
    }

    /// One attempt to reach the agent: the stream, and the pid of who listens on the socket.
    async fn guest(&self) -> io::Result<(UnixStream, Option<u32>)> {
        let mut stream = UnixStream::connect(self.path(VSOCK)).await?;
        let peer = stream.peer_cred()?.pid().and_then(|pid| u32::try_from(pid).ok());
        stream.write_all(format!("CONNECT {PORT}\n").as_bytes()).await?;
        // `OK <port>` and a line feed; what follows is the agent's.
        let mut line = Vec::new();
        while !line.ends_with(b"\n") {
            if line.len() > 32 {
                return Err(io::ErrorKind::InvalidData.into());
            }
            line.push(stream.read_u8().await?);
        }
        if line.starts_with(b"OK ") { Ok((stream, peer)) } else { Err(io::ErrorKind::ConnectionRefused.into()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_went_wrong_has_a_fix() {
        let troubles = [
            Trouble::Silent(Duration::from_secs(12)),
            Trouble::Ended,
            Trouble::Told("PUT /actions was refused (400): \u{1b}[31m".to_owned()),
            Trouble::Failed { stage: Stage::Engine, what: "jailer".into(), errno: None, log: "no\u{202e}".into() },
        ];
        for trouble in troubles {
            let (PrepareError::Unavailable { blocker, help, .. } | PrepareError::Unfit { blocker, help, .. }) =
                trouble.explain("last\nwords", None, true)
            else {
                panic!("no help")
            };
            assert!(!help.is_empty() && !blocker.contains('\u{202e}'), "{blocker}");
        }
    }
}
