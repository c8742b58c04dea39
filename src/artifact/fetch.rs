//! Downloads an artifact that another job left at the forge: `{github: name, run-id: …}`, `{gitlab: job, ref: …}`.
//!
//! Main function: [`fetch`]. It writes one file into a directory of ours and hashes it meanwhile; where the forge says what
//! its digest is (GitHub does since 2025), that is compared. Nothing of the file is looked at here: it goes the same way as any archive
//! afterwards, into the jailed helper, which finds out by its bytes what it is.
//!
//! Whether the job may have it is the forge's to say: the token is the job's own. It goes to the API's address alone; GitHub
//! answers with a redirect to where it stores artifacts, which gets none ([`crate::forge::http`]).

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use reqwest::Url;
use reqwest::header::{ACCEPT, HeaderName, HeaderValue};
use serde::Deserialize;

use super::digest::{Digest, Hasher};
use super::rejection::shown;
use crate::env::{Env, Var};
use crate::forge::http::{self, Http, HttpError, Request, Response, Secret};
use crate::spec::ArtifactSource;

/// GitHub's API, where the environment names no other.
const GITHUB: &str = "https://api.github.com";
/// Longest answer that is a list, bytes.
const MAX_LIST: u64 = 8 << 20;
/// Most pages of a pipeline's jobs, 100 each.
const MAX_PAGES: u32 = 20;
/// Tries of a download that breaks off; it begins anew each time, since the address it was redirected to is valid for a minute.
const TRIES: u32 = 4;

/// What came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// The file.
    pub path: PathBuf,
    /// Its digest, computed while it came.
    pub sha256: Digest,
    /// Whether the forge said the same digest.
    pub announced: bool,
    /// Its bytes.
    pub bytes: u64,
}

/// Why there is none.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The environment lacks something: this is no job of that forge, or it has no token.
    #[error("{0} is not set")]
    Unset(&'static str),
    /// No answer, or none that is understood.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// The forge refuses.
    #[error("{place} answers {status}")]
    Status {
        /// The address without its query.
        place: String,
        /// The status.
        status: u16,
    },
    /// There is none of that name.
    #[error("{0}")]
    Missing(String),
    /// It is not what the forge says that it is.
    #[error("the forge says sha256 {expected}, but what came has {found}")]
    Digest {
        /// The forge's.
        expected: Digest,
        /// What came.
        found: Digest,
    },
    /// It can't be kept.
    #[error("failed to write the artifact")]
    Io(#[from] io::Error),
}

impl FetchError {
    /// The stable word for reports.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            FetchError::Digest { .. } => "sha256",
            _ => "not-fetched",
        }
    }

    /// What to do about it, in one line.
    #[must_use]
    pub fn help(&self, source: &ArtifactSource) -> &'static str {
        let github = matches!(source, ArtifactSource::GitHub { .. });
        match self {
            FetchError::Unset("GITHUB_TOKEN") => {
                "give the step `env: { GITHUB_TOKEN: ${{ github.token }} }` and the job `permissions: { actions: read }`"
            }
            FetchError::Status { status: 401 | 403 | 404, .. } if github => {
                "the job needs `permissions: { actions: read }`; look at the run's id"
            }
            FetchError::Status { status: 401 | 403 | 404, .. } => {
                "in one pipeline use `needs:` and name the path; a job's own token can't list a pipeline's jobs: set GITLAB_TOKEN with `read_api`, or name a ref"
            }
            FetchError::Unset(_) => "run this in a job of that forge, or name a path",
            FetchError::Missing(_) => "look at the artifact's name; the job that uploads it has to be done (`needs:`)",
            FetchError::Digest { .. } => "upload the artifact again",
            FetchError::Http(HttpError::TooLarge { .. }) => "upload less: what the step needs",
            _ => "look at the forge's address, HTTPS_PROXY and SSL_CERT_FILE, and run again",
        }
    }
}

