//! Messages and frames; see the crate's documentation for the conversation.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Version of the conversation; an answer with another number is refused.
pub const PROTOCOL: u32 = 1;
/// Longest frame the runner accepts from a guest, in bytes.
pub const MAX_FROM_GUEST: usize = 256 * 1024;
/// Longest frame a guest accepts from the runner, in bytes (a dispatch carries a whole module).
pub const MAX_TO_GUEST: usize = 512 * 1024 * 1024;
/// Largest piece of output or file content in one message, in bytes; leaves room for the envelope.
pub const MAX_CHUNK: usize = 128 * 1024;

/// What the runner says to the guest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToGuest {
    /// Prove that you hold this channel: answer with the same nonce.
    Challenge {
        /// Fresh random bytes.
        nonce: [u8; 32],
    },
    /// Run this. Sent once, after the judge admitted the boundary.
    Dispatch(Box<Dispatch>),
    /// The last observation is done; end yourself.
    Release,
}

/// Everything the guest needs to run one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Dispatch {
    /// What to run.
    pub program: Program,
    /// The guest program's whole environment, in order.
    pub env: Vec<(String, String)>,
    /// Directory to start in, relative to `/workspace`; `.` is the workspace itself.
    pub working_directory: String,
    /// Uid and gid of the guest program inside the boundary; never 0.
    pub user: (u32, u32),
    /// Globs below `/workspace` whose files are sent back after the run.
    pub outputs: Vec<String>,
    /// Bounds on what is sent back.
    pub output_budget: OutputBudget,
    /// Limits that only the inside can set.
    pub limits: GuestLimits,
    /// The host's wall clock at dispatch, nanoseconds since the Unix epoch; set where the guest owns a clock.
    pub clock_ns: u64,
    /// Fresh host randomness, mixed in where the guest owns an entropy pool.
    pub entropy: [u8; 32],
    /// Block devices of a microVM that are mounted at dispatch, read-only; none elsewhere.
    pub drives: Vec<Drive>,
}

/// A block device with a squashfs on it, and where it appears.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drive {
    /// Name of the device below `/dev`, such as `vdb`.
    pub device: String,
    /// Absolute path inside. `/workspace` is the artifact: what the program writes there lies over it.
    pub at: String,
    /// Only this file, at the top of the image, is to appear there.
    pub file: Option<String>,
}

/// What runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Program {
    /// A script for an interpreter: `argv` with `{0}` replaced by the path of a file that holds `text`.
    Script {
        /// For example `["sh", "-e", "{0}"]`.
        argv: Vec<String>,
        /// The script.
        text: String,
    },
    /// A WebAssembly module or component.
    Wasm(WasmProgram),
}

/// A WebAssembly program and how it is to be run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WasmProgram {
    /// Name for `argv[0]`.
    pub name: String,
    /// The module's bytes, binary or text; empty when `precompiled`.
    #[serde(with = "serde_bytes")]
    pub code: Vec<u8>,
    /// The module was compiled earlier: its code is in the memory file that the worker was given when it was made.
    pub precompiled: bool,
    /// Send compiled code back, for the cache.
    pub want_compiled: bool,
    /// Arguments after `argv[0]`.
    pub args: Vec<String>,
    /// Fuel, fixed clock and seeded randomness: the same result on every run.
    pub deterministic: bool,
    /// Where the workspace is visible, if a filesystem grant says so.
    pub filesystem: Filesystem,
}

/// What a WebAssembly program may see of the workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Filesystem {
    /// Nothing.
    None,
    /// `/workspace`, read-only.
    ReadOnly,
    /// `/workspace`, writable over an overlay that is thrown away.
    Work,
}

/// Limits that are applied inside the boundary, on top of what the host enforces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestLimits {
    /// Processes and threads of the guest's uid.
    pub pids: u64,
    /// Bytes of memory (linear memory for WebAssembly).
    pub memory_bytes: u64,
    /// Bytes that the workspace overlay may grow by.
    pub disk_bytes: u64,
    /// Time the step has, in milliseconds from dispatch; the host kills at the same moment.
    pub deadline_ms: u64,
}

/// Bounds on files sent back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputBudget {
    /// Number of files.
    pub files: u64,
    /// Sum of their sizes, bytes.
    pub bytes: u64,
}

/// What a guest says to the runner. All of it is guest-origin.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum FromGuest {
    /// Answer to a challenge.
    Answer {
        /// [`PROTOCOL`].
        protocol: u32,
        /// The challenge's nonce.
        nonce: [u8; 32],
        /// The kernel the agent sees: `uname -r` and boot id, as text.
        kernel: String,
        /// `/proc/sys/kernel/random/boot_id`, empty where there is none.
        boot_id: String,
    },
    /// A piece of the program's output.
    Output {
        /// Which stream.
        stream: Stream,
        /// At most [`MAX_CHUNK`] bytes.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// An output file begins; its content follows in `FileData` until `FileEnd`.
    FileBegin {
        /// Path below the workspace, as the guest names it.
        path: String,
        /// Size the guest announces, bytes.
        bytes: u64,
    },
    /// Content of the file begun last.
    FileData(#[serde(with = "serde_bytes")] Vec<u8>),
    /// The file begun last is complete.
    FileEnd,
    /// A remark for the report, such as an output that was left out and why.
    Notice(String),
    /// A piece of compiled code for the cache; the last piece says so.
    Compiled {
        /// At most [`MAX_CHUNK`] bytes.
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
        /// Nothing follows.
        last: bool,
    },
    /// The program ended, or could not be started.
    Result(GuestResult),
}

/// Which output stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// How the program ended, as the guest tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestResult {
    /// Exit code, unless a signal or a fault ended it.
    pub exit_code: Option<i32>,
    /// Signal number that ended it.
    pub signal: Option<i32>,
    /// A limit the guest saw being hit.
    pub limit_hit: Option<LimitHit>,
    /// The program was refused before its first instruction (an import that is not granted, for example).
    pub refused: Option<String>,
    /// Why it could not be started, or what trapped.
    pub message: Option<String>,
    /// Peak memory of the program, bytes; 0 if unknown.
    pub peak_memory_bytes: u64,
    /// CPU time of the program, milliseconds.
    pub cpu_ms: u64,
}

