//! Unpacks in a process of its own, which is to be jailed, because decoders of hostile bytes are what gets hijacked.
//!
//! Three parts:
//! - [`unpack_in_helper`] is the runner's side ([`apply_in_helper`] for the layers of an image). It starts the helper, passes it the open files and the [`Request`] over
//!   one socket, waits with a deadline, and believes nothing that it needn't: it hashes the input itself, at the same
//!   time; it looks through the finished tree ([`super::inspect`]); it escapes every text; and it empties the destination
//!   after any failure, a killed helper included.
//! - [`Job::receive`] and [`Job::run`] are the helper's side, in the jail. The jail is none of this module's business,
//!   which knows no backend.
//! - [`Running`] is how the runner holds what was started.
//!
//! In the jail, [`Job::run`] needs: `read`, `write`, `lseek`, `openat2`, `mkdirat`, `fchmod`, `linkat`, `unlinkat`,
//! `symlinkat`, `renameat2`, `ftruncate`, `fstat`, `newfstatat`, `statx`, `getdents64`, `fcntl` (duplicating a fd), `close`,
//! `sendto`, `recvmsg`, memory (`mmap`, `munmap`, `mremap`, `madvise`, `brk`), `getrandom`, `futex`, `rt_sigprocmask`, `sigaltstack`
//! and `exit_group`; read access to nothing by path; write access beneath the destination's fd; 512 MiB of data; and
//! one fd for each level of depth.

use std::fs::{self, File, Permissions};
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, send, sendmsg, socketpair,
};
use serde::{Deserialize, Serialize};

use super::digest::Digest;
use super::inspect;
use super::layers::{self, Applied};
use super::rejection::{Error, Rejection, Rule, shown};
use super::tree::Purpose;
use super::unpack::{Request, Summary, mismatch, undo, unpack};

/// The internal word that the runner's own binary is started with to be the helper.
pub const SUBCOMMAND: &str = "__unpack";

/// Largest message in either direction, bytes. A request takes some 400, a rejection less than 5,000.
const MESSAGE_MAX: usize = 64 << 10;

/// How often the wait looks at the flag that cancels it.
const TICK: Duration = Duration::from_millis(100);

/// How long a helper that is done may take to end by itself.
const ENDING: Duration = Duration::from_secs(2);

/// How long a killed helper may take to be gone.
const GONE: Duration = Duration::from_secs(10);

/// Most files that come with a job, the destination included: one for each layer of an image.
const FILES_MAX: usize = layers::MAX_LAYERS + 1;

/// Makes a directory to unpack into: the helper has another uid, and so has whoever runs inside. A private directory above it
/// has to keep others out.
///
/// # Errors
/// If it is there already or can't be made.
pub fn make_destination(path: &Path) -> io::Result<File> {
    fs::create_dir(path)?;
    // Whatever the mask is.
    fs::set_permissions(path, Permissions::from_mode(0o777))?;
    File::open(path)
}

/// What the helper is asked to do.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
enum Work {
    Unpack(Request),
    Layers(layers::Request),
}

/// What the helper answers with.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
enum Answer {
    Unpacked(Summary),
    Applied(Applied),
    Rejected(Rejection),
    Failed(String),
}

/// A started helper.
pub trait Running {
    /// Ends it and everything that it started, at once.
    fn kill(&mut self) -> io::Result<()>;
    /// Says how it ended, for people, if it has ended.
    fn try_wait(&mut self) -> io::Result<Option<String>>;
}

impl Running for Child {
    fn kill(&mut self) -> io::Result<()> {
        Child::kill(self)
    }

    fn try_wait(&mut self) -> io::Result<Option<String>> {
        Child::try_wait(self).map(|status| status.map(|status| status.to_string()))
    }
}

