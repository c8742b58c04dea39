//! Advisory locks on open files and directories (flock(2)).
//!
//! Such a lock belongs to the open file, which every child inherits until it executes something: closing the descriptor
//! while another thread starts a process would leave the lock held. So [`Lock`] gives it back by name when it is dropped.
//! Where the process dies instead, the kernel does it, once no such child is left.

use std::ops::Deref;
use std::os::fd::AsFd;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// An open file with its lock.
#[derive(Debug)]
pub struct Lock<F: AsFd>(F);

impl<F: AsFd> Lock<F> {
    /// Locks an open file as `how` says; waits, through signals, unless it is one of the operations that don't.
    ///
    /// # Errors
    /// `EWOULDBLOCK` if another open file has it and `how` says not to wait; if the file system has no locks.
    pub fn of(file: F, how: FlockOperation) -> Result<Self, Errno> {
        let lock = Self(file);
        lock.convert(how)?;
        Ok(lock)
    }

    /// Makes it shared or exclusive. This is not one step: another may get in between.
    ///
    /// # Errors
    /// As for [`Lock::of`].
    pub fn convert(&self, how: FlockOperation) -> Result<(), Errno> {
        rustix::io::retry_on_intr(|| flock(&self.0, how))
    }
}

impl<F: AsFd> Deref for Lock<F> {
    type Target = F;

    fn deref(&self) -> &F {
        &self.0
    }
}

impl<F: AsFd> Drop for Lock<F> {
    fn drop(&mut self) {
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn it_ends_with_its_holder_even_where_a_child_still_has_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let lock = |how| Lock::of(File::open(dir.path()).unwrap(), how);
        let held = lock(FlockOperation::LockExclusive).unwrap();
        // What a child has between its fork and its exec.
        let inherited = held.try_clone().unwrap();
        assert_eq!(lock(FlockOperation::NonBlockingLockShared).unwrap_err(), Errno::WOULDBLOCK);
        held.convert(FlockOperation::LockShared).unwrap();
        drop(lock(FlockOperation::NonBlockingLockShared).unwrap());
        drop(held);
        drop(lock(FlockOperation::NonBlockingLockExclusive).unwrap());
        drop(inherited);
    }
}