/// Downloads what a step names into `directory`, as one file of at most `most` bytes. `progress` is told bytes that are here, and
/// all where that is known.
///
/// # Errors
/// As [`FetchError`] says; a source that is a path is [`FetchError::Missing`].
pub async fn fetch(
    source: &ArtifactSource,
    http: &Http,
    env: &Env,
    directory: &Path,
    most: u64,
    progress: &(dyn Fn(u64, Option<u64>) + Sync),
) -> Result<Fetched, FetchError> {
    let (request, announced) = match source {
        ArtifactSource::GitHub { name, run_id } => github(http, env, name, *run_id).await?,
        ArtifactSource::GitLab { job, reference } => (gitlab(http, env, job, reference.as_deref()).await?, None),
        ArtifactSource::Path(_) | ArtifactSource::PathWithDigest { .. } => {
            return Err(FetchError::Missing("it is a path of this host".to_owned()));
        }
    };
    let path = directory.join("download");
    let mut tries = 0;
    let (sha256, bytes) = loop {
        tries += 1;
        match download(http, request.clone(), &path, most, progress).await {
            Err(FetchError::Http(HttpError::Body { .. })) if tries < TRIES => {
                tracing::info!("the download of {source} broke off: trying again");
            }
            done => break done?,
        }
    };
    match announced {
        Some(expected) if expected != sha256 => Err(FetchError::Digest { expected, found: sha256 }),
        _ => Ok(Fetched { path, sha256, announced: announced.is_some(), bytes }),
    }
}

async fn download(
    http: &Http,
    request: Request,
    path: &Path,
    most: u64,
    progress: &(dyn Fn(u64, Option<u64>) + Sync),
) -> Result<(Digest, u64), FetchError> {
    let mut response = welcome(http.send(request).await?)?;
    let total = response.length();
    if total.is_some_and(|total| total > most) {
        return Err(HttpError::TooLarge { place: response.place().to_owned(), limit: most }.into());
    }
    let (mut file, mut hasher, mut bytes) = (File::create(path)?, Hasher::default(), 0);
    while let Some(piece) = response.chunk(most).await? {
        file.write_all(&piece)?;
        hasher.update(&piece);
        bytes += piece.len() as u64;
        progress(bytes, total);
    }
    Ok((hasher.finish(), bytes))
}

fn welcome(response: Response) -> Result<Response, FetchError> {
    if response.status.is_success() {
        return Ok(response);
    }
    Err(FetchError::Status { place: response.place().to_owned(), status: response.status.as_u16() })
}

fn set(env: &Env, var: Var) -> Result<&str, FetchError> {
    env.text(var).ok_or(FetchError::Unset(var.name()))
}

/// An address below another, each segment escaped.
fn below(base: &Url, segments: &[&str]) -> Result<Url, FetchError> {
    let mut url = base.clone();
    url.path_segments_mut()
        .map_err(|()| FetchError::Missing("the API's address can't have a path".to_owned()))?
        .pop_if_empty()
        .extend(segments);
    Ok(url)
}

#[derive(Deserialize)]
struct Artifacts {
    artifacts: Vec<Artifact>,
}

#[derive(Deserialize)]
struct Artifact {
    id: u64,
    name: String,
    #[serde(default)]
    expired: bool,
    digest: Option<String>,
}

