//! What to do about a host that a backend cannot work on: the words of exit 12, which `docs/hosts.md` repeats.
//!
//! Each names the exact setting. What differs between container runtimes is said for each that runs CI jobs, since the job
//! cannot tell which of them is around it.

/// `user.max_user_namespaces` is 0.
pub const MAX_USER_NAMESPACES: &str = "sudo sysctl -w user.max_user_namespaces=15000";
/// `kernel.unprivileged_userns_clone` is 0.
pub const USERNS_CLONE: &str = "sudo sysctl -w kernel.unprivileged_userns_clone=1";
/// `kernel.apparmor_restrict_unprivileged_userns` is 1.
pub const APPARMOR_USERNS: &str =
    "sudo plimsoll setup userns, or sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0";
/// The seccomp filter of a container.
pub const SECCOMP: &str = "start the container with `--security-opt seccomp=unconfined`, or with a profile that allows unshare and mount \
     (GitLab: `security_opt = [\"seccomp=unconfined\"]`; Kubernetes: `seccompProfile: {type: Unconfined}`)";
/// The AppArmor profile of a container.
pub const APPARMOR: &str = "start the container with `--security-opt apparmor=unconfined` \
     (GitLab: `security_opt = [\"apparmor=unconfined\"]`; Kubernetes: `appArmorProfile: {type: Unconfined}`)";
/// Root in a container, without `CAP_SYS_ADMIN`: the sandbox would have root's own uid. Said with exit 11: the backend works,
/// and proves no more than `process`.
pub const ROOT_WITHOUT_ADMIN: &str = "run as a plain user (our image has one), or give the container the capability, with its seccomp and AppArmor unconfined: \
     `--cap-add SYS_ADMIN` (GitLab: `cap_add = [\"SYS_ADMIN\"]`; Kubernetes: `capabilities: {add: [SYS_ADMIN]}`)";
/// There is no `/dev/kvm`.
pub const NO_KVM: &str = "run on bare metal, or on a virtual machine with nested virtualisation; load the module kvm_intel or kvm_amd; \
     in a container hand the device in (`--device /dev/kvm`; GitLab: `devices = [\"/dev/kvm\"]`; Kubernetes: a device plugin)";
/// `/dev/kvm` may not be opened.
pub const KVM_DENIED: &str =
    "add the runner's user to the group kvm (`sudo usermod -aG kvm USER`) and start the runner again";
/// `/dev/kvm` runs no guest.
pub const KVM_USELESS: &str =
    "run on bare metal or with working nested virtualisation; on a host that is only slow, raise PLIMSOLL_BOOT_TIMEOUT";

/// Those of exit 12, with what is in the way: the table in `docs/hosts.md`.
pub const ALL: [(&str, &str); 8] = [
    ("`user.max_user_namespaces` is 0", MAX_USER_NAMESPACES),
    ("`kernel.unprivileged_userns_clone` is 0 (older Debian)", USERNS_CLONE),
    ("AppArmor lets plain users make no user namespaces (Ubuntu 24.04)", APPARMOR_USERNS),
    ("a container's seccomp filter (stock Docker)", SECCOMP),
    ("a container's AppArmor profile (stock Docker and containerd on Debian and Ubuntu)", APPARMOR),
    ("there is no `/dev/kvm`", NO_KVM),
    ("`/dev/kvm` may not be opened", KVM_DENIED),
    ("`/dev/kvm` opens and runs no guest", KVM_USELESS),
];
