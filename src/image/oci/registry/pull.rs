//! Talks to the registry. Runs in the helper, whose memory the runner bounds: the client library reads refusals, tokens
//! and manifests whole before anybody can say how long they may be.
//!
//! Of what a manifest announces nothing is believed: each document is compared with its digest and each layer with its digest
//! and its length, while it is written; more bytes than were announced end it at once. A layer that breaks off goes on where
//! it broke off.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use oci_client::Client;
use oci_client::client::{BlobResponse, ClientConfig, ClientProtocol};
use oci_client::errors::{OciDistributionError, OciErrorCode};
use oci_client::secrets::RegistryAuth;
use oci_client::{Reference, RegistryOperation};

use super::{Credentials, Failure, Job, Kind, Said, Task, oauth};
use crate::artifact::digest::Hasher;
use crate::artifact::layers::MAX_LAYERS;
use crate::artifact::{Digest, rejection};
use crate::image::oci::document::{Descriptor, Index, MAX_DOCUMENT, Manifest};
use crate::image::oci::layout::{MAX_NESTING, choose};

/// Layers that are fetched at the same time.
const PARALLEL: usize = 4;
/// Tries of one request.
const TRIES: u32 = 6;
/// Wait before the second try; twice as long before each further one.
const PAUSE: Duration = Duration::from_millis(250);
/// Longest time to a connection.
pub(super) const CONNECT: Duration = Duration::from_secs(15);
/// Longest silence while an answer is read.
pub(super) const SILENCE: Duration = Duration::from_secs(30);
/// Time between two reports of progress.
const BEAT: Duration = Duration::from_millis(500);

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// What is understood; the two first are also what is written for whatever came.
const ACCEPTED: [&str; 4] = [
    INDEX,
    MANIFEST,
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];

type Sayer<'a> = &'a (dyn Fn(&Said) + Sync);

/// Does the errand; says the digest.
pub(super) async fn run(job: &Job, say: Sayer<'_>) -> Result<Digest, Failure> {
    let reference: Reference =
        job.name.parse().map_err(|e: oci_client::ParseError| Failure::new(Kind::Local, e.to_string()))?;
    let registry = Registry::reach(job, reference).await?;
    match &job.task {
        Task::Resolve => registry.document(&registry.reference).await.map(|(digest, _)| digest),
        Task::Pull(directory) => registry.pull(directory, job.bytes, say).await,
    }
}

struct Registry {
    client: Client,
    auth: RegistryAuth,
    reference: Reference,
}

impl Registry {
    /// Logs in. A registry that may be plain is first asked with TLS.
    async fn reach(job: &Job, reference: Reference) -> Result<Self, Failure> {
        if job.plain {
            match Self::connect(job, &reference, ClientProtocol::Https).await {
                Ok(registry) => return Ok(registry),
                // It speaks TLS: what it wants is not said in the clear.
                Err(Trouble::Final(failure)) if failure.kind != Kind::Unreachable => return Err(failure),
                Err(_) => {}
            }
            return retried(|| Self::connect(job, &reference, ClientProtocol::Http)).await;
        }
        retried(|| Self::connect(job, &reference, ClientProtocol::Https)).await
    }

    async fn connect(job: &Job, reference: &Reference, protocol: ClientProtocol) -> Result<Self, Trouble> {
        let scheme = if matches!(protocol, ClientProtocol::Http) { "http" } else { "https" };
        let config = ClientConfig {
            protocol,
            connect_timeout: Some(CONNECT),
            read_timeout: Some(SILENCE),
            user_agent: concat!("plimsoll/", env!("CARGO_PKG_VERSION")),
            ..ClientConfig::default()
        };
        let client = Client::try_from(config).map_err(|e| Trouble::Final(Failure::new(Kind::Local, words(e))))?;
        let auth = match &job.credentials {
            Credentials::Anonymous => RegistryAuth::Anonymous,
            Credentials::Password { user, password } => RegistryAuth::Basic(user.clone(), password.clone()),
            Credentials::IdentityToken { token } => {
                let base = format!("{scheme}://{}", reference.resolve_registry());
                let access = oauth::access_token(&base, reference.repository(), token).await?;
                access.map_or(RegistryAuth::Anonymous, RegistryAuth::Bearer)
            }
        };
        let registry = Self { client, auth, reference: reference.clone() };
        registry.log_in().await?;
        Ok(registry)
    }

