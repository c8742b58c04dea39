//! Settings of the host that weaken or strengthen a boundary: reported, and nobody's grade.
//!
//! Main type: [`Finding`]. [`posture`] is what concerns a hypervisor; it follows Firecracker's recommendations for
//! production hosts (<https://github.com/firecracker-microvm/firecracker/blob/main/docs/prod-host-setup.md>).

use std::fs;
use std::path::Path;

use schemars::JsonSchema;
use serde::Serialize;

/// How a setting is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Grade {
    /// As it should be.
    Good,
    /// It weakens a boundary, or costs a control.
    Weak,
    /// It undoes a boundary, or keeps a backend from working.
    Bad,
    /// It cannot be found out here.
    Unknown,
}

impl Grade {
    /// In a word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Weak => "weak",
            Self::Bad => "bad",
            Self::Unknown => "unknown",
        }
    }
}

/// One setting of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Finding {
    /// Which; stable.
    pub id: &'static str,
    /// How it is.
    pub grade: Grade,
    /// What was seen, in words.
    pub fact: String,
    /// The command that mends it, or what to do where no single command does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

impl Finding {
    /// One that is as it should be.
    #[must_use]
    pub fn good(id: &'static str, fact: impl Into<String>) -> Self {
        Self { id, grade: Grade::Good, fact: fact.into(), fix: None }
    }

    /// One that is not, and what mends it.
    #[must_use]
    pub fn not(grade: Grade, id: &'static str, fact: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { id, grade, fact: fact.into(), fix: Some(fix.into()) }
    }

    /// One that this host does not tell.
    #[must_use]
    pub fn unknown(id: &'static str, fact: impl Into<String>) -> Self {
        Self { id, grade: Grade::Unknown, fact: fact.into(), fix: None }
    }
}

/// What a hypervisor's boundary rests on.
#[must_use]
pub fn posture() -> Vec<Finding> {
    posture_below(Path::new("/"))
}

fn posture_below(root: &Path) -> Vec<Finding> {
    let read = |path: &str| fs::read_to_string(root.join(path)).ok().map(|text| text.trim().to_owned());
    let mut found = vec![
        match read("sys/devices/system/cpu/smt/active").as_deref() {
            Some("0") => Finding::good("smt", "SMT is off"),
            Some("1") => Finding::not(
                Grade::Weak,
                "smt",
                "SMT is on: guests of two boundaries may share a core's two threads",
                "echo off | sudo tee /sys/devices/system/cpu/smt/control",
            ),
            _ => Finding::unknown("smt", "SMT: this kernel does not say"),
        },
        match read("sys/kernel/mm/ksm/run").as_deref() {
            Some("0") | None => Finding::good("ksm", "KSM is off"),
            Some(_) => Finding::not(
                Grade::Weak,
                "ksm",
                "KSM is on: equal pages are merged, which tells one guest what another holds",
                "echo 0 | sudo tee /sys/kernel/mm/ksm/run",
            ),
        },
        match read("proc/swaps").map_or(0, |text| text.lines().skip(1).count()) {
            0 => Finding::good("swap", "no swap: guest memory stays in memory"),
            n => Finding::not(
                Grade::Weak,
                "swap",
                format!("{n} swap areas: guest memory may be written to disk"),
                "sudo swapoff --all",
            ),
        },
    ];
    for module in ["kvm_intel", "kvm_amd"] {
        if let Some(value) = read(&format!("sys/module/{module}/parameters/nested")) {
            found.push(if matches!(value.as_str(), "1" | "Y") {
                Finding::not(
                    Grade::Weak,
                    "nested-virtualisation",
                    format!("{module}: nested virtualisation is on"),
                    format!(
                        "echo options {module} nested=0 | sudo tee /etc/modprobe.d/kvm-nested.conf, then load the module again"
                    ),
                )
            } else {
                Finding::good("nested-virtualisation", format!("{module}: nested virtualisation is off"))
            });
        }
    }
    found.push(vulnerabilities(&root.join("sys/devices/system/cpu/vulnerabilities")));
    found
}

fn vulnerabilities(directory: &Path) -> Finding {
    const ID: &str = "cpu-vulnerabilities";
    let entries: Vec<_> = fs::read_dir(directory).into_iter().flatten().flatten().collect();
    let exposed = |path: &Path| fs::read_to_string(path).unwrap_or_default().starts_with("Vulnerable");
    let mut names: Vec<String> = entries
        .iter()
        .filter(|entry| exposed(&entry.path()))
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    match (entries.len(), names.as_slice()) {
        (0, _) => Finding::unknown(ID, "CPU vulnerabilities: this kernel does not say"),
        (known, []) => Finding::good(ID, format!("CPU vulnerabilities: none of {known} unmitigated")),
        (_, names) => Finding::not(
            Grade::Weak,
            ID,
            format!("CPU vulnerabilities without mitigation: {}", names.join(", ")),
            "install the newest kernel and CPU microcode, and boot without `mitigations=off`",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(files: &[(&str, &str)]) -> Vec<Finding> {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        posture_below(dir.path())
    }

    #[test]
    fn weak_settings_are_named_with_a_fix_and_good_ones_too() {
        let weak = host(&[
            ("sys/devices/system/cpu/smt/active", "1\n"),
            ("sys/kernel/mm/ksm/run", "1\n"),
            ("proc/swaps", "Filename Type\n/dev/sda2 partition\n"),
            ("sys/module/kvm_amd/parameters/nested", "1\n"),
            ("sys/devices/system/cpu/vulnerabilities/l1tf", "Vulnerable\n"),
            ("sys/devices/system/cpu/vulnerabilities/mds", "Mitigation: Clear CPU buffers\n"),
        ]);
        assert_eq!(weak.len(), 5);
        assert!(weak.iter().all(|f| f.grade == Grade::Weak && f.fix.is_some()), "{weak:?}");
        let said = weak.iter().map(|f| f.fact.as_str()).collect::<Vec<_>>().join("\n");
        for word in ["SMT is on", "KSM is on", "1 swap areas", "kvm_amd: nested virtualisation is on", ": l1tf"] {
            assert!(said.contains(word), "{word}: {said}");
        }
        assert!(!said.contains("mds"));
        let good = host(&[
            ("sys/devices/system/cpu/smt/active", "0\n"),
            ("proc/swaps", "Filename Type\n"),
            ("sys/module/kvm_intel/parameters/nested", "N\n"),
            ("sys/devices/system/cpu/vulnerabilities/mds", "Not affected\n"),
        ]);
        assert!(good.iter().all(|f| f.grade == Grade::Good && f.fix.is_none()), "{good:?}");
    }

    #[test]
    fn what_a_kernel_does_not_say_is_not_called_good() {
        let silent = host(&[]);
        let unknown: Vec<_> = silent.iter().filter(|f| f.grade == Grade::Unknown).map(|f| f.id).collect();
        assert_eq!(unknown, ["smt", "cpu-vulnerabilities"]);
    }
}
