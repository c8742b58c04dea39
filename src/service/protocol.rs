//! What client and service say to each other.
//!
//! A frame is four bytes of length (big endian, of what follows the kind), one byte of kind, and the body: JSON for most,
//! raw bytes for what is large. Main types: [`ToService`] and [`ToClient`]. Each kind has its own largest size
//! ([`largest`]), known before a byte of the body is read; descriptors come with a request and with nothing else.
//!
//! The first frame of each side carries [`VERSION`]. Between versions nothing is promised: a client and a service of
//! different ones part at once, and say so.

use plimsoll_guest::Stream;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::request::Request;
use crate::backend::channel::CancelSignal;
use crate::exit::Exit;

/// Version of the protocol.
pub const VERSION: u32 = 1;
/// Bytes before a body.
pub const HEAD: usize = 5;
/// Most descriptors that come with a request.
pub const MAX_FDS: usize = 64;
/// Largest piece of a file or of output, bytes.
pub const PIECE: usize = 64 << 10;
/// Largest request, bytes: several step files of the largest size.
pub const MAX_REQUEST: usize = 4 << 20;
/// Largest of the small messages, bytes.
const SMALL: usize = 4 << 10;
/// Largest message with a text of ours in it, bytes.
const MEDIUM: usize = 64 << 10;

mod kind {
    pub const HELLO: u8 = 1;
    pub const REQUEST: u8 = 2;
    pub const CANCEL: u8 = 3;
    pub const WELCOME: u8 = 65;
    pub const DECLINED: u8 = 66;
    pub const QUEUED: u8 = 67;
    pub const STARTED: u8 = 68;
    pub const PROGRESS: u8 = 69;
    pub const DISPATCH: u8 = 70;
    pub const OUTPUT: u8 = 71;
    pub const OMITTED: u8 = 72;
    pub const ENDED: u8 = 73;
    pub const FILE: u8 = 74;
    pub const DATA: u8 = 75;
    pub const DONE: u8 = 76;
}

/// Largest body of a kind, bytes; `None` for a kind that there is not.
#[must_use]
pub const fn largest(kind: u8) -> Option<usize> {
    match kind {
        kind::HELLO | kind::CANCEL | kind::WELCOME | kind::QUEUED | kind::DISPATCH | kind::OMITTED | kind::DONE => {
            Some(SMALL)
        }
        kind::REQUEST => Some(MAX_REQUEST),
        kind::DECLINED | kind::STARTED | kind::PROGRESS | kind::ENDED | kind::FILE => Some(MEDIUM),
        kind::OUTPUT => Some(PIECE + OUTPUT_HEAD),
        kind::DATA => Some(PIECE),
        _ => None,
    }
}

/// Whether descriptors may come with a kind.
#[must_use]
pub const fn carries_descriptors(kind: u8) -> bool {
    kind == kind::REQUEST
}

/// Step and stream in front of a piece of output.
const OUTPUT_HEAD: usize = 5;

/// From the client.
#[derive(Debug, Clone, PartialEq)]
pub enum ToService {
    /// First.
    Hello(Hello),
    /// What to run; descriptors come with it.
    Request(Box<Request>),
    /// End the run.
    Cancel(Cancelled),
}

/// From the service.
#[derive(Debug, Clone, PartialEq)]
pub enum ToClient {
    /// The client may ask.
    Welcome(Hello),
    /// There will be no run, and why; the last frame.
    Declined(Declined),
    /// The request waits for room.
    Queued(Queued),
    /// A step begins.
    Started(Named),
    /// A step reached the next part of its way.
    Progress(Named),
    /// A step's code is about to be started. Sent, and taken by the kernel, before it is.
    Dispatch(Index),
    /// A piece of a step's output; guest bytes.
    Output {
        /// The step.
        index: u32,
        /// Which stream.
        stream: Stream,
        /// Raw guest bytes, at most [`PIECE`].
        bytes: Vec<u8>,
    },
    /// Output that was not sent because nobody read it; the log file has it.
    Omitted(Omitted),
    /// A step is over.
    Ended(Ended),
    /// A file of the result follows, in [`ToClient::Data`].
    File(File),
    /// The next bytes of the file.
    Data(Vec<u8>),
    /// The run is over and everything was sent; the last frame.
    Done(Done),
}

/// Who speaks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`]. Other members may be anything in another version.
    pub protocol: u32,
    /// Version of the program, for messages.
    #[serde(default)]
    pub version: String,
}

impl Hello {
    /// This program's.
    #[must_use]
    pub fn ours() -> Self {
        Self { protocol: VERSION, version: env!("CARGO_PKG_VERSION").to_owned() }
    }
}

/// Why it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cancelled {
    /// Whether by SIGINT; otherwise by SIGTERM.
    pub interrupt: bool,
}

impl From<CancelSignal> for Cancelled {
    fn from(signal: CancelSignal) -> Self {
        Self { interrupt: signal == CancelSignal::Interrupt }
    }
}

