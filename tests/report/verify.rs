//! `plimsoll verify`: a tampered report is found out, an honest one is not accused.

use std::fs;
use std::path::Path;

use plimsoll::exit::Exit;
use plimsoll::report::json_v1::{ReportV1, record_digest};
use plimsoll::report::verify::{Verified, verify};
use serde_json::{Value, json};

use crate::samples::{self, Sample};

fn check(root: &Path) -> Verified {
    let outputs = Some(root.join("outputs")).filter(|p| p.exists());
    verify(&root.join("report"), outputs.as_deref()).unwrap()
}

/// A forger who knows the format: changes the record and makes both digests right again.
fn forge(root: &Path, change: impl FnOnce(&mut Value)) {
    let path = root.join("report/report.json");
    let mut value: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut value);
    if let Ok(report) = serde_json::from_value::<ReportV1>(value.clone()) {
        value["digests"]["result_sha256"] = plimsoll::report::canonical::digest(&report.result()).into();
    }
    value["digests"]["record_sha256"] = record_digest(value.clone()).into();
    fs::write(&path, serde_json::to_vec(&value).unwrap()).unwrap();
}

fn faults(mut sample: Sample, change: impl FnOnce(&mut Value)) -> String {
    let root = tempfile::tempdir().unwrap();
    sample.commit(root.path());
    forge(root.path(), change);
    let verified = check(root.path());
    assert_eq!(verified.exit(), if verified.consistent() { Exit::Passed } else { Exit::FaultFound });
    verified.faults.iter().map(|f| format!("{f}\n")).collect()
}

fn control<'a>(value: &'a mut Value, id: &str) -> &'a mut Value {
    let controls = value["steps"][0]["controls"].as_array_mut().unwrap();
    controls.iter_mut().find(|c| c["id"] == id).unwrap()
}

#[test]
fn every_honest_report_is_consistent() {
    for (name, mut sample) in samples::all() {
        if name == "hostile" {
            // It claims a refusal of a step that ran and failed, and test cases that none of its outputs has: no run does.
            let step = &mut sample.report.steps[0];
            (step.refusal, step.guest_tests, step.guest_cases) = (None, None, Default::default());
        }
        let root = tempfile::tempdir().unwrap();
        sample.commit(root.path());
        let verified = check(root.path());
        assert!(verified.consistent(), "{name}: {:#?}", verified.faults);
    }
    assert_eq!(faults(samples::passed(), |_| {}), "");
}

#[test]
fn a_changed_byte_is_found_in_every_file() {
    for file in [
        "report/report.json",
        "report/junit.xml",
        "report/summary.md",
        "report/report.html",
        "report/steps/01-unit-tests-of-the-generated-patch/stdout.log",
        "report/steps/01-unit-tests-of-the-generated-patch/stderr.log",
        "outputs/01-unit-tests-of-the-generated-patch/report.xml",
        "outputs/01-unit-tests-of-the-generated-patch/out/summary.txt",
    ] {
        let root = tempfile::tempdir().unwrap();
        samples::passed().commit(root.path());
        let path = root.path().join(file);
        let mut bytes = fs::read(&path).unwrap();
        // A digit of a number in the record, any byte elsewhere.
        let at = if file.ends_with("json") {
            String::from_utf8(bytes.clone()).unwrap().find("1893376").unwrap()
        } else {
            bytes.len() / 2
        };
        bytes[at] = if bytes[at] == b'2' { b'3' } else { b'2' };
        fs::write(&path, &bytes).unwrap();
        assert!(!check(root.path()).consistent(), "{file}");
        fs::remove_file(&path).unwrap();
        assert!(!check(root.path()).consistent(), "{file} removed");
    }
}

#[test]
fn a_log_cut_at_the_limit_is_verified_too() {
    let root = tempfile::tempdir().unwrap();
    let report = samples::failed().commit(root.path());
    assert!(report.steps[0].result.as_ref().unwrap().stdout.truncated);
    assert!(check(root.path()).consistent());
    let path = root.path().join("report/steps/01-check-the-generated-parser/stdout.log");
    let mut bytes = fs::read(&path).unwrap();
    bytes[100] ^= 1;
    fs::write(&path, bytes).unwrap();
    assert!(!check(root.path()).consistent());
}

