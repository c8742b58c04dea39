//! A release server on this machine.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

/// Serves files by path; everything else is 404. Lives as long as the test program.
#[derive(Clone)]
pub struct Server {
    port: u16,
    files: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Server {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Self { port: listener.local_addr().unwrap().port(), files: Arc::default(), asked: Arc::default() };
        let serving = server.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // A client that goes away is its own affair.
                let _ = stream.and_then(|mut stream| {
                    let mut lines = BufReader::new(stream.try_clone()?).lines();
                    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
                    while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
                    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
                    let body = serving.files.lock().unwrap().get(&path).cloned();
                    serving.asked.lock().unwrap().push(path);
                    let status = if body.is_some() { "200 OK" } else { "404 Not Found" };
                    let body = body.unwrap_or_else(|| b"no such release".to_vec());
                    let head =
                        format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
                    stream.write_all(head.as_bytes())?;
                    stream.write_all(&body)
                });
            }
        });
        server
    }

    pub fn put(&self, path: &str, bytes: impl Into<Vec<u8>>) {
        self.files.lock().unwrap().insert(path.to_owned(), bytes.into());
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/mirror", self.port)
    }

    /// What was asked for so far.
    pub fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}
