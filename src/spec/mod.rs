//! What is asked for: step files, flags, workflows, and the operator's policy over them.
//!
//! The flow: a file's text becomes a tree ([`raw`]: the only part that knows YAML), the tree becomes raw structs, and
//! [`load`], [`workflow::load`] or [`from_script`] make [`Step`]s of them, in which nothing is left to check. Then
//! [`policy::Policy::apply`] tightens or refuses, and [`select`] picks what this run does.
//!
//! Trust: step files and workflows come with the pull request, so they are hostile: their size, nesting and expansion are
//! bounded, and their text reaches a message only through [`place::shown`]. The policy is the runner's owner's; it binds only
//! what nobody else could have written. Nothing here looks at the machine, apart from reading those files.

mod build;
mod check;
mod digest;
mod error;
pub mod limits;
mod load;
mod merge;
pub mod place;
pub mod policy;
pub mod raw;
mod select;
mod shell;
mod step;
#[cfg(test)]
mod tests;
mod units;
pub mod wire;
pub mod workflow;

pub use build::WORKSPACE;
pub use digest::Sha256Digest;
pub use error::SpecError;
pub use limits::{Limit, Limits};
pub use load::{SpecFile, default_file, from_script, load};
pub use merge::{Overrides, Surroundings};
pub use place::Place;
pub use policy::{Policy, PolicyRefusal, ServiceRules};
pub use raw::{policy_schema, step_schema};
pub use select::{Shard, select};
pub use shell::Shell;
pub use step::{
    ArtifactSource, Backend, BackendChoice, Command, FilesystemGrant, Grants, ImageSource, Kernel, Mount, Network,
    Step, WasmProgram, slug,
};
pub use units::{BadAmount, parse_duration, parse_size, show_duration, show_size};