impl From<Cancelled> for CancelSignal {
    fn from(cancelled: Cancelled) -> Self {
        if cancelled.interrupt { CancelSignal::Interrupt } else { CancelSignal::Terminate }
    }
}

/// Why there will be no run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Declined {
    /// What the run's exit code is.
    pub exit: Exit,
    /// As a report's `refusal.stage`: `service`, `policy`, `spec`.
    pub stage: String,
    /// Stable word.
    pub reason: String,
    /// In words.
    pub message: String,
    /// What to do.
    pub help: String,
}

impl Declined {
    /// What a journal says of it. Messages about a step repeat words of it, which are somebody else's.
    #[must_use]
    pub fn for_journal(&self) -> &str {
        match self.stage.as_str() {
            "service" | "policy" => &self.message,
            _ => "the request is told why",
        }
    }
}

/// Where a request stands in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Queued {
    /// From 1.
    pub position: u32,
    /// Of how many.
    pub waiting: u32,
}

/// A step, with a word about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Named {
    /// The step.
    pub index: u32,
    /// Its name, or what it does now.
    pub text: String,
}

/// A step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Index {
    /// Its index.
    pub index: u32,
}

/// Output that was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Omitted {
    /// The step.
    pub index: u32,
    /// How much.
    pub bytes: u64,
}

/// How a step ended, for whoever watches; the report says the rest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ended {
    /// The step.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// What the step alone would exit with.
    pub exit: Exit,
    /// Weakest tier that would do.
    pub floor: crate::evidence::Tier,
    /// Tier proven.
    pub tier: Option<crate::evidence::Tier>,
    /// Whether its code was started.
    pub dispatched: crate::gate::Dispatched,
}

/// Which of the two directories a file belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tree {
    /// The report's.
    Report,
    /// The outputs'.
    Outputs,
}

/// A file of the result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// Where it belongs.
    pub tree: Tree,
    /// Relative, components separated by `/`.
    pub path: String,
    /// How many bytes follow.
    pub bytes: u64,
}

/// The end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Done {
    /// The run's exit code; the report says the same.
    pub exit: Exit,
}

/// A frame that is none.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    /// A kind that is unknown, or that this side does not get.
    #[error("a frame of kind {0} is not expected")]
    Kind(u8),
    /// Longer than its kind may be.
    #[error("a frame of kind {kind} has {length} bytes; {largest} are allowed")]
    TooLong {
        /// The kind.
        kind: u8,
        /// What it says of its length.
        length: usize,
        /// What is allowed.
        largest: usize,
    },
    /// A body that its kind does not have.
    #[error("a frame of kind {kind} is malformed: {why}")]
    Malformed {
        /// The kind.
        kind: u8,
        /// Why.
        why: String,
    },
}

/// Kind and length of the body, from what stands before it.
///
/// # Errors
/// For a kind that there is not, or a length that it may not have.
pub fn head(head: [u8; HEAD]) -> Result<(u8, usize), ProtocolError> {
    let [a, b, c, d, kind] = head;
    let largest = largest(kind).ok_or(ProtocolError::Kind(kind))?;
    let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
    if length > largest { Err(ProtocolError::TooLong { kind, length, largest }) } else { Ok((kind, length)) }
}

/// A frame of that kind and body.
#[must_use]
pub fn frame(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(HEAD + body.len());
    frame.extend_from_slice(&u32::try_from(body.len()).unwrap_or(u32::MAX).to_be_bytes());
    frame.push(kind);
    frame.extend_from_slice(body);
    frame
}

fn json(kind: u8, value: &impl Serialize) -> Vec<u8> {
    // Structs of text and numbers always serialise.
    frame(kind, &serde_json::to_vec(value).unwrap_or_default())
}

fn parse<T: DeserializeOwned>(kind: u8, body: &[u8]) -> Result<T, ProtocolError> {
    serde_json::from_slice(body).map_err(|e| ProtocolError::Malformed { kind, why: shown(&e.to_string()) })
}

/// An error of serde's may repeat what was sent.
fn shown(text: &str) -> String {
    crate::spec::place::shown_up_to(text, 200)
}

impl ToService {
    /// The frame, whole.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            ToService::Hello(hello) => json(kind::HELLO, hello),
            ToService::Request(request) => json(kind::REQUEST, request),
            ToService::Cancel(cancelled) => json(kind::CANCEL, cancelled),
        }
    }

    /// A body of that kind.
    ///
    /// # Errors
    /// As [`ProtocolError`] says.
    pub fn decode(kind: u8, body: &[u8]) -> Result<Self, ProtocolError> {
        Ok(match kind {
            kind::HELLO => ToService::Hello(parse(kind, body)?),
            kind::REQUEST => ToService::Request(parse(kind, body)?),
            kind::CANCEL => ToService::Cancel(parse(kind, body)?),
            _ => return Err(ProtocolError::Kind(kind)),
        })
    }
}

