//! The inside of a boundary: the wire format that the runner and the inside speak, and the guest agent.
//!
//! * [`wire`] is the messages and frames.
//! * [`collect`] sends output files back.
//! * [`agent`] is process 1 of a boundary; the package's executable is nothing more.
//!
//! One format serves the guest agent (gVisor over pipes, microVMs over vsock) and the WebAssembly worker. A frame is
//! a little-endian `u32` length followed by that many bytes of [`postcard`]-encoded message. The conversation:
//!
//! ```text
//! runner -> Challenge{nonce}        guest -> Answer{nonce, …}
//! runner -> Dispatch{…}             guest -> Output* OutputFile* Notice* Compiled* Result
//! runner -> Release                 guest exits
//! ```
//!
//! The runner treats every byte that comes *from* the guest as hostile: a frame longer than [`MAX_FROM_GUEST`] ends
//! the conversation before anything is allocated for it, and a message decodes only into what its frame holds. The
//! guest trusts the runner, up to [`MAX_TO_GUEST`].

#[cfg(target_os = "linux")]
pub mod agent;
#[cfg(target_os = "linux")]
pub mod collect;
pub mod wire;

pub use wire::*;
