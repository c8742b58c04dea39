//! What a boundary is made of, beside the artifact: the image and, for a microVM, kernel and disks.
//!
//! Main type: [`Parts`]. None of it depends on the artifact, so it is made ready in the background while that is unpacked.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::image::{self, Prepared, Trouble};
use super::machine::{self, Ground};
use super::record::refusal;
use super::task::Task;
use super::{Context, Event};
use crate::backend::Backend;
use crate::env::Env;
use crate::exit::Exit;
use crate::image::Cache;
use crate::image::store::StoreError;
use crate::report::RefusalRecord;
use crate::spec::{ImageSource, Kernel, Mount, Sha256Digest, Step};

/// How long making the image ready may take.
const DEADLINE: Duration = Duration::from_secs(600);

/// What was made ready. Held until the boundary is gone: what is in the cache stays there meanwhile.
#[derive(Debug, Default)]
pub struct Parts {
    /// The root file system, for a backend that has one.
    pub image: Option<Prepared>,
    /// Kernel and disks, for a microVM.
    pub ground: Option<Arc<Ground>>,
}

/// Why there are none: the exit code, and what to report.
pub type Why = Box<(Exit, RefusalRecord)>;

impl Parts {
    /// Begins to make them ready. What is made for this step alone goes into `scratch`, a directory.
    pub fn begin(
        context: &Context,
        step: &Step,
        index: u32,
        backend: Backend,
        scratch: &Path,
    ) -> Task<Result<Self, Why>> {
        let events = context.events.clone();
        let order = Order {
            backend,
            image: step.image.clone().unwrap_or(ImageSource::Host),
            digest: step.image_digest,
            insecure_registries: context.insecure_registries.clone(),
            kernel: step.kernel.clone(),
            mounts: step.mounts.clone(),
            scratch: scratch.to_owned(),
            fallback: context.scratch.join("cache"),
            progress: Box::new(move |what| {
                let _ = events.send(Event::Progress { index, what });
            }),
        };
        Task::start(move |stop| order.make(stop))
    }
}

struct Order {
    backend: Backend,
    image: ImageSource,
    digest: Option<Sha256Digest>,
    insecure_registries: Vec<String>,
    kernel: Kernel,
    mounts: Vec<Mount>,
    scratch: PathBuf,
    fallback: PathBuf,
    progress: Box<dyn Fn(String) + Send>,
}

impl Order {
    fn make(&self, stop: &AtomicBool) -> Result<Parts, Why> {
        if self.backend == Backend::Wasm {
            return Ok(Parts::default());
        }
        let image = self.image(stop).map_err(|trouble| {
            let Trouble { exit, reason, message, help } = *trouble;
            Box::new((exit, refusal("image", reason, message, &help)))
        })?;
        let ground = match &image.root {
            Some(tree) if self.backend == Backend::Firecracker => {
                let sources = machine::Sources {
                    kernel: &self.kernel,
                    rootfs: image.stored.as_ref().map_or(machine::Root::Tree(tree), machine::Root::Stored),
                    mounts: &self.mounts,
                    scratch: &self.scratch,
                    fallback: &self.fallback,
                };
                Some(Arc::new(Ground::make(&sources)?))
            }
            _ => None,
        };
        Ok(Parts { image: Some(image), ground })
    }

    fn image(&self, stop: &AtomicBool) -> Result<Prepared, Box<Trouble>> {
        let env = Env::process();
        let cache = Cache::of_user(&env, &self.fallback).map_err(|e| Trouble::from(StoreError::from(e)))?;
        let terms = image::Terms {
            cache: &cache,
            digest: self.digest,
            deadline: DEADLINE,
            stop,
            env: &env,
            insecure_registries: &self.insecure_registries,
            progress: &self.progress,
        };
        let mut prepared = image::prepare(&self.image, &terms)?;
        prepared.notices.extend(cache.notice().filter(|_| prepared.stored.is_some()).map(str::to_owned));
        Ok(prepared)
    }
}
