//! What an artifact may cost, and the meter that counts it while it streams.
//!
//! Main types: [`Budget`] (the limits) and [`Meter`] (what was used so far). Sizes count as the guest would see
//! them: a sparse file costs its logical size, each archive member counts as one file whatever its kind, and so
//! does a directory that only a longer path implies. The meter is asked *before* a byte is written.

use std::cell::Cell;

use serde::{Deserialize, Serialize};

use super::rejection::{Rejection, Rule};

/// Below this many bytes out, no ratio is judged: a few kilobytes of zeros are no bomb.
const RATIO_GRACE: u64 = 64 << 20;

/// The limits for one artifact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// Logical bytes of all regular files together. Default 8 GiB.
    pub bytes: u64,
    /// Members: files, directories (implied ones too) and links. Default 200,000.
    pub files: u64,
    /// Components of a path. Default 64.
    pub depth: u32,
    /// Bytes of one path component. Default 255, Linux's own limit (`NAME_MAX`).
    pub name_bytes: u32,
    /// Bytes of a whole path. Default 4,000: below `PATH_MAX` with room for the mount point.
    pub path_bytes: u32,
    /// Bytes out for each byte of the input, once 64 MiB are out. Default 200; text logs reach about 30, deflate
    /// can't exceed 1,032.
    pub ratio: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Budget { bytes: 8 << 30, files: 200_000, depth: 64, name_bytes: 255, path_bytes: 4000, ratio: 200 }
    }
}

/// Counts against a [`Budget`]. Shared by the readers and the writer of one unpacking.
#[derive(Debug)]
pub struct Meter {
    budget: Budget,
    input: u64,
    bytes: Cell<u64>,
    files: Cell<u64>,
    stream: Cell<u64>,
}

impl Meter {
    /// A fresh meter for an input of that many bytes.
    pub fn new(budget: &Budget, input: u64) -> Self {
        Meter { budget: budget.clone(), input, bytes: Cell::new(0), files: Cell::new(0), stream: Cell::new(0) }
    }

    /// The limits.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Logical bytes of regular files so far.
    pub fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// One more member of any kind.
    pub fn member(&self) -> Result<(), Rejection> {
        let files = self.files.get() + 1;
        if files > self.budget.files {
            return Err(Rejection::new(Rule::BudgetFiles, format!("more than {} members", self.budget.files)));
        }
        self.files.set(files);
        Ok(())
    }

    /// A regular file of this logical size is about to be written.
    pub fn file(&self, size: u64) -> Result<(), Rejection> {
        let bytes = self.bytes.get().saturating_add(size);
        if bytes > self.budget.bytes {
            let message = format!("{size} more bytes exceed the {} that an artifact may hold", self.budget.bytes);
            return Err(Rejection::new(Rule::BudgetBytes, message));
        }
        self.ratio(bytes)?;
        self.bytes.set(bytes);
        Ok(())
    }

    /// This many bytes came out of a decoder, whatever they are: what bounds headers, padding and an archive
    /// inside an archive, none of which is a file.
    pub fn decoded(&self, bytes: u64) -> Result<(), Rejection> {
        let stream = self.stream.get().saturating_add(bytes);
        // Twice for the one level of nesting; 2 KiB a member for headers and padding; and tar's record padding.
        let limit = self.budget.bytes.saturating_mul(2).saturating_add(self.budget.files.saturating_mul(2048));
        let limit = limit.saturating_add(1 << 20);
        if stream > limit {
            return Err(Rejection::new(Rule::BudgetBytes, format!("the archive decodes to more than {limit} bytes")));
        }
        self.ratio(stream)?;
        self.stream.set(stream);
        Ok(())
    }

    fn ratio(&self, out: u64) -> Result<(), Rejection> {
        if out > RATIO_GRACE && out / self.budget.ratio.max(1) > self.input {
            let message = format!("{} bytes expand to more than {} times as many", self.input, self.budget.ratio);
            return Err(Rejection::new(Rule::BudgetRatio, message));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> Budget {
        Budget { bytes: 100, files: 2, ..Budget::default() }
    }

    #[test]
    fn bytes_and_members_are_counted_to_the_last_one() {
        let meter = Meter::new(&small(), 10);
        meter.file(60).unwrap();
        meter.file(40).unwrap();
        assert_eq!(meter.file(1).unwrap_err().rule, Rule::BudgetBytes);
        assert_eq!(meter.bytes(), 100);
        meter.member().unwrap();
        meter.member().unwrap();
        assert_eq!(meter.member().unwrap_err().rule, Rule::BudgetFiles);
    }

    #[test]
    fn sizes_near_the_end_of_u64_do_not_wrap() {
        let meter = Meter::new(&small(), 10);
        meter.file(1).unwrap();
        assert_eq!(meter.file(u64::MAX).unwrap_err().rule, Rule::BudgetBytes);
        assert_eq!(meter.decoded(u64::MAX).unwrap_err().rule, Rule::BudgetBytes);
    }

    #[test]
    fn a_ratio_counts_only_beyond_the_grace() {
        let meter = Meter::new(&Budget::default(), 1000);
        meter.file(RATIO_GRACE).unwrap();
        assert_eq!(meter.file(1).unwrap_err().rule, Rule::BudgetRatio);
        assert_eq!(meter.decoded(RATIO_GRACE + 1).unwrap_err().rule, Rule::BudgetRatio);
        let honest = Meter::new(&Budget::default(), 10 << 20);
        honest.file(1 << 30).unwrap();
    }
}
