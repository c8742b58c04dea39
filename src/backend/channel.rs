//! The runner's end of the channel into a boundary.
//!
//! Everything read here is guest-origin and hostile. A frame is bounded before it is read; the conversation is a small
//! state machine that ends at the first message out of order, at the deadline, on cancellation, or when the other end
//! closes. [`Channel::converse`] is the only place that reads guest messages after dispatch.

use std::io;
use std::time::{Duration, Instant};

use plimsoll_guest::{
    Dispatch, FrameError, FromGuest, GuestResult, MAX_FROM_GUEST, PROTOCOL, ToGuest, decode, encode, frame_length,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;

use super::output::Output;
use crate::text::Untrusted;

/// A signal that asked the whole run to stop; `None` while nobody did. Shared by all steps.
pub type Cancel = watch::Receiver<Option<CancelSignal>>;

/// Which signal cancelled the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CancelSignal {
    /// Ctrl-C, or the first signal of a cancelled CI job.
    Interrupt,
    /// Termination.
    Terminate,
}

/// Both directions of the channel.
pub struct Channel {
    reader: Box<dyn AsyncRead + Send + Unpin>,
    writer: Box<dyn AsyncWrite + Send + Unpin>,
    inodes: Vec<u64>,
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Channel").field("inodes", &self.inodes).finish_non_exhaustive()
    }
}

/// The answer to a challenge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// From question to answer.
    pub took: Duration,
    /// Kernel release that the inside sees; guest-origin text.
    pub kernel: String,
    /// Boot id that the inside sees; guest-origin text.
    pub boot_id: String,
}

/// Why a challenge failed.
#[derive(Debug, thiserror::Error)]
pub enum ChallengeError {
    /// No answer in time.
    #[error("no answer to the challenge within {0:?}")]
    Silent(Duration),
    /// Something else than the answer came.
    #[error("the answer to the challenge was wrong: {0}")]
    Wrong(&'static str),
    /// The agent says that it could not make the boundary ready. Its own words, fit for a terminal.
    #[error("the agent could not make the boundary ready: {0}")]
    Apology(String),
    /// The channel failed.
    #[error("the channel failed during the challenge: {0}")]
    Channel(FrameError),
}

/// How a dispatched run ended.
#[derive(Debug)]
pub enum Ended {
    /// The guest told its result and waits.
    Result(GuestResult),
    /// The deadline passed; the boundary still stands.
    Deadline,
    /// The run was cancelled; the boundary still stands.
    Cancelled(CancelSignal),
    /// The boundary closed its channel without a result: it ended by itself.
    Gone,
    /// The guest broke the protocol.
    Protocol(String),
}

/// What came of a dispatch.
#[derive(Debug)]
pub struct Outcome {
    /// How it ended.
    pub ended: Ended,
    /// From dispatch to the end.
    pub took: Duration,
}

impl Channel {
    /// A channel over two pipes or the halves of a socket. `inodes` identify it in other processes' descriptor lists.
    pub fn new(
        reader: impl AsyncRead + Send + Unpin + 'static,
        writer: impl AsyncWrite + Send + Unpin + 'static,
        inodes: Vec<u64>,
    ) -> Self {
        Self { reader: Box::new(reader), writer: Box::new(writer), inodes }
    }

    /// Two pipes: the runner's ends as a channel, and the guest's ends (its input, its output), which are not inherited
    /// unless handed on.
    ///
    /// # Errors
    /// If pipes cannot be made.
    pub fn pipes() -> io::Result<(Self, io::PipeReader, io::PipeWriter)> {
        let (guest_in, to_guest) = io::pipe()?;
        let (from_guest, guest_out) = io::pipe()?;
        let inode = |fd: std::os::fd::BorrowedFd<'_>| rustix::fs::fstat(fd).map(|s| s.st_ino);
        use std::os::fd::{AsFd, OwnedFd};
        let inodes = vec![inode(to_guest.as_fd())?, inode(from_guest.as_fd())?];
        // Larger pipes move a module or a flood of output in fewer turns; the default serves where this is refused.
        for fd in [to_guest.as_fd(), from_guest.as_fd()] {
            let _ = rustix::pipe::fcntl_setpipe_size(fd, 1024 * 1024);
        }
        let reader = tokio::net::unix::pipe::Receiver::from_owned_fd(OwnedFd::from(from_guest))?;
        let writer = tokio::net::unix::pipe::Sender::from_owned_fd(OwnedFd::from(to_guest))?;
        Ok((Self::new(reader, writer, inodes), guest_in, guest_out))
    }

