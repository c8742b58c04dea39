//! What a user can make the service write into the journal: a few lines a minute, and how many were left out.
//!
//! Main type: [`Journal`]. A job can open connections as fast as it likes, and each that comes to nothing is a line.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines about one user's connections that came to nothing, in each [`WINDOW`].
const LINES: u32 = 10;
/// How long those count.
const WINDOW: Duration = Duration::from_secs(60);

/// Who has had which lines.
#[derive(Debug, Default)]
pub struct Journal(Mutex<BTreeMap<u32, Window>>);

#[derive(Debug, Clone, Copy)]
struct Window {
    since: Instant,
    lines: u32,
    left_out: u64,
}

impl Journal {
    /// Whether one more line about this user may be written. The first one after some were left out says so before.
    pub fn admits(&self, uid: u32) -> bool {
        let (admitted, left_out) = self.admit_at(uid, Instant::now());
        if left_out > 0 {
            tracing::warn!(uid, "{left_out} more connections came to nothing");
        }
        admitted
    }

    /// Whether a line is written then, and how many were left out before it.
    fn admit_at(&self, uid: u32, now: Instant) -> (bool, u64) {
        let mut users = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let window = users.entry(uid).or_insert(Window { since: now, lines: 0, left_out: 0 });
        let mut left_out = 0;
        if now.duration_since(window.since) >= WINDOW {
            left_out = window.left_out;
            *window = Window { since: now, lines: 0, left_out: 0 };
        }
        let admitted = window.lines < LINES;
        if admitted {
            window.lines += 1;
        } else {
            window.left_out += 1;
        }
        (admitted, left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_a_few_lines_a_minute_and_takes_none_from_others() {
        let journal = Journal::default();
        let start = Instant::now();
        let admitted = (0..1000).filter(|_| journal.admit_at(7, start).0).count();
        assert_eq!(admitted, LINES as usize);
        assert_eq!(journal.admit_at(8, start), (true, 0));
        assert_eq!(journal.admit_at(7, start + WINDOW / 2), (false, 0));
        assert_eq!(journal.admit_at(7, start + WINDOW), (true, 1000 - u64::from(LINES) + 1));
        assert_eq!(journal.admit_at(7, start + WINDOW), (true, 0));
    }
}
