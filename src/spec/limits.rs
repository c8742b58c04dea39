//! Limits of a step: their defaults, their bounds, how they are written, and which of them the user wrote.
//!
//! A limit that someone wrote is a promise, so its control is required: a boundary that can't enforce it is refused. The built-in
//! defaults are enforced where the backend can, and graded, but required only where the design says so anyway
//! (time and output).

use std::collections::BTreeSet;
use std::time::Duration;

use super::units::{self, BadAmount, GIB, MIB, TIB};
use crate::evidence::ControlId;
use crate::time::millis;

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
            Limit::Cpus => units::show_thousandths(amount),
            Limit::Memory | Limit::Disk | Limit::Output => units::show_size(amount),
            Limit::Pids => amount.to_string(),
            Limit::Timeout => units::show_duration(Duration::from_millis(amount)),
        }
    }

    /// Reads what a file has at this limit's key.
    ///
    /// # Errors
    /// A [`BadAmount`] that says what is wrong and what to write.
    pub fn parse(self, text: &str) -> Result<u64, BadAmount> {
        let amount = match self {
            Limit::Cpus => units::parse_thousandths(text)
                .ok_or_else(|| BadAmount::new("not a number of CPUs", "write a number such as `2` or `0.5`"))?,
            Limit::Memory | Limit::Disk | Limit::Output => units::parse_size(text)?,
            Limit::Pids => units::parse_digits(text)
                .ok_or_else(|| BadAmount::new("not a number of processes", "write a whole number such as `128`"))?,
            Limit::Timeout => units::parse_minutes(text)?,
        };
        self.within_bounds(amount)
    }

    /// Reads what the flag `--timeout` has: a duration, in milliseconds.
    ///
    /// # Errors
    /// As [`Limit::parse`].
    pub fn timeout(text: &str) -> Result<u64, BadAmount> {
        let duration = units::parse_duration(text)?;
        Limit::Timeout.within_bounds(millis(duration))
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
            Limit::Timeout => millis(self.timeout),
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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

    #[test]
    fn timeouts_have_bounds_whatever_they_are_written_in() {
        assert_eq!(Limit::timeout("1h30m"), Ok(5_400_000));
        for text in ["0s", "0ms", "121h", "30", "x"] {
            assert!(Limit::timeout(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,24}") {
            for limit in Limit::ALL {
                let _ = limit.parse(&text);
            }
        }

        #[test]
        fn shown_amounts_are_read_back(kind in 0_usize..5, amount in 1_u64..2_000_000) {
            let limit = Limit::ALL[kind];
            if limit.within_bounds(amount).is_ok() {
                prop_assert_eq!(limit.parse(&limit.show(amount)), Ok(amount));
            }
        }
    }
}