    /// Inodes of the channel's pipes or sockets.
    #[must_use]
    pub fn inodes(&self) -> &[u64] {
        &self.inodes
    }

    /// Sends one message.
    ///
    /// # Errors
    /// If the other end is gone.
    pub async fn send(&mut self, message: &ToGuest) -> Result<(), FrameError> {
        let frame = encode(message)?;
        self.writer.write_all(&frame).await.map_err(FrameError::Io)?;
        self.writer.flush().await.map_err(FrameError::Io)
    }

    /// Reads one message. Not cancellation safe: after a dropped call the channel is out of step, so whoever drops it
    /// must not read again.
    async fn receive(&mut self) -> Result<FromGuest, FrameError> {
        let mut header = [0u8; 4];
        match self.reader.read(&mut header[..1]).await {
            Ok(0) => return Err(FrameError::Closed),
            Ok(_) => {}
            Err(e) => return Err(FrameError::Io(e)),
        }
        self.reader.read_exact(&mut header[1..]).await.map_err(FrameError::Io)?;
        let mut body = vec![0u8; frame_length(header, MAX_FROM_GUEST)?];
        self.reader.read_exact(&mut body).await.map_err(FrameError::Io)?;
        decode(&body)
    }

    /// Sends a fresh nonce and waits for the same one.
    ///
    /// # Errors
    /// If nothing or something else comes within `patience`.
    pub async fn challenge(&mut self, patience: Duration) -> Result<Answer, ChallengeError> {
        let mut nonce = [0u8; 32];
        getrandom::fill(&mut nonce).map_err(|_| ChallengeError::Wrong("the host has no randomness for a nonce"))?;
        let asked = Instant::now();
        let exchange = async {
            self.send(&ToGuest::Challenge { nonce }).await?;
            self.receive().await
        };
        match tokio::time::timeout(patience, exchange).await {
            Err(_) => Err(ChallengeError::Silent(patience)),
            Ok(Err(e)) => Err(ChallengeError::Channel(e)),
            Ok(Ok(FromGuest::Answer { protocol, nonce: said, kernel, boot_id })) => {
                if protocol != PROTOCOL {
                    Err(ChallengeError::Wrong("another protocol version"))
                } else if said != nonce {
                    Err(ChallengeError::Wrong("another nonce"))
                } else {
                    Ok(Answer { took: asked.elapsed(), kernel, boot_id })
                }
            }
            Ok(Ok(FromGuest::Notice(why))) => Err(ChallengeError::Apology(Untrusted::new(why).for_terminal(600))),
            Ok(Ok(_)) => Err(ChallengeError::Wrong("another message")),
        }
    }

