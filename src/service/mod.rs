//! Service mode: a root-owned service on the runner's host runs steps for jobs that could not, and vouches for the report.
//!
//! In the order of the flow:
//!
//! 1. [`client`] finds the socket, fetches ([`gather`]) and opens what the step names with the caller's own rights ([`pack`]
//!    makes one file of a directory), and sends [`request::Request`] with the descriptors.
//! 2. [`server`] accepts, asks the kernel who that is ([`peer`]), and the policy whether they may; reads the request under
//!    a deadline and within bounds; and queues it ([`admission`]) until there is memory and CPU for it.
//! 3. A [`worker`], a copy of this program with one run in its care, gets socket and request: it copies what was sent into
//!    a private directory ([`inbox`]), runs [`crate::run`] under the policy, streams the log ([`stream`]), writes the report and
//!    sends the files ([`delivery`]).
//! 4. The client writes them where a local run would have ([`receipt`]).
//!
//! Both ends speak [`protocol`] over a [`link`]. Trust: the service trusts nothing that comes from the client, neither
//! bytes nor descriptors nor names; no path of the client's is ever opened. The client trusts a socket that only root can
//! have put there, and checks the names of files all the same.

pub mod admission;
pub mod client;
mod delivery;
mod gather;
mod inbox;
mod journal;
pub mod link;
pub mod listen;
pub mod pack;
pub mod parcel;
pub mod peer;
pub mod protocol;
mod receipt;
pub mod request;
pub mod server;
mod stream;
pub mod worker;

/// Where the service listens.
pub const SOCKET: &str = "/run/plimsoll/plimsoll.sock";
/// What it signs reports with, unless told otherwise.
pub const KEY: &str = "/etc/plimsoll/service.key";
