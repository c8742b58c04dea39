//! What a guest is given of WASI: arguments, declared environment, an empty standard input, output as frames, clocks,
//! randomness, and the granted files. Nothing else exists for it.

use std::io::{self, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use plimsoll_guest::wire::write_message;
use plimsoll_guest::{Dispatch, Filesystem, FromGuest, MAX_CHUNK, Stream, WasmProgram};
use sha2::{Digest, Sha256};
use tokio::io::AsyncWrite;
use wasmtime_wasi::cli::{IsTerminal, StdoutStream};
use wasmtime_wasi::p2::{OutputStream, Pollable, StreamError, StreamResult};
use wasmtime_wasi::{Deterministic, FsPerms, HostMonotonicClock, HostWallClock, WasiCtxBuilder, async_trait};

use crate::backend::jail::{Inside, Wire};

/// Where the artifact is inside.
pub const WORKSPACE: &str = "/workspace";
/// Time of the fixed clock: 2000-01-01T00:00:00Z.
const FIXED_EPOCH: Duration = Duration::from_secs(946_684_800);
/// By how much the fixed clock goes on each time it is read, so that a loop that waits for time to pass ends.
const FIXED_STEP: Duration = Duration::from_micros(1);
/// Bytes of the seeded random sequence before it repeats.
const SEEDED_BYTES: usize = 1 << 20;

/// Everything a guest is given, ready to build for a module or a component.
///
/// # Errors
/// If a granted directory cannot be opened.
pub fn builder(inside: &Inside, dispatch: &Dispatch, program: &WasmProgram) -> wasmtime::Result<WasiCtxBuilder> {
    let mut builder = WasiCtxBuilder::new();
    builder
        .allow_blocking_current_thread(true)
        .stdout(Framed(Stream::Stdout))
        .stderr(Framed(Stream::Stderr))
        .arg(&program.name)
        .args(&program.args)
        .envs(&dispatch.env);
    if program.deterministic {
        let ticks = Arc::new(AtomicU64::new(0));
        builder
            .wall_clock(FixedClock(Arc::clone(&ticks)))
            .monotonic_clock(FixedClock(ticks))
            .secure_random(Deterministic::new(seeded(b"secure")))
            .insecure_random(Deterministic::new(seeded(b"insecure")))
            .insecure_random_seed(0);
    }
    if program.filesystem != Filesystem::None {
        preopen(&mut builder, inside, dispatch)?;
    }
    Ok(builder)
}

/// Opens the granted directories: the working directory as `.`, the workspace and the mounts under their own names.
fn preopen(builder: &mut WasiCtxBuilder, inside: &Inside, dispatch: &Dispatch) -> wasmtime::Result<()> {
    let permissions = |writable| if writable { FsPerms::ReadWrite } else { FsPerms::ReadOnly };
    for seen in inside.visible.iter().filter(|v| v.directory) {
        if seen.path == WORKSPACE {
            let below = dispatch.working_directory.trim_matches('/');
            let start =
                if below.is_empty() || below == "." { WORKSPACE.to_owned() } else { format!("{WORKSPACE}/{below}") };
            builder.preopened_dir(&start, ".", permissions(seen.writable))?;
            builder.initial_cwd(&start);
        }
        builder.preopened_dir(&seen.path, &seen.path, permissions(seen.writable))?;
    }
    Ok(())
}

/// Pseudo-random bytes that are the same on every run: SHA-256 in counter mode.
fn seeded(label: &[u8]) -> Vec<u8> {
    (0u64..)
        .flat_map(|n| <[u8; 32]>::from(Sha256::new().chain_update(label).chain_update(n.to_le_bytes()).finalize()))
        .take(SEEDED_BYTES)
        .collect()
}

/// A clock that starts at a fixed moment and goes on only when it is read.
struct FixedClock(Arc<AtomicU64>);

impl FixedClock {
    fn next(&self) -> Duration {
        FIXED_STEP * u32::try_from(self.0.fetch_add(1, Ordering::Relaxed)).unwrap_or(u32::MAX)
    }
}

impl HostWallClock for FixedClock {
    fn resolution(&self) -> Duration {
        FIXED_STEP
    }

    fn now(&self) -> Duration {
        FIXED_EPOCH + self.next()
    }
}

impl HostMonotonicClock for FixedClock {
    fn resolution(&self) -> u64 {
        u64::try_from(FIXED_STEP.as_nanos()).unwrap_or(u64::MAX)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.next().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// One output stream: each write is sent as frames before it returns, so the two streams keep their order and nothing
/// is buffered here. A full channel blocks the guest.
#[derive(Debug, Clone, Copy)]
struct Framed(Stream);

impl Framed {
    fn send(self, bytes: &[u8]) -> io::Result<()> {
        for piece in bytes.chunks(MAX_CHUNK) {
            let message = FromGuest::Output { stream: self.0, bytes: piece.to_vec() };
            write_message(&mut Wire, &message).map_err(|e| io::Error::other(e.to_string()))?;
        }
        Wire.flush()
    }
}

impl IsTerminal for Framed {
    fn is_terminal(&self) -> bool {
        false
    }
}

impl StdoutStream for Framed {
    fn async_stream(&self) -> Box<dyn AsyncWrite + Send + Sync> {
        Box::new(*self)
    }

    fn p2_stream(&self) -> Box<dyn OutputStream> {
        Box::new(*self)
    }
}

#[async_trait]
impl Pollable for Framed {
    async fn ready(&mut self) {}
}

impl OutputStream for Framed {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        self.send(&bytes).map_err(|e| StreamError::Trap(e.into()))
    }

    fn flush(&mut self) -> StreamResult<()> {
        Ok(())
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        Ok(MAX_CHUNK)
    }
}

impl AsyncWrite for Framed {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(self.send(bytes).map(|()| bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
