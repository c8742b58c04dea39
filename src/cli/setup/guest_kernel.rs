//! `plimsoll setup guest-kernel`.

use clap::Args;

use super::{CommonArgs, Env, Exit, Failure, PlaceArgs, failure};
use crate::setup::guest_kernel;
use crate::setup::source::Pin;
use crate::spec::Sha256Digest;

/// Arguments.
#[derive(Debug, Args)]
pub struct GuestKernelArgs {
    /// A tree with boot/vmlinuz-RELEASE and lib/modules/RELEASE, or an archive of one; otherwise this host's own kernel is
    /// copied
    #[arg(long, value_name = "DIR|FILE|URL", default_value = "/", hide_default_value = true)]
    pub from: String,

    /// SHA-256 of the kernel, or of the archive; needed unless root installed it, or a checksum file lies beside the archive
    #[arg(long, value_name = "DIGEST")]
    pub sha256: Option<String>,

    /// The kernel's release, as `uname -r` says it; otherwise the newest there
    #[arg(long, value_name = "RELEASE")]
    pub release: Option<String>,

    /// Where to.
    #[command(flatten)]
    pub place: PlaceArgs,
}

/// Sets it up.
pub fn set_up(args: &GuestKernelArgs, common: &CommonArgs, env: &Env) -> Result<Exit, Failure> {
    let place = args.place.place(env)?;
    let pin = match &args.sha256 {
        Some(text) => {
            let digest: Sha256Digest = text.parse().map_err(|e| Failure::usage(format!("--sha256: {e}")))?;
            Some(Pin::Sha256(digest.to_string(), "--sha256".to_owned()))
        }
        None => None,
    };
    let from = guest_kernel::From::parse(&args.from).map_err(|e| failure(&e.into()))?;
    let plan = guest_kernel::plan(&place, &from, args.release.as_deref(), pin, env).map_err(|e| failure(&e))?;
    args.place.carry_out(&plan, &place, common, env)
}
