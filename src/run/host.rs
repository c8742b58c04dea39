//! What machine this is, for the report. Labels, not evidence.

use std::fs;
use std::io::Read;

use crate::backend::jail::{own_executable, own_sha256};
use crate::image::cache::{Cache, CacheError};
use crate::report::{Host, Tool};

/// Reads the host's description. `runner` is the name that CI gives the machine, if it does.
#[must_use]
pub fn describe(runner: Option<String>) -> Host {
    let uname = rustix::system::uname();
    let text = |c: &std::ffi::CStr| c.to_string_lossy().into_owned();
    Host {
        runner: runner.unwrap_or_else(|| text(uname.nodename())),
        kernel: format!("{} {}", text(uname.sysname()), text(uname.release())),
        cpu: cpu_model(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
        virtualization: virtualization(),
    }
}

/// This program: its version and the digest of the executable that runs; the latter as it is kept in the cache, if there
/// is one. That is as good as computing it: what this program says of itself is no evidence.
///
/// # Errors
/// If the executable cannot be read.
pub fn tool(cache: Option<&Cache>) -> std::io::Result<Tool> {
    let exe = own_executable()?;
    let meta = exe.metadata()?;
    let hash =
        || own_sha256().map_err(|source| CacheError::Io { action: "read", path: "/proc/self/exe".into(), source });
    let sha256 = match cache.map(|cache| cache.digest(&meta, hash)) {
        Some(Ok(sha256)) => sha256,
        Some(Err(_)) | None => own_sha256()?,
    };
    Ok(Tool { version: env!("CARGO_PKG_VERSION").to_owned(), sha256 })
}

fn cpu_model(cpuinfo: &str) -> String {
    let field = |name: &str| {
        cpuinfo.lines().find_map(|l| l.split_once(':').filter(|(key, _)| key.trim() == name)).map(|(_, v)| v.trim())
    };
    let model = field("model name").or_else(|| field("CPU part")).unwrap_or("unknown");
    let count = cpuinfo.lines().filter(|l| l.starts_with("processor")).count();
    format!("{model} × {count}")
}

/// The container or hypervisor that the host itself runs in, as far as it shows. systemd-detect-virt(1) looks at the
/// same places.
fn virtualization() -> String {
    let read = |path: &str| {
        let mut text = String::new();
        let _ = fs::File::open(path).and_then(|f| f.take(4096).read_to_string(&mut text));
        text.trim().to_owned()
    };
    let container = if fs::exists("/.dockerenv").unwrap_or(false) {
        Some("docker".to_owned())
    } else if fs::exists("/run/.containerenv").unwrap_or(false) {
        Some("podman".to_owned())
    } else {
        Some(read("/run/systemd/container")).filter(|kind| !kind.is_empty())
    };
    let hypervisor = Some(read("/sys/hypervisor/type")).filter(|t| !t.is_empty()).or_else(|| {
        let vendor = [read("/sys/class/dmi/id/sys_vendor"), read("/sys/class/dmi/id/product_name")].join(" ");
        let vendor = vendor.trim().to_owned();
        let cpu_says_so = fs::read_to_string("/proc/cpuinfo").is_ok_and(|c| {
            c.lines().any(|l| l.starts_with("flags") && l.split_whitespace().any(|flag| flag == "hypervisor"))
        });
        cpu_says_so.then_some(if vendor.is_empty() { "unnamed hypervisor".to_owned() } else { vendor })
    });
    match (container, hypervisor) {
        (Some(container), Some(hypervisor)) => format!("{container} on {hypervisor}"),
        (Some(one), None) | (None, Some(one)) => one,
        (None, None) => "none".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_described_without_empty_fields() {
        let host = describe(None);
        for field in [&host.runner, &host.kernel, &host.cpu, &host.virtualization] {
            assert!(!field.is_empty());
        }
        assert_eq!(tool(None).unwrap().sha256.len(), 64);
    }

    #[test]
    fn a_cpu_without_a_model_name_is_still_something() {
        assert_eq!(cpu_model("processor : 0\nmodel name : X 9\nprocessor : 1\n"), "X 9 × 2");
        assert_eq!(cpu_model(""), "unknown × 0");
    }
}
