//! GitLab's API, as much of it as is used: notes on merge requests, and commit statuses.
//!
//! The address is `CI_API_V4_URL` whole, so that an instance below a sub-path works. Written against the documentation
//! (<https://docs.gitlab.com/api/notes/>, <https://docs.gitlab.com/api/commits/#set-the-commit-status>). A job's own token can
//! do none of this: its list of endpoints (<https://docs.gitlab.com/ci/jobs/ci_job_token/>) has neither.

use http::{HeaderName, Method, StatusCode};
use reqwest::Url;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::http::{self as client, Http, HttpError, Request, Secret};
use crate::env::{Env, Var};
use crate::text::Untrusted;

/// Largest answer read, bytes: a hundred notes of the greatest length GitLab takes.
const MAX_ANSWER: u64 = 128 * 1024 * 1024;
/// Notes on one page. Fewer than GitLab's greatest number, since notes can be long.
pub const PER_PAGE: usize = 50;
/// The header of access tokens.
const PRIVATE_TOKEN: HeaderName = HeaderName::from_static("private-token");

/// Why a call came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// GitLab answered, and the answer is no.
    #[error("{method} {place} was answered {status}: {message}")]
    Refused {
        /// The method.
        method: Method,
        /// Address without query.
        place: String,
        /// The status.
        status: StatusCode,
        /// What GitLab said about it: one line, cleaned.
        message: String,
    },
    /// No answer came, or one that is not understood.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// The environment does not say where to write.
    #[error("{0}")]
    Unknown(String),
}

impl ApiError {
    /// The status, where GitLab answered.
    #[must_use]
    pub const fn status(&self) -> Option<StatusCode> {
        match self {
            ApiError::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }
}

/// A user or bot, as an author.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Account {
    /// Its number.
    pub id: u64,
}

/// A note on a merge request.
#[derive(Debug, Clone, Deserialize)]
pub struct Note {
    /// Its number; a greater one is newer.
    pub id: u64,
    /// Its text.
    #[serde(default)]
    pub body: String,
    /// Who wrote it.
    #[serde(default)]
    pub author: Option<Account>,
    /// GitLab wrote it about something that happened.
    #[serde(default)]
    pub system: bool,
}

/// A commit status that was set.
#[derive(Debug, Clone, Deserialize)]
pub struct Made {
    /// Its number.
    #[serde(default)]
    pub id: Option<u64>,
}

/// GitLab's API.
#[derive(Debug, Clone)]
pub struct Gitlab {
    http: Http,
    base: Url,
    token: Secret,
}

impl Gitlab {
    /// The API that the environment names, with its token.
    ///
    /// # Errors
    /// If there is no token, or the address is none.
    pub fn new(env: &Env, http: Http) -> Result<Self, ApiError> {
        let unknown = |text: &str| ApiError::Unknown(text.to_owned());
        let token = env.text(Var::GitlabToken).ok_or_else(|| unknown("there is no token: GITLAB_TOKEN is not set"))?;
        let base = env.text(Var::CiApiV4Url).ok_or_else(|| unknown("CI_API_V4_URL is not set"))?;
        let mut base = client::base("CI_API_V4_URL", base)?;
        // What is joined to it goes below it.
        base.set_path(&format!("{}/", base.path().trim_end_matches('/')));
        Ok(Self { http, base, token: Secret::new(token) })
    }

    /// The account that the token belongs to.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn me(&self) -> Result<Account, ApiError> {
        self.call(Method::GET, "user", &[], None).await
    }

    /// One page, from 1, of a merge request's notes, the oldest first.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn notes(&self, project: u64, request: u64, page: usize) -> Result<Vec<Note>, ApiError> {
        let (size, page) = (PER_PAGE.to_string(), page.to_string());
        let query = [("per_page", size.as_str()), ("page", &page), ("order_by", "created_at"), ("sort", "asc")];
        self.call(Method::GET, &notes(project, request), &query, None).await
    }

    /// A note.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn note(&self, project: u64, request: u64, id: u64) -> Result<Note, ApiError> {
        self.call(Method::GET, &format!("{}/{id}", notes(project, request)), &[], None).await
    }

    /// Writes a note.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn create_note(&self, project: u64, request: u64, body: &str) -> Result<Note, ApiError> {
        self.call(Method::POST, &notes(project, request), &[], Some(json!({"body": body}))).await
    }

    /// Writes a note anew.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn update_note(&self, project: u64, request: u64, id: u64, body: &str) -> Result<Note, ApiError> {
        let path = format!("{}/{id}", notes(project, request));
        self.call(Method::PUT, &path, &[], Some(json!({"body": body}))).await
    }

    /// Removes a note.
    ///
    /// # Errors
    /// If the call fails; one that is gone already is none.
    pub async fn delete_note(&self, project: u64, request: u64, id: u64) -> Result<(), ApiError> {
        let path = format!("{}/{id}", notes(project, request));
        match self.send(Method::DELETE, &path, &[], None).await {
            Ok(_) => Ok(()),
            Err(error) if error.status() == Some(StatusCode::NOT_FOUND) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Sets a commit's status.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn set_status(&self, project: u64, sha: &str, status: Value) -> Result<Made, ApiError> {
        self.call(Method::POST, &format!("projects/{project}/statuses/{sha}"), &[], Some(status)).await
    }

    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, &str)],
        body: Option<Value>,
    ) -> Result<T, ApiError> {
        Ok(self.send(method, path, query, body).await?.json(MAX_ANSWER).await?)
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, &str)],
        body: Option<Value>,
    ) -> Result<client::Response, ApiError> {
        let joined = self.base.join(path).map_err(|e| ApiError::Unknown(format!("{path} is no path: {e}")));
        let mut url = joined?;
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let mut request = Request::new(method.clone(), url).credential(PRIVATE_TOKEN, self.token.clone());
        if let Some(body) = &body {
            request = request.json(body);
        }
        let response = self.http.send(request).await?;
        if response.status.is_success() {
            return Ok(response);
        }
        let (place, status) = (response.place().to_owned(), response.status);
        let body = response.bytes(MAX_ANSWER).await?;
        Err(ApiError::Refused { method, place, status, message: self.token.hide(&message(&body)) })
    }
}

fn notes(project: u64, request: u64) -> String {
    format!("projects/{project}/merge_requests/{request}/notes")
}

/// What a refusal says: `{"message": …}` (a text, or an object of them), `{"error": …}`, or the text itself.
fn message(body: &[u8]) -> String {
    let parsed = serde_json::from_slice::<Value>(body).ok();
    let found =
        parsed.as_ref().and_then(|v| v.get("message").or_else(|| v.get("error_description")).or(v.get("error")));
    let text = match found {
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => String::from_utf8_lossy(body).into_owned(),
    };
    Untrusted::new(text.trim()).for_terminal(300)
}
