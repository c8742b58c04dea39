//! How wasmtime is set up: the same on the runner's side, which only computes the cache key, and in the worker.

use std::hash::{Hash, Hasher};

use sha2::{Digest, Sha256};
use wasmtime::{Config, Engine};

/// Version of wasmtime, for reports. Compiled code is keyed by wasmtime's own, finer notion ([`fingerprint`]).
pub const VERSION: &str = "wasmtime 48";
/// Stack that guest code may use, bytes. CPython recurses deeply before its own limit.
const GUEST_STACK: usize = 1 << 20;
/// Stack of the fiber that guest code and host calls share, bytes.
const FIBER_STACK: usize = 3 << 20;
/// How often an epoch passes, milliseconds.
pub const EPOCH_MS: u64 = 100;

/// The engine's configuration.
///
/// Compilation stays on one thread (the feature that makes it parallel is not built in), since the jail allows no second.
/// A memory's first content is mapped from the memory file that cached code comes in, and copied from a module compiled
/// just now: the jail lets it make no memory file. Traps come as signals, which makes guest code faster and takes no
/// system call but those the jail allows.
fn config(deterministic: bool) -> Config {
    let mut config = Config::new();
    config
        .signals_based_traps(true)
        .memory_init_cow(true)
        .epoch_interruption(true)
        .max_wasm_stack(GUEST_STACK)
        .async_stack_size(FIBER_STACK)
        // Unwinding by the system's own libraries is for debuggers outside.
        .native_unwind_info(false)
        // Where in the bytecode an instruction came from: a third of a large module's compiled code, for nothing that
        // a report shows. Traps still name their function.
        .generate_address_map(false);
    if deterministic {
        config.consume_fuel(true).cranelift_nan_canonicalization(true).relaxed_simd_deterministic(true);
    }
    config
}

/// An engine.
///
/// # Errors
/// If this processor cannot run it.
pub fn engine(deterministic: bool) -> wasmtime::Result<Engine> {
    Engine::new(&config(deterministic))
}

/// Digest of everything that decides what compiled code looks like: wasmtime's version, target, processor features and
/// settings. From the engine's own notion of compatibility.
#[must_use]
pub fn fingerprint(engine: &Engine) -> [u8; 32] {
    let mut hasher = Collect(Sha256::new());
    engine.precompile_compatibility_hash().hash(&mut hasher);
    hasher.0.finalize().into()
}

/// A hasher that keeps all of what it is fed, where the standard ones keep 64 bits.
struct Collect(Sha256);

impl Hasher for Collect {
    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn finish(&self) -> u64 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_that_changes_code_changes_the_fingerprint() {
        let print = |deterministic| fingerprint(&engine(deterministic).unwrap());
        assert_eq!(print(false), print(false));
        assert_ne!(print(false), print(true));
    }
}
