//! `plimsoll image`: images before a run needs them, and the cache that they are kept in.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};

use super::failure::Failure;
use super::output::{self, Log};
use super::{CommonArgs, signals};
use crate::env::{Env, Var};
use crate::exit::Exit;
use crate::image::cache::{self, Cache, CacheError, Gone};
use crate::image::store::{self, LONGEST_UNUSED, Listed, MOST_BYTES};
use crate::report::words;
use crate::run::image::{self, Terms, Trouble};
use crate::spec::{self, ImageSource, Overrides, Sha256Digest, Surroundings};
use crate::text::Untrusted;

/// How long bringing in one image may take.
const DEADLINE: Duration = Duration::from_secs(3600);

/// Arguments.
#[derive(Debug, Args)]
pub struct ImageArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: ImageCommand,
}

/// What to do with images.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Bring images from a registry into the cache, unpacked and ready
    Pull {
        /// Images, such as python:3.12-slim or registry.local:5000/x@sha256:…
        #[arg(value_name = "IMAGE", required = true)]
        images: Vec<String>,

        /// A registry that may be asked without TLS; one on this host may be in any case. Repeatable
        #[arg(long, value_name = "HOST[:PORT]")]
        insecure_registry: Vec<String>,
    },
    /// Bring images from files into the cache, unpacked and ready
    Import {
        /// tar:PATH, oci-layout:PATH[:TAG] or docker-archive:PATH
        #[arg(value_name = "SOURCE", required = true)]
        sources: Vec<String>,
    },
    /// Say what is in the cache
    List {
        /// As JSON, one array
        #[arg(long)]
        json: bool,
    },
    /// Remove images from the cache, by name or digest; those in use stay
    Remove {
        /// A name as it was pulled, or a digest or its beginning
        #[arg(value_name = "IMAGE", required = true)]
        images: Vec<String>,
    },
    /// Make room: first what nobody used for long, then the oldest until the rest fits
    Gc {
        /// Most that stays
        #[arg(long, value_name = "SIZE", default_value = "20GiB")]
        max_size: String,

        /// Longest that an unused image stays
        #[arg(long, value_name = "DAYS", default_value_t = LONGEST_UNUSED.as_secs() / 86_400)]
        unused_days: u64,
    },
}

/// Does it.
pub fn image(args: &ImageArgs, common: &CommonArgs, env: &Env) -> Result<Exit, Failure> {
    let cache = cache(env)?;
    match &args.command {
        ImageCommand::Pull { images, insecure_registry } => {
            let found = sources(images, env, |source| matches!(source, ImageSource::Registry(_)))?;
            bring(found, cache, insecure_registry.clone(), common, env)
        }
        ImageCommand::Import { sources: texts } => {
            let is_file = |source: &ImageSource| {
                matches!(source, ImageSource::Tar(_) | ImageSource::OciLayout { .. } | ImageSource::DockerArchive(_))
            };
            bring(sources(texts, env, is_file)?, cache, Vec::new(), common, env)
        }
        ImageCommand::List { json } => list(&cache, *json),
        ImageCommand::Remove { images } => remove(&cache, images),
        ImageCommand::Gc { max_size, unused_days } => {
            let most = spec::parse_size(max_size)
                .map_err(|e| Failure::usage(format!("--max-size: {}", e.reason)).with_help(e.help))?;
            debug_assert_eq!(MOST_BYTES, 20 << 30, "the default that the help shows");
            gc(&cache, most, Duration::from_secs(unused_days.saturating_mul(86_400)))
        }
    }
}

/// The cache of this user; here there is nothing to fall back on.
fn cache(env: &Env) -> Result<Cache, Failure> {
    let base = cache::base(env).ok_or_else(|| {
        Failure::new(Exit::Internal, "this user has no home directory, so there is no cache")
            .with_help("set XDG_CACHE_HOME")
    })?;
    Cache::at(&base.join("image")).map_err(|e| unusable(&e))
}

fn unusable(error: &CacheError) -> Failure {
    Failure::from_error(Exit::Internal, error).with_help(error.help())
}

/// Reads them by the rules of a step's `image`.
fn sources(
    texts: &[String],
    env: &Env,
    fits: impl Fn(&ImageSource) -> bool,
) -> Result<Vec<(ImageSource, Option<Sha256Digest>)>, Failure> {
    let around = Surroundings { home: env.path(Var::Home) };
    let mut found = Vec::new();
    for text in texts {
        let flags = Overrides { run: Some("true".to_owned()), image: Some(text.clone()), ..Overrides::default() };
        let step = spec::load(&[], &flags, &around)?.into_iter().next();
        match step.and_then(|step| step.image.map(|image| (image, step.image_digest))) {
            Some(one) if fits(&one.0) => found.push(one),
            _ => {
                let shown = spec::place::shown(text);
                return Err(Failure::usage(format!("`{shown}` is no image of this kind")).with_help(
                    "`pull` takes a registry's images, `import` takes tar:, oci-layout: and docker-archive:",
                ));
            }
        }
    }
    Ok(found)
}

