//! x
pub mod budget;
pub mod destination;
pub mod digest;
pub mod directory;
pub mod format;
pub mod path;
pub mod rejection;
pub mod stream;
pub mod tar;
pub mod tree;
pub mod unpack;
pub mod zip;
pub use budget::Budget;
pub use unpack::{Request, Summary, unpack};
