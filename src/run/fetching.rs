//! An artifact that a forge keeps, on its way to a directory of ours: under a deadline, with lines about how far it is.
//!
//! Main function: [`artifact`]. A local run fetches for itself; before a run by the service, its client does.

use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::artifact::fetch::{self, Fetched};
use crate::artifact::{Budget, Rule};
use crate::env::Env;
use crate::forge::Http;
use crate::report::words;
use crate::spec::ArtifactSource;

/// How long it may take.
const DEADLINE: Duration = Duration::from_secs(600);
/// Time between two lines about a download.
const PROGRESS: Duration = Duration::from_secs(3);

/// Why there is none, in the terms of a refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotFetched {
    /// The stable word.
    pub reason: &'static str,
    /// A lowercase fragment that names the artifact.
    pub message: String,
    /// What to do.
    pub help: &'static str,
}

/// Downloads it into that directory.
///
/// # Errors
/// As [`NotFetched`] says.
pub async fn artifact(
    source: &ArtifactSource,
    env: &Env,
    directory: &Path,
    progress: &(dyn Fn(String) + Sync),
) -> Result<Fetched, NotFetched> {
    progress(format!("downloading {source}"));
    let last = Mutex::new(Instant::now());
    let how_far = |done: u64, total: Option<u64>| {
        let Ok(mut last) = last.lock() else { return };
        if last.elapsed() >= PROGRESS {
            *last = Instant::now();
            let total = total.map(|total| format!(" of {}", words::bytes(total))).unwrap_or_default();
            progress(format!("downloaded {}{total}", words::bytes(done)));
        }
    };
    let work = async {
        let http = Http::new(env)?;
        fetch::fetch(source, &http, env, directory, Budget::default().bytes, &how_far).await
    };
    let (reason, why, help) = match tokio::time::timeout(DEADLINE, work).await {
        Ok(Ok(fetched)) => return Ok(fetched),
        Ok(Err(error)) => (error.reason(), crate::text::chain(&error), error.help(source)),
        Err(_) => {
            let why = format!("it did not come within {} s", DEADLINE.as_secs());
            (Rule::Deadline.id(), why, "look at the forge and the network, and run again")
        }
    };
    Err(NotFetched { reason, message: format!("artifact {source}: {why}"), help })
}