/// Limits that can end a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LimitHit {
    /// Memory.
    Memory,
    /// Processes.
    Pids,
    /// Workspace size.
    Disk,
    /// Time.
    Time,
    /// Fuel (deterministic WebAssembly).
    Fuel,
}

/// Why a frame could not be read.
#[derive(Debug)]
pub enum FrameError {
    /// The peer closed the channel between frames.
    Closed,
    /// A length above the limit: `(announced, limit)`, bytes.
    TooLong(usize, usize),
    /// The bytes are no message of the expected kind, or more than one.
    Malformed,
    /// Reading or writing failed, or the channel closed inside a frame.
    Io(io::Error),
}

impl std::fmt::Display for FrameError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Closed => write!(f, "the channel was closed"),
            Self::TooLong(n, max) => write!(f, "a frame of {n} bytes is longer than the limit of {max}"),
            Self::Malformed => write!(f, "a frame holds no valid message"),
            Self::Io(e) => write!(f, "the channel failed: {e}"),
        }
    }
}

impl std::error::Error for FrameError {}

/// A message as one frame, length included.
///
/// # Errors
/// [`FrameError::Malformed`] if it cannot be encoded, [`FrameError::TooLong`] above `u32::MAX`.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut frame = postcard::to_extend(message, vec![0u8; 4]).map_err(|_| FrameError::Malformed)?;
    let length = u32::try_from(frame.len() - 4).map_err(|_| FrameError::TooLong(frame.len(), u32::MAX as usize))?;
    frame[..4].copy_from_slice(&length.to_le_bytes());
    Ok(frame)
}

/// The message in a frame's body; bytes after it are refused.
///
/// # Errors
/// [`FrameError::Malformed`].
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, FrameError> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        _ => Err(FrameError::Malformed),
    }
}

/// The length a frame's header announces, if it is within `max`.
///
/// # Errors
/// [`FrameError::TooLong`].
pub fn frame_length(header: [u8; 4], max: usize) -> Result<usize, FrameError> {
    let length = u32::from_le_bytes(header) as usize;
    if length > max { Err(FrameError::TooLong(length, max)) } else { Ok(length) }
}

/// Reads one message, blocking.
///
/// # Errors
/// As [`FrameError`] says; `Closed` only between frames.
pub fn read_message<T: DeserializeOwned>(from: &mut impl Read, max: usize) -> Result<T, FrameError> {
    let mut header = [0u8; 4];
    let mut have = 0;
    while have < 4 {
        match from.read(&mut header[have..]) {
            Ok(0) if have == 0 => return Err(FrameError::Closed),
            Ok(0) => return Err(FrameError::Io(io::ErrorKind::UnexpectedEof.into())),
            Ok(n) => have += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(FrameError::Io(e)),
        }
    }
    let mut body = vec![0u8; frame_length(header, max)?];
    from.read_exact(&mut body).map_err(FrameError::Io)?;
    decode(&body)
}

/// Writes one message, blocking.
///
/// # Errors
/// As [`encode`], and [`FrameError::Io`].
pub fn write_message<T: Serialize>(to: &mut impl Write, message: &T) -> Result<(), FrameError> {
    let frame = encode(message)?;
    to.write_all(&frame).and_then(|()| to.flush()).map_err(FrameError::Io)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_survives_the_wire() {
        let said = FromGuest::Output { stream: Stream::Stderr, bytes: vec![7; 300] };
        let mut wire = Vec::new();
        write_message(&mut wire, &said).unwrap();
        let heard: FromGuest = read_message(&mut wire.as_slice(), MAX_FROM_GUEST).unwrap();
        assert_eq!(said, heard);
    }

    #[test]
    fn a_huge_length_is_refused_before_anything_is_allocated() {
        let wire = [0xff, 0xff, 0xff, 0xff, 0];
        let heard = read_message::<FromGuest>(&mut wire.as_slice(), MAX_FROM_GUEST);
        assert!(matches!(heard, Err(FrameError::TooLong(0xffff_ffff, MAX_FROM_GUEST))));
    }

    #[test]
    fn bytes_after_the_message_are_refused() {
        let mut frame = encode(&FromGuest::FileEnd).unwrap();
        frame.push(0);
        assert!(matches!(decode::<FromGuest>(&frame[4..]), Err(FrameError::Malformed)));
    }

    #[test]
    fn closed_inside_a_frame_is_not_closed_between_frames() {
        let frame = encode(&FromGuest::Notice("x".into())).unwrap();
        let cut = read_message::<FromGuest>(&mut &frame[..frame.len() - 1], MAX_FROM_GUEST);
        assert!(matches!(cut, Err(FrameError::Io(_))));
        assert!(matches!(read_message::<FromGuest>(&mut [].as_slice(), MAX_FROM_GUEST), Err(FrameError::Closed)));
    }
}
