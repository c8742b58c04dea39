//! An access token in exchange for an identity token, as Docker's specification has it
//! (<https://distribution.github.io/distribution/spec/auth/oauth/>).
//!
//! The identity token goes to the realm that the registry itself names, over TLS or to this host, and follows no redirect.

use std::net::IpAddr;
use std::time::Duration;

use http_auth::parse_challenges;
use reqwest::header::WWW_AUTHENTICATE;
use reqwest::redirect::Policy;
use reqwest::{Client, Response, StatusCode, Url};
use serde::Deserialize;

use super::pull::{CONNECT, SILENCE, Trouble};
use super::{Failure, Kind};

/// Longest answer of a token server, bytes.
const MAX_ANSWER: usize = 1 << 20;
/// Longest time for a request and its answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a registry asks for.
struct Challenge {
    realm: Url,
    service: String,
}

#[derive(Deserialize)]
struct Granted {
    access_token: String,
}

/// An access token to pull that repository; none where the registry at `base` (`https://HOST`) asks for nothing.
///
/// # Errors
/// If the registry takes no such tokens, or its token server refuses this one.
pub(super) async fn access_token(base: &str, repository: &str, identity: &str) -> Result<Option<String>, Trouble> {
    let client = Client::builder()
        .user_agent(concat!("plimsoll/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT)
        .read_timeout(SILENCE)
        .timeout(PATIENCE)
        .redirect(Policy::none());
    let client = client.build().map_err(|e| Trouble::Final(Failure::new(Kind::Local, crate::text::chain(&e))))?;
    let answer = client.get(format!("{base}/v2/")).send().await.map_err(unreachable)?;
    if answer.status().is_success() {
        return Ok(None);
    }
    if answer.status() != StatusCode::UNAUTHORIZED {
        return Err(refused("the registry", answer.status()));
    }
    let Challenge { realm, service } = challenge(&answer)?;
    let scope = format!("repository:{repository}:pull");
    let form = [
        ("grant_type", "refresh_token"),
        ("service", &service),
        ("client_id", "plimsoll"),
        ("scope", &scope),
        ("refresh_token", identity),
    ];
    let mut answer = client.post(realm).form(&form).send().await.map_err(unreachable)?;
    if !answer.status().is_success() {
        return Err(refused("the token server", answer.status()));
    }
    let mut text = Vec::new();
    while let Some(bytes) = answer.chunk().await.map_err(unreachable)? {
        text.extend_from_slice(&bytes);
        if text.len() > MAX_ANSWER {
            let why = format!("the token server answers with more than {MAX_ANSWER} bytes");
            return Err(Trouble::Final(Failure::new(Kind::Hostile, why)));
        }
    }
    // What is wrong with the answer is not said: it may hold a token.
    let granted: Granted = serde_json::from_slice(&text)
        .map_err(|_| Trouble::Final(Failure::new(Kind::Hostile, "the token server answers with no access token")))?;
    Ok(Some(granted.access_token))
}

fn challenge(answer: &Response) -> Result<Challenge, Trouble> {
    let unauthorized = |why: &str| Trouble::Final(Failure::new(Kind::Unauthorized, why));
    let texts = answer.headers().get_all(WWW_AUTHENTICATE).into_iter().filter_map(|value| value.to_str().ok());
    let bearer = texts.flat_map(|text| parse_challenges(text).unwrap_or_default());
    let bearer = bearer.into_iter().find(|one| one.scheme.eq_ignore_ascii_case("Bearer"));
    let bearer = bearer.ok_or_else(|| unauthorized("the registry takes a name and a password, no identity token"))?;
    let param = |wanted: &str| {
        let value = bearer.params.iter().find(|(name, _)| name.eq_ignore_ascii_case(wanted))?;
        Some(value.1.to_unescaped())
    };
    let realm = param("realm").and_then(|realm| Url::parse(&realm).ok());
    let realm = realm.ok_or_else(|| unauthorized("the registry names no token server"))?;
    let host = realm.host_str().unwrap_or_default();
    let loopback =
        host == "localhost" || host.trim_matches(['[', ']']).parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
    if realm.scheme() != "https" && !(realm.scheme() == "http" && loopback) {
        return Err(unauthorized(&format!("the registry wants the identity token sent to {host} without TLS")));
    }
    Ok(Challenge { service: param("service").unwrap_or_default(), realm })
}

fn unreachable(error: reqwest::Error) -> Trouble {
    Trouble::Passing(Failure::new(Kind::Unreachable, crate::text::chain(&error.without_url())))
}

fn refused(who: &str, status: StatusCode) -> Trouble {
    let why = format!("{who} answers {}", status.as_u16());
    match status.as_u16() {
        408 | 425 | 429 | 500.. => Trouble::Passing(Failure::new(Kind::Unreachable, why)),
        _ => Trouble::Final(Failure::new(Kind::Unauthorized, format!("{why}: it does not take this identity token"))),
    }
}
