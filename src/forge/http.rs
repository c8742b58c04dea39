//! The one HTTP client: for forges' APIs, artifacts and redirects to where they are stored.
//!
//! [`Http`] is made once from the environment's snapshot ([`Env`]): proxies and roots come from there. TLS is rustls with ring;
//! roots are the system's, or those of `SSL_CERT_FILE`; names are resolved without the C library, which can't load its modules
//! into a static program. [`Http::send`] gives whatever answer comes, after as many tries as [`Patience`] allows; a body
//! is read under a limit that the reader names.
//!
//! Servers are not trusted with more than the credential that belongs to them: a redirect to another origin is followed
//! without it, and for reading only. No error text holds a credential, a query or a proxy's password.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
pub use reqwest::Url;
use serde::de::DeserializeOwned;

use crate::env::{Env, Var};

mod patience;
mod roots;

pub use patience::{Patience, is_rate_limit};

/// Longest time to a connection.
const CONNECT: Duration = Duration::from_secs(15);
/// Longest silence while an answer is read.
const SILENCE: Duration = Duration::from_secs(30);
/// Longest time for one try of a request to an API, its answer's head included.
const ANSWER: Duration = Duration::from_secs(60);
/// Redirects followed of one request.
const MAX_REDIRECTS: usize = 5;
/// Bytes read of an answer that is a refusal.
const MAX_REFUSAL: usize = 64 * 1024;