    /// Dispatches and listens until the run ends one way or another. `compiled` receives compiled code for the cache.
    pub async fn converse(
        &mut self,
        dispatch: Dispatch,
        output: &mut Output,
        deadline: Duration,
        cancel: &mut Cancel,
        mut compiled: impl FnMut(&[u8], bool),
    ) -> Outcome {
        let began = Instant::now();
        let listen = async {
            if let Err(e) = self.send(&ToGuest::Dispatch(Box::new(dispatch))).await {
                return match e {
                    FrameError::Io(e) if e.kind() == io::ErrorKind::BrokenPipe => Ended::Gone,
                    e => Ended::Protocol(e.to_string()),
                };
            }
            loop {
                match self.receive().await {
                    Ok(FromGuest::Output { stream, bytes }) => output.stream(stream, &bytes),
                    Ok(FromGuest::FileBegin { path, bytes }) => output.file_begin(&path, bytes),
                    Ok(FromGuest::FileData(bytes)) => output.file_data(&bytes),
                    Ok(FromGuest::FileEnd) => output.file_end(),
                    Ok(FromGuest::Notice(text)) => output.notice(text),
                    Ok(FromGuest::Compiled { bytes, last }) => compiled(&bytes, last),
                    Ok(FromGuest::Result(result)) => return Ended::Result(result),
                    Ok(FromGuest::Answer { .. }) => return Ended::Protocol("an answer nobody asked for".to_owned()),
                    Err(FrameError::Closed) => return Ended::Gone,
                    Err(FrameError::Io(e)) if e.kind() == io::ErrorKind::UnexpectedEof => return Ended::Gone,
                    Err(e) => return Ended::Protocol(e.to_string()),
                }
            }
        };
        let ended = tokio::select! {
            ended = listen => ended,
            () = tokio::time::sleep(deadline) => Ended::Deadline,
            signal = cancelled(cancel) => Ended::Cancelled(signal),
        };
        Outcome { ended, took: began.elapsed() }
    }

    /// Lets the guest end itself. It may be gone already.
    pub async fn release(&mut self) {
        let _ = tokio::time::timeout(Duration::from_secs(1), self.send(&ToGuest::Release)).await;
    }
}

/// Resolves when the run is cancelled.
pub async fn cancelled(cancel: &mut Cancel) -> CancelSignal {
    match cancel.wait_for(Option::is_some).await.map(|signal| *signal) {
        Ok(Some(signal)) => signal,
        // The sender is gone without a signal: nobody can cancel any more.
        _ => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_guest::{Filesystem, GuestLimits, MAX_CHUNK, OutputBudget, Program, Stream, WasmProgram};
    use proptest::prelude::*;

    use super::*;

    /// Never waited for: every conversation here ends by itself.
    const FOR_EVER: Duration = Duration::from_secs(600);

    fn dispatch() -> Dispatch {
        Dispatch {
            program: Program::Wasm(WasmProgram {
                name: "x".into(),
                code: Vec::new(),
                precompiled: false,
                want_compiled: false,
                args: Vec::new(),
                deterministic: false,
                filesystem: Filesystem::None,
            }),
            env: Vec::new(),
            working_directory: ".".into(),
            user: (1, 1),
            outputs: Vec::new(),
            output_budget: OutputBudget { files: 4, bytes: 100 },
            limits: GuestLimits { pids: 1, memory_bytes: 1, disk_bytes: 1, deadline_ms: 1 },
            clock_ns: 0,
            entropy: [0; 32],
            drives: Vec::new(),
        }
    }

    /// What a guest said, up to its end, and what became of it.
    fn converse(said: &[u8]) -> (Ended, super::super::output::Written) {
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        let logs = dir.path().join("logs");
        let files = dir.path().join("files");
        std::fs::create_dir(&logs).unwrap();
        std::fs::create_dir(&files).unwrap();
        let directory = std::fs::File::open(&files).unwrap().into();
        let mut output =
            Output::create(&logs, Some(directory), 1000, OutputBudget { files: 4, bytes: 100 }, None).unwrap();
        let (_cancel, mut cancelled) = watch::channel(None);
        let mut channel = Channel::new(std::io::Cursor::new(said.to_vec()), tokio::io::sink(), Vec::new());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let outcome = runtime.block_on(channel.converse(dispatch(), &mut output, FOR_EVER, &mut cancelled, |_, _| {}));
        (outcome.ended, output.finish())
    }

    fn message() -> impl Strategy<Value = FromGuest> {
        let bytes = || proptest::collection::vec(any::<u8>(), 0..300);
        let stream = prop_oneof![Just(Stream::Stdout), Just(Stream::Stderr)];
        prop_oneof![
            (stream, bytes()).prop_map(|(stream, bytes)| FromGuest::Output { stream, bytes }),
            ("[a-c./]{0,8}", any::<u64>()).prop_map(|(path, bytes)| FromGuest::FileBegin { path, bytes: bytes % 200 }),
            bytes().prop_map(FromGuest::FileData),
            Just(FromGuest::FileEnd),
            ".{0,20}".prop_map(FromGuest::Notice),
            (bytes(), any::<bool>()).prop_map(|(bytes, last)| FromGuest::Compiled { bytes, last }),
        ]
    }

    fn result() -> FromGuest {
        FromGuest::Result(GuestResult {
            exit_code: Some(0),
            signal: None,
            limit_hit: None,
            refused: None,
            message: None,
            peak_memory_bytes: 0,
            cpu_ms: 0,
        })
    }

    fn frames<'a>(messages: impl IntoIterator<Item = &'a FromGuest>) -> Vec<u8> {
        messages.into_iter().flat_map(|m| encode(m).unwrap()).collect()
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_end_in_a_verdict(said in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let (ended, written) = converse(&said);
            prop_assert!(matches!(ended, Ended::Gone | Ended::Protocol(_) | Ended::Result(_)));
            prop_assert!(written.failure.is_none());
        }

        #[test]
        fn damaged_conversations_end_in_a_verdict_within_their_bounds(
            messages in proptest::collection::vec(message(), 0..20),
            flips in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..6),
            cut in any::<proptest::sample::Index>(),
        ) {
            let mut said = frames(messages.iter().chain([&result()]));
            for (at, with) in flips {
                let at = at.index(said.len());
                said[at] ^= with;
            }
            said.truncate(cut.index(said.len() + 1));
            let (_, written) = converse(&said);
            prop_assert!(written.failure.is_none());
            prop_assert!(written.stdout.kept <= 1000 && written.stderr.kept <= 1000);
            prop_assert!(written.files.len() <= 4);
            prop_assert!(written.files.iter().map(|f| f.bytes).sum::<u64>() <= 100);
        }

        #[test]
        fn a_conversation_that_keeps_to_the_rules_ends_in_its_result(
            messages in proptest::collection::vec(message(), 0..20),
        ) {
            let (ended, _) = converse(&frames(messages.iter().chain([&result()])));
            prop_assert!(matches!(ended, Ended::Result(_)));
        }
    }

