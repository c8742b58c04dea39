//! The runner's side of the launcher: start it, hear that the boundary is up, end it.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use plimsoll_guest::{decode, encode, frame_length};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::socket;
use super::{END, ENTRY, MAX_REPLY, Reply, Request};
use crate::backend::cgroup::Group;
use crate::backend::jail::own_executable;
use crate::backend::process::{self, Child};

/// How long the launcher may take beyond what it gives the engine.
const SLACK: Duration = Duration::from_secs(5);
/// How long it may take to end everything; it gives up after 3 s itself.
const END_PATIENCE: Duration = Duration::from_secs(4);

static EXECUTABLE: OnceLock<File> = OnceLock::new();

/// Has another executable serve as launcher than the running one: for tests, which are programs of their own.
///
/// # Errors
/// If it cannot be opened, or this was called before.
pub fn use_executable(path: &Path) -> io::Result<()> {
    EXECUTABLE.set(File::open(path)?).map_err(|_| io::Error::other("the launcher's executable is settled already"))
}

fn executable() -> io::Result<&'static File> {
    EXECUTABLE.get().map_or_else(own_executable, Ok)
}

/// A launched engine. Dropping it kills the launcher, and with it everything.
#[derive(Debug)]
pub struct Launched {
    /// The launcher, the runner's child.
    pub launcher: Child,
    control: UnixStream,
}

/// A launcher that waits to hear what it is for, and does nothing before. It takes a while to start, so it may be started
/// while that is found out. Dropping it kills it.
#[derive(Debug)]
pub struct Standby {
    launcher: Child,
    control: StdUnixStream,
}

impl Standby {
    /// Starts one.
    ///
    /// # Errors
    /// What was being done, and why it failed.
    pub fn start() -> Result<Self, (String, io::Error)> {
        let (control, theirs) = StdUnixStream::pair().map_err(failed("make the launcher's socket"))?;
        let file = executable().map_err(failed("open the runner's own executable"))?;
        let mut command = Command::new(format!("/proc/self/fd/{}", file.as_raw_fd()));
        command.arg0("plimsoll").arg(ENTRY).env_clear().current_dir("/");
        command.stdin(std::os::fd::OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
        let launcher = process::spawn(command).map_err(failed("start the launcher"))?;
        Ok(Self { launcher, control })
    }
}

fn failed(what: &str) -> impl FnOnce(io::Error) -> (String, io::Error) {
    let what = what.to_owned();
    move |e| (what, e)
}

/// Puts a launcher into the group before it does anything, tells it what to launch, and waits for its answer. Without one that
/// stands by, one is started.
///
/// # Errors
/// What was being done, and why it failed. [`Reply::Failed`] is no error here.
pub async fn launch(
    standby: Option<Standby>,
    request: &Request,
    descriptors: &[BorrowedFd<'_>],
    group: &mut Group,
) -> Result<(Launched, Reply), (String, io::Error)> {
    let Standby { launcher, control } = standby.map_or_else(Standby::start, Ok)?;
    group.add(launcher.pid());
    socket::send(&control, descriptors).map_err(failed("hand the launcher its descriptors"))?;
    control.set_nonblocking(true).map_err(failed("use the launcher's socket"))?;
    let mut control = UnixStream::from_std(control).map_err(failed("use the launcher's socket"))?;
    let frame = encode(request).map_err(|e| ("write the request".to_owned(), io::Error::other(e.to_string())))?;
    control.write_all(&frame).await.map_err(failed("send the request to the launcher"))?;
    let patience = Duration::from_millis(request.patience_ms) + SLACK;
    let reply = hear(&mut control, patience).await.map_err(failed("hear from the launcher"))?;
    Ok((Launched { launcher, control }, reply))
}

async fn hear(control: &mut UnixStream, patience: Duration) -> io::Result<Reply> {
    let read = async {
        let mut header = [0u8; 4];
        control.read_exact(&mut header).await?;
        let length = frame_length(header, MAX_REPLY).map_err(|e| io::Error::other(e.to_string()))?;
        let mut body = vec![0u8; length];
        control.read_exact(&mut body).await?;
        decode(&body).map_err(|e| io::Error::other(e.to_string()))
    };
    tokio::time::timeout(patience, read).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

impl Launched {
    /// Ends the boundary and waits for the launcher; says what the launcher said, if it did.
    pub async fn end(mut self) -> Option<Reply> {
        let said = match self.control.write_all(&[END]).await {
            Ok(()) => hear(&mut self.control, END_PATIENCE).await.ok(),
            Err(_) => None,
        };
        drop(self.control);
        if tokio::time::timeout(Duration::from_secs(1), self.launcher.wait()).await.is_err() {
            self.launcher.kill_tree();
        }
        said
    }
}
