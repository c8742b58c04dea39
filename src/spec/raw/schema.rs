//! JSON Schemas (draft 2020-12) of the step file and the policy, for editors and other tools.
//!
//! They are committed under `schema/`; a test compares, and `PLIMSOLL_UPDATE_SCHEMAS=1 cargo test --lib schema` writes
//! them again.

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

use super::{RawArtifact, RawArtifactTable, RawPolicy, RawSpec};
use crate::spec::units::SIZE_PATTERN;

const BASE: &str = "https://raw.githubusercontent.com/plimsoll-ci/plimsoll/main/schema";

/// Schema of `plimsoll.yml`.
#[must_use]
pub fn step_schema() -> Value {
    generate::<RawSpec>("step.schema.json", "plimsoll step file")
}

/// Schema of `/etc/plimsoll/policy.yml`.
#[must_use]
pub fn policy_schema() -> Value {
    generate::<RawPolicy>("policy.schema.json", "plimsoll operator policy")
}

fn generate<T: JsonSchema>(file: &str, title: &str) -> Value {
    let schema = SchemaSettings::draft2020_12().into_generator().into_root_schema_for::<T>();
    let mut value = schema.to_value();
    drop_null(&mut value);
    if let Some(root) = value.as_object_mut() {
        root.insert("$id".into(), json!(format!("{BASE}/{file}")));
        root.insert("title".into(), json!(title));
    }
    value
}

/// Optional keys are left out rather than written as null; an editor that offers `null` helps nobody.
fn drop_null(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(drop_null),
        Value::Object(map) => {
            map.values_mut().for_each(drop_null);
            if map.get("default").is_some_and(Value::is_null) {
                map.remove("default");
            }
            if let Some(Value::Array(types)) = map.get_mut("type") {
                types.retain(|kind| kind != "null");
                if let [only] = types.as_slice() {
                    let only = only.clone();
                    map.insert("type".into(), only);
                }
            }
            if let Some(Value::Array(variants)) = map.get_mut("anyOf") {
                variants.retain(|variant| variant != &json!({"type": "null"}));
                if let [Value::Object(only)] = variants.as_slice() {
                    let only = only.clone();
                    map.remove("anyOf");
                    for (key, value) in only {
                        map.entry(key).or_insert(value);
                    }
                }
            }
        }
        _ => {}
    }
}

impl JsonSchema for RawArtifact {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Artifact".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let table = generator.subschema_for::<RawArtifactTable>();
        json_schema!({ "anyOf": [{ "type": "string" }, table] })
    }
}

/// A file has steps, and each has a command unless the defaults do.
pub(super) fn what_runs(schema: &mut Schema) {
    if let Some(Value::Array(required)) = schema.get_mut("required") {
        required.push(json!("steps"));
    }
    if let Some(steps) = schema.get_mut("properties").and_then(|properties| properties.get_mut("steps"))
        && let Some(steps) = steps.as_object_mut()
    {
        steps.insert("minItems".into(), json!(1));
    }
    schema.insert(
        "if".into(),
        json!({ "required": ["defaults"], "properties": { "defaults": { "required": ["run"] } } }),
    );
    schema.insert("else".into(), json!({ "properties": { "steps": { "items": { "required": ["run"] } } } }));
}

pub(super) fn version(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "const": 1 })
}

pub(super) fn env(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "additionalProperties": { "type": ["string", "number", "boolean"] },
    })
}

/// Names or numbers of users or groups.
pub(super) fn names(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "array", "items": { "type": ["string", "integer"] } })
}

pub(super) fn run_id(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["integer", "string"] })
}

pub(super) fn cpus(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["number", "string"], "exclusiveMinimum": 0, "examples": [1, 0.5] })
}

fn size(examples: [&str; 2]) -> Schema {
    json_schema!({ "type": ["string", "integer"], "pattern": SIZE_PATTERN, "examples": examples })
}

pub(super) fn memory(_: &mut SchemaGenerator) -> Schema {
    size(["512MiB", "2GiB"])
}