    async fn log_in(&self) -> Result<(), Trouble> {
        self.client.auth(&self.reference, &self.auth, RegistryOperation::Pull).await.map(drop).map_err(Trouble::from)
    }

    /// A manifest or index, as it is named. A digest in the name is compared.
    async fn document(&self, reference: &Reference) -> Result<(Digest, Vec<u8>), Failure> {
        let (bytes, _) = retried(|| async {
            self.client.pull_manifest_raw(reference, &self.auth, &ACCEPTED).await.map_err(Trouble::from)
        })
        .await?;
        if bytes.len() as u64 > MAX_DOCUMENT {
            let why = format!("a manifest of {} bytes, where {MAX_DOCUMENT} are allowed", bytes.len());
            return Err(Failure::new(Kind::Hostile, why));
        }
        let digest = Digest::of(&bytes);
        match reference.digest() {
            Some(expected) if expected != format!("sha256:{digest}") => {
                Err(Failure::new(Kind::Hostile, format!("what was asked for as {expected} has the sha256 {digest}")))
            }
            _ => Ok((digest, bytes.to_vec())),
        }
    }

    /// Makes the layout.
    async fn pull(&self, directory: &Path, most: u64, say: Sayer<'_>) -> Result<Digest, Failure> {
        let into = Into::new(directory)?;
        let (digest, mut bytes) = self.document(&self.reference).await?;
        let mut kind = kind(&bytes)?;
        let index = format!(
            r#"{{"schemaVersion":2,"manifests":[{{"mediaType":"{kind}","digest":"sha256:{digest}","size":{}}}]}}"#,
            bytes.len()
        );
        into.document(digest, &bytes)?;
        for _ in 0..MAX_NESTING {
            if kind != INDEX {
                break;
            }
            let list = Index::parse(&bytes).map_err(|why| Failure::new(Kind::Hostile, why))?;
            let one = choose(&list.manifests, None)
                .map_err(|e| Failure::new(Kind::Missing, rejection::shown(e.to_string().as_bytes())))?;
            let wanted = one.digest().map_err(|why| Failure::new(Kind::Hostile, why))?;
            let found = self.document(&self.reference.clone_with_digest(format!("sha256:{wanted}"))).await?;
            into.document(found.0, &found.1)?;
            bytes = found.1;
            kind = self::kind(&bytes)?;
        }
        let manifest = Manifest::parse(&bytes).map_err(|why| Failure::new(Kind::Hostile, why))?;
        let mut wanted = vec![&manifest.config];
        wanted.extend(&manifest.layers);
        let total = announced(&manifest, most)?;
        let meter = Meter { total, state: Mutex::new((0, Instant::now())), say };
        say(&Said::Progress { done: 0, total });
        // The same layer may stand there several times.
        wanted.sort_by_key(|descriptor| descriptor.digest().ok());
        wanted.dedup_by_key(|descriptor| descriptor.digest().ok());
        let fetches = wanted.into_iter().map(|descriptor| self.blob(descriptor, &into, &meter));
        let mut fetching = futures_util::stream::iter(fetches).buffer_unordered(PARALLEL);
        while let Some(done) = fetching.next().await {
            done?;
        }
        // Last, so that a layout without it is none.
        into.write("index.json", index.as_bytes())?;
        Ok(digest)
    }

    /// Fetches a blob under its digest and length.
    async fn blob(&self, descriptor: &Descriptor, into: &Into<'_>, meter: &Meter<'_>) -> Result<(), Failure> {
        let hostile = |why: String| Failure::new(Kind::Hostile, why);
        let digest = descriptor.digest().map_err(hostile)?;
        let name = format!("sha256:{digest}");
        let mut blob = Blob { file: into.create(digest)?, hasher: Hasher::default(), done: 0, size: descriptor.size };
        let (mut tries, mut reached) = (0, 0);
        while blob.done < blob.size || tries == 0 {
            tries += 1;
            match self.piece(&name, &mut blob, meter).await {
                Ok(()) => break,
                // A connection that broke after a while is a first time again.
                Err(Trouble::Passing(_)) if blob.done > reached => (tries, reached) = (1, blob.done),
                Err(Trouble::Passing(failure)) if tries >= TRIES => return Err(failure),
                Err(Trouble::Passing(_)) => {}
                Err(Trouble::Final(failure)) => return Err(failure),
            }
            tokio::time::sleep(PAUSE * 2_u32.pow(tries - 1)).await;
        }
        let found = blob.hasher.finish();
        if found != digest {
            return Err(hostile(format!("the blob {name} has the sha256 {found}")));
        }
        Ok(())
    }

