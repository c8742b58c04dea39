//! What comes over the network: images from a real registry with a login and from ones that lie, artifacts from a forge.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

#[path = "../common/mod.rs"]
mod common;

mod forge;
mod hostile;
mod real;
mod server;
