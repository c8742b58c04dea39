//! What the VMM is told to build, and what it says it has built.
//!
//! Paths are those inside the VMM's own root directory, where the launcher puts the files (see [`super::raise`]).

use serde_json::{Value, json};

use crate::backend::{Bounds, MachineParts};

/// Bytes in a mebibyte, the unit in which the VMM takes memory.
pub const MIB: u64 = 1024 * 1024;
/// The guest's context id; it is alone on its own vsock device.
const GUEST_CID: u32 = 3;
/// The vsock device's socket.
pub const VSOCK: &str = "/run/v.sock";
/// The socket that takes requests.
pub const API: &str = "/run/api.sock";
/// Directory of the files below.
pub const IMAGES: &str = "/img";
/// Least memory that a distribution's kernel boots in with our initramfs, MiB.
pub const LEAST_MEMORY: u64 = 96;
/// Letters that drives are named by.
const LETTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyz";

/// A virtual machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Virtual CPUs.
    pub vcpus: u64,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// The kernel's command line.
    pub boot_args: String,
    /// Names of the drives, in order.
    pub drives: Vec<String>,
}

/// Names of drives, in the order in which they are attached: `vda`, `vdb`, …
#[must_use]
pub fn drive_name(index: usize) -> Option<String> {
    LETTERS.get(index).map(|&letter| format!("vd{}", char::from(letter)))
}

impl Machine {
    /// The machine for these limits and files; `None` if there are more drives than letters.
    #[must_use]
    pub fn new(bounds: &Bounds, parts: &MachineParts) -> Option<Self> {
        let count = 1 + usize::from(parts.workspace.is_some()) + parts.mounts.len();
        let drives = (0..count).map(drive_name).collect::<Option<_>>()?;
        // No serial port, no probing for keyboards and mice; a panic or a restart ends the VMM.
        let boot_args = format!(
            "reboot=k panic=-1 quiet 8250.nr_uarts=0 i8042.noaux i8042.nomux i8042.dumbkbd plimsoll.disk={}",
            bounds.disk_bytes
        );
        Some(Self {
            vcpus: bounds.cpu_millis.div_ceil(1000).clamp(1, 32),
            memory_mib: bounds.memory_bytes / MIB,
            boot_args,
            drives,
        })
    }

    /// The requests that build it, in order: a path and a body for `PUT`.
    #[must_use]
    pub fn requests(&self) -> Vec<(String, Value)> {
        let mut requests = vec![
            ("/machine-config".to_owned(), self.machine_config()),
            ("/boot-source".to_owned(), self.boot_source()),
        ];
        requests.extend(self.drives.iter().map(|name| (format!("/drives/{name}"), drive(name))));
        requests.push(("/vsock".to_owned(), vsock()));
        requests
    }

    fn machine_config(&self) -> Value {
        json!({"vcpu_count": self.vcpus, "mem_size_mib": self.memory_mib, "smt": false, "track_dirty_pages": false})
    }

    fn boot_source(&self) -> Value {
        json!({
            "kernel_image_path": format!("{IMAGES}/kernel"),
            "initrd_path": format!("{IMAGES}/initramfs"),
            "boot_args": self.boot_args,
        })
    }

    /// What the configuration that was read back has that was not planned, or the other way round: in words, or
    /// nothing if they agree. A device that we do not know counts.
    #[must_use]
    pub fn differs(&self, read: &Value) -> Option<String> {
        let planned = [
            ("machine-config", self.machine_config()),
            ("boot-source", self.boot_source()),
            ("drives", Value::Array(self.drives.iter().map(|name| drive(name)).collect())),
            ("vsock", vsock()),
        ];
        let Some(read) = read.as_object() else { return Some("it is no JSON object".to_owned()) };
        for (key, value) in &planned {
            match read.get(*key) {
                Some(found) if covers(found, value) => {}
                found => return Some(format!("{key} is {}, not {value}", found.unwrap_or(&Value::Null))),
            }
        }
        read.iter()
            .filter(|(key, _)| !planned.iter().any(|(known, _)| known == key))
            .find(|(_, value)| !empty(value))
            .map(|(key, value)| format!("{key} is {value}, and was not planned"))
    }
}

fn drive(name: &str) -> Value {
    json!({
        "drive_id": name,
        "path_on_host": format!("{IMAGES}/{name}"),
        "is_root_device": false,
        "is_read_only": true,
    })
}

