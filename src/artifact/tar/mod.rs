//! Unpacks tar: ustar, GNU and pax.
//!
//! Main function: [`unpack`]. The `tar` crate's own iterator is not used here: what decides between safe and unsafe in a
//! tar (which size counts, which header an extension belongs to, what follows the end) happens inside it, out of
//! sight, and has been wrong before (CVE-2026-33055). The crate writes the archives of the tests.
//!
//! Where readers differ, the archive is refused rather than interpreted: see [`reader`].

pub mod header;
mod pax;
pub mod reader;
mod sparse;

pub use reader::{Listed, list, unpack};

/// Whether a tar can begin with this block: a header, or the zeros of an empty archive.
pub fn is_start(block: &header::Block) -> bool {
    header::is_header(block) || block.iter().all(|&b| b == 0)
}
