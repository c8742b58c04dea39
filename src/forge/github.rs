//! GitHub's API, as much of it as is used: comments, statuses, check runs, pull requests.
//!
//! [`Github`] is octocrab over our own [`Http`] client: requests are made and answers read by octocrab, and everything that
//! has to be bounded is bounded below it. Answers are read into types that hold only what is used, so that a field that GitHub
//! adds, drops or sets to null (the author of a comment whose account is gone) is no fault.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{HeaderValue, StatusCode, header};
use http_body_util::BodyExt;
use octocrab::{AuthState, OctoBody, Octocrab, OctocrabBuilder};
use reqwest::Url;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::context::is_repository;
use super::http::{self as client, Http, HttpError, Request, Secret};
use crate::env::{Env, Var};
use crate::text::Untrusted;

/// Where the API is, if nothing says otherwise.
const API: &str = "https://api.github.com";
/// The version of the API that is asked for. Servers that don't know it answer in the oldest they have.
const VERSION: &str = "2022-11-28";
/// Largest answer read, bytes: a hundred comments of the greatest length.
const MAX_ANSWER: u64 = 64 * 1024 * 1024;
/// Things on one page.
pub const PER_PAGE: usize = 100;

/// Why a call came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// GitHub answered, and the answer is no.
    #[error("{method} {place} was answered {status}: {message}")]
    Refused {
        /// The method.
        method: String,
        /// Address without query.
        place: String,
        /// The status.
        status: StatusCode,
        /// What GitHub said about it: one line, cleaned.
        message: String,
        /// It is a rate limit.
        limited: bool,
    },
    /// No answer came.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// The answer was not understood.
    #[error("{method} {place} was answered with something else than expected")]
    Shape {
        /// The method.
        method: String,
        /// Address without query.
        place: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The environment does not say where to write, or its token is none.
    #[error("{0}")]
    Unknown(String),
}

impl ApiError {
    /// The status, where GitHub answered.
    #[must_use]
    pub const fn status(&self) -> Option<StatusCode> {
        match self {
            ApiError::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }
}

/// A user or app, as an author.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Account {
    /// Its number.
    pub id: u64,
    /// Its name.
    pub login: String,
}

/// A comment on an issue or pull request.
#[derive(Debug, Clone, Deserialize)]
pub struct Comment {
    /// Its number; a greater one is newer.
    pub id: u64,
    /// Its text.
    #[serde(default)]
    pub body: Option<String>,
    /// Who wrote it; nobody if the account is gone.
    #[serde(default)]
    pub user: Option<Account>,
    /// Link to it.
    #[serde(default)]
    pub html_url: Option<String>,
}

/// Something that has a link.
#[derive(Debug, Clone, Deserialize)]
pub struct Made {
    /// Its number.
    #[serde(default)]
    pub id: Option<u64>,
    /// Link for people.
    #[serde(default)]
    pub html_url: Option<String>,
}

/// A pull request.
#[derive(Debug, Clone, Deserialize)]
pub struct Pull {
    /// Its number.
    pub number: u64,
    /// `open` or `closed`.
    #[serde(default)]
    pub state: Option<String>,
    /// The commit it asks to merge.
    pub head: Head,
}

/// The commit that a pull request asks to merge.
#[derive(Debug, Clone, Deserialize)]
pub struct Head {
    /// Its id.
    pub sha: String,
}

/// GitHub's API for one repository.
#[derive(Debug, Clone)]
pub struct Github {
    crab: Octocrab,
    base: String,
    repository: String,
    token: Secret,
}