    #[test]
    fn silence_and_a_half_frame_are_gone_and_never_a_result() {
        assert!(matches!(converse(&[]).0, Ended::Gone));
        let whole = frames([&result()]);
        for length in 1..whole.len() {
            assert!(matches!(converse(&whole[..length]).0, Ended::Gone), "cut to {length}");
        }
        assert!(matches!(converse(&whole).0, Ended::Result(_)));
    }

    #[test]
    fn a_frame_that_announces_gigabytes_is_refused_unread() {
        assert!(matches!(converse(&[0xff; 4]).0, Ended::Protocol(why) if why.contains("longer")));
        let long = FromGuest::Output { stream: Stream::Stdout, bytes: vec![0; MAX_FROM_GUEST] };
        assert!(matches!(converse(&frames([&long])).0, Ended::Protocol(_)));
        let allowed = FromGuest::Output { stream: Stream::Stdout, bytes: vec![0; MAX_CHUNK] };
        assert!(matches!(converse(&frames([&allowed, &result()])).0, Ended::Result(_)));
    }

    #[test]
    fn an_answer_after_dispatch_breaks_the_protocol() {
        let answer =
            FromGuest::Answer { protocol: PROTOCOL, nonce: [0; 32], kernel: String::new(), boot_id: String::new() };
        assert!(matches!(converse(&frames([&answer, &result()])).0, Ended::Protocol(_)));
    }
}
