//! `report.json` and its schema.

use plimsoll::report::json_v1::{ReadError, ReportV1, SCHEMA};

use crate::{commit_all, python, samples};

const COMMITTED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/schema/report.schema.json");

const JSONSCHEMA: &str = concat!(
    "import json, jsonschema\nschema = json.load(open('",
    env!("CARGO_MANIFEST_DIR"),
    "/schema/report.schema.json'))\njsonschema.Draft202012Validator.check_schema(schema)\n",
    "for f in sys.argv[1:]: jsonschema.validate(json.load(open(f)), schema, cls=jsonschema.Draft202012Validator)\n"
);

#[test]
fn the_committed_schema_is_the_one_of_the_types() {
    let mut text = serde_json::to_string_pretty(&ReportV1::json_schema()).unwrap();
    text.push('\n');
    if std::env::var_os("UPDATE_SCHEMAS").is_some() {
        std::fs::write(COMMITTED, &text).unwrap();
    }
    let committed = std::fs::read_to_string(COMMITTED).unwrap();
    assert!(committed == text, "schema/report.schema.json is out of date; run with UPDATE_SCHEMAS=1");
}

#[test]
fn every_report_is_valid_under_the_schema_and_reads_back() {
    let root = tempfile::tempdir().unwrap();
    let all = commit_all(root.path());
    let files: Vec<_> = all.iter().map(|(name, _)| root.path().join(name).join("report/report.json")).collect();
    python("jsonschema", JSONSCHEMA, &files);
    for ((name, sample), file) in all.iter().zip(&files) {
        let bytes = std::fs::read(file).unwrap();
        let mut expected = ReportV1::from(&sample.report);
        let read = ReportV1::read(&bytes).unwrap();
        (expected.renderings, expected.digests) = (read.renderings.clone(), read.digests.clone());
        assert_eq!(read, expected, "{name}");
        let text = String::from_utf8(bytes).unwrap();
        assert!(!text.chars().any(|c| c.is_control() && c != '\n') && !text.contains('\u{202e}'), "{name}");
    }
}

#[test]
fn a_passed_report_has_the_fields_that_others_rely_on() {
    let root = tempfile::tempdir().unwrap();
    let written = samples::passed().commit(root.path());
    assert_eq!(written.schema, SCHEMA);
    let mut value = serde_json::to_value(&written).unwrap();
    // What depends on the renderings changes with every stroke of the pen.
    value["digests"]["record_sha256"] = "[record digest]".into();
    for rendering in value["renderings"].as_array_mut().unwrap() {
        (rendering["sha256"], rendering["bytes"]) = ("[digest]".into(), "[bytes]".into());
    }
    insta::assert_snapshot!("passed.json", serde_json::to_string_pretty(&value).unwrap());
}

#[test]
fn the_result_digest_repeats_whatever_else_differs() {
    let commit = |sample: &mut samples::Sample| sample.commit(tempfile::tempdir().unwrap().path());
    let first = commit(&mut samples::passed());
    let mut other = samples::passed();
    other.report.started_at = "2027-01-01T00:00:00Z".parse().unwrap();
    other.report.ended_at = "2027-01-01T00:00:09Z".parse().unwrap();
    other.report.host.runner = "elsewhere".to_owned();
    other.report.steps[0].resources.run_ms += 12;
    other.files.reverse();
    let second = commit(&mut other);
    assert_eq!(first.digests.result_sha256, second.digests.result_sha256);
    assert_ne!(first.digests.record_sha256, second.digests.record_sha256);

    let mut changed = samples::passed();
    changed.logs[0].0.push(b'!');
    assert_ne!(commit(&mut changed).digests.result_sha256, first.digests.result_sha256);
    let mut changed = samples::passed();
    changed.files[0].1 = b"<testsuites/>";
    assert_ne!(commit(&mut changed).digests.result_sha256, first.digests.result_sha256);
}

#[test]
fn what_is_no_such_record_is_refused() {
    let root = tempfile::tempdir().unwrap();
    samples::passed().commit(root.path());
    let good = std::fs::read_to_string(root.path().join("report/report.json")).unwrap();
    assert!(ReportV1::read(good.as_bytes()).is_ok());
    for (from, to) in [
        ("\"verdict\": \"passed\"", "\"verdict\": \"splendid\""),
        ("\"exit_code\": 0", "\"exit_code\": 3"),
        ("\"exit_code\": 0", "\"exit_code\": -1"),
        ("\"grants\"", "\"surprise\": 1, \"grants\""),
        ("\"index\": 1", "\"index\": 1, \"index\": 2"),
        ("\"origin\": \"local\"", "\"origin\": \"notary\""),
        ("\"started_at\": \"2026", "\"started_at\": \"once upon a time 2026"),
    ] {
        let bad = good.replacen(from, to, 1);
        assert_ne!(bad, good, "{from}");
        assert!(matches!(ReportV1::read(bad.as_bytes()), Err(ReadError::Shape(_))), "{to}");
    }
    let other = good.replacen("boundary-report.v1", "boundary-report.v2", 1);
    assert!(matches!(ReportV1::read(other.as_bytes()), Err(ReadError::Schema)));
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(matches!(ReportV1::read(deep.as_bytes()), Err(ReadError::Shape(_))));
}

#[test]
fn what_doctor_prints_is_valid_under_its_schema_and_each_fault_has_a_fix() {
    let doctor = |backend: &str| {
        let run = std::process::Command::new(env!("CARGO_BIN_EXE_plimsoll"))
            .args(["doctor", "--json", "--backend", backend])
            .env("GITHUB_TOKEN", "ghs_not-to-be-told")
            .env_remove("PLIMSOLL_FIRECRACKER")
            .env("PATH", "/usr/bin:/bin")
            .output()
            .unwrap();
        (run.status.code(), String::from_utf8(run.stdout).unwrap())
    };
    let root = tempfile::tempdir().unwrap();
    let (_, text) = doctor("wasm");
    let file = root.path().join("doctor.json");
    std::fs::write(&file, &text).unwrap();
    python("jsonschema", &JSONSCHEMA.replace("report.schema.json", "doctor.schema.json"), &[file]);
    assert!(!text.contains("ghs_not-to-be-told"), "a value is told");
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let findings = value["findings"].as_array().unwrap();
    for finding in findings {
        let faulty = matches!(finding["grade"].as_str().unwrap(), "weak" | "bad");
        assert_eq!(faulty, finding["fix"].is_string(), "{finding}");
    }
    let secrets = findings.iter().find(|f| f["id"] == "secrets").unwrap();
    assert!(secrets["grade"] == "weak" && secrets["fact"].as_str().unwrap().contains("GITHUB_TOKEN"), "{secrets}");
    // A backend that is not there is exit 12, with what to do.
    let (code, text) = doctor("firecracker");
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let backend = &value["backends"][0];
    if backend["usable"] == false {
        assert_eq!(code, Some(12), "{text}");
        assert!(backend["blocker"].is_string() && backend["help"].is_string(), "{backend}");
    }
}
