//! The forge whose CI runs us: which one, and what it says about the job.
//!
//! [`Context`] is what the environment claims. Nothing in it is proven, and no verdict depends on it; it labels reports
//! and links them to commits and pull requests. API clients for publishing come on top of it.

pub mod context;

pub use context::{Change, Context, Provider};
