//! Lengths of time, as records and messages have them.

use std::time::Duration;

/// Whole milliseconds; the largest number for what is longer than that (584 million years).
#[must_use]
pub fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_beyond_all_numbers_is_the_largest() {
        assert_eq!([millis(Duration::from_micros(1999)), millis(Duration::MAX)], [1, u64::MAX]);
    }
}