impl ToClient {
    /// The frame, whole.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            ToClient::Welcome(hello) => json(kind::WELCOME, hello),
            ToClient::Declined(declined) => json(kind::DECLINED, declined),
            ToClient::Queued(queued) => json(kind::QUEUED, queued),
            ToClient::Started(named) => json(kind::STARTED, named),
            ToClient::Progress(named) => json(kind::PROGRESS, named),
            ToClient::Dispatch(index) => json(kind::DISPATCH, index),
            ToClient::Output { index, stream, bytes } => {
                let mut body = index.to_be_bytes().to_vec();
                body.push(match stream {
                    Stream::Stdout => 1,
                    Stream::Stderr => 2,
                });
                body.extend_from_slice(bytes);
                frame(kind::OUTPUT, &body)
            }
            ToClient::Omitted(omitted) => json(kind::OMITTED, omitted),
            ToClient::Ended(ended) => json(kind::ENDED, ended),
            ToClient::File(file) => json(kind::FILE, file),
            ToClient::Data(bytes) => frame(kind::DATA, bytes),
            ToClient::Done(done) => json(kind::DONE, done),
        }
    }

    /// A body of that kind.
    ///
    /// # Errors
    /// As [`ProtocolError`] says.
    pub fn decode(kind: u8, body: &[u8]) -> Result<Self, ProtocolError> {
        Ok(match kind {
            kind::WELCOME => ToClient::Welcome(parse(kind, body)?),
            kind::DECLINED => ToClient::Declined(parse(kind, body)?),
            kind::QUEUED => ToClient::Queued(parse(kind, body)?),
            kind::STARTED => ToClient::Started(parse(kind, body)?),
            kind::PROGRESS => ToClient::Progress(parse(kind, body)?),
            kind::DISPATCH => ToClient::Dispatch(parse(kind, body)?),
            kind::OUTPUT => match body {
                [a, b, c, d, stream @ (1 | 2), bytes @ ..] => ToClient::Output {
                    index: u32::from_be_bytes([*a, *b, *c, *d]),
                    stream: if *stream == 1 { Stream::Stdout } else { Stream::Stderr },
                    bytes: bytes.to_vec(),
                },
                _ => return Err(ProtocolError::Malformed { kind, why: "neither step nor stream".to_owned() }),
            },
            kind::OMITTED => ToClient::Omitted(parse(kind, body)?),
            kind::ENDED => ToClient::Ended(parse(kind, body)?),
            kind::FILE => ToClient::File(parse(kind, body)?),
            kind::DATA => ToClient::Data(body.to_vec()),
            kind::DONE => ToClient::Done(parse(kind, body)?),
            _ => return Err(ProtocolError::Kind(kind)),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frames_go_over() {
        let declined = Declined {
            exit: Exit::Refused,
            stage: "policy".into(),
            reason: "not-allowed".into(),
            message: "no".into(),
            help: String::new(),
        };
        let frames = [
            ToClient::Welcome(Hello::ours()),
            ToClient::Declined(declined),
            ToClient::Output { index: 7, stream: Stream::Stderr, bytes: vec![0, 255, 10] },
            ToClient::File(File { tree: Tree::Outputs, path: "01-x/a".into(), bytes: 3 }),
            ToClient::Data(vec![1, 2, 3]),
            ToClient::Done(Done { exit: Exit::GuestFailed }),
        ];
        for sent in frames {
            let bytes = sent.encode();
            let (kind, length) = head(bytes[..HEAD].try_into().unwrap()).unwrap();
            assert_eq!(length, bytes.len() - HEAD);
            assert_eq!(ToClient::decode(kind, &bytes[HEAD..]).unwrap(), sent);
            assert!(ToService::decode(kind, &bytes[HEAD..]).is_err(), "a client can't play the service");
        }
    }

    #[test]
    fn another_version_is_still_understood_to_be_one() {
        let hello = br#"{"protocol":9,"version":"9.0.0","more":[1]}"#;
        assert!(matches!(ToService::decode(1, hello), Ok(ToService::Hello(Hello { protocol: 9, .. }))));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_frame_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..400), kind: u8) {
            let _ = ToService::decode(kind, &bytes);
            let _ = ToClient::decode(kind, &bytes);
            if let Some(first) = bytes.first_chunk::<HEAD>()
                && let Ok((kind, length)) = head(*first)
            {
                prop_assert!(length <= largest(kind).unwrap());
            }
        }

        #[test]
        fn mutilated_requests_do_no_harm(cut in 0usize..200, at in 0usize..200, byte: u8) {
            let text = br#"{"steps":[{"index":1,"step":{"run":"make","sandbox":{"memory":"1GiB"}},"artifact":{"fd":0,"kind":"file","name":"a"}}],"jobs":1}"#;
            let mut text = text.to_vec();
            let at = at % text.len();
            text[at] = byte;
            text.truncate(text.len() - cut.min(text.len()));
            if let Ok(ToService::Request(request)) = ToService::decode(2, &text) {
                let _ = request.steps(1);
            }
        }
    }
}
