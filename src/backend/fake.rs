//! A boundary for the gate's own tests: no process, a scripted guest on the other end of the channel.

#![allow(missing_docs, reason = "the calls are those of `Sandbox`")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use plimsoll_guest::{Dispatch, FromGuest, PROTOCOL, ToGuest, decode, encode};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::channel::{Cancel, Channel, Outcome};
use super::{EngineRecord, Output, Phase, PrepareError, Usage};
use crate::evidence::{Admission, Observation};

/// What the scripted boundary does.
#[derive(Debug, Clone, Default)]
pub struct Script {
    /// Fails to come up.
    pub unavailable: bool,
    /// Answers the challenge with another nonce.
    pub wrong_nonce: bool,
    /// Sends this before it is dispatched.
    pub early: Option<FromGuest>,
    /// Sends these raw frames or messages after dispatch.
    pub says: Vec<FromGuest>,
    /// Raw bytes after those.
    pub raw: Vec<u8>,
    /// Stays silent after that instead of closing the channel.
    pub lingers: bool,
    /// Seen before dispatch.
    pub before: Vec<Observation>,
    /// Seen after the run; `None`: the boundary cannot be observed any more.
    pub after: Option<Vec<Observation>>,
}

/// The calls that the gate made, in order.
pub type Calls = Arc<Mutex<Vec<&'static str>>>;

/// The scripted boundary.
#[derive(Debug)]
pub struct Fake {
    channel: Channel,
    script: Script,
    calls: Calls,
}

impl Fake {
    /// Comes up, or not.
    pub fn prepare(script: Script, calls: Calls) -> Result<Self, PrepareError> {
        calls.lock().unwrap().push("prepare");
        if script.unavailable {
            return Err(PrepareError::Unavailable {
                backend: super::Backend::Wasm,
                blocker: "the script says so".to_owned(),
                help: "change the script".to_owned(),
            });
        }
        let (ours, theirs) = tokio::io::duplex(1024);
        let (reader, writer) = tokio::io::split(ours);
        tokio::spawn(guest(theirs, script.clone()));
        Ok(Self { channel: Channel::new(reader, writer, vec![]), script, calls })
    }

    pub fn channel(&mut self) -> &mut Channel {
        &mut self.channel
    }

    pub fn observe(&mut self, phase: Phase) -> std::io::Result<Vec<Observation>> {
        self.calls.lock().unwrap().push(match phase {
            Phase::Before => "observe",
            Phase::After => "observe again",
        });
        match phase {
            Phase::Before => Ok(self.script.before.clone()),
            Phase::After => self.script.after.clone().ok_or_else(|| std::io::Error::other("gone")),
        }
    }

    pub async fn dispatch(
        &mut self,
        _admission: Admission,
        dispatch: Dispatch,
        output: &mut Output,
        deadline: Duration,
        cancel: &mut Cancel,
    ) -> Outcome {
        self.calls.lock().unwrap().push("dispatch");
        self.channel.converse(dispatch, output, deadline, cancel, |_, _| {}).await
    }

    pub fn usage(&mut self) -> Usage {
        Usage::default()
    }

    pub fn engine(&self) -> EngineRecord {
        EngineRecord {
            name: "fake".to_owned(),
            engine_version: String::new(),
            binaries: vec![],
            settings: Default::default(),
        }
    }

    pub async fn teardown(self) -> Vec<Observation> {
        self.calls.lock().unwrap().push("tear down");
        vec![]
    }
}

async fn read(from: &mut DuplexStream) -> Option<ToGuest> {
    let length = from.read_u32_le().await.ok()?;
    let mut body = vec![0; length as usize];
    from.read_exact(&mut body).await.ok()?;
    decode(&body).ok()
}

async fn guest(mut channel: DuplexStream, script: Script) {
    if let Some(early) = &script.early {
        let _ = channel.write_all(&encode(early).unwrap()).await;
    }
    while let Some(message) = read(&mut channel).await {
        match message {
            ToGuest::Challenge { mut nonce } => {
                if script.wrong_nonce {
                    nonce[0] ^= 1;
                }
                let answer =
                    FromGuest::Answer { protocol: PROTOCOL, nonce, kernel: String::new(), boot_id: String::new() };
                let _ = channel.write_all(&encode(&answer).unwrap()).await;
            }
            ToGuest::Dispatch(_) => {
                for message in &script.says {
                    let _ = channel.write_all(&encode(message).unwrap()).await;
                }
                let _ = channel.write_all(&script.raw).await;
                if !script.lingers {
                    return;
                }
            }
            ToGuest::Release => return,
        }
    }
}
