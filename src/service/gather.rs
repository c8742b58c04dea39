//! What steps name that is not on this machine, fetched before anything is sent: the client's side, with the caller's own
//! tokens, logins, proxies and cache.
//!
//! Main type: [`Gathered`]. The service talks to no other machine and has nobody's token. A forge's artifact goes over as the
//! file that came; a registry's image as its layout, whose digests the service computes again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tempfile::TempDir;
use tokio::sync::mpsc::UnboundedSender;

use super::client::Ask;
use super::parcel::SendError;
use crate::exit::Exit;
use crate::image::Cache;
use crate::image::cache::Entry;
use crate::image::store::StoreError;
use crate::run::image::{Terms, Trouble, pulled};
use crate::run::{Event, fetching};
use crate::spec::{ArtifactSource, ImageSource, Sha256Digest, Step};

/// How long a pull may take.
const DEADLINE: Duration = Duration::from_secs(600);

/// What came. It stays while this is held.
#[derive(Debug, Default)]
pub struct Gathered {
    artifacts: BTreeMap<String, PathBuf>,
    images: BTreeMap<(String, Option<String>), Entry>,
    /// Private to the caller; removed in the end.
    directory: Option<TempDir>,
}

impl Gathered {
    /// The file of a forge's artifact.
    #[must_use]
    pub fn artifact(&self, source: &ArtifactSource) -> Option<&Path> {
        self.artifacts.get(&source.to_string()).map(PathBuf::as_path)
    }

    /// The layout of a registry's image.
    #[must_use]
    pub fn image(&self, reference: &str, digest: Option<Sha256Digest>) -> Option<&Path> {
        self.images.get(&image_key(reference, digest)).map(Entry::path)
    }

    /// Fetches all that the steps name, each thing once. Dropping the future ends it.
    ///
    /// # Errors
    /// [`SendError::Missing`] for what can't be had, [`SendError::Temporary`] for a directory that can't be made.
    pub async fn of(ask: &Ask, events: &UnboundedSender<Event>) -> Result<Self, SendError> {
        let mut gathered = Self::default();
        for step in &ask.steps {
            let index = u32::try_from(step.index).unwrap_or(u32::MAX);
            let events = events.clone();
            let progress = move |what: String| {
                let _ = events.send(Event::Progress { index, what });
            };
            if matches!(step.artifact, ArtifactSource::GitHub { .. } | ArtifactSource::GitLab { .. }) {
                gathered.fetch(ask, &step.artifact, &progress).await?;
            }
            gathered.pull(ask, step, progress).await?;
        }
        Ok(gathered)
    }

    async fn fetch(
        &mut self,
        ask: &Ask,
        source: &ArtifactSource,
        progress: &(dyn Fn(String) + Sync),
    ) -> Result<(), SendError> {
        if self.artifact(source).is_some() {
            return Ok(());
        }
        let own = self.place(&ask.temp)?;
        let fetched = fetching::artifact(source, &ask.env, &own, progress).await.map_err(|failed| {
            let fetching::NotFetched { reason, message, help } = failed;
            SendError::Missing { exit: Exit::Rejected, stage: "artifact", reason, message, help: help.to_owned() }
        })?;
        self.artifacts.insert(source.to_string(), fetched.path);
        Ok(())
    }

    async fn pull(
        &mut self,
        ask: &Ask,
        step: &Step,
        progress: impl Fn(String) + Send + 'static,
    ) -> Result<(), SendError> {
        let Some(ImageSource::Registry(reference)) = &step.image else { return Ok(()) };
        let (reference, digest) = (reference.clone(), step.image_digest);
        let key = image_key(&reference, digest);
        if self.images.contains_key(&key) {
            return Ok(());
        }
        let (env, insecure, fallback) = (ask.env.clone(), ask.insecure_registries.clone(), self.place(&ask.temp)?);
        let stop = Stop::default();
        let told = Arc::clone(&stop.0);
        let work = move || {
            let cache = Cache::of_user(&env, &fallback).map_err(|e| Trouble::from(StoreError::from(e)))?;
            let terms = Terms {
                cache: &cache,
                digest,
                deadline: DEADLINE,
                stop: &told,
                env: &env,
                insecure_registries: &insecure,
                progress: &progress,
            };
            pulled(&reference, &terms)
        };
        let entry = match tokio::task::spawn_blocking(work).await {
            Ok(done) => done.map_err(|trouble| {
                let Trouble { exit, reason, message, help } = *trouble;
                SendError::Missing { exit, stage: "image", reason, message, help }
            })?,
            Err(panic) => {
                let message = format!("pulling broke: {panic}");
                let help = "this is a fault of plimsoll".to_owned();
                return Err(SendError::Missing {
                    exit: Exit::Internal,
                    stage: "image",
                    reason: "internal",
                    message,
                    help,
                });
            }
        };
        self.images.insert(key, entry);
        Ok(())
    }

    /// A fresh directory of the caller's alone.
    fn place(&mut self, temp: &Path) -> Result<PathBuf, SendError> {
        let unusable = |source| SendError::Temporary { dir: temp.to_owned(), source };
        let whole = match &mut self.directory {
            Some(directory) => directory,
            none => none.insert(tempfile::Builder::new().prefix("plimsoll-").tempdir_in(temp).map_err(unusable)?),
        };
        let path = whole.path().join((self.artifacts.len() + self.images.len()).to_string());
        match std::fs::create_dir(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => Err(unusable(e)),
            _ => Ok(path),
        }
    }
}

fn image_key(reference: &str, digest: Option<Sha256Digest>) -> (String, Option<String>) {
    (reference.to_owned(), digest.map(|digest| digest.to_string()))
}

/// Ends the work that looks at it, when dropped.
#[derive(Default)]
struct Stop(Arc<AtomicBool>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
