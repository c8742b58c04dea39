//! Any bytes as what a guest says. No panic; every conversation ends in a verdict, and what is written stays within its bounds.
#![no_main]

use std::io::Cursor;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use plimsoll::backend::Output;
use plimsoll::backend::channel::{Channel, Ended};
use plimsoll_guest::{
    Dispatch, FromGuest, GuestLimits, MAX_FROM_GUEST, OutputBudget, Program, decode, encode, read_message,
};
use tokio::runtime::Builder;
use tokio::sync::watch;

const CAP: u64 = 1000;
const BUDGET: OutputBudget = OutputBudget { files: 4, bytes: 500 };
/// Never waited for: what is said here ends by itself.
const FOR_EVER: Duration = Duration::from_secs(600);

fuzz_target!(|data: &[u8]| {
    let Some((&how, rest)) = data.split_first() else { return };
    // Half of the time the lengths are right, so that more than the first frame is reached.
    let said = if how & 1 == 1 { framed(rest) } else { rest.to_vec() };
    messages(&said);
    let runtime = Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(async {
        let mut channel = Channel::new(Cursor::new(said.clone()), tokio::io::sink(), Vec::new());
        assert!(channel.challenge(FOR_EVER).await.is_err(), "nobody guesses a nonce");
        converse(&said).await;
    });
});

/// Cuts the bytes into frames: one byte of length each, then so many bytes.
fn framed(mut rest: &[u8]) -> Vec<u8> {
    let mut said = Vec::new();
    while let Some((&length, after)) = rest.split_first() {
        let (body, after) = after.split_at(after.len().min(usize::from(length)));
        said.extend_from_slice(&u32::try_from(body.len()).expect("a byte's worth").to_le_bytes());
        said.extend_from_slice(body);
        rest = after;
    }
    said
}

/// Reads message after message. One that is read says the same when it is written and read again.
fn messages(said: &[u8]) {
    let mut rest = Cursor::new(said);
    while let Ok(message) = read_message::<FromGuest>(&mut rest, MAX_FROM_GUEST) {
        let again = encode(&message).expect("what was read can be written");
        assert_eq!(decode::<FromGuest>(&again[4..]).expect("and read"), message);
    }
}

async fn converse(said: &[u8]) {
    let place = tempfile::tempdir().expect("a place");
    let (logs, files) = (place.path().join("logs"), place.path().join("files"));
    std::fs::create_dir(&logs).expect("logs");
    std::fs::create_dir(&files).expect("files");
    let directory = std::fs::File::open(&files).expect("opens").into();
    let mut output = Output::create(&logs, Some(directory), CAP, BUDGET, None).expect("an output");
    let (_cancel, mut cancelled) = watch::channel(None);
    let mut channel = Channel::new(Cursor::new(said.to_vec()), tokio::io::sink(), Vec::new());
    let mut compiled = 0;
    let keep = |piece: &[u8], _: bool| compiled += piece.len();
    let outcome = channel.converse(dispatch(), &mut output, FOR_EVER, &mut cancelled, keep).await;
    assert!(matches!(outcome.ended, Ended::Gone | Ended::Protocol(_) | Ended::Result(_)), "{:?}", outcome.ended);
    assert!(compiled <= said.len(), "more than was said");
    let written = output.finish();
    assert!(written.failure.is_none(), "{:?}", written.failure);
    for (name, stream) in [("stdout.log", &written.stdout), ("stderr.log", &written.stderr)] {
        assert!(stream.kept <= CAP && stream.kept <= stream.bytes);
        assert_eq!(std::fs::metadata(logs.join(name)).expect("is there").len(), stream.kept);
    }
    assert!(written.files.len() as u64 <= BUDGET.files);
    assert!(written.files.iter().map(|file| file.bytes).sum::<u64>() <= BUDGET.bytes);
    assert_eq!(std::fs::read_dir(place.path()).expect("lists").count(), 2, "written beside its directories");
}

fn dispatch() -> Dispatch {
    Dispatch {
        program: Program::Script { argv: Vec::new(), text: String::new() },
        env: Vec::new(),
        working_directory: ".".to_owned(),
        user: (1, 1),
        outputs: Vec::new(),
        output_budget: BUDGET,
        limits: GuestLimits { pids: 1, memory_bytes: 1, disk_bytes: 1, deadline_ms: 1 },
        clock_ns: 0,
        entropy: [0; 32],
        drives: Vec::new(),
    }
}
