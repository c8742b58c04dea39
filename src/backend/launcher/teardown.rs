//! Tearing a launched boundary down, and looking at what is left of it: the same for every engine.

use std::path::PathBuf;

use super::Reply;
use super::control::Launched;
use crate::backend::cgroup::Group;
use crate::backend::family::Family;
use crate::backend::traces::{mounts_below, remove_files};
use crate::evidence::{Fact, Observation};

/// What a boundary is made of outside itself.
#[derive(Debug)]
pub struct Remains {
    /// The launcher.
    pub launched: Launched,
    /// The control group.
    pub group: Group,
    /// Its processes, as they were last seen.
    pub family: Family,
    /// Its directory.
    pub scratch: PathBuf,
}

impl Remains {
    /// Ends every process, removes what was made, and says what was looked for and found. `main` is what the engine's
    /// main process is called, such as `the sentry`.
    pub async fn end(self, main: &str) -> Vec<Observation> {
        let Self { launched, group, family, scratch } = self;
        let mut looked_for = vec![
            format!("{} processes and their pid namespaces", family.len()),
            format!("{} cgroups", group.directories().len()),
            format!("mounts and files below {}", scratch.display()),
        ];
        let mut found = Vec::new();
        match launched.end().await {
            Some(Reply::Ended { engine, left, log }) => {
                if let Some(end) = engine {
                    looked_for.push(match (end.code, end.signal) {
                        (Some(code), _) => format!("{main}'s end (exit code {code})"),
                        (None, signal) => format!("{main}'s end (signal {})", signal.unwrap_or(0)),
                    });
                }
                found.extend(left.into_iter().map(|pid| format!("process {pid} of the boundary's own numbering")));
                if !log.is_empty() {
                    tracing::debug!(?log, "the engine's last words");
                }
            }
            _ => tracing::debug!("the launcher did not say how the boundary ended"),
        }
        let look = move || {
            let mut found = group.remove();
            found.extend(family.survivors());
            found.extend(mounts_below(&scratch));
            found.extend(remove_files(&scratch));
            found
        };
        found.extend(tokio::task::spawn_blocking(look).await.unwrap_or_else(|e| vec![format!("unknown: {e}")]));
        vec![Observation::host(Fact::Leftovers { looked_for, found })]
    }
}