fn vsock() -> Value {
    json!({"guest_cid": GUEST_CID, "uds_path": VSOCK})
}

fn empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.values().all(empty),
        _ => false,
    }
}

/// Whether `found` says everything that `planned` does. Lists are equally long.
fn covers(found: &Value, planned: &Value) -> bool {
    match (found, planned) {
        (Value::Object(found), Value::Object(planned)) => {
            planned.iter().all(|(key, value)| found.get(key).is_some_and(|f| covers(f, value)))
        }
        (Value::Array(found), Value::Array(planned)) => {
            found.len() == planned.len() && found.iter().zip(planned).all(|(f, p)| covers(f, p))
        }
        _ => found == planned,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn machine() -> Machine {
        let bounds = Bounds {
            memory_bytes: 512 * MIB,
            cpu_millis: 1500,
            pids: 8,
            disk_bytes: 7,
            output_bytes: 1,
            deadline: Duration::from_secs(1),
        };
        let parts = MachineParts {
            kernel: "k".into(),
            initramfs: "i".into(),
            kernel_release: "6".into(),
            kernel_sha256: "0".into(),
            rootfs: "r".into(),
            workspace: Some("w".into()),
            mounts: vec![crate::backend::MachineMount { image: "m".into(), at: "/m".into(), file: None }],
        };
        Machine::new(&bounds, &parts).unwrap()
    }

    /// What Firecracker 1.12.1 answers to `GET /vm/config` for that machine.
    fn read() -> Value {
        let drive = |name: &str| {
            json!({"drive_id": name, "partuuid": null, "is_root_device": false, "cache_type": "Unsafe",
                "is_read_only": true, "path_on_host": format!("/img/{name}"), "rate_limiter": null,
                "io_engine": "Sync", "socket": null})
        };
        json!({
            "balloon": null,
            "drives": [drive("vda"), drive("vdb"), drive("vdc")],
            "boot-source": {"kernel_image_path": "/img/kernel", "initrd_path": "/img/initramfs",
                "boot_args": machine().boot_args},
            "cpu-config": null, "logger": null,
            "machine-config": {"vcpu_count": 2, "mem_size_mib": 512, "smt": false, "track_dirty_pages": false,
                "huge_pages": "None"},
            "metrics": null, "mmds-config": null, "network-interfaces": [],
            "vsock": {"guest_cid": 3, "uds_path": "/run/v.sock"},
            "entropy": null,
        })
    }

    #[test]
    fn what_was_planned_is_recognised() {
        assert_eq!(machine().differs(&read()), None);
    }

    #[test]
    fn every_kind_of_difference_is_named() {
        let changed = |pointer: &str, value: Value| {
            let mut read = read();
            *read.pointer_mut(pointer).unwrap() = value;
            machine().differs(&read).unwrap_or_else(|| panic!("{pointer} was not noticed"))
        };
        assert!(changed("/machine-config/mem_size_mib", json!(1024)).contains("machine-config"));
        assert!(changed("/machine-config/smt", json!(true)).contains("machine-config"));
        assert!(changed("/boot-source/boot_args", json!("init=/bin/sh")).contains("boot-source"));
        assert!(changed("/drives/0/is_read_only", json!(false)).contains("drives"));
        assert!(changed("/drives/1/path_on_host", json!("/etc/shadow")).contains("drives"));
        assert!(changed("/drives", json!([])).contains("drives"));
        assert!(changed("/vsock/uds_path", json!("/x")).contains("vsock"));
        assert!(changed("/network-interfaces", json!([{"iface_id": "eth0"}])).contains("network-interfaces"));
        assert!(changed("/balloon", json!({"amount_mib": 1})).contains("balloon"));
        let mut new_device = read();
        new_device["pmem"] = json!([{"id": "p"}]);
        assert!(machine().differs(&new_device).unwrap().contains("pmem"));
        assert!(machine().differs(&json!("yes")).is_some());
    }

    #[test]
    fn limits_become_a_machine() {
        let machine = machine();
        assert_eq!((machine.vcpus, machine.memory_mib), (2, 512));
        assert!(machine.boot_args.ends_with("plimsoll.disk=7") && machine.boot_args.contains("8250.nr_uarts=0"));
        assert_eq!(machine.drives, ["vda", "vdb", "vdc"]);
        assert_eq!(drive_name(26), None);
    }
}
