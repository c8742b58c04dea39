//! Loading compiled code: the second place with `unsafe`, since only this backend knows wasmtime.
#![allow(unsafe_code)]

use wasmtime::component::Component;
use wasmtime::{Engine, Module, Precompiled};

use super::run::Loaded;

/// Loads code that an earlier worker compiled for the module that was dispatched.
///
/// # Errors
/// If it was made by another version or configuration, or is damaged in a way that wasmtime notices.
pub fn load(engine: &Engine, code: &[u8]) -> wasmtime::Result<Loaded> {
    // SAFETY: wasmtime asks that the bytes come from its own `serialize`, unchanged. The cache holds that as far as it
    // can: entries are written only from a worker's frames under the key of the module that the worker was given,
    // belong to the user alone, and carry a digest. What is left is a worker that was taken over while it compiled, or
    // somebody with the user's rights: their code runs here as guest code does, inside the jail, which is why nothing
    // but a jailed worker ever calls this.
    unsafe {
        match Engine::detect_precompiled(code) {
            Some(Precompiled::Component) => Component::deserialize(engine, code).map(Loaded::Component),
            _ => Module::deserialize(engine, code).map(Loaded::Module),
        }
    }
}
