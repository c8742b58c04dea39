//! Guests that keep to no rule, for the KVM lab: process 1 of a microVM, in the agent's place.
//!
//! What it does is the word in `/mode` of its initramfs. Each of these has to end in a clear verdict on the runner's side,
//! without a hang and without a byte written where none belongs.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[cfg(target_os = "linux")]
fn main() {
    let mode = std::fs::read_to_string("/mode").unwrap_or_default();
    if let Ok((transport, _)) = plimsoll_guest::agent::machine::boot() {
        let _ = linux::misbehave(mode.trim(), transport);
    }
    plimsoll_guest::agent::machine::end();
}

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
mod linux {
    use std::fs::File;
    use std::io::Write;
    use std::time::Duration;

    use plimsoll_guest::agent::Transport;
    use plimsoll_guest::{
        FrameError, FromGuest, GuestResult, MAX_CHUNK, MAX_TO_GUEST, PROTOCOL, Stream, ToGuest, read_message,
        write_message,
    };

    /// Long after every deadline.
    const FOR_EVER: Duration = Duration::from_secs(3600);

    fn answer(nonce: [u8; 32], protocol: u32) -> FromGuest {
        FromGuest::Answer { protocol, nonce, kernel: "Linux \u{1b}[31m\u{202e}".to_owned(), boot_id: "x".to_owned() }
    }

    fn success() -> FromGuest {
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

    fn file(output: &mut File, path: &str) -> Result<(), FrameError> {
        let content = b"written by the guest\n".to_vec();
        write_message(output, &FromGuest::FileBegin { path: path.to_owned(), bytes: content.len() as u64 })?;
        write_message(output, &FromGuest::FileData(content))?;
        write_message(output, &FromGuest::FileEnd)
    }

    pub fn misbehave(mode: &str, transport: Transport) -> Result<(), FrameError> {
        let (mut input, mut output) = transport.into_files();
        let ToGuest::Challenge { mut nonce } = read_message(&mut input, MAX_TO_GUEST)? else { return Ok(()) };
        match mode {
            "silence" => std::thread::sleep(FOR_EVER),
            "wrong-nonce" => {
                nonce[31] ^= 1;
                write_message(&mut output, &answer(nonce, PROTOCOL))?;
                std::thread::sleep(FOR_EVER);
            }
            "wrong-protocol" => write_message(&mut output, &answer(nonce, PROTOCOL + 1))?,
            "result-before-dispatch" => write_message(&mut output, &success())?,
            "huge-length-before-dispatch" => output.write_all(&[0xff; 64]).map_err(FrameError::Io)?,
            "end-before-dispatch" => return Ok(()),
            _ => write_message(&mut output, &answer(nonce, PROTOCOL))?,
        }
        let _: ToGuest = read_message(&mut input, MAX_TO_GUEST)?;
        match mode {
            "huge-length" => output.write_all(&[0xff; 64]).map_err(FrameError::Io)?,
            "half-a-frame" => output.write_all(&[200, 0, 0, 0, 1, 0]).map_err(FrameError::Io)?,
            "answer-again" => write_message(&mut output, &answer(nonce, PROTOCOL))?,
            "endless-stream" => loop {
                write_message(
                    &mut output,
                    &FromGuest::Output { stream: Stream::Stdout, bytes: vec![b'x'; MAX_CHUNK] },
                )?;
            },
            "endless-notices" => loop {
                write_message(&mut output, &FromGuest::Notice("\u{1b}]0;x\u{7}".repeat(1000)))?;
            },
            "names" => {
                for path in ["../evil", "/etc/evil", "a/../../evil", "", ".", "ok/../../../evil", "fine"] {
                    file(&mut output, path)?;
                }
                write_message(&mut output, &success())?;
            }
            "calls-the-host" => {
                let reached: Vec<u32> = [1, 52, 1023, 1024, 5000].into_iter().filter(|&port| connects(port)).collect();
                let text = format!("reached {reached:?}\n").into_bytes();
                write_message(&mut output, &FromGuest::Output { stream: Stream::Stdout, bytes: text })?;
                write_message(&mut output, &success())?;
            }
            "two-results" => {
                write_message(&mut output, &success())?;
                write_message(&mut output, &success())?;
            }
            "end-after-dispatch" => return Ok(()),
            _ => {}
        }
        std::thread::sleep(FOR_EVER);
        Ok(())
    }

    /// Whether somebody on the host takes a vsock connection.
    fn connects(port: u32) -> bool {
        // SAFETY: an all-zero sockaddr_vm is valid and outlives the calls; the descriptor is closed here.
        unsafe {
            let fd = libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0);
            let mut address: libc::sockaddr_vm = std::mem::zeroed();
            address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
            address.svm_port = port;
            address.svm_cid = libc::VMADDR_CID_HOST;
            let length = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
            let connected = libc::connect(fd, (&raw const address).cast(), length) == 0;
            libc::close(fd);
            connected
        }
    }
}