impl Github {
    /// The API that the environment names, with its token.
    ///
    /// # Errors
    /// If there is no token or no repository, or the address is none.
    pub fn new(env: &Env, http: Http) -> Result<Self, ApiError> {
        let unknown = |text: &str| ApiError::Unknown(text.to_owned());
        let token = env.text(Var::GithubToken).ok_or_else(|| unknown("there is no token: GITHUB_TOKEN is not set"))?;
        let repository = env.text(Var::GithubRepository).filter(|name| is_repository(name));
        let repository = repository.ok_or_else(|| unknown("GITHUB_REPOSITORY names no repository"))?;
        let base = client::base("GITHUB_API_URL", env.text(Var::GithubApiUrl).unwrap_or(API))?;
        let base = base.as_str().trim_end_matches('/').to_owned();
        let service = Service { http, base: base.clone(), token: Secret::new(token) };
        let built = OctocrabBuilder::new_empty().with_service(service).with_auth(AuthState::None).build();
        let crab = built.unwrap_or_else(|never| match never {});
        Ok(Self { crab, base, repository: repository.to_owned(), token: Secret::new(token) })
    }

    /// `owner/name`.
    #[must_use]
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The account that the token belongs to; `None` for a token of an installation, which is none's.
    ///
    /// # Errors
    /// If the call fails for another reason than that.
    pub async fn me(&self) -> Result<Option<Account>, ApiError> {
        match self.get("/user".to_owned(), &[]).await {
            Ok(account) => Ok(Some(account)),
            Err(ApiError::Refused {
                status: StatusCode::FORBIDDEN | StatusCode::NOT_FOUND, limited: false, ..
            }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// One page, from 1, of a pull request's comments, the oldest first.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn comments(&self, number: u64, page: usize) -> Result<Vec<Comment>, ApiError> {
        let (size, page) = (PER_PAGE.to_string(), page.to_string());
        self.get(self.path(&format!("issues/{number}/comments")), &[("per_page", &size), ("page", &page)]).await
    }

    /// A comment.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn comment(&self, id: u64) -> Result<Comment, ApiError> {
        self.get(self.path(&format!("issues/comments/{id}")), &[]).await
    }

    /// Writes a comment.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn create_comment(&self, number: u64, body: &str) -> Result<Comment, ApiError> {
        self.write("POST", self.path(&format!("issues/{number}/comments")), &json!({"body": body})).await
    }

