//! One run: steps from the spec through artifact, image and gate into the report.
//!
//! This is the library that local mode and, later, the service call; it knows nothing of terminals or forges.

use plimsoll_guest::Stream;

use crate::report::StepReport;

pub mod host;
pub mod scratch;

/// What happens during a run, for whoever shows it live. Guest bytes are raw.
#[derive(Debug, Clone)]
pub enum Event {
    /// A step begins.
    Started {
        /// From 1.
        index: u32,
        /// The step's name.
        name: String,
    },
    /// A step reached the next part of its way: `unpacking`, `preparing gvisor`, `running`, …
    Progress {
        /// From 1.
        index: u32,
        /// In a word or two.
        what: String,
    },
    /// A piece of the guest's output.
    Output {
        /// From 1.
        index: u32,
        /// Which stream.
        stream: Stream,
        /// Raw guest bytes.
        bytes: Vec<u8>,
    },
    /// A step is over.
    Ended {
        /// Everything about it.
        step: Box<StepReport>,
    },
}
