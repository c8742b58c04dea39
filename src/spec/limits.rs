//! Limits of a step: their defaults, their bounds, how they are written, and which of them the user wrote.
//!
//! A limit that someone wrote is a promise, so its control is required: a boundary that can't enforce it is refused. The built-in
//! defaults are enforced where the backend can, and graded, but required only where the design says so anyway
//! (time and output).

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use crate::evidence::ControlId;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
const GIB: u64 = 1024 * MIB;
const TIB: u64 = 1024 * GIB;

/// What a size looks like, for the JSON Schemas. [`parse_size`] decides.
pub const SIZE_PATTERN: &str = "^[0-9]+(\\.[0-9]+)? ?([KkMmGgTt]([Ii][Bb]?)?|[Bb])?$";

/// A kind of limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Limit {
    /// CPU time per second.
    Cpus,
    /// Memory.
    Memory,
    /// Bytes written.
    Disk,
    /// Processes and threads.
    Pids,
    /// Bytes kept of each output stream.
    Output,
    /// Time until the boundary is ended.
    Timeout,
}

impl Limit {
    /// All kinds.
    pub const ALL: [Limit; 6] = [Limit::Cpus, Limit::Memory, Limit::Disk, Limit::Pids, Limit::Output, Limit::Timeout];

    /// The key in files, under `sandbox` but for the last; also the name of the flag, which for the last is `timeout`.
    #[must_use]
    pub const fn key(self) -> &'static str {
        match self {
            Limit::Cpus => "cpus",
            Limit::Memory => "memory",
            Limit::Disk => "disk",
            Limit::Pids => "pids",
            Limit::Output => "output",
            Limit::Timeout => "timeout-minutes",
        }
    }

    /// What is limited, in words.
    #[must_use]
    pub const fn noun(self) -> &'static str {
        match self {
            Limit::Cpus => "CPUs",
            Limit::Memory => "memory",
            Limit::Disk => "disk",
            Limit::Pids => "processes",
            Limit::Output => "output per stream",
            Limit::Timeout => "the time limit",
        }
    }

    /// The control that says whether it is enforced.
    #[must_use]
    pub const fn control(self) -> ControlId {
        match self {
            Limit::Cpus => ControlId::CpuLimit,
            Limit::Memory => ControlId::MemoryLimit,
            Limit::Disk => ControlId::DiskLimit,
            Limit::Pids => ControlId::PidsLimit,
            Limit::Output => ControlId::OutputLimit,
            Limit::Timeout => ControlId::TimeLimit,
        }
    }

    /// Least and most that can be asked for, in the unit of [`Limits::amount`].
    const fn bounds(self) -> (u64, u64) {
        match self {
            Limit::Cpus => (10, 1_024_000),
            Limit::Memory => (MIB, 16 * TIB),
            Limit::Disk => (MIB, 16 * TIB),
            Limit::Pids => (1, 4_194_304),
            Limit::Output => (0, GIB),
            Limit::Timeout => (1, 5 * 24 * 3600 * 1000),
        }
    }

    /// An amount in words that can be written in a file again.
    #[must_use]
    pub fn show(self, amount: u64) -> String {
        match self {
            Limit::Cpus => show_thousandths(amount),
            Limit::Memory | Limit::Disk | Limit::Output => show_size(amount),
            Limit::Pids => amount.to_string(),
            Limit::Timeout => show_duration(Duration::from_millis(amount)),
        }
    }

    /// Reads what a file has at this limit's key.
    ///
    /// # Errors
    /// A [`BadAmount`] that says what is wrong and what to write.
    pub fn parse(self, text: &str) -> Result<u64, BadAmount> {
        let amount = match self {
            Limit::Cpus => parse_thousandths(text)
                .ok_or_else(|| BadAmount::new("not a number of CPUs", "write a number such as `2` or `0.5`"))?,
            Limit::Memory | Limit::Disk | Limit::Output => parse_size(text)?,
            Limit::Pids => parse_digits(text)
                .ok_or_else(|| BadAmount::new("not a number of processes", "write a whole number such as `128`"))?,
            Limit::Timeout => parse_minutes(text)?,
        };
        self.within_bounds(amount)
    }

    fn within_bounds(self, amount: u64) -> Result<u64, BadAmount> {
        let (least, most) = self.bounds();
        if amount < least {
            let help = match self {
                Limit::Memory | Limit::Disk if amount > 0 => format!("write a unit, such as `{amount}MiB`"),
                _ => format!("the least is {}", self.show(least)),
            };
            return Err(BadAmount { reason: format!("less than {}", self.show(least)), help });
        }
        if amount > most {
            return Err(BadAmount::new(
                format!("more than {}", self.show(most)),
                format!("the most is {}", self.show(most)),
            ));
        }
        Ok(amount)
    }
}

/// The limits of one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// CPU time per second, in thousandths of a CPU.
    pub milli_cpus: u32,
    /// Memory, in bytes.
    pub memory: u64,
    /// What the code can write, in bytes.
    pub disk: u64,
    /// Processes and threads.
    pub pids: u32,
    /// Kept of each output stream, in bytes.
    pub output: u64,
    /// Until the boundary is ended, from dispatch.
    pub timeout: Duration,
    /// The limits that a file, a flag or a policy states; their controls are required.
    pub written: BTreeSet<Limit>,
}

impl Default for Limits {
    /// What a step has that says nothing: the values that the documentation's example shows.
    fn default() -> Self {
        Limits {
            milli_cpus: 1000,
            memory: 512 * MIB,
            disk: GIB,
            pids: 128,
            output: MIB,
            timeout: Duration::from_secs(5 * 60),
            written: BTreeSet::new(),
        }
    }
}

