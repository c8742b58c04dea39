//! A step's image: from what the step names to a tree that a boundary can show.
//!
//! Main function: [`prepare`]. What has to be unpacked is unpacked once, by the jailed helper, into the cache
//! ([`crate::image::store`]); a directory is used where it lies, and a registry's image is pulled before, unless it is named by
//! a digest that was pulled already. What an image says of how it wants to be run is taken over
//! where a step has such a thing ([`Prepared`]), and named in the report where not.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::{puller, unpacker};
use crate::artifact::helper::apply_in_helper;
use crate::artifact::layers;
use crate::artifact::{Acquire, Budget, Digest, Error as ArtifactError, Purpose, Rejection, acquire};
use crate::env::Env;
use crate::exit::Exit;
use crate::image::cache::{CacheError, Entry};
use crate::image::oci::registry::{Credentials, Failure, Job, Kind, Name, Task, helper};
use crate::image::oci::{self, OciError, Opened};
use crate::image::store::{self, About, Origin, StoreError, Stored};
use crate::image::{Cache, Image, ImageError, user};
use crate::report::{ImageRecord, words};
use crate::spec::ImageSource;

/// Shortest time between two lines about a pull.
const PROGRESS: Duration = Duration::from_secs(3);

/// A step's image, ready to be shown.
#[derive(Debug)]
pub struct Prepared {
    /// The tree; none for the runner's own toolchain.
    pub root: Option<PathBuf>,
    /// If that is in the cache, this keeps it there; and its disk is found by it ([`store::disk`]).
    pub stored: Option<Stored>,
    /// For the report.
    pub record: ImageRecord,
    /// What the image sets, which a step's own variables go before.
    pub env: Vec<(String, String)>,
    /// Who the program is, if the image says so; never root.
    pub user: Option<(u32, u32)>,
    /// For the report.
    pub notices: Vec<String>,
}

/// Why there is none, in the terms of a refusal.
#[derive(Debug)]
pub struct Trouble {
    /// The exit code.
    pub exit: Exit,
    /// The stable word.
    pub reason: &'static str,
    /// A lowercase fragment.
    pub message: String,
    /// What to do.
    pub help: String,
}

impl Trouble {
    fn rejected(reason: &'static str, message: String, help: &str) -> Self {
        Trouble { exit: Exit::Rejected, reason, message, help: help.to_owned() }
    }

    fn internal(message: String) -> Self {
        let help = "this is a fault of the host or of plimsoll; run again with --verbose".to_owned();
        Trouble { exit: Exit::Internal, reason: "internal", message, help }
    }
}

impl From<OciError> for Trouble {
    fn from(error: OciError) -> Self {
        let reason = match error {
            OciError::Digest { .. } | OciError::Blob { .. } => "sha256",
            _ => "image-rejected",
        };
        Trouble::rejected(reason, crate::text::chain(&error), error.help())
    }
}

impl From<ImageError> for Trouble {
    fn from(error: ImageError) -> Self {
        Trouble::rejected("image-rejected", crate::text::chain(&error), "see `sandbox.image`")
    }
}

impl From<Rejection> for Trouble {
    fn from(rejection: Rejection) -> Self {
        Trouble::rejected(rejection.rule.id(), rejection.to_string(), rejection.rule.help().unwrap_or_default())
    }
}

impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Artifact(ArtifactError::Rejected(rejection)) => rejection.into(),
            StoreError::Cache(error @ CacheError::Untrusted(_)) => {
                let (message, help) = (error.to_string(), error.help().to_owned());
                Trouble { exit: Exit::Unavailable, reason: "cache", message, help }
            }
            error => Trouble::internal(crate::text::chain(&error)),
        }
    }
}

impl From<CacheError> for Trouble {
    fn from(error: CacheError) -> Self {
        StoreError::from(error).into()
    }
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Self {
        let (reason, help) = (failure.kind.reason(), failure.kind.help());
        let exit = if failure.kind == Kind::Local { Exit::Internal } else { Exit::Rejected };
        Trouble { exit, reason, message: failure.message, help: help.to_owned() }
    }
}

/// How an image is brought in.
pub struct Terms<'a> {
    /// Where unpacked images are kept.
    pub cache: &'a Cache,
    /// What the step says that its digest is.
    pub digest: Option<Digest>,
    /// How long unpacking may take.
    pub deadline: Duration,
    /// Set to end it early.
    pub stop: &'a AtomicBool,
    /// Where credentials, proxies and roots are.
    pub env: &'a Env,
    /// Registries that may be asked without TLS.
    pub insecure_registries: &'a [String],
    /// Told what is being done.
    pub progress: &'a dyn Fn(String),
}