    /// Writes a comment anew.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn update_comment(&self, id: u64, body: &str) -> Result<Comment, ApiError> {
        self.write("PATCH", self.path(&format!("issues/comments/{id}")), &json!({"body": body})).await
    }

    /// Removes a comment.
    ///
    /// # Errors
    /// If the call fails; one that is gone already is none.
    pub async fn delete_comment(&self, id: u64) -> Result<(), ApiError> {
        let path = self.path(&format!("issues/comments/{id}"));
        let sent = match self.crab._delete(path.clone(), None::<&()>).await {
            Ok(response) => octocrab::map_github_error(response).await,
            Err(error) => Err(error),
        };
        match sent.map_err(|e| self.error("DELETE", &path, e)) {
            Ok(_) => Ok(()),
            Err(ApiError::Refused { status: StatusCode::NOT_FOUND, .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Sets a commit's status.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn create_status(&self, sha: &str, status: &Value) -> Result<Made, ApiError> {
        self.write("POST", self.path(&format!("statuses/{sha}")), status).await
    }

    /// Makes a check run.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn create_check(&self, check: &Value) -> Result<Made, ApiError> {
        self.write("POST", self.path("check-runs"), check).await
    }

    /// Changes a check run; annotations are added to those it has.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn update_check(&self, id: u64, check: &Value) -> Result<Made, ApiError> {
        self.write("PATCH", self.path(&format!("check-runs/{id}")), check).await
    }

    /// A pull request.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn pull(&self, number: u64) -> Result<Pull, ApiError> {
        self.get(self.path(&format!("pulls/{number}")), &[]).await
    }

    /// Pull requests that a commit belongs to.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn pulls_of_commit(&self, sha: &str) -> Result<Vec<Pull>, ApiError> {
        self.get(self.path(&format!("commits/{sha}/pulls")), &[("per_page", "100")]).await
    }

    /// Open pull requests from a branch, `owner:branch`; of a fork as well.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn pulls_from(&self, head: &str) -> Result<Vec<Pull>, ApiError> {
        self.get(self.path("pulls"), &[("state", "open"), ("head", head), ("per_page", "100")]).await
    }

    fn path(&self, rest: &str) -> String {
        format!("/repos/{}/{rest}", self.repository)
    }

    async fn get<T: DeserializeOwned + 'static>(&self, path: String, query: &[(&str, &str)]) -> Result<T, ApiError> {
        let sent = self.crab.get::<T, _, _>(path.clone(), Some(query)).await;
        sent.map_err(|e| self.error("GET", &path, e))
    }

    async fn write<T: DeserializeOwned + 'static>(
        &self,
        method: &str,
        path: String,
        body: &(impl Serialize + ?Sized),
    ) -> Result<T, ApiError> {
        let sent = match method {
            "PATCH" => self.crab.patch::<T, _, _>(path.clone(), Some(body)).await,
            _ => self.crab.post::<_, T>(path.clone(), Some(body)).await,
        };
        sent.map_err(|e| self.error(method, &path, e))
    }

    /// What octocrab's error comes down to, without its backtraces.
    fn error(&self, method: &str, path: &str, error: octocrab::Error) -> ApiError {
        let place = format!("{}{path}", self.base);
        match error {
            octocrab::Error::GitHub { source, .. } => {
                let detail = source.errors.iter().flatten().take(3).map(detail).collect::<Vec<_>>().join("; ");
                let text = [source.message.as_str(), &detail].join(" ");
                let none = http::HeaderMap::new();
                let headers = source.headers.as_ref().unwrap_or(&none);
                ApiError::Refused {
                    method: method.to_owned(),
                    place,
                    status: source.status_code,
                    message: Untrusted::new(self.token.hide(text.trim())).for_terminal(300),
                    limited: client::is_rate_limit(source.status_code, headers, source.message.as_bytes()),
                }
            }
            octocrab::Error::Service { source, .. } => match source.downcast::<HttpError>() {
                Ok(http) => ApiError::Http(*http),
                Err(source) => ApiError::Shape { method: method.to_owned(), place, source },
            },
            octocrab::Error::Json { source, .. } => ApiError::Shape {
                method: method.to_owned(),
                place,
                source: format!("at {}: {}", source.path(), source.inner()).into(),
            },
            other => {
                // Its own text may end in a backtrace.
                let text = other.to_string();
                let source = text.lines().next().unwrap_or_default().to_owned().into();
                ApiError::Shape { method: method.to_owned(), place, source }
            }
        }
    }
}

/// One entry of `errors`: `{"resource": …, "field": …, "code": …, "message": …}`, or a text.
fn detail(error: &Value) -> String {
    match error {
        Value::String(text) => text.clone(),
        other => {
            let part = |name: &str| other.get(name).and_then(Value::as_str);
            let parts = [part("field"), part("code"), part("message")];
            parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
        }
    }
}

/// octocrab's requests, sent by our client.
#[derive(Debug, Clone)]
struct Service {
    http: Http,
    base: String,
    token: Secret,
}

impl tower_service::Service<http::Request<OctoBody>> for Service {
    type Response = http::Response<reqwest::Body>;
    type Error = Box<dyn std::error::Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<OctoBody>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let path = parts.uri.path_and_query().map_or("/", |p| p.as_str());
            let url = Url::parse(&format!("{}{path}", service.base))?;
            let mut sent = Request::new(parts.method, url)
                .header(header::ACCEPT, HeaderValue::from_static("application/vnd.github+json, application/json"))
                .header(header::HeaderName::from_static("x-github-api-version"), HeaderValue::from_static(VERSION))
                .bearer(&service.token);
            let body = body.collect().await?.to_bytes();
            if !body.is_empty() {
                sent = sent.body(HeaderValue::from_static("application/json"), body);
            }
            let response = service.http.send(sent).await?;
            let mut answer = http::Response::builder().status(response.status);
            if let Some(headers) = answer.headers_mut() {
                *headers = response.headers.clone();
            }
            // All of it, so that the limit holds and what breaks off is told by its own name.
            let body = response.bytes(MAX_ANSWER).await?;
            Ok(answer.body(reqwest::Body::from(body))?)
        })
    }
}