/// Unpacks `input` into the empty directory `destination` by a helper that `start` starts with its end of a socket
/// and the destination, which must be writable for the uid that the helper gets in its jail. Blocks until the helper is gone.
///
/// # Errors
/// As [`unpack`]; also [`Rule::Deadline`], and [`Error::Failed`] when the helper died, couldn't start, or `cancel` was
/// set ([`io::ErrorKind::Interrupted`]). The destination is empty after each of them.
pub fn unpack_in_helper<H: Running>(
    input: &File,
    destination: BorrowedFd<'_>,
    request: &Request,
    deadline: Duration,
    cancel: &AtomicBool,
    start: impl FnOnce(OwnedFd, BorrowedFd<'_>) -> io::Result<H>,
) -> Result<Summary, Error> {
    let until = Instant::now() + deadline;
    // Before the helper exists, so that what it parses is what was asked for.
    if let Some(expected) = request.sha256 {
        let found = hash(input, cancel)?;
        if found != expected {
            return Err(mismatch(expected, found).into());
        }
    }
    inspect::is_empty(destination)?;
    let work = || -> Result<Summary, Error> {
        // The helper need not hash twice: that was done above, and is compared below.
        let asked = Work::Unpack(Request { sha256: None, ..request.clone() });
        let (ours, mut helper) = begin(&[input.as_fd()], destination, &asked, start)?;
        let done = AtomicBool::new(false);
        let (summary, found) = std::thread::scope(|scope| {
            let hashing = scope.spawn(|| hash(input, &done));
            let summary = await_answer(&ours, &mut helper, until, cancel);
            if summary.is_err() {
                done.store(true, Ordering::Relaxed);
            }
            (summary, hashing.join())
        });
        let Answer::Unpacked(summary) = summary? else { return Err(beside_the_point()) };
        let found = found.unwrap_or_else(|_| Err(Error::failed("hash the artifact", io::Error::other("panicked"))))?;
        if found != summary.sha256 {
            return Err(Rejection::new(Rule::Changed, "the file changed while it was unpacked").into());
        }
        inspect::tree(destination, request.purpose, &request.budget, summary.files)?;
        Ok(summary)
    };
    work().map_err(|error| undo(destination, error))
}

/// Applies the layers of an image to the empty directory `destination`; `files` are what the request's layers lie in.
/// Otherwise as [`unpack_in_helper`].
///
/// # Errors
/// As [`unpack_in_helper`]; a layer's digest is compared before the helper exists.
pub fn apply_in_helper<H: Running>(
    files: &[File],
    destination: BorrowedFd<'_>,
    request: &layers::Request,
    deadline: Duration,
    cancel: &AtomicBool,
    start: impl FnOnce(OwnedFd, BorrowedFd<'_>) -> io::Result<H>,
) -> Result<Applied, Error> {
    let until = Instant::now() + deadline;
    if request.layers.len() > layers::MAX_LAYERS || files.len() > layers::MAX_LAYERS {
        let message = format!("{} layers, where {} are allowed", request.layers.len(), layers::MAX_LAYERS);
        return Err(Rejection::new(Rule::BudgetFiles, message).into());
    }
    for layer in &request.layers {
        if let (Some(expected), Some(file)) = (layer.sha256, files.get(layer.file)) {
            let found = hash_part(file, layer.offset, layer.length, cancel)?;
            if found != expected {
                return Err(Rejection::new(Rule::Sha256, format!("the layer {expected} has the sha256 {found}")).into());
            }
        }
    }
    inspect::is_empty(destination)?;
    let work = || -> Result<Applied, Error> {
        let inputs: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let (ours, mut helper) = begin(&inputs, destination, &Work::Layers(request.clone()), start)?;
        let Answer::Applied(applied) = await_answer(&ours, &mut helper, until, cancel)? else {
            return Err(beside_the_point());
        };
        inspect::tree(destination, Purpose::RootFs, &request.budget, applied.files)?;
        Ok(applied)
    };
    work().map_err(|error| undo(destination, error))
}

fn beside_the_point() -> Error {
    Error::failed("trust the unpacking helper", io::Error::other("it answered something that it was not asked"))
}

/// Starts the helper, once its work waits for it in the socket.
fn begin<H: Running>(
    inputs: &[BorrowedFd<'_>],
    destination: BorrowedFd<'_>,
    work: &Work,
    start: impl FnOnce(OwnedFd, BorrowedFd<'_>) -> io::Result<H>,
) -> Result<(OwnedFd, H), Error> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(|e| Error::failed("make a socket pair", e))?;
    submit(&ours, inputs, destination, work)?;
    let helper = start(theirs, destination).map_err(|e| Error::failed("start the unpacking helper", e))?;
    Ok((ours, helper))
}

/// The digest of the whole file, without touching the offset that the helper shares.
fn hash(input: &File, cancel: &AtomicBool) -> Result<Digest, Error> {
    hash_part(input, 0, u64::MAX, cancel)
}

/// The digest of at most `length` bytes of a file.
fn hash_part(input: &File, offset: u64, length: u64, cancel: &AtomicBool) -> Result<Digest, Error> {
    struct At<'a>(&'a File, u64, &'a AtomicBool);
    impl Read for At<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            if self.2.load(Ordering::Relaxed) {
                return Err(io::Error::other("cancelled"));
            }
            let n = self.0.read_at(buffer, self.1)?;
            self.1 += n as u64;
            Ok(n)
        }
    }
    Digest::of_reader(At(input, offset, cancel).take(length)).map_err(|e| Error::failed("hash the artifact", e))
}

fn submit(channel: &OwnedFd, inputs: &[BorrowedFd<'_>], destination: BorrowedFd<'_>, work: &Work) -> Result<(), Error> {
    let message = serde_json::to_vec(work).map_err(|e| Error::failed("write the request", e))?;
    let fds = [inputs, &[destination]].concat();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(channel, &[IoSlice::new(&message)], &mut ancillary, SendFlags::NOSIGNAL)
        .map_err(|e| Error::failed("send the request to the unpacking helper", e))?;
    Ok(())
}

/// Waits for the answer and for the helper's end: until it is gone it may still write.
fn await_answer(
    channel: &OwnedFd,
    helper: &mut impl Running,
    until: Instant,
    cancel: &AtomicBool,
) -> Result<Answer, Error> {
    let answer = receive_answer(channel, until, cancel);
    // Once it has answered or closed the socket it ends by itself, and how it ended is worth knowing.
    let patience = if answer.is_ok() { ENDING } else { Duration::ZERO };
    let ended = end(helper, patience).map_err(|e| Error::failed("end the unpacking helper", e))?;
    // The process that was started may have children that are still going down: all of them hold the socket.
    if !closed(channel, Instant::now() + GONE) {
        return Err(Error::failed("end the unpacking helper", io::Error::from(io::ErrorKind::TimedOut)));
    }
    match answer? {
        Some(answer @ (Answer::Unpacked(_) | Answer::Applied(_))) => Ok(answer),
        Some(Answer::Rejected(rejection)) => Err(rejection.escaped().into()),
        Some(Answer::Failed(message)) => {
            Err(Error::failed("unpack the artifact in the helper", io::Error::other(shown(message.as_bytes()))))
        }
        None => Err(Error::failed(
            "unpack the artifact",
            io::Error::other(format!("the helper ended without an answer ({ended})")),
        )),
    }
}

/// Waits that long for the helper's end, then kills it.
fn end(helper: &mut impl Running, patience: Duration) -> io::Result<String> {
    for (wait, kill) in [(patience, false), (GONE, true)] {
        if kill {
            helper.kill()?;
        }
        let until = Instant::now() + wait;
        let mut pause = Duration::from_micros(200);
        loop {
            if let Some(ended) = helper.try_wait()? {
                return Ok(ended);
            }
            if Instant::now() >= until {
                break;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

fn receive_answer(channel: &OwnedFd, until: Instant, cancel: &AtomicBool) -> Result<Option<Answer>, Error> {
    loop {
        if cancel.load(Ordering::Relaxed) {
            return Err(Error::failed("unpack the artifact", io::Error::from(io::ErrorKind::Interrupted)));
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Rejection::new(Rule::Deadline, "it took longer to unpack than its deadline").into());
        }
        if readable(channel, left.min(TICK))? {
            break;
        }
    }
    let mut message = vec![0; MESSAGE_MAX];
    let (message, _, flags) =
        receive(channel, &mut message).map_err(|e| Error::failed("read the helper's answer", e))?;
    if message.is_empty() {
        return Ok(None);
    }
    if flags.contains(ReturnFlags::TRUNC) {
        return Err(Error::failed("read the helper's answer", io::Error::from(io::ErrorKind::InvalidData)));
    }
    serde_json::from_slice(message).map(Some).map_err(|e| Error::failed("read the helper's answer", e))
}

fn readable(channel: &OwnedFd, within: Duration) -> Result<bool, Error> {
    let timeout = Timespec { tv_sec: within.as_secs() as i64, tv_nsec: within.subsec_nanos().into() };
    match poll(&mut [PollFd::new(channel, PollFlags::IN)], Some(&timeout)) {
        Ok(0) | Err(Errno::INTR) => Ok(false),
        Ok(_) => Ok(true),
        Err(e) => Err(Error::failed("wait for the unpacking helper", e)),
    }
}

/// Reads and drops what still comes, until nobody holds the other end.
fn closed(channel: &OwnedFd, until: Instant) -> bool {
    let mut rest = [0; 64];
    while Instant::now() < until {
        if readable(channel, TICK).unwrap_or(false) && receive(channel, &mut rest).is_ok_and(|got| got.0.is_empty()) {
            return true;
        }
    }
    false
}

/// One message and the fds that came with it. An empty message is the end.
fn receive<'b>(channel: &OwnedFd, buffer: &'b mut [u8]) -> rustix::io::Result<(&'b [u8], Vec<OwnedFd>, ReturnFlags)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        match recvmsg(channel, &mut [IoSliceMut::new(buffer)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            // The other end closed with our message unread: as good as closed.
            Err(Errno::CONNRESET) => return Ok((&[], Vec::new(), ReturnFlags::empty())),
            got => break got?,
        }
    };
    let fds = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    Ok((&buffer[..got.bytes], fds, got.flags))
}

/// What the helper was given to do.
pub struct Job {
    channel: OwnedFd,
    inputs: Vec<File>,
    destination: OwnedFd,
    work: Work,
}

impl Job {
    /// Takes the job from the helper's end of the socket: nothing that was sent is the artifact's yet.
    pub fn receive(channel: OwnedFd) -> io::Result<Self> {
        let mut buffer = vec![0; MESSAGE_MAX];
        let (message, mut fds, _) = receive(&channel, &mut buffer)?;
        let work = serde_json::from_slice(message)?;
        let destination = fds.pop().ok_or_else(|| io::Error::other("the request came without a destination"))?;
        Ok(Job { channel, inputs: fds.into_iter().map(File::from).collect(), destination, work })
    }

    /// The directory that is to be written beneath.
    pub fn destination(&self) -> BorrowedFd<'_> {
        self.destination.as_fd()
    }

    /// Unpacks and answers. The helper is to exit afterwards.
    pub fn run(self) -> io::Result<()> {
        let done = match self.work {
            Work::Unpack(request) => match self.inputs.first() {
                Some(input) => unpack(input, self.destination, &request).map(Answer::Unpacked),
                None => Err(Error::failed("read the artifact", io::Error::from(io::ErrorKind::NotFound))),
            },
            Work::Layers(request) => layers::apply(&self.inputs, self.destination, &request).map(Answer::Applied),
        };
        let answer = done.unwrap_or_else(|error| match error {
            Error::Rejected(rejection) => Answer::Rejected(rejection),
            error @ Error::Failed { .. } => Answer::Failed(crate::text::chain(&error)),
        });
        send(&self.channel, &serde_json::to_vec(&answer)?, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}
