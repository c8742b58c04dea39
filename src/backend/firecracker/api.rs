//! Requests to the VMM over its Unix socket.
//!
//! All of them come before dispatch, when nothing of the guest's runs yet; answers are bounded all the same. One
//! connection carries them (HTTP/1.1, kept alive).

use std::io;
use std::path::Path;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// Longest answer, bytes.
const MAX_ANSWER: usize = 64 * 1024;
/// Most header lines in an answer.
const MAX_HEADERS: usize = 32;

/// A connection to the VMM's socket.
#[derive(Debug)]
pub struct Api {
    stream: UnixStream,
}

/// Why a request did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The VMM refused it.
    #[error("{request} was refused ({status}): {said}")]
    Refused {
        /// Method and path.
        request: String,
        /// HTTP status.
        status: u16,
        /// What the VMM says.
        said: String,
    },
    /// The connection failed.
    #[error("{request} failed")]
    Io {
        /// Method and path.
        request: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl Api {
    /// Connects.
    ///
    /// # Errors
    /// As connect(2).
    pub async fn connect(path: &Path) -> io::Result<Self> {
        Ok(Self { stream: UnixStream::connect(path).await? })
    }

    /// Pid of the process that listens on the socket, in the runner's pid namespace (unix(7), `SO_PEERCRED`).
    ///
    /// # Errors
    /// As getsockopt(2).
    pub fn peer(&self) -> io::Result<Option<u32>> {
        Ok(self.stream.peer_cred()?.pid().and_then(|pid| u32::try_from(pid).ok()))
    }

    /// Puts something.
    ///
    /// # Errors
    /// If the VMM refuses it or is gone.
    pub async fn put(&mut self, path: &str, body: &Value) -> Result<(), ApiError> {
        self.request("PUT", path, Some(body)).await.map(drop)
    }

    /// Gets something.
    ///
    /// # Errors
    /// If the VMM refuses it, is gone, or answers with something else than JSON.
    pub async fn get(&mut self, path: &str) -> Result<Value, ApiError> {
        let body = self.request("GET", path, None).await?;
        serde_json::from_slice(&body)
            .map_err(|e| ApiError::Io { request: format!("GET {path}"), source: io::Error::other(e) })
    }

    async fn request(&mut self, method: &str, path: &str, body: Option<&Value>) -> Result<Vec<u8>, ApiError> {
        let request = || format!("{method} {path}");
        let failed = |source| ApiError::Io { request: request(), source };
        let body = body.map(Value::to_string).unwrap_or_default();
        let mut text = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n");
        if !body.is_empty() {
            text.push_str(&format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len()));
        }
        text.push_str("\r\n");
        text.push_str(&body);
        self.stream.write_all(text.as_bytes()).await.map_err(failed)?;
        let (status, said) = self.answer().await.map_err(failed)?;
        if (200..300).contains(&status) {
            return Ok(said);
        }
        let fault = serde_json::from_slice::<Value>(&said).ok();
        let said = fault
            .as_ref()
            .and_then(|v| v.get("fault_message"))
            .and_then(Value::as_str)
            .map_or_else(|| String::from_utf8_lossy(&said).into_owned(), str::to_owned);
        Err(ApiError::Refused { request: request(), status, said: said.chars().take(1000).collect() })
    }

    /// One answer: its status and body.
    async fn answer(&mut self) -> io::Result<(u16, Vec<u8>)> {
        let mut bytes = Vec::new();
        loop {
            if let Some((status, head, length)) = head(&bytes)?
                && bytes.len() >= head + length
            {
                bytes.truncate(head + length);
                return Ok((status, bytes.split_off(head)));
            }
            if bytes.len() >= MAX_ANSWER {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the answer is too long"));
            }
            if self.stream.read_buf(&mut bytes).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

/// Status, length of the head, and length of the body, once the head is complete.
fn head(bytes: &[u8]) -> io::Result<Option<(u16, usize, usize)>> {
    let bad = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(head) = response.parse(bytes).map_err(|e| bad(format!("no HTTP answer: {e}")))?
    else {
        return Ok(None);
    };
    let length = response
        .headers
        .iter()
        .find(|h| h.name.eq_ignore_ascii_case("content-length"))
        .map_or(Ok(0), |h| String::from_utf8_lossy(h.value).trim().parse::<usize>())
        .map_err(|e| bad(format!("no length: {e}")))?;
    if length > MAX_ANSWER {
        return Err(bad("the answer is too long".to_owned()));
    }
    Ok(Some((response.code.unwrap_or(0), head, length)))
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;

    /// What comes of a request that is answered so.
    async fn answered(answer: &'static [u8]) -> Result<Value, ApiError> {
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut asked = vec![0u8; 4096];
            let n = stream.read(&mut asked).await.unwrap();
            let _ = stream.write_all(answer).await;
            asked.truncate(n);
            String::from_utf8(asked).unwrap()
        });
        let mut api = Api::connect(&path).await.unwrap();
        assert_eq!(api.peer().unwrap(), Some(std::process::id()));
        let got = api.get("/vm/config").await;
        assert!(server.await.unwrap().starts_with("GET /vm/config HTTP/1.1\r\n"));
        got
    }

    #[tokio::test]
    async fn an_answer_is_read_and_a_refusal_told() {
        let got = answered(b"HTTP/1.1 200 \r\nServer: Firecracker API\r\nContent-Length: 8\r\n\r\n{\"a\": 1}").await;
        assert_eq!(got.unwrap(), serde_json::json!({"a": 1}));
        let body = b"HTTP/1.1 400 \r\nContent-Length: 27\r\n\r\n{\"fault_message\": \"no KVM\"}";
        let Err(ApiError::Refused { status: 400, said, .. }) = answered(body).await else { panic!() };
        assert_eq!(said, "no KVM");
    }

    #[tokio::test]
    async fn half_an_answer_none_nonsense_and_too_much_are_errors() {
        for answer in [
            &b"HTTP/1.1 200 \r\nContent-Length: 9\r\n\r\n{}"[..],
            b"",
            b"hello\r\n\r\n",
            b"HTTP/1.1 200 \r\nContent-Length: 99999999999\r\n\r\n",
            b"HTTP/1.1 200 \r\nContent-Length: -1\r\n\r\n",
            b"HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\nxx",
        ] {
            assert!(matches!(answered(answer).await, Err(ApiError::Io { .. })), "{answer:?}");
        }
    }
}
