//! Numbers with units, as people write them: sizes, durations, minutes, decimals. Hostile text in, a number or a sentence
//! out; bounds are the business of [`super::limits`].

use std::fmt;
use std::time::Duration;

pub(super) const KIB: u64 = 1024;
pub(super) const MIB: u64 = 1024 * KIB;
pub(super) const GIB: u64 = 1024 * MIB;
pub(super) const TIB: u64 = 1024 * GIB;

/// What a size looks like, for the JSON Schemas. [`parse_size`] decides.
pub(super) const SIZE_PATTERN: &str = "^[0-9]+(\\.[0-9]+)? ?([KkMmGgTt]([Ii][Bb]?)?|[Bb])?$";

/// An amount that can't be understood or is out of bounds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadAmount {
    /// What is wrong with it.
    pub reason: String,
    /// What to write instead.
    pub help: String,
}

impl BadAmount {
    pub(super) fn new(reason: impl Into<String>, help: impl Into<String>) -> BadAmount {
        BadAmount { reason: reason.into(), help: help.into() }
    }
}

impl fmt::Display for BadAmount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for BadAmount {}

/// Bytes: `65536`, `64k`, `512MiB`, `1.5GiB`. Single letters and `KiB`, `MiB`, `GiB`, `TiB` are powers of 1024, in any
/// case, as Docker, systemd and the kernel read them. `KB` and `MB` are refused: to some they are powers of 1000.
///
/// # Errors
/// Anything else, with what to write.
pub fn parse_size(text: &str) -> Result<u64, BadAmount> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit = unit.strip_prefix(' ').unwrap_or(unit);
    let factor = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "ki" | "kib" => KIB,
        "m" | "mi" | "mib" => MIB,
        "g" | "gi" | "gib" => GIB,
        "t" | "ti" | "tib" => TIB,
        "kb" | "mb" | "gb" | "tb" if !number.is_empty() => {
            let letter = unit.chars().next().unwrap_or('M').to_ascii_uppercase();
            return Err(BadAmount::new(
                "ambiguous: counted by 1000 or by 1024",
                format!("write `{number}{letter}iB`, which is a power of 1024"),
            ));
        }
        _ => return Err(not_a_size()),
    };
    scaled(number, factor).ok_or_else(not_a_size)?.ok_or_else(|| BadAmount::new("too large", "the most is 16TiB"))
}

fn not_a_size() -> BadAmount {
    BadAmount::new("not a size", "write bytes, or a number with `KiB`, `MiB` or `GiB`, such as `512MiB`")
}

/// A time: `30s`, `5m`, `1h30m`, `500ms`, `1.5h`; units from large to small, each at most once.
///
/// # Errors
/// Anything else, with what to write.
pub fn parse_duration(text: &str) -> Result<Duration, BadAmount> {
    let bad = || BadAmount::new("not a duration", "write a number and a unit, such as `30s`, `5m` or `1h30m`");
    let large = || BadAmount::new("too long", "the most is 120h");
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        return Err(BadAmount::new(
            "a duration without a unit",
            format!("write `{text}s` for seconds or `{text}m` for minutes"),
        ));
    }
    let mut total: u64 = 0;
    let mut rest = text;
    let mut smallest = u64::MAX;
    while !rest.is_empty() || total == 0 && smallest == u64::MAX {
        let split = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(bad)?;
        let (number, tail) = rest.split_at(split);
        let end = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(end);
        let factor = match unit {
            "h" => 3_600_000,
            "m" | "min" => 60_000,
            "s" => 1000,
            "ms" => 1,
            _ => return Err(bad()),
        };
        if factor >= smallest {
            return Err(bad());
        }
        smallest = factor;
        let part = scaled(number, factor).ok_or_else(bad)?.ok_or_else(large)?;
        total = total.checked_add(part).ok_or_else(large)?;
        rest = tail;
    }
    Ok(Duration::from_millis(total))
}

/// A decimal number of minutes, in milliseconds.
pub(super) fn parse_minutes(text: &str) -> Result<u64, BadAmount> {
    let bad = || BadAmount::new("not a number of minutes", "write minutes, decimals allowed: `0.5` is 30 seconds");
    scaled(text, 60_000).ok_or_else(bad)?.ok_or_else(|| BadAmount::new("too long", "the most is 7200 minutes"))
}

/// A decimal number in thousandths; finer than that is no number here.
pub(super) fn parse_thousandths(text: &str) -> Option<u64> {
    let fraction = text.split_once('.').map_or("", |(_, fraction)| fraction);
    if fraction.len() > 3 { None } else { scaled(text, 1000)? }
}

pub(super) fn parse_digits(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if digits { Some(text.parse().unwrap_or(u64::MAX)) } else { None }
}