/// Makes a step's image ready. Blocks.
///
/// # Errors
/// As [`Trouble`] says.
pub fn prepare(source: &ImageSource, terms: &Terms<'_>) -> Result<Prepared, Box<Trouble>> {
    let reference = source.to_string();
    let found = match source {
        ImageSource::Host => Ok(Prepared {
            root: None,
            stored: None,
            record: ImageRecord { reference: reference.clone(), digest: None },
            env: Vec::new(),
            user: None,
            notices: Vec::new(),
        }),
        ImageSource::Dir(path) => shown(&reference, path, None, None),
        ImageSource::Tar(path) => tar(&reference, path, terms),
        ImageSource::OciLayout { path, tag } => oci::open_layout(path, tag.as_deref(), terms.digest)
            .map_err(Trouble::from)
            .and_then(|opened| layered(&reference, &opened, terms)),
        ImageSource::DockerArchive(path) => oci::open_archive(path, terms.digest)
            .map_err(Trouble::from)
            .and_then(|opened| layered(&reference, &opened, terms)),
        ImageSource::Registry(text) => registry(text, terms),
    };
    found.map_err(|trouble| Box::new(Trouble { message: format!("image {reference}: {}", trouble.message), ..trouble }))
}

/// A tree that is there.
fn shown(reference: &str, path: &Path, digest: Option<Digest>, stored: Option<Stored>) -> Result<Prepared, Trouble> {
    let image = Image::directory(reference, path, digest.map(|d| d.to_string()))?;
    Ok(Prepared {
        root: image.root,
        stored,
        record: ImageRecord { reference: image.reference, digest: image.digest },
        env: Vec::new(),
        user: None,
        notices: Vec::new(),
    })
}

/// A tree in an archive, known by the archive's digest.
fn tar(reference: &str, path: &Path, terms: &Terms<'_>) -> Result<Prepared, Trouble> {
    let hash = || -> std::io::Result<Digest> {
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        if !file.metadata()?.is_file() {
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is no regular file"));
        }
        Digest::of_reader(file)
    };
    let unreadable =
        |e: std::io::Error| Trouble::rejected("unreadable", format!("can't be read: {e}"), "see `sandbox.image`");
    let digest = hash().map_err(unreadable)?;
    if let Some(expected) = terms.digest.filter(|expected| *expected != digest) {
        return Err(OciError::Digest { expected, found: digest }.into());
    }
    let stored = store::tree(terms.cache, Origin { how: "tar", reference, digest }, |tree| {
        let what = Acquire {
            path,
            purpose: Purpose::RootFs,
            sha256: Some(digest),
            budget: Budget::default(),
            deadline: terms.deadline,
            exclude: &[],
        };
        acquire(&what, tree.as_fd(), terms.stop, unpacker::start).map(drop)
    })?;
    shown(reference, &stored.path(), Some(digest), Some(stored))
}

/// A registry's image: resolved, unless a digest says which it is; pulled, unless it was before; unpacked.
fn registry(reference: &str, terms: &Terms<'_>) -> Result<Prepared, Trouble> {
    // The blobs of the layers are compared when they are unpacked.
    with_layout(reference, terms, |_, opened| layered(reference, opened, terms))
}

/// The layout of a registry's image, for somebody else to unpack: pulled, unless it was before. Each blob is what its digest
/// says. It stays while the entry is held. Blocks.
///
/// # Errors
/// As [`Trouble`] says.
pub fn pulled(reference: &str, terms: &Terms<'_>) -> Result<Entry, Box<Trouble>> {
    let whole = |layout: &Entry, opened: &Opened| {
        opened.layers.iter().try_for_each(|layer| whole(opened, layer)).map(|()| layout.clone())
    };
    with_layout(reference, terms, whole)
        .map_err(|trouble| Box::new(Trouble { message: format!("image {reference}: {}", trouble.message), ..trouble }))
}

/// Compares a layer's bytes with their digest.
fn whole(opened: &Opened, layer: &layers::Layer) -> Result<(), Trouble> {
    let read = || -> std::io::Result<Digest> {
        let file = opened.files.get(layer.file).ok_or(std::io::ErrorKind::NotFound)?;
        let mut file = file.try_clone()?;
        file.seek(SeekFrom::Start(layer.offset))?;
        Digest::of_reader(file.take(layer.length))
    };
    let found = read().map_err(|e| Trouble::internal(format!("a layer can't be read: {e}")))?;
    match layer.sha256 {
        Some(expected) if expected != found => Err(OciError::Digest { expected, found }.into()),
        _ => Ok(()),
    }
}

