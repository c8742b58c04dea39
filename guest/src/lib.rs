//! The wire format between the runner and whatever runs inside a boundary.
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
pub mod collect;
pub mod wire;

pub use wire::*;