/// `number` (digits, with at most one dot between digits) times `factor`, rounded down. The outer `None` is no
/// number, the inner one is too large.
fn scaled(number: &str, factor: u64) -> Option<Option<u64>> {
    let (whole, fraction) = match number.split_once('.') {
        Some((_, "")) => return None,
        Some(parts) => parts,
        None => (number, ""),
    };
    let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(fraction) {
        return None;
    }
    // Twelve decimals are finer than any unit here needs.
    let fraction = fraction.get(..12).unwrap_or(fraction);
    let parts = |whole: &str| -> Option<u64> {
        let whole = whole.parse::<u64>().ok()?.checked_mul(factor)?;
        let scale = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
        let fraction = if fraction.is_empty() { 0 } else { fraction.parse::<u128>().ok()? };
        whole.checked_add(u64::try_from(fraction * u128::from(factor) / scale).ok()?)
    };
    Some(parts(whole))
}

pub(super) fn show_thousandths(amount: u64) -> String {
    let text = format!("{}.{:03}", amount / 1000, amount % 1000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Bytes with the largest unit that loses nothing.
#[must_use]
pub fn show_size(bytes: u64) -> String {
    for (factor, unit) in [(TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")] {
        if bytes >= factor && bytes.is_multiple_of(factor) {
            return format!("{}{unit}", bytes / factor);
        }
    }
    format!("{bytes}B")
}

/// A duration as [`parse_duration`] reads it.
#[must_use]
pub fn show_duration(duration: Duration) -> String {
    let mut rest = duration.as_millis();
    let mut out = String::new();
    for (factor, unit) in [(3_600_000, "h"), (60_000, "m"), (1000, "s"), (1, "ms")] {
        if rest >= factor {
            out.push_str(&format!("{}{unit}", rest / factor));
            rest %= factor;
        }
    }
    if out.is_empty() { "0s".to_owned() } else { out }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_that_are_clear_are_read() {
        for (text, bytes) in [
            ("0", 0),
            ("65536", 65536),
            ("64k", 64 * KIB),
            ("64K", 64 * KIB),
            ("512MiB", 512 * MIB),
            ("512 MiB", 512 * MIB),
            ("512mi", 512 * MIB),
            ("1GiB", GIB),
            ("1.5GiB", GIB + 512 * MIB),
            ("2T", 2 * TIB),
            ("100b", 100),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn sizes_that_are_not_clear_are_refused() {
        for text in [
            "",
            " ",
            "MiB",
            ".5GiB",
            "5.GiB",
            "1.2.3k",
            "-1",
            "-1MiB",
            "+1MiB",
            "1e9",
            "1_000",
            "0x10",
            "512MB",
            "1gb",
            "64kb",
            "1EiB",
            "1  MiB",
            "1MiB ",
            "1MiBs",
            "１MiB",
            "99999999999999999999",
            "99999999999GiB",
            "18446744073709551616",
        ] {
            assert!(parse_size(text).is_err(), "{text}");
        }
        assert!(parse_size("512MB").unwrap_err().help.contains("`512MiB`"));
    }

    #[test]
    fn durations() {
        for (text, millis) in [
            ("30s", 30_000),
            ("5m", 300_000),
            ("1h30m", 5_400_000),
            ("500ms", 500),
            ("1.5h", 5_400_000),
            ("1m500ms", 60_500),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in
            ["", "30", "s", "5x", "-5s", "30m1h", "5s5s", "1 h", "99999999999999999h", "1h30", "1e3s", "5m ", "١s"]
        {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        assert!(parse_duration("30").unwrap_err().help.contains("`30s`"));
    }

    proptest! {
        #[test]
        fn parsers_never_panic(text in "\\PC{0,24}") {
            let _ = parse_size(&text);
            let _ = parse_duration(&text);
            let _ = parse_minutes(&text);
            let _ = parse_thousandths(&text);
            let _ = parse_digits(&text);
        }

        #[test]
        fn near_misses_never_panic(text in "[0-9.]{0,30}[ kKmMgGtTiIbBhs]{0,4}[0-9.]{0,3}[hms]{0,2}") {
            let _ = parse_size(&text);
            let _ = parse_duration(&text);
        }

        #[test]
        fn shown_sizes_are_read_back(bytes in any::<u64>()) {
            prop_assert_eq!(parse_size(&show_size(bytes)), Ok(bytes));
        }

        #[test]
        fn shown_durations_are_read_back(millis in 1_u64..=432_000_000) {
            let duration = Duration::from_millis(millis);
            prop_assert_eq!(parse_duration(&show_duration(duration)), Ok(duration));
        }

        #[test]
        fn shown_thousandths_are_read_back(milli in any::<u32>()) {
            prop_assert_eq!(parse_thousandths(&show_thousandths(milli.into())), Some(milli.into()));
        }
    }
}
