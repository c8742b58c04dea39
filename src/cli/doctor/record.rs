//! What `plimsoll doctor --json` prints; its schema is printed by `plimsoll schema doctor`.

use std::collections::BTreeMap;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::backend::EngineRecord;
use crate::evidence::host::Finding;
use crate::evidence::{ControlId, Status, Tier};
use crate::report::{Host, PolicyRecord};

/// Value of `schema`.
pub const SCHEMA: &str = "plimsoll.doctor.v1";

/// Everything that was found out.
#[derive(Debug, Serialize, JsonSchema)]
pub struct DoctorV1 {
    /// Always `plimsoll.doctor.v1`.
    pub schema: &'static str,
    /// The machine.
    pub host: Host,
    /// What the operator's policy does here.
    pub policy: PolicyRecord,
    /// Settings of the host, each with what to do about it.
    pub findings: Vec<Finding>,
    /// The backends that were tried.
    pub backends: Vec<BackendV1>,
}

/// One backend, tried by building its boundary.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct BackendV1 {
    /// Its name.
    pub backend: String,
    /// Whether a step with the backend's default floor would be admitted.
    pub usable: bool,
    /// The tier that was proven, if one was.
    pub tier: Option<Tier>,
    /// The backend's default floor.
    pub floor: Tier,
    /// From start to teardown, milliseconds.
    pub total_ms: u64,
    /// The engine, if it came up.
    pub engine: Option<EngineRecord>,
    /// Grade of each control.
    pub controls: BTreeMap<ControlId, Status>,
    /// What stands in the way.
    pub blocker: Option<String>,
    /// What to do about it.
    pub help: Option<String>,
    /// When it was tried.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub found_at: Timestamp,
    /// Whether that was before this call: on this host as it is now, since it was started.
    pub cached: bool,
}

impl DoctorV1 {
    /// JSON schema (2020-12).
    #[must_use]
    pub fn json_schema() -> Value {
        let mut schema = schemars::schema_for!(DoctorV1).to_value();
        schema["properties"]["schema"]["const"] = SCHEMA.into();
        schema
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_schema_is_the_one_of_the_types() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/schema/doctor.schema.json");
        let text = format!("{:#}\n", DoctorV1::json_schema());
        if std::env::var_os("UPDATE_SCHEMAS").is_some() {
            std::fs::write(path, &text).unwrap();
        }
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        assert!(committed == text, "schema/doctor.schema.json is out of date; run with UPDATE_SCHEMAS=1");
    }
}
