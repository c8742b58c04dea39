//! What users install: the release, the scripts that install it, and the image.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code, reason = "its binary is named here, not put into a text")]
#[path = "../forge/project.rs"]
mod project;

mod image;
mod install;
mod jobs;
mod release;
mod server;
