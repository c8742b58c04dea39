//! The GitHub Action and the GitLab component, from outside: their scripts alone, and whole jobs under `act` and
//! `gitlab-ci-local`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;

mod github;
mod gitlab;
mod project;
mod scripts;
mod zizmor;