pub(super) fn disk(_: &mut SchemaGenerator) -> Schema {
    size(["1GiB", "256MiB"])
}

pub(super) fn output(_: &mut SchemaGenerator) -> Schema {
    size(["1MiB", "64KiB"])
}

pub(super) fn backends(_: &mut SchemaGenerator) -> Schema {
    let names: Vec<_> = crate::spec::Backend::ALL.iter().map(|backend| backend.name()).collect();
    json_schema!({ "type": "array", "items": { "enum": names } })
}

pub(super) fn digests(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "array", "items": { "type": "string", "pattern": "^(sha256:)?[0-9a-fA-F]{64}$" } })
}

pub(super) fn vulnerable_engines(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "enum": ["warn", "refuse"], "default": "warn" })
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::spec::place::Source;
    use crate::spec::raw::RawStep;
    use crate::spec::{SpecFile, Surroundings};

    fn committed(file: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("schema").join(file)
    }

    #[test]
    fn committed_schemas_are_the_generated_ones() {
        for (file, schema) in [("step.schema.json", step_schema()), ("policy.schema.json", policy_schema())] {
            let text = format!("{schema:#}\n");
            if std::env::var_os("PLIMSOLL_UPDATE_SCHEMAS").is_some() {
                std::fs::create_dir_all(committed("")).unwrap();
                std::fs::write(committed(file), &text).unwrap();
            }
            let found = std::fs::read_to_string(committed(file)).unwrap_or_default();
            assert!(found == text, "schema/{file} is stale: PLIMSOLL_UPDATE_SCHEMAS=1 cargo test --lib schema");
        }
    }

    /// Enough of JSON Schema for what is generated here; patterns and ranges are not looked at.
    fn admits(root: &Value, schema: &Value, value: &Value) -> bool {
        let any = |key: &str| match schema.get(key) {
            Some(Value::Array(variants)) => variants.iter().any(|variant| admits(root, variant, value)),
            _ => true,
        };
        let kind = |kind: &Value| match kind.as_str().unwrap() {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "boolean" => value.is_boolean(),
            "number" => value.is_number(),
            "integer" => value.is_u64() || value.is_i64(),
            other => panic!("{other}"),
        };
        let kinds = match schema.get("type") {
            Some(Value::Array(kinds)) => kinds.iter().any(kind),
            Some(one) => kind(one),
            None => true,
        };
        let reference = schema.get("$ref").is_none_or(|reference| {
            let pointer = reference.as_str().unwrap().strip_prefix('#').unwrap();
            admits(root, root.pointer(pointer).unwrap(), value)
        });
        let words = schema.get("enum").is_none_or(|words| words.as_array().unwrap().contains(value));
        let constant = schema.get("const").is_none_or(|constant| constant == value);
        let items = match (schema.get("items"), value) {
            (Some(items), Value::Array(values)) => values.iter().all(|value| admits(root, items, value)),
            _ => true,
        };
        let keys = match value {
            Value::Object(map) => map.iter().all(|(key, value)| {
                match schema.get("properties").and_then(|properties| properties.get(key)) {
                    Some(property) => admits(root, property, value),
                    None => match schema.get("additionalProperties") {
                        None => true,
                        Some(Value::Bool(allowed)) => *allowed,
                        Some(other) => admits(root, other, value),
                    },
                }
            }),
            _ => true,
        };
        let required = match (schema.get("required"), value) {
            (Some(Value::Array(required)), Value::Object(map)) => {
                required.iter().all(|key| map.contains_key(key.as_str().unwrap()))
            }
            _ => true,
        };
        let least = schema.get("minItems").and_then(Value::as_u64);
        let enough = least.is_none_or(|least| value.as_array().is_none_or(|items| items.len() as u64 >= least));
        let otherwise = match (schema.get("if"), schema.get("else")) {
            (Some(condition), Some(otherwise)) => admits(root, condition, value) || admits(root, otherwise, value),
            _ => true,
        };
        enough
            && otherwise
            && any("anyOf")
            && any("oneOf")
            && kinds
            && reference
            && words
            && constant
            && items
            && keys
            && required
    }

    #[test]
    fn a_schema_admits_what_the_reader_does_and_refuses_what_an_editor_should_mark() {
        let schema = step_schema();
        let step = |value: &Value| admits(&schema, &schema, value);
        let with = |step: Value| json!({ "version": 1, "steps": [step] });
        for good in [
            json!({ "run": "x" }),
            json!({ "run": "x", "artifact": { "path": "x.zip", "sha256": "a".repeat(64) }, "env": { "A": 1, "B": true } }),
            json!({ "run": "x", "timeout-minutes": 0.5, "sandbox": { "backend": "wasm", "minimum-isolation": "vm", "cpus": 0.5 } }),
            json!({ "run": "x", "sandbox": { "require": ["memory-limit"], "memory": "512MiB", "pids": 3, "network": "none" } }),
            json!({ "run": "x", "sandbox": { "mounts": [{ "path": "~/x", "at": "/x" }], "grants": { "filesystem": "work" } } }),
        ] {
            assert!(step(&with(good.clone())), "{good}");
        }
        for bad in [
            json!({ "rum": "x" }),
            json!({ "run": "x", "sandbox": { "backend": "docker" } }),
            json!({ "run": "x", "sandbox": { "minimum-isolation": "strong" } }),
            json!({ "run": "x", "sandbox": { "network": "host" } }),
            json!({ "run": "x", "sandbox": { "require": ["memory"] } }),
            json!({ "run": "x", "artifact": { "file": "x" } }),
        ] {
            assert!(!step(&with(bad.clone())), "{bad}");
        }
        assert!(!step(&json!({ "version": 2, "steps": [{ "run": "x" }] })));
        for nothing in [
            json!({ "version": 1 }),
            json!({ "version": 1, "steps": [] }),
            json!({ "version": 1, "steps": [{ "name": "x" }] }),
            json!({ "version": 1, "defaults": { "shell": "sh" }, "steps": [{ "run": "x" }, {}] }),
        ] {
            assert!(!step(&nothing), "{nothing}");
            let file = Source::from_bytes(Path::new("x.yml"), nothing.to_string().into_bytes()).unwrap();
            let steps = SpecFile::parse(&file).and_then(|f| f.steps(&RawStep::default(), 1, &Surroundings::default()));
            assert!(steps.is_err(), "{nothing}");
        }
        assert!(step(&json!({ "version": 1, "defaults": { "run": "x" }, "steps": [{ "name": "y" }] })));
        assert!(!step(&json!({ "steps": [{ "run": "x" }] })));
        let schema = policy_schema();
        let policy = |value: &Value| admits(&schema, &schema, value);
        let whole = json!({
            "minimum-isolation": "kernel", "backends": ["gvisor"], "engines": ["a".repeat(64)], "kernels": [], "images": ["host"],
            "maxima": { "memory": "1GiB", "timeout-minutes": 10 }, "mounts": ["/srv"], "network": "none",
            "grants": { "filesystem": "none" }, "require": ["network"], "vulnerable-engines": "refuse",
        });
        assert!(policy(&whole));
        assert!(!policy(&json!({ "minimum_isolation": "vm" })));
    }

    #[test]
    fn every_key_is_described() {
        fn walk(value: &Value, at: &str) {
            let Value::Object(map) = value else { return };
            if let Some(Value::Object(properties)) = map.get("properties") {
                for (key, property) in properties {
                    assert!(property.get("description").is_some(), "{at}.{key}");
                }
            }
            // A condition speaks of keys that are described where they are.
            let described = map.iter().filter(|(key, _)| !matches!(key.as_str(), "if" | "else"));
            described.for_each(|(key, value)| walk(value, &format!("{at}.{key}")));
        }
        walk(&step_schema(), "step");
        walk(&policy_schema(), "policy");
        assert!(!step_schema().to_string().contains("null"));
    }
}