    /// What is missing of a blob, or a part of it.
    async fn piece(&self, name: &str, blob: &mut Blob, meter: &Meter<'_>) -> Result<(), Trouble> {
        let mut body = if blob.done == 0 {
            self.client.pull_blob_stream(&self.reference, name).await?
        } else {
            match self.client.pull_blob_stream_partial(&self.reference, name, blob.done, None).await? {
                BlobResponse::Partial(body) => body,
                // It can't begin in the middle: once more, whole.
                BlobResponse::Full(body) => {
                    blob.again(meter).map_err(|e| Trouble::Final(Failure::new(Kind::Local, e.to_string())))?;
                    body
                }
            }
        };
        let left = blob.size - blob.done;
        if let Some(length) = body.content_length.filter(|length| *length > left) {
            let why = format!("the blob {name} has {length} bytes to come, not {left}");
            return Err(Trouble::Final(Failure::new(Kind::Hostile, why)));
        }
        while blob.done < blob.size {
            match body.next().await {
                Some(Ok(piece)) => blob.take(&piece, name, meter)?,
                Some(Err(e)) => return Err(Trouble::Passing(Failure::new(Kind::Unreachable, broken(&e)))),
                None => {
                    let why = format!("the blob {name} ends after {} of {} bytes", blob.done, blob.size);
                    return Err(Trouble::Passing(Failure::new(Kind::Unreachable, why)));
                }
            }
        }
        // What the library says of the digest at the end is said by ours; but there must be no more.
        match body.next().await {
            Some(Ok(piece)) if !piece.is_empty() => blob.take(&piece, name, meter),
            _ => Ok(()),
        }
    }
}

struct Blob {
    file: File,
    hasher: Hasher,
    done: u64,
    size: u64,
}

impl Blob {
    fn take(&mut self, piece: &[u8], name: &str, meter: &Meter<'_>) -> Result<(), Trouble> {
        let length = piece.len() as u64;
        if length > self.size - self.done {
            let why = format!("the blob {name} has more than the {} bytes that were announced", self.size);
            return Err(Trouble::Final(Failure::new(Kind::Hostile, why)));
        }
        self.file.write_all(piece).map_err(|e| Trouble::Final(Failure::new(Kind::Local, e.to_string())))?;
        self.hasher.update(piece);
        self.done += length;
        meter.add(i64::try_from(length).unwrap_or(i64::MAX));
        Ok(())
    }

    fn again(&mut self, meter: &Meter<'_>) -> std::io::Result<()> {
        use std::io::Seek;
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.hasher = Hasher::default();
        meter.add(-i64::try_from(self.done).unwrap_or(i64::MAX));
        self.done = 0;
        Ok(())
    }
}

/// The directory being filled.
struct Into<'d> {
    directory: &'d Path,
}

impl<'d> Into<'d> {
    fn new(directory: &'d Path) -> Result<Self, Failure> {
        let into = Self { directory };
        std::fs::create_dir_all(directory.join("blobs/sha256")).map_err(|e| local("make a layout", e))?;
        into.write("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        Ok(into)
    }

    fn create(&self, digest: Digest) -> Result<File, Failure> {
        let path = self.directory.join("blobs/sha256").join(digest.to_string());
        File::create(path).map_err(|e| local("write a blob", e))
    }

    fn document(&self, digest: Digest, bytes: &[u8]) -> Result<(), Failure> {
        self.create(digest)?.write_all(bytes).map_err(|e| local("write a manifest", e))
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), Failure> {
        std::fs::write(self.directory.join(name), bytes).map_err(|e| local("write a layout", e))
    }
}

fn local(action: &str, error: std::io::Error) -> Failure {
    Failure::new(Kind::Local, format!("failed to {action}: {error}"))
}

/// Which of the two a document is. Each refuses the other's keys.
fn kind(bytes: &[u8]) -> Result<&'static str, Failure> {
    match (Index::parse(bytes), Manifest::parse(bytes)) {
        (Ok(_), _) => Ok(INDEX),
        (_, Ok(_)) => Ok(MANIFEST),
        (_, Err(why)) => Err(Failure::new(Kind::Hostile, format!("the manifest can't be used: {why}"))),
    }
}

