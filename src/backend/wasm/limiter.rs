//! The guest's memory budget: all linear memories and tables of a run together.

use wasmtime::ResourceLimiter;

/// What a table element counts for, bytes; a pointer and room for its bookkeeping.
const ELEMENT: usize = 16;
/// Core instances of one run: a component may hold many.
const INSTANCES: usize = 1000;

/// Counts what the guest's memories and tables have, and refuses more than the budget.
#[derive(Debug)]
pub struct Budget {
    limit: usize,
    used: usize,
    peak: usize,
    /// A request was refused, by the budget or because the process's own limit was reached.
    pub refused: bool,
}

impl Budget {
    /// A budget of `bytes`.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self { limit: usize::try_from(bytes).unwrap_or(usize::MAX), used: 0, peak: 0, refused: false }
    }

    /// Most bytes ever in use.
    #[must_use]
    pub const fn peak(&self) -> u64 {
        self.peak as u64
    }

    fn grow(&mut self, current: usize, desired: usize, unit: usize) -> bool {
        let more = desired.saturating_sub(current).saturating_mul(unit);
        match self.used.checked_add(more).filter(|&sum| sum <= self.limit) {
            Some(sum) => {
                self.used = sum;
                self.peak = self.peak.max(sum);
                true
            }
            None => {
                self.refused = true;
                false
            }
        }
    }
}

impl ResourceLimiter for Budget {
    fn memory_growing(&mut self, current: usize, desired: usize, maximum: Option<usize>) -> wasmtime::Result<bool> {
        // Beyond its own declared maximum a memory never grows; that is no limit of ours.
        Ok(maximum.is_none_or(|max| desired <= max) && self.grow(current, desired, 1))
    }

    fn memory_grow_failed(&mut self, _error: wasmtime::Error) -> wasmtime::Result<()> {
        self.refused = true;
        Ok(())
    }

    fn table_growing(&mut self, current: usize, desired: usize, maximum: Option<usize>) -> wasmtime::Result<bool> {
        Ok(maximum.is_none_or(|max| desired <= max) && self.grow(current, desired, ELEMENT))
    }

    fn table_grow_failed(&mut self, _error: wasmtime::Error) -> wasmtime::Result<()> {
        self.refused = true;
        Ok(())
    }

    fn instances(&self) -> usize {
        INSTANCES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_memories_share_one_budget() {
        let mut budget = Budget::new(100);
        assert!(budget.memory_growing(0, 60, None).unwrap());
        assert!(!budget.memory_growing(0, 60, None).unwrap());
        assert!(budget.refused);
        assert!(budget.table_growing(0, 2, None).unwrap());
        assert!(!budget.table_growing(2, 4_000_000_000, None).unwrap());
        assert_eq!(budget.peak(), 92);
    }

    #[test]
    fn a_module_that_reaches_its_own_maximum_has_not_hit_our_limit() {
        let mut budget = Budget::new(100);
        assert!(!budget.memory_growing(10, 20, Some(15)).unwrap());
        assert!(!budget.refused);
    }
}
