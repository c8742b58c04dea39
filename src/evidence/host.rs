//! Settings of the host that weaken or strengthen a hypervisor's boundary: reported, and nobody's grade.
//!
//! What to look at follows Firecracker's recommendations for production hosts
//! (<https://github.com/firecracker-microvm/firecracker/blob/main/docs/prod-host-setup.md>).

use std::fs;
use std::path::Path;

/// What this host's settings are, a line each.
#[must_use]
pub fn posture() -> Vec<String> {
    posture_below(Path::new("/"))
}

fn posture_below(root: &Path) -> Vec<String> {
    let read = |path: &str| fs::read_to_string(root.join(path)).ok().map(|text| text.trim().to_owned());
    let mut lines = Vec::new();
    lines.push(match read("sys/devices/system/cpu/smt/active").as_deref() {
        Some("0") => "SMT is off".to_owned(),
        Some("1") => "SMT is on: guests of two boundaries may share a core's two threads".to_owned(),
        _ => "SMT: this kernel does not say".to_owned(),
    });
    lines.push(match read("sys/kernel/mm/ksm/run").as_deref() {
        Some("0") | None => "KSM is off".to_owned(),
        Some(_) => "KSM is on: equal pages are merged, which tells one guest what another holds".to_owned(),
    });
    let swaps = read("proc/swaps").map_or(0, |text| text.lines().skip(1).count());
    lines.push(match swaps {
        0 => "no swap: guest memory stays in memory".to_owned(),
        n => format!("{n} swap areas: guest memory may be written to disk"),
    });
    for module in ["kvm_intel", "kvm_amd"] {
        if let Some(value) = read(&format!("sys/module/{module}/parameters/nested")) {
            let on = matches!(value.as_str(), "1" | "Y");
            lines.push(format!("{module}: nested virtualisation is {}", if on { "on" } else { "off" }));
        }
    }
    let mut exposed = Vec::new();
    let mut known = 0;
    for entry in fs::read_dir(root.join("sys/devices/system/cpu/vulnerabilities")).into_iter().flatten().flatten() {
        known += 1;
        let state = fs::read_to_string(entry.path()).unwrap_or_default();
        if state.starts_with("Vulnerable") {
            exposed.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    exposed.sort();
    lines.push(match (known, exposed.is_empty()) {
        (0, _) => "CPU vulnerabilities: this kernel does not say".to_owned(),
        (_, true) => format!("CPU vulnerabilities: none of {known} unmitigated"),
        (_, false) => format!("CPU vulnerabilities without mitigation: {}", exposed.join(", ")),
    });
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(files: &[(&str, &str)]) -> String {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        posture_below(dir.path()).join("\n")
    }

    #[test]
    fn weak_settings_are_named_and_good_ones_too() {
        let weak = host(&[
            ("sys/devices/system/cpu/smt/active", "1\n"),
            ("sys/kernel/mm/ksm/run", "1\n"),
            ("proc/swaps", "Filename Type\n/dev/sda2 partition\n"),
            ("sys/module/kvm_amd/parameters/nested", "1\n"),
            ("sys/devices/system/cpu/vulnerabilities/l1tf", "Vulnerable\n"),
            ("sys/devices/system/cpu/vulnerabilities/mds", "Mitigation: Clear CPU buffers\n"),
        ]);
        for word in ["SMT is on", "KSM is on", "1 swap areas", "kvm_amd: nested virtualisation is on", ": l1tf"] {
            assert!(weak.contains(word), "{word}: {weak}");
        }
        assert!(!weak.contains("mds"));
        let good = host(&[
            ("sys/devices/system/cpu/smt/active", "0\n"),
            ("proc/swaps", "Filename Type\n"),
            ("sys/devices/system/cpu/vulnerabilities/mds", "Not affected\n"),
        ]);
        for word in ["SMT is off", "KSM is off", "no swap", "none of 1 unmitigated"] {
            assert!(good.contains(word), "{word}: {good}");
        }
    }
}