/// The newest artifact of that name (<https://docs.github.com/en/rest/actions/artifacts>).
async fn github(http: &Http, env: &Env, name: &str, run: Option<u64>) -> Result<(Request, Option<Digest>), FetchError> {
    let base = http::base("GITHUB_API_URL", env.text(Var::GithubApiUrl).unwrap_or(GITHUB))?;
    let token = Secret::new(set(env, Var::GithubToken)?);
    let repository = set(env, Var::GithubRepository)?;
    let Some((owner, project)) = repository.split_once('/').filter(|(_, project)| !project.contains('/')) else {
        return Err(FetchError::Missing(format!("GITHUB_REPOSITORY is `{}`", shown(repository.as_bytes()))));
    };
    let run = match run {
        Some(run) => run,
        None => env.number(Var::GithubRunId).ok_or(FetchError::Unset(Var::GithubRunId.name()))?,
    };
    let actions = below(&base, &["repos", owner, project, "actions"])?;
    let mut list = below(&actions, &["runs", &run.to_string(), "artifacts"])?;
    list.query_pairs_mut().append_pair("name", name).append_pair("per_page", "100");
    let asked = |url| {
        Request::get(url)
            .bearer(&token)
            .header(ACCEPT, HeaderValue::from_static("application/vnd.github+json"))
            .header(HeaderName::from_static("x-github-api-version"), HeaderValue::from_static("2022-11-28"))
    };
    let found: Artifacts = welcome(http.send(asked(list)).await?)?.json(MAX_LIST).await?;
    let named = found.artifacts.into_iter().filter(|one| one.name == name);
    let (gone, mut there): (Vec<_>, Vec<_>) = named.partition(|one| one.expired);
    // A job that ran again has uploaded it again.
    there.sort_by_key(|one| one.id);
    let Some(one) = there.pop() else {
        let why = if gone.is_empty() { "has no artifact" } else { "has only an expired artifact" };
        return Err(FetchError::Missing(format!("the run {run} {why} `{}`", shown(name.as_bytes()))));
    };
    let digest =
        match one.digest.as_deref().map(|text| (text, text.strip_prefix("sha256:").and_then(|h| h.parse().ok()))) {
            None => None,
            Some((_, Some(digest))) => Some(digest),
            Some((text, None)) => {
                return Err(FetchError::Missing(format!("its digest `{}` is not understood", shown(text.as_bytes()))));
            }
        };
    let url = below(&actions, &["artifacts", &one.id.to_string(), "zip"])?;
    let request = Request::download(url).bearer(&token);
    Ok((
        request.header(HeaderName::from_static("x-github-api-version"), HeaderValue::from_static("2022-11-28")),
        digest,
    ))
}

#[derive(Deserialize)]
struct Job {
    id: u64,
    name: String,
    status: String,
}

/// A job's artifacts: of the latest good pipeline of a ref, or of this pipeline
/// (<https://docs.gitlab.com/api/job_artifacts/>).
async fn gitlab(http: &Http, env: &Env, job: &str, reference: Option<&str>) -> Result<Request, FetchError> {
    let base = http::base("CI_API_V4_URL", set(env, Var::CiApiV4Url)?)?;
    let project = below(&base, &["projects", set(env, Var::CiProjectId)?])?;
    let credential = |request: Request| -> Result<Request, FetchError> {
        Ok(match env.text(Var::GitlabToken) {
            Some(token) => request.credential(HeaderName::from_static("private-token"), Secret::new(token)),
            None => request.credential(HeaderName::from_static("job-token"), Secret::new(set(env, Var::CiJobToken)?)),
        })
    };
    if let Some(reference) = reference {
        let mut url = below(&project, &["jobs", "artifacts", reference, "download"])?;
        url.query_pairs_mut().append_pair("job", job);
        return credential(Request::download(url));
    }
    let pipeline = set(env, Var::CiPipelineId)?;
    for page in 1..=MAX_PAGES {
        let mut url = below(&project, &["pipelines", pipeline, "jobs"])?;
        url.query_pairs_mut().append_pair("per_page", "100").append_pair("page", &page.to_string());
        let jobs: Vec<Job> = welcome(http.send(credential(Request::get(url))?).await?)?.json(MAX_LIST).await?;
        if let Some(one) = jobs.iter().filter(|one| one.name == job).max_by_key(|one| one.id) {
            if one.status != "success" {
                let why = format!("the job `{}` is {}", shown(job.as_bytes()), shown(one.status.as_bytes()));
                return Err(FetchError::Missing(why));
            }
            let url = below(&project, &["jobs", &one.id.to_string(), "artifacts"])?;
            return credential(Request::download(url));
        }
        if jobs.len() < 100 {
            break;
        }
    }
    Err(FetchError::Missing(format!("the pipeline {pipeline} has no job `{}`", shown(job.as_bytes()))))
}

#[cfg(test)]
mod tests;