#[test]
fn links_devices_and_strangers_in_the_directory_are_faults() {
    let root = tempfile::tempdir().unwrap();
    samples::passed().commit(root.path());
    let report = root.path().join("report");
    fs::rename(report.join("junit.xml"), root.path().join("junit.xml")).unwrap();
    std::os::unix::fs::symlink(root.path().join("junit.xml"), report.join("junit.xml")).unwrap();
    fs::write(report.join("extra.sh"), "x").unwrap();
    fs::create_dir_all(report.join("steps/02-x")).unwrap();
    fs::write(report.join("steps/02-x/stdout.log"), "not recorded").unwrap();
    let found: Vec<String> = check(root.path()).faults.iter().map(|f| f.place.clone()).collect();
    for place in ["junit.xml", "extra.sh", "steps/02-x/stdout.log"] {
        assert!(found.iter().any(|f| f == place), "{place} in {found:?}");
    }
    fs::remove_file(report.join("report.json")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", report.join("report.json")).unwrap();
    let verified = check(root.path());
    assert!(verified.report.is_none() && !verified.consistent());
}

#[test]
fn paths_out_of_the_directory_are_not_followed() {
    for path in ["../../../etc/passwd", "/etc/passwd", "steps/../report.json", "steps/01-x/../../junit.xml", ""] {
        let text = faults(samples::passed(), |v| v["steps"][0]["result"]["stdout"]["path"] = path.into());
        assert!(text.contains("is not that of a log of this step"), "{path}: {text}");
    }
    let text = faults(samples::passed(), |v| v["steps"][0]["outputs"][0]["path"] = "../../report/report.json".into());
    assert!(text.contains("cannot be read"), "{text}");
}

#[test]
fn grades_and_tiers_follow_from_the_facts_alone() {
    let text = faults(samples::refused(), |v| control(v, "secrets")["status"] = "enforced".into());
    assert!(text.contains("the recorded facts make it not-enforced"), "{text}");
    let text = faults(samples::passed(), |v| {
        v["steps"][0]["isolation"] = json!({"floor": "kernel", "tier": "vm", "proven": true});
    });
    assert!(text.contains("is vm, but the recorded facts prove kernel"), "{text}");
    // A fact changed in value keeps its old words, or changes the grade.
    let text = faults(samples::passed(), |v| control(v, "seccomp")["observations"][0]["value"]["filtered"] = 1.into());
    assert!(text.contains("isolation.tier") && text.contains("controls.seccomp"), "{text}");
    let text = faults(samples::passed(), |v| control(v, "seccomp")["observations"] = json!([]));
    assert!(text.contains("prove process"), "{text}");
    // A guest's word raises nothing.
    let text = faults(samples::passed(), |v| control(v, "challenge")["observations"][0]["origin"] = "guest".into());
    assert!(text.contains("isolation.tier"), "{text}");
    let text = faults(samples::passed(), |v| control(v, "seccomp")["observations"][0]["fact"] = "all is well".into());
    assert!(text.contains("says `all is well`"), "{text}");
    let text = faults(samples::passed(), |v| {
        v["steps"][0]["controls"].as_array_mut().unwrap().retain(|c| c["id"] != "network");
    });
    assert!(text.contains("network is there 0 times"), "{text}");
}

#[test]
fn verdicts_follow_from_what_happened() {
    let pass = |v: &mut Value| {
        (v["verdict"], v["exit_code"]) = ("passed".into(), 0.into());
        (v["steps"][0]["verdict"], v["steps"][0]["exit_code"]) = ("passed".into(), 0.into());
    };
    for (sample, expected) in [
        (samples::failed(), "did not end with exit code 0"),
        (samples::refused(), "nothing is known to have run"),
        (samples::unavailable(), "there is no result"),
    ] {
        assert!(faults(sample, pass).contains(expected), "{expected}");
    }
    let text = faults(samples::failed(), |v| (v["verdict"], v["exit_code"]) = ("passed".into(), 0.into()));
    assert!(text.contains("the steps come to 10"), "{text}");
    let text = faults(samples::refused(), |v| v["steps"][0]["forgiven"] = true.into());
    assert!(text.contains("only exit code 10 can be forgiven"), "{text}");
    let text = faults(samples::refused(), |v| v["steps"][0]["dispatched"] = "yes".into());
    assert!(text.contains("the floor is not proven") && text.contains("secrets is required"), "{text}");
    let text = faults(samples::passed(), |v| control(v, "network")["required"] = false.into());
    assert!(text.contains("network is not marked as required"), "{text}");
    let text = faults(samples::passed(), |v| v["verdict"] = "failed".into());
    assert!(text.contains("exit code 0 means passed"), "{text}");
    let text = faults(samples::mixed(), |v| v["steps"].as_array_mut().unwrap().swap(0, 1));
    assert!(text.contains("is 1, after 2"), "{text}");
    let text = faults(samples::cancelled(), |v| (v["verdict"], v["exit_code"]) = ("passed".into(), 0.into()));
    assert!(text.contains("there are no steps"), "{text}");
    let text = faults(samples::cancelled(), |v| v["verdict"] = "passed".into());
    assert!(!text.is_empty());
}

/// `--step` and `--shard` leave gaps. Two steps with one number would have one directory.
#[test]
fn a_selection_of_steps_keeps_their_numbers() {
    let of = |indices: [u32; 2]| {
        let mut sample = samples::refused();
        sample.report.steps = indices
            .map(|index| {
                let mut step = sample.report.steps[0].clone();
                step.index = index;
                step
            })
            .into();
        sample.logs = vec![(vec![], vec![]); 2];
        faults(sample, |_| {})
    };
    assert_eq!(of([2, 7]), "");
    assert!(of([7, 2]).contains("steps[1].index: is 2, after 7"));
    assert!(of([2, 2]).contains("steps[1].index: is 2, after 2"));
    assert!(of([0, 1]).contains("steps[0].index: is 0, after 0"));
}

#[test]
fn a_member_that_no_type_reads_still_counts_in_the_digest() {
    let root = tempfile::tempdir().unwrap();
    samples::passed().commit(root.path());
    let path = root.path().join("report/report.json");
    let text = fs::read_to_string(&path).unwrap().replacen("\"runner\":", "\"surprise\": 1, \"runner\":", 1);
    fs::write(&path, text).unwrap();
    assert!(!check(root.path()).consistent());
}

#[test]
fn a_fault_quotes_no_raw_text() {
    let text =
        faults(samples::passed(), |v| control(v, "seccomp")["observations"][0]["fact"] = samples::HOSTILE.into());
    assert!(
        !text.contains('\u{1b}') && !text.contains('\u{202e}') && text.lines().all(|l| !l.starts_with("::")),
        "{text}"
    );
}

/// A forger who also makes the digest of a rendering right.
fn forge_rendering(root: &Path, name: &str, change: impl FnOnce(String) -> String) {
    let path = root.join("report").join(name);
    let text = change(fs::read_to_string(&path).unwrap());
    fs::write(&path, &text).unwrap();
    forge(root, |value| {
        let files = value["renderings"].as_array_mut().unwrap();
        let file = files.iter_mut().find(|file| file["path"] == name).unwrap();
        file["bytes"] = text.len().into();
        file["sha256"] = plimsoll::spec::Sha256Digest::of(text.as_bytes()).to_string().into();
    });
}

#[test]
fn a_rendering_that_says_something_else_is_found_though_its_digest_is_right() {
    // One whose guest's own test cases come out of the outputs, and one without any.
    for sample in [samples::passed, samples::mixed] {
        for name in ["junit.xml", "summary.md", "report.html"] {
            let root = tempfile::tempdir().unwrap();
            sample().commit(root.path());
            forge_rendering(root.path(), name, |text| text);
            assert!(check(root.path()).consistent(), "{name}: an honest one");
            forge_rendering(root.path(), name, |text| format!("{text}forged"));
            let faults = check(root.path()).faults;
            assert!(faults.iter().any(|f| f.place == name && f.what.contains("record")), "{name}: {faults:?}");
        }
    }
}

#[test]
fn a_record_that_was_changed_does_not_fit_its_renderings() {
    let found = faults(samples::mixed(), |value| value["steps"][0]["resources"]["total_ms"] = json!(7));
    for name in ["junit.xml", "summary.md", "report.html"] {
        assert!(found.contains(&format!("{name}: does not say what the record says")), "{found}");
    }
}

#[test]
fn what_cannot_be_rendered_again_is_said() {
    let root = tempfile::tempdir().unwrap();
    samples::passed().commit(root.path());
    // Without the outputs nobody knows the cases of the guest's own tests.
    let verified = verify(&root.path().join("report"), None).unwrap();
    assert!(verified.consistent(), "{:?}", verified.faults);
    assert!(verified.unchecked.iter().any(|u| u.contains("guest's own tests")), "{:?}", verified.unchecked);
    forge_rendering(root.path(), "summary.md", |text| text.replacen("kernel", "vm", 1));
    assert!(!verify(&root.path().join("report"), None).unwrap().consistent(), "it shows no cases");
    // Another version renders in its own way.
    let root = tempfile::tempdir().unwrap();
    samples::failed().commit(root.path());
    forge(root.path(), |value| value["tool"]["version"] = json!("0.0.1"));
    let verified = check(root.path());
    assert!(verified.unchecked.iter().any(|u| u.contains("plimsoll 0.0.1")), "{:?}", verified.unchecked);
}

#[test]
fn test_counts_that_no_output_file_has_are_a_fault() {
    let found = faults(samples::passed(), |value| value["steps"][0]["guest_tests"]["total"] = json!(77));
    assert!(found.contains("no output file has that many test cases"), "{found}");
}