/// Makes images ready as a run would, one after the other.
fn bring(
    sources: Vec<(ImageSource, Option<Sha256Digest>)>,
    cache: Cache,
    insecure: Vec<String>,
    common: &CommonArgs,
    env: &Env,
) -> Result<Exit, Failure> {
    let target = output::log_target(env);
    let log = Mutex::new((!common.quiet).then(|| Log::for_target(target)));
    let stop = Arc::new(AtomicBool::new(false));
    let work = {
        let (stop, env) = (Arc::clone(&stop), env.clone());
        move || -> Result<(), Box<Trouble>> {
            let progress = |what: String| {
                if let Ok(mut log) = log.lock()
                    && let Some(log) = log.as_mut()
                {
                    log.line(&format!("  · {}", Untrusted::new(what).for_log_line(target, 200)));
                }
            };
            for (source, digest) in &sources {
                let terms = Terms {
                    cache: &cache,
                    digest: *digest,
                    deadline: DEADLINE,
                    stop: &stop,
                    env: &env,
                    insecure_registries: &insecure,
                    progress: &progress,
                };
                let prepared = image::prepare(source, &terms)?;
                let digest = prepared.record.digest.as_deref().unwrap_or_default();
                let bytes = prepared.stored.as_ref().map_or(0, store::Stored::bytes);
                let mut out = Log::data();
                let reference = Untrusted::new(prepared.record.reference.as_str()).for_log_line(target, 600);
                out.line(&format!("{reference} sha256:{digest} {}", words::bytes(bytes)));
            }
            Ok(())
        }
    };
    let done = super::runtime()?.block_on(async {
        let mut cancel = signals::listen().map_err(|e| Failure::from_error(Exit::Internal, &e))?;
        let mut work = tokio::task::spawn_blocking(work);
        tokio::select! {
            done = &mut work => done.map_err(|e| Failure::new(Exit::Internal, e.to_string())),
            signal = crate::backend::channel::cancelled(&mut cancel) => {
                stop.store(true, Ordering::Relaxed);
                let _ = work.await;
                Err(Failure::new(signals::exit(signal), "cancelled"))
            }
        }
    })?;
    match done {
        Ok(()) => Ok(Exit::Passed),
        Err(trouble) => Err(Failure::new(trouble.exit, trouble.message).with_help(trouble.help)),
    }
}

fn list(cache: &Cache, json: bool) -> Result<Exit, Failure> {
    let all = store::list(cache).map_err(|e| unusable(&e))?;
    let mut out = Log::data();
    if json {
        let rows: Vec<_> = all.iter().map(row).collect();
        out.line(&serde_json::Value::from(rows).to_string());
        return Ok(Exit::Passed);
    }
    for one in all.iter().rev() {
        let (digest, bytes, reference) = match &one.about {
            Some(about) => {
                let reference = Untrusted::new(about.reference.as_str());
                let reference = reference.for_log_line(crate::text::LogTarget::Plain, 600);
                (about.digest.to_string(), words::bytes(about.bytes), reference)
            }
            None => Default::default(),
        };
        let reference = if reference.is_empty() { "of another release of plimsoll" } else { &reference };
        out.line(&format!("{:12}  {:6}  {bytes:>10}  {reference}", digest.get(..12).unwrap_or("-"), one.form()));
    }
    let known = || all.iter().filter_map(|one| one.about.as_ref());
    let images = known().map(|about| about.digest.to_string()).collect::<BTreeSet<_>>().len() as u64;
    let total = known().map(|about| about.bytes).sum();
    out.line(&format!("{}, {} in all", words::count(images, "image"), words::bytes(total)));
    Ok(Exit::Passed)
}

fn row(one: &Listed) -> serde_json::Value {
    let used = one.held.used.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let about = one.about.as_ref();
    serde_json::json!({
        "reference": about.map(|a| &a.reference),
        "digest": about.map(|a| a.digest.to_string()),
        "index": about.and_then(|a| a.index).map(|digest| digest.to_string()),
        "form": one.form(),
        "bytes": about.map(|a| a.bytes),
        "used": used,
        "path": one.held.path,
    })
}

fn remove(cache: &Cache, wanted: &[String]) -> Result<Exit, Failure> {
    let all = store::list(cache).map_err(|e| unusable(&e))?;
    let mut out = Log::data();
    let mut stayed = Vec::new();
    for text in wanted {
        let meant: Vec<_> = all.iter().filter(|one| one.answers_to(text)).collect();
        if meant.is_empty() {
            let shown = spec::place::shown(text);
            return Err(
                Failure::usage(format!("no image `{shown}` is in the cache")).with_help("see `plimsoll image list`")
            );
        }
        for one in meant {
            match cache.discard(&one.held.kind, &one.held.key).map_err(|e| unusable(&e))? {
                Gone::Removed => out.line(&removed(one)),
                Gone::InUse => stayed.push(one.held.path.display().to_string()),
            }
        }
    }
    cache.sweep_copies().map_err(|e| unusable(&e))?;
    if stayed.is_empty() {
        return Ok(Exit::Passed);
    }
    Err(Failure::new(Exit::Internal, format!("in use, and kept: {}", stayed.join(", "))).with_help("try again later"))
}

fn gc(cache: &Cache, most: u64, unused: Duration) -> Result<Exit, Failure> {
    let gone = store::gc(cache, most, unused).map_err(|e| unusable(&e))?;
    let mut out = Log::data();
    for one in &gone {
        out.line(&removed(one));
    }
    let freed: u64 = gone.iter().filter_map(|one| one.about.as_ref()).map(|about| about.bytes).sum();
    out.line(&format!("{} removed", words::bytes(freed)));
    Ok(Exit::Passed)
}

fn removed(one: &Listed) -> String {
    match &one.about {
        Some(about) => {
            let reference = Untrusted::new(about.reference.as_str()).for_log_line(crate::text::LogTarget::Plain, 600);
            format!("removed {} of {reference} (sha256:{})", one.form(), about.digest)
        }
        None => format!("removed {}", one.held.path.display()),
    }
}
