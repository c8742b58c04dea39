//! The forge whose CI runs us: which one, and what it says about the job.
//!
//! [`Context`] is what the environment claims. Nothing in it is proven, and no verdict depends on it; it labels reports
//! and links them to commits and pull requests. [`http`] is the client that everything outside is reached by.

pub mod context;
pub mod github;
pub mod gitlab;
pub mod http;

pub use self::http::{Http, HttpError, Secret};
pub use context::{Change, Context, Producer, Provider};