/// Does something with the layout of a registry's image; once more with one that is pulled again, where what lies in the cache
/// turns out to be damaged.
fn with_layout<T>(
    reference: &str,
    terms: &Terms<'_>,
    work: impl Fn(&Entry, &Opened) -> Result<T, Trouble>,
) -> Result<T, Trouble> {
    let help = "write [REGISTRY/]NAME[:TAG][@sha256:DIGEST]";
    let name = Name::parse(reference).map_err(|why| Trouble::rejected("image-source", why, help))?;
    let digest = match name.digest().or(terms.digest) {
        Some(digest) => digest,
        None => {
            (terms.progress)(format!("asking {} for {reference}", name.registry()));
            errand(&name, Task::Resolve, terms)?
        }
    };
    for last in [false, true] {
        let layout =
            store::pulled(terms.cache, digest, |directory| pull(reference, &name.at(digest), directory, terms))?;
        // The manifest and the configuration are compared with their digests here.
        let opened = oci::open_layout(layout.path(), None, terms.digest);
        let done = opened.map_err(Trouble::from).and_then(|opened| work(&layout, &opened));
        match done {
            // What lies in the cache has changed since it was pulled.
            Err(trouble) if trouble.reason == "sha256" && !layout.fresh && !last => {
                tracing::warn!("{reference} is damaged in the cache, and pulled again: {}", trouble.message);
                drop(layout);
                store::forget_pulled(terms.cache, digest)?;
            }
            done => return done,
        }
    }
    Err(Trouble::internal("it is damaged each time".to_owned()))
}

/// Fills a directory with the layout of that image.
fn pull(reference: &str, name: &Name, directory: &Path, terms: &Terms<'_>) -> Result<About, Trouble> {
    errand(name, Task::Pull(directory.to_owned()), terms)?;
    let opened = oci::open_layout(directory, None, None)?;
    let bytes = opened.layers.iter().map(|layer| layer.length).sum();
    let (reference, digest, index) = (reference.to_owned(), opened.digest, opened.index);
    Ok(About { reference, digest, index, bytes, content: None })
}

/// Sends the helper to the registry.
fn errand(name: &Name, task: Task, terms: &Terms<'_>) -> Result<Digest, Trouble> {
    let registry = name.registry();
    let credentials = Credentials::of_user(registry, terms.env).map_err(|e| Trouble {
        exit: Exit::Rejected,
        reason: "registry-unauthorized",
        message: crate::text::chain(&e),
        help: e.help().to_owned(),
    })?;
    let job = Job {
        name: name.to_string(),
        credentials,
        plain: name.is_loopback() || terms.insecure_registries.iter().any(|host| host == registry),
        bytes: Budget::default().bytes,
        task,
    };
    let said: std::cell::Cell<Option<Instant>> = std::cell::Cell::new(None);
    let progress = |done: u64, total: u64| {
        if said.get().is_none_or(|when| when.elapsed() >= PROGRESS) {
            said.set(Some(Instant::now()));
            (terms.progress)(format!("pulling {} of {}", words::bytes(done), words::bytes(total)));
        }
    };
    Ok(helper::errand(&job, terms.deadline, terms.stop, &progress, || puller::start(terms.env))?)
}

/// An image of layers, which also says how it wants to be run.
fn layered(reference: &str, opened: &Opened, terms: &Terms<'_>) -> Result<Prepared, Trouble> {
    let stored = store::tree(terms.cache, Origin { how: "layers", reference, digest: opened.digest }, |tree| {
        let request = layers::Request { layers: opened.layers.clone(), budget: Budget::default() };
        apply_in_helper(&opened.files, tree.as_fd(), &request, terms.deadline, terms.stop, unpacker::start).map(drop)
    })?;
    let mut prepared = shown(reference, &stored.path(), Some(opened.digest), Some(stored))?;
    let facts = &opened.facts;
    if let Some(root) = &prepared.root {
        let user = user::resolve(root, &facts.user).map_err(|e| {
            Trouble::rejected("image-rejected", crate::text::chain(&e), "give the image a user that it has (`USER`)")
        })?;
        prepared.user = Some(user.ids);
        prepared.notices.extend(user.notice);
    }
    if !matches!(&*facts.working_directory, "" | "/") {
        let directory = crate::artifact::rejection::shown(facts.working_directory.as_bytes());
        prepared.notices.push(format!(
            "the image's working directory `{directory}` is not used: a step runs in its artifact, at /workspace"
        ));
    }
    prepared.env.clone_from(&facts.env);
    Ok(prepared)
}