impl Limits {
    /// The amount of one limit: thousandths of a CPU, bytes, processes, or milliseconds.
    #[must_use]
    pub fn amount(&self, limit: Limit) -> u64 {
        match limit {
            Limit::Cpus => u64::from(self.milli_cpus),
            Limit::Memory => self.memory,
            Limit::Disk => self.disk,
            Limit::Pids => u64::from(self.pids),
            Limit::Output => self.output,
            Limit::Timeout => u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// Sets one limit and notes it as written.
    pub fn write(&mut self, limit: Limit, amount: u64) {
        match limit {
            Limit::Cpus => self.milli_cpus = u32::try_from(amount).unwrap_or(u32::MAX),
            Limit::Memory => self.memory = amount,
            Limit::Disk => self.disk = amount,
            Limit::Pids => self.pids = u32::try_from(amount).unwrap_or(u32::MAX),
            Limit::Output => self.output = amount,
            Limit::Timeout => self.timeout = Duration::from_millis(amount),
        }
        self.written.insert(limit);
    }

    /// The controls that the written limits require.
    #[must_use]
    pub fn required_controls(&self) -> BTreeSet<ControlId> {
        self.written.iter().map(|limit| limit.control()).collect()
    }

    /// The CPUs as a number, for cgroups and engines that take one.
    #[must_use]
    pub fn cpus(&self) -> f64 {
        f64::from(self.milli_cpus) / 1000.0
    }
}

/// An amount that can't be understood or is out of bounds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadAmount {
    /// What is wrong with it.
    pub reason: String,
    /// What to write instead.
    pub help: String,
}

impl BadAmount {
    fn new(reason: impl Into<String>, help: impl Into<String>) -> BadAmount {
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
            let unit = super::place::shown(unit);
            return Err(BadAmount::new(
                format!("`{unit}` is ambiguous: 1000 or 1024"),
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
    Limit::Timeout.within_bounds(total).map(Duration::from_millis)
}

/// A decimal number of minutes, in milliseconds.
fn parse_minutes(text: &str) -> Result<u64, BadAmount> {
    let bad = || BadAmount::new("not a number of minutes", "write minutes, decimals allowed: `0.5` is 30 seconds");
    scaled(text, 60_000).ok_or_else(bad)?.ok_or_else(|| BadAmount::new("too long", "the most is 7200 minutes"))
}

/// A decimal number in thousandths; finer than that is no number here.
fn parse_thousandths(text: &str) -> Option<u64> {
    let fraction = text.split_once('.').map_or("", |(_, fraction)| fraction);
    if fraction.len() > 3 { None } else { scaled(text, 1000)? }
}

fn parse_digits(text: &str) -> Option<u64> {
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

fn show_thousandths(amount: u64) -> String {
    let text = format!("{}.{:03}", amount / 1000, amount % 1000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Bytes with the largest unit that loses nothing.
#[must_use]
pub fn show_size(bytes: u64) -> String {
    for (factor, unit) in [(TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")] {
        if bytes >= factor && bytes % factor == 0 {
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
        for text in [
            "",
            "30",
            "s",
            "5x",
            "-5s",
            "30m1h",
            "5s5s",
            "0s",
            "1 h",
            "99999999999h",
            "121h",
            "1h30",
            "1e3s",
            "5m ",
            "١s",
        ] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        assert!(parse_duration("30").unwrap_err().help.contains("`30s`"));
    }

    #[test]
    fn minutes_take_decimals_and_no_units() {
        assert_eq!(Limit::Timeout.parse("5"), Ok(300_000));
        assert_eq!(Limit::Timeout.parse("0.5"), Ok(30_000));
        for text in ["30s", "0", "-1", "", "5.", ".5", "7201", "99999999999999999999", "NaN", ".inf"] {
            assert!(Limit::Timeout.parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn bounds_are_named_with_what_to_write() {
        let small = Limit::Memory.parse("512").unwrap_err();
        assert_eq!(small.reason, "less than 1MiB");
        assert_eq!(small.help, "write a unit, such as `512MiB`");
        assert_eq!(Limit::Cpus.parse("0.5"), Ok(500));
        assert!(Limit::Cpus.parse("0").is_err());
        assert!(Limit::Cpus.parse("0.0001").is_err());
        assert!(Limit::Pids.parse("0").is_err());
        assert!(Limit::Pids.parse("1.5").is_err());
        assert!(Limit::Pids.parse("99999999999999999999999").is_err());
        assert_eq!(Limit::Output.parse("0"), Ok(0));
        assert!(Limit::Output.parse("2GiB").is_err());
    }

    #[test]
    fn only_written_limits_are_required() {
        let mut limits = Limits::default();
        assert!(limits.required_controls().is_empty());
        limits.write(Limit::Memory, 64 * MIB);
        assert_eq!(limits.memory, 64 * MIB);
        assert_eq!(limits.required_controls(), BTreeSet::from([ControlId::MemoryLimit]));
    }

    #[test]
    fn every_default_is_within_its_bounds() {
        let limits = Limits::default();
        for limit in Limit::ALL {
            let amount = limits.amount(limit);
            assert_eq!(limit.within_bounds(amount), Ok(amount));
        }
    }

    proptest! {
        #[test]
        fn parsers_never_panic(text in "\\PC{0,24}") {
            let _ = parse_size(&text);
            let _ = parse_duration(&text);
            for limit in Limit::ALL {
                let _ = limit.parse(&text);
            }
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
        fn shown_cpus_are_read_back(milli in 10_u64..=1_024_000) {
            prop_assert_eq!(Limit::Cpus.parse(&Limit::Cpus.show(milli)), Ok(milli));
        }
    }
}
