//! How often something is tried again, and how long in between.
//!
//! After GitHub's rules (<https://docs.github.com/en/rest/using-the-rest-api/best-practices-for-using-the-rest-api#handle-rate-limit-errors-appropriately>):
//! `Retry-After`, else the time at which the limit is reset, else a minute and then longer. GitLab sends the same headers
//! (<https://docs.gitlab.com/administration/settings/user_and_ip_rate_limits/>). All of it is bounded.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::{HeaderMap, StatusCode, header};

/// What one request may cost in tries and time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Tries in all, the first included.
    pub tries: u32,
    /// No wait begins that would end later than this after the first try began.
    pub whole: Duration,
    /// Wait after a fault of the server's or the network's; doubled each time.
    pub pause: Duration,
    /// Wait after a rate limit that says nothing about its end; doubled each time.
    pub limited: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            tries: 4,
            whole: Duration::from_secs(180),
            pause: Duration::from_secs(1),
            limited: Duration::from_secs(60),
        }
    }
}

impl Patience {
    /// For a job that is being cancelled and will be killed in a few seconds.
    #[must_use]
    pub fn short() -> Self {
        Self { tries: 1, whole: Duration::ZERO, ..Self::default() }
    }

    /// How long to wait after no answer at all; `None` to give up.
    #[must_use]
    pub fn after_silence(&self, tries: u32) -> Option<Duration> {
        (tries < self.tries).then(|| doubled(self.pause, tries))
    }

    /// How long to wait after an answer; `None` if trying again is no help.
    #[must_use]
    pub fn after_answer(&self, tries: u32, status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Option<Duration> {
        if tries >= self.tries {
            return None;
        }
        if is_rate_limit(status, headers, body) {
            let wait = asked(headers).or_else(|| reset(headers));
            return Some(wait.unwrap_or_else(|| doubled(self.limited, tries)));
        }
        let fault = matches!(status.as_u16(), 408 | 500 | 502 | 503 | 504);
        fault.then(|| asked(headers).unwrap_or_else(|| doubled(self.pause, tries)))
    }
}

/// Whether an answer is a rate limit. GitHub says 403 as well as 429, and for its secondary limits only the text tells.
#[must_use]
pub fn is_rate_limit(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> bool {
    match status {
        StatusCode::TOO_MANY_REQUESTS => true,
        StatusCode::FORBIDDEN => {
            let exhausted = headers.get("x-ratelimit-remaining").is_some_and(|left| left == "0");
            let text = String::from_utf8_lossy(body).to_ascii_lowercase();
            exhausted || headers.contains_key(header::RETRY_AFTER) || text.contains("rate limit")
        }
        _ => false,
    }
}

fn doubled(wait: Duration, tries: u32) -> Duration {
    wait.saturating_mul(1 << tries.saturating_sub(1).min(6))
}

/// `Retry-After` in seconds. Neither forge sends a date.
fn asked(headers: &HeaderMap) -> Option<Duration> {
    number(headers, header::RETRY_AFTER.as_str()).map(Duration::from_secs)
}

/// Until the limit is reset, and a second more, since clocks differ.
fn reset(headers: &HeaderMap) -> Option<Duration> {
    let at = number(headers, "x-ratelimit-reset").or_else(|| number(headers, "ratelimit-reset"))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs();
    Some(Duration::from_secs(at.saturating_sub(now).saturating_add(1)))
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(all: &[(&'static str, String)]) -> HeaderMap {
        all.iter().map(|(name, value)| (http::HeaderName::from_static(name), value.parse().unwrap())).collect()
    }

    fn wait(tries: u32, status: u16, all: &[(&'static str, String)], body: &str) -> Option<u64> {
        let status = StatusCode::from_u16(status).unwrap();
        Patience::default().after_answer(tries, status, &headers(all), body.as_bytes()).map(|d| d.as_secs())
    }

    #[test]
    fn a_rate_limit_is_waited_for_as_long_as_it_says() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let reset = ("x-ratelimit-reset", (now + 30).to_string());
        assert_eq!(wait(1, 429, &[("retry-after", "7".into()), reset.clone()], ""), Some(7));
        let until = wait(1, 403, &[("x-ratelimit-remaining", "0".into()), reset], "").unwrap();
        assert!((30..=31).contains(&until), "{until}");
        assert_eq!(wait(1, 403, &[], "You have exceeded a secondary rate limit"), Some(60));
        assert_eq!(wait(2, 429, &[], ""), Some(120));
    }

    #[test]
    fn a_refusal_is_no_rate_limit_and_faults_are_tried_a_few_times() {
        let remaining = ("x-ratelimit-remaining", "12".to_owned());
        assert_eq!(wait(1, 403, &[remaining], "Resource not accessible by integration"), None);
        assert_eq!(wait(1, 404, &[], ""), None);
        assert_eq!(wait(1, 422, &[], ""), None);
        assert_eq!(wait(1, 502, &[], ""), Some(1));
        assert_eq!(wait(3, 500, &[], ""), Some(4));
        assert_eq!(wait(4, 500, &[], ""), None, "the last try");
        assert_eq!(wait(1, 503, &[("retry-after", "9".into())], ""), Some(9));
        assert_eq!(Patience::default().after_silence(1), Some(Duration::from_secs(1)));
        assert_eq!(Patience::short().after_silence(1), None);
    }
}
