//! A registry of a test's own, which answers as the test says: also with what no honest library would send.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use plimsoll::artifact::Digest;

use crate::common::{Run, plimsoll};

pub const ARCH: &str = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// What was asked.
#[derive(Debug, Clone)]
pub struct Asked {
    pub path: String,
    /// Names in lowercase.
    pub headers: BTreeMap<String, String>,
    pub body: String,
}

/// An answer.
#[derive(Clone)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// After so many bytes of the body the connection ends.
    pub cut: Option<usize>,
    /// The body is sent again and again.
    pub endless: bool,
}

impl Reply {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, headers: Vec::new(), body: body.into(), cut: None, endless: false }
    }

    pub fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }
}

type Answer = dyn Fn(&Asked) -> Reply + Send + Sync;

/// The server. Its threads end with the test program.
pub struct Server {
    pub host: String,
    pub log: Arc<Mutex<Vec<Asked>>>,
}

impl Server {
    pub fn start(answer: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Self {
        Self::at(Ipv4Addr::LOCALHOST.into(), answer)
    }

    pub fn at(address: IpAddr, answer: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((address, 0)).unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let log = Arc::new(Mutex::new(Vec::new()));
        let (answer, kept): (Arc<Answer>, _) = (Arc::new(answer), Arc::clone(&log));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (answer, log) = (Arc::clone(&answer), Arc::clone(&kept));
                std::thread::spawn(move || one(stream, &*answer, &log));
            }
        });
        Server { host, log }
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.log.lock().unwrap().clone()
    }
}

/// One request for each connection.
fn one(mut stream: TcpStream, answer: &Answer, log: &Mutex<Vec<Asked>>) -> Option<()> {
    let mut input = BufReader::new(stream.try_clone().ok()?);
    let mut lines = input.by_ref().lines();
    let first = lines.next()?.ok()?;
    // What is not HTTP is a try with TLS.
    let path = first.split_whitespace().nth(1).filter(|path| path.starts_with('/'))?.to_owned();
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line.ok()?;
        let Some((name, value)) = line.split_once(": ") else { break };
        headers.insert(name.to_lowercase(), value.to_owned());
    }
    let length = headers.get("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    let mut body = String::new();
    input.take(length).read_to_string(&mut body).ok()?;
    let asked = Asked { path, headers, body };
    log.lock().unwrap().push(asked.clone());
    let reply = answer(&asked);
    let mut head = format!("HTTP/1.1 {} x\r\nconnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    if !reply.endless && !reply.headers.iter().any(|(name, _)| name == "content-length") {
        head.push_str(&format!("content-length: {}\r\n", reply.body.len()));
    }
    stream.write_all(format!("{head}\r\n").as_bytes()).ok()?;
    loop {
        stream.write_all(&reply.body[..reply.cut.unwrap_or(reply.body.len())]).ok()?;
        if !reply.endless {
            return Some(());
        }
        if reply.cut == Some(0) {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
}

/// An image of one layer, as documents.
#[derive(Clone)]
pub struct Image {
    pub manifest: String,
    pub config: String,
    pub layer: Vec<u8>,
}

impl Image {
    pub fn new() -> Self {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, content) in
            [("bin/x", "#!/bin/sh\n"), ("etc/name", "plimsoll"), ("big", &"0123456789".repeat(30_000))]
        {
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o755);
            header.set_size(content.len() as u64);
            builder.append_data(&mut header, name, content.as_bytes()).unwrap();
        }
        Self::of(builder.into_inner().unwrap(), ARCH)
    }

    pub fn of(layer: Vec<u8>, architecture: &str) -> Self {
        let config = format!(
            r#"{{"os":"linux","architecture":{architecture:?},"config":{{"Env":["A=b"]}},"rootfs":{{"type":"layers","diff_ids":["sha256:{}"]}}}}"#,
            Digest::of(&layer)
        );
        let descriptor = |kind: &str, bytes: &[u8]| {
            format!(r#"{{"mediaType":{kind:?},"digest":"sha256:{}","size":{}}}"#, Digest::of(bytes), bytes.len())
        };
        let manifest = format!(
            r#"{{"schemaVersion":2,"mediaType":{MANIFEST:?},"config":{},"layers":[{}]}}"#,
            descriptor("application/vnd.oci.image.config.v1+json", config.as_bytes()),
            descriptor("application/vnd.oci.image.layer.v1.tar", &layer)
        );
        Image { manifest, config, layer }
    }

    pub fn digest(&self) -> Digest {
        Digest::of(self.manifest.as_bytes())
    }

    /// The honest answer: `x` is its repository and `1` its tag.
    pub fn answer(&self, asked: &Asked) -> Reply {
        let manifest = || Reply::new(200, self.manifest.clone()).header("content-type", MANIFEST);
        let blob = |bytes: &[u8]| {
            let range = asked
                .headers
                .get("range")
                .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
            match range {
                Some(from) => Reply::new(206, &bytes[from..]),
                None => Reply::new(200, bytes),
            }
        };
        match asked.path.as_str() {
            "/v2/" => Reply::new(200, "{}"),
            "/v2/x/manifests/1" => manifest(),
            path if path == format!("/v2/x/manifests/sha256:{}", self.digest()) => manifest(),
            path if path == format!("/v2/x/blobs/sha256:{}", Digest::of(self.config.as_bytes())) => {
                blob(self.config.as_bytes())
            }
            path if path == self.layer_path() => blob(&self.layer),
            _ => Reply::new(404, r#"{"errors":[{"code":"MANIFEST_UNKNOWN"}]}"#),
        }
    }

    pub fn layer_path(&self) -> String {
        format!("/v2/x/blobs/sha256:{}", Digest::of(&self.layer))
    }
}

/// A user with a cache and a Docker configuration of his own.
pub struct User {
    pub dir: tempfile::TempDir,
}

impl User {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("docker")).unwrap();
        User { dir }
    }

    /// With a login.
    pub fn logged_in(registry: &str, base64: &str) -> Self {
        let user = Self::new();
        let config = format!(r#"{{"auths":{{{registry:?}:{{"auth":{base64:?}}}}}}}"#);
        std::fs::write(user.dir.path().join("docker/config.json"), config).unwrap();
        user
    }

    /// With an identity token, as a single sign-on leaves it.
    pub fn with_identity_token(registry: &str, token: &str) -> Self {
        let user = Self::new();
        // "user:".
        let config = format!(r#"{{"auths":{{{registry:?}:{{"auth":"dXNlcjo=","identitytoken":{token:?}}}}}}}"#);
        std::fs::write(user.dir.path().join("docker/config.json"), config).unwrap();
        user
    }

    pub fn run<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Run {
        plimsoll(arguments)
            .env("XDG_CACHE_HOME", self.dir.path())
            .env("DOCKER_CONFIG", self.dir.path().join("docker"))
            .env("HOME", self.dir.path())
    }

    pub fn pull(&self, image: &str) -> Run {
        self.run(["image", "pull", image])
    }

    pub fn cache(&self) -> PathBuf {
        self.dir.path().join("plimsoll/image")
    }

    /// The one entry of that form.
    pub fn entry(&self, form: &str) -> PathBuf {
        let listed = self.run(["image", "list", "--json"]).run().exits(0).stdout;
        let all: Vec<serde_json::Value> = serde_json::from_str(&listed).unwrap();
        let mut found = all.iter().filter(|one| one["form"] == form);
        let one = found.next().unwrap_or_else(|| panic!("no {form} in {listed}"));
        assert!(found.next().is_none(), "several: {listed}");
        one["path"].as_str().unwrap().into()
    }
}