/// A value that is shown nowhere.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps it.
    #[must_use]
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The value, to be handed to whom it is meant for.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// A text of the other side's, which may repeat what it was sent, without the value.
    #[must_use]
    pub fn hide(&self, text: &str) -> String {
        if self.0.is_empty() { text.to_owned() } else { text.replace(&self.0, "***") }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Why there is no answer. An answer with an unwelcome status is none of these.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// An address that can't be used.
    #[error("{what} is no address that can be used: {why}")]
    Address {
        /// Which.
        what: String,
        /// Why.
        why: String,
    },
    /// `SSL_CERT_FILE` can't be used.
    #[error("failed to read the certificates in {} (SSL_CERT_FILE)", path.display())]
    Roots {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The client could not be made.
    #[error("failed to set up HTTPS")]
    Client(#[source] reqwest::Error),
    /// No answer came.
    #[error("no answer to {method} {place}")]
    Send {
        /// The method.
        method: Method,
        /// Address without query.
        place: String,
        /// Why; without the address.
        #[source]
        source: reqwest::Error,
    },
    /// The answer broke off.
    #[error("the answer of {place} broke off")]
    Body {
        /// Address without query.
        place: String,
        /// Why; without the address.
        #[source]
        source: reqwest::Error,
    },
    /// The answer is longer than its reader allows.
    #[error("the answer of {place} has more than {limit} bytes")]
    TooLarge {
        /// Address without query.
        place: String,
        /// The limit, bytes.
        limit: u64,
    },
    /// The answer is not what the reader expects.
    #[error("the answer of {place} is not understood")]
    Shape {
        /// Address without query.
        place: String,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// A redirect that is not followed.
    #[error("{place} redirects {why}")]
    Redirect {
        /// Address without query.
        place: String,
        /// What is wrong with it.
        why: String,
    },
}

/// One request. Its credential goes to the origin of its address only.
#[derive(Debug, Clone)]
pub struct Request {
    method: Method,
    url: Url,
    headers: HeaderMap,
    credential: Option<(HeaderName, Secret)>,
    body: Option<Bytes>,
    timeout: Option<Duration>,
}

impl Request {
    /// A request without body. An answer's head has to come within a minute.
    #[must_use]
    pub fn new(method: Method, url: Url) -> Self {
        Self { method, url, headers: HeaderMap::new(), credential: None, body: None, timeout: Some(ANSWER) }
    }

    /// A request that reads.
    #[must_use]
    pub fn get(url: Url) -> Self {
        Self::new(Method::GET, url)
    }

    /// A request whose answer may take as long as bytes keep coming: a download.
    #[must_use]
    pub fn download(url: Url) -> Self {
        Self { timeout: None, ..Self::get(url) }
    }

    /// Adds a header that is no secret.
    #[must_use]
    pub fn header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.insert(name, value);
        self
    }

    /// Sends `name: value` to the address's own origin, and to no other that it redirects to.
    #[must_use]
    pub fn credential(mut self, name: HeaderName, value: Secret) -> Self {
        self.credential = Some((name, value));
        self
    }

    /// `Authorization: Bearer …`, as [`Request::credential`].
    #[must_use]
    pub fn bearer(self, token: &Secret) -> Self {
        self.credential(header::AUTHORIZATION, Secret::new(format!("Bearer {}", token.expose())))
    }

    /// A body, and what it is.
    #[must_use]
    pub fn body(mut self, kind: HeaderValue, body: impl Into<Bytes>) -> Self {
        self.headers.insert(header::CONTENT_TYPE, kind);
        self.body = Some(body.into());
        self
    }

    /// A JSON body.
    #[must_use]
    pub fn json(self, body: &serde_json::Value) -> Self {
        self.body(HeaderValue::from_static("application/json"), body.to_string())
    }

    fn to_client(&self, credential: bool) -> Result<reqwest::Request, HttpError> {
        let mut request = reqwest::Request::new(self.method.clone(), self.url.clone());
        *request.headers_mut() = self.headers.clone();
        *request.timeout_mut() = self.timeout;
        if let (Some((name, secret)), true) = (&self.credential, credential) {
            let mut value = HeaderValue::from_str(secret.expose()).map_err(|_| HttpError::Address {
                what: format!("the token for {}", place(&self.url)),
                why: "it holds characters that no header may hold".to_owned(),
            })?;
            value.set_sensitive(true);
            request.headers_mut().insert(name.clone(), value);
        }
        *request.body_mut() = self.body.clone().map(reqwest::Body::from);
        Ok(request)
    }
}

/// An answer: status and headers, and a body that is read under a limit.
#[derive(Debug)]
pub struct Response {
    /// Its status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    place: String,
    /// What was read of the body already.
    ahead: Option<Bytes>,
    rest: Option<reqwest::Response>,
    read: u64,
}

impl Response {
    fn new(url: &Url, response: reqwest::Response) -> Self {
        let (status, headers) = (response.status(), response.headers().clone());
        Self { status, headers, place: place(url), ahead: None, rest: Some(response), read: 0 }
    }

    /// Where it came from: the address without its query.
    #[must_use]
    pub fn place(&self) -> &str {
        &self.place
    }

    /// How long the body claims to be, bytes.
    #[must_use]
    pub fn length(&self) -> Option<u64> {
        self.headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
    }

    /// The body's next piece; `None` at its end.
    ///
    /// # Errors
    /// If it breaks off, or there were more than `limit` bytes by now.
    pub async fn chunk(&mut self, limit: u64) -> Result<Option<Bytes>, HttpError> {
        let piece = match (self.ahead.take(), &mut self.rest) {
            (Some(ahead), _) => Some(ahead),
            (None, Some(rest)) => rest
                .chunk()
                .await
                .map_err(|e| HttpError::Body { place: self.place.clone(), source: e.without_url() })?,
            (None, None) => None,
        };
        self.read += piece.as_ref().map_or(0, |p| p.len() as u64);
        if self.read > limit {
            return Err(HttpError::TooLarge { place: self.place.clone(), limit });
        }
        Ok(piece)
    }

    /// The whole body.
    ///
    /// # Errors
    /// As [`Response::chunk`].
    pub async fn bytes(mut self, limit: u64) -> Result<Bytes, HttpError> {
        let mut whole = Vec::new();
        while let Some(piece) = self.chunk(limit).await? {
            whole.extend_from_slice(&piece);
        }
        Ok(whole.into())
    }

    /// The whole body as JSON.
    ///
    /// # Errors
    /// As [`Response::chunk`], or if it is no such JSON.
    pub async fn json<T: DeserializeOwned>(self, limit: u64) -> Result<T, HttpError> {
        let place = self.place.clone();
        let body = self.bytes(limit).await?;
        serde_json::from_slice(&body).map_err(|source| HttpError::Shape { place, source })
    }

    /// Reads the body of a refusal ahead, as far as it is read at all.
    async fn read_refusal(&mut self) -> &[u8] {
        let mut whole = Vec::new();
        while let Some(Ok(Some(piece))) = match &mut self.rest {
            Some(rest) => Some(rest.chunk().await),
            None => None,
        } {
            whole.extend_from_slice(&piece);
            if whole.len() > MAX_REFUSAL {
                whole.truncate(MAX_REFUSAL);
                break;
            }
        }
        self.rest = None;
        self.ahead.insert(whole.into())
    }
}

/// The client.
#[derive(Debug, Clone)]
pub struct Http {
    client: reqwest::Client,
    patience: Patience,
}

impl Http {
    /// A client with the environment's proxies and roots, and [`Patience::default`].
    ///
    /// # Errors
    /// If a proxy's address or `SSL_CERT_FILE` can't be used.
    pub fn new(env: &Env) -> Result<Self, HttpError> {
        // Whoever else builds a client in this process gets the same; the first to come sets it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = reqwest::Client::builder()
            .user_agent(concat!("plimsoll/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none())
            .referer(false)
            .connect_timeout(CONNECT)
            .read_timeout(SILENCE)
            .no_proxy();
        for proxy in proxies(env)? {
            builder = builder.proxy(proxy);
        }
        builder = roots::given(env, builder)?;
        let client = builder.build().map_err(HttpError::Client)?;
        Ok(Self { client, patience: Patience::default() })
    }

    /// The same client with other patience.
    #[must_use]
    pub fn with_patience(self, patience: Patience) -> Self {
        Self { patience, ..self }
    }

    /// Sends a request, again where that may help, and gives the last answer: one with an unwelcome status as well.
    ///
    /// # Errors
    /// If no answer came, or it redirects to where it must not.
    pub async fn send(&self, request: Request) -> Result<Response, HttpError> {
        let begun = Instant::now();
        let mut tries = 0;
        loop {
            tries += 1;
            let mut answer = self.follow(request.clone()).await;
            let wait = match &mut answer {
                Ok(response) if response.status.is_success() => None,
                Ok(response) => {
                    let status = response.status;
                    let headers = response.headers.clone();
                    self.patience.after_answer(tries, status, &headers, response.read_refusal().await)
                }
                Err(HttpError::Send { source, .. }) if !source.is_builder() => self.patience.after_silence(tries),
                Err(_) => None,
            };
            match wait {
                Some(wait) if begun.elapsed() + wait <= self.patience.whole => {
                    let shown = place(&request.url);
                    tracing::info!("{} {shown}: trying again in {} s", request.method, wait.as_secs());
                    tokio::time::sleep(wait).await;
                }
                _ => return answer,
            }
        }
    }

    /// One try, through redirects.
    async fn follow(&self, mut request: Request) -> Result<Response, HttpError> {
        let origin = request.url.origin();
        for _ in 0..=MAX_REDIRECTS {
            let own = request.url.origin() == origin;
            let sent = self.client.execute(request.to_client(own)?).await;
            let response = sent.map_err(|e| HttpError::Send {
                method: request.method.clone(),
                place: place(&request.url),
                source: e.without_url(),
            })?;
            let response = Response::new(&request.url, response);
            match target(&request, &response)? {
                None => return Ok(response),
                Some(next) => request.url = next,
            }
        }
        Err(HttpError::Redirect { place: place(&request.url), why: "too often".to_owned() })
    }
}

/// Where an answer sends the request on to, if it does. It is sent as it was: that is what GitHub asks for when a
/// repository was renamed (<https://docs.github.com/en/rest/using-the-rest-api/best-practices-for-using-the-rest-api>).
fn target(request: &Request, response: &Response) -> Result<Option<Url>, HttpError> {
    let redirect = |why: &str| HttpError::Redirect { place: place(&request.url), why: why.to_owned() };
    let reads = request.method == Method::GET || request.method == Method::HEAD;
    match response.status.as_u16() {
        301 | 302 | 307 | 308 => {}
        303 if reads => {}
        303 => return Err(redirect("to a page about it instead of doing it")),
        _ => return Ok(None),
    }
    let location = response.headers.get(header::LOCATION).and_then(|l| l.to_str().ok());
    let location = location.ok_or_else(|| redirect("to no address"))?;
    let next = request.url.join(location).map_err(|_| redirect("to something that is no address"))?;
    if !matches!(next.scheme(), "http" | "https") || !next.username().is_empty() || next.password().is_some() {
        return Err(redirect("to an address that can't be used"));
    }
    if request.url.scheme() == "https" && next.scheme() != "https" {
        return Err(redirect("from HTTPS to an address without"));
    }
    if next.origin() != request.url.origin() && !reads {
        return Err(redirect("what was to be written to another host"));
    }
    Ok(Some(next))
}

/// An address without what may be secret in it: user, password, query, fragment.
#[must_use]
pub fn place(url: &Url) -> String {
    let mut url = url.clone();
    let _ = url.set_username("");
    let _ = url.set_password(None);
    url.set_query(None);
    url.set_fragment(None);
    url.to_string()
}

/// Reads the address of an API: `https`, or `http` for those who run it so, without user, query or fragment.
///
/// # Errors
/// If it is none.
pub fn base(what: &str, text: &str) -> Result<Url, HttpError> {
    let bad = |why: &str| HttpError::Address { what: what.to_owned(), why: why.to_owned() };
    let url = Url::parse(text).map_err(|e| bad(&e.to_string()))?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return Err(bad("it is neither http:// nor https://"));
    }
    if !url.username().is_empty() || url.password().is_some() || url.query().is_some() || url.fragment().is_some() {
        return Err(bad("it has more than a host and a path"));
    }
    Ok(url)
}

/// Proxies as curl and most others read them from the environment. The uppercase `HTTP_PROXY` is left out where a CGI
/// server could have set it from a request's header.
fn proxies(env: &Env) -> Result<Vec<reqwest::Proxy>, HttpError> {
    let first = |vars: [Var; 2]| vars.into_iter().find_map(|var| Some((var, env.text(var)?)));
    let none = first([Var::NoProxyLower, Var::NoProxy]).and_then(|(_, list)| reqwest::NoProxy::from_string(list));
    let all = [Var::AllProxyLower, Var::AllProxy];
    let http = first([Var::HttpProxyLower, Var::HttpProxy]).or_else(|| first(all));
    let https = first([Var::HttpsProxyLower, Var::HttpsProxy]).or_else(|| first(all));
    let made = |(var, text): (Var, &str), make: fn(&str) -> reqwest::Result<reqwest::Proxy>| {
        // The cause may repeat the address, and that may hold a password.
        let proxy = make(text).map_err(|_| HttpError::Address {
            what: format!("the value of {}", var.name()),
            why: "write http://host:port".to_owned(),
        })?;
        Ok(proxy.no_proxy(none.clone()))
    };
    let http = http.map(|found| made(found, |url| reqwest::Proxy::http(url)));
    let https = https.map(|found| made(found, |url| reqwest::Proxy::https(url)));
    [http, https].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests;
