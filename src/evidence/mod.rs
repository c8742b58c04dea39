//! What is known about a boundary, where it was seen, and what follows from it.
//!
//! * [`tier`] and [`control`] are the vocabulary: the four tiers, the controls and their grades.
//! * [`fact`] is what can be seen: typed facts with the words and the control that each stands for.
//! * [`observe`] reads facts about a live process from `/proc`, relative to one directory descriptor.
//! * [`identity`] says what an executable is, [`advisory`] what is known against its version, [`host`] how the host is set up.
//! * [`judge`] is pure: facts in, an [`Admission`] or a [`Refusal`] out. Nothing else makes an `Admission`.
//!
//! A fact that came from the guest may lower a grade, never raise one.

pub mod advisory;
pub mod control;
pub mod fact;
pub mod host;
pub mod identity;
pub mod judge;
pub mod observe;
pub mod proc;
pub mod tier;

pub use control::{ControlId, Status};
pub use fact::{Fact, Observation, Origin};
pub use judge::{Admission, Judgement, Refusal, judge};
pub use tier::Tier;