/// Bytes of all blobs, if that is bearable.
fn announced(manifest: &Manifest, most: u64) -> Result<u64, Failure> {
    let hostile = |why: String| Err(Failure::new(Kind::Hostile, why));
    if manifest.layers.len() > MAX_LAYERS {
        return hostile(format!("{} layers, where {MAX_LAYERS} are allowed", manifest.layers.len()));
    }
    if manifest.config.size > MAX_DOCUMENT {
        return hostile(format!("a configuration of {} bytes, where {MAX_DOCUMENT} are allowed", manifest.config.size));
    }
    let total = manifest.layers.iter().try_fold(manifest.config.size, |sum, layer| sum.checked_add(layer.size));
    match total {
        Some(total) if total <= most => Ok(total),
        _ => hostile(format!("its layers have more than {most} bytes together")),
    }
}

/// Counts what has come, and tells now and then.
struct Meter<'a> {
    total: u64,
    state: Mutex<(u64, Instant)>,
    say: Sayer<'a>,
}

impl Meter<'_> {
    fn add(&self, bytes: i64) {
        let Ok(mut state) = self.state.lock() else { return };
        state.0 = state.0.saturating_add_signed(bytes);
        if state.1.elapsed() >= BEAT {
            state.1 = Instant::now();
            (self.say)(&Said::Progress { done: state.0, total: self.total });
        }
    }
}

/// Whether it may help to try again.
#[derive(Debug)]
pub(super) enum Trouble {
    Passing(Failure),
    Final(Failure),
}

impl From<OciDistributionError> for Trouble {
    fn from(error: OciDistributionError) -> Self {
        use OciDistributionError as E;
        let (kind, passing) = match &error {
            E::UnauthorizedError { .. } | E::AuthenticationFailure(_) => (Kind::Unauthorized, false),
            E::RegistryError { envelope, .. } => {
                let is = |code: &OciErrorCode| envelope.errors.iter().any(|e| e.code == *code);
                if is(&OciErrorCode::ManifestUnknown)
                    || is(&OciErrorCode::NameUnknown)
                    || is(&OciErrorCode::BlobUnknown)
                {
                    (Kind::Missing, false)
                } else if is(&OciErrorCode::Unauthorized) || is(&OciErrorCode::Denied) {
                    (Kind::Unauthorized, false)
                } else {
                    (Kind::Unreachable, is(&OciErrorCode::Toomanyrequests))
                }
            }
            E::ServerError { code, .. } => match code {
                401 | 403 => (Kind::Unauthorized, false),
                404 => (Kind::Missing, false),
                408 | 425 | 429 | 500.. => (Kind::Unreachable, true),
                _ => (Kind::Unreachable, false),
            },
            E::RequestError(_) | E::IoError(_) => (Kind::Unreachable, true),
            _ => (Kind::Hostile, false),
        };
        let failure = Failure::new(kind, words(error));
        if passing { Trouble::Passing(failure) } else { Trouble::Final(failure) }
    }
}

/// The error with its causes and without an address's query, which may hold a signature.
fn words(error: OciDistributionError) -> String {
    use OciDistributionError as E;
    let bare = |url: &str| url.split(['?', '#']).next().unwrap_or_default().to_owned();
    match error {
        E::RequestError(error) => crate::text::chain(&error.without_url()),
        E::RegistryError { envelope, url } => {
            let all: Vec<_> = envelope.errors.iter().map(|e| format!("{:?} {}", e.code, e.message)).collect();
            format!("{} answers {}", bare(&url), all.join("; ").trim_end())
        }
        E::ServerError { code, url, message } => format!("{} answers {code} {message}", bare(&url)),
        E::UnauthorizedError { url } => format!("{} wants a login", bare(&url)),
        error => crate::text::chain(&error),
    }
}

fn broken(error: &std::io::Error) -> String {
    // The library wraps its own error, whose first line has the address.
    let mut inner: &dyn std::error::Error = error;
    while let Some(next) = inner.source() {
        inner = next;
    }
    format!("the answer broke off: {inner}")
}

/// Tries until it works, can't, or has been tried often enough.
async fn retried<T, F: Future<Output = Result<T, Trouble>>>(attempt: impl Fn() -> F) -> Result<T, Failure> {
    let mut tries = 0;
    loop {
        tries += 1;
        match attempt().await {
            Ok(done) => return Ok(done),
            Err(Trouble::Final(failure)) => return Err(failure),
            Err(Trouble::Passing(failure)) if tries >= TRIES => return Err(failure),
            Err(Trouble::Passing(_)) => tokio::time::sleep(PAUSE * 2_u32.pow(tries - 1)).await,
        }
    }
}
