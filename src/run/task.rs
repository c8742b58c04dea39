//! Work that blocks, in the background of a step.
//!
//! Main type: [`Task`]. Whatever ends the wait for it, the work is over by then: it writes below the step's private directory,
//! which is removed afterwards.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::task::{JoinError, JoinHandle};

use crate::backend::channel::{Cancel, CancelSignal, cancelled};

/// Work under way.
#[derive(Debug)]
pub struct Task<T> {
    stop: Arc<AtomicBool>,
    work: JoinHandle<T>,
}

impl<T: Send + 'static> Task<T> {
    /// Begins it. It ends early when what it is given is set.
    pub fn start(work: impl FnOnce(&AtomicBool) -> T + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        Self { stop, work: tokio::task::spawn_blocking(move || work(&stopped)) }
    }

    /// Waits for its end; a run that is cancelled ends it.
    ///
    /// # Errors
    /// The signal that cancelled the run.
    pub async fn finish(mut self, cancel: &mut Cancel) -> Result<Result<T, JoinError>, CancelSignal> {
        tokio::select! {
            done = &mut self.work => Ok(done),
            signal = cancelled(cancel) => {
                self.abandon().await;
                Err(signal)
            }
        }
    }

    /// Ends it early.
    pub async fn abandon(self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.work.await;
    }
}
