//! Signed reports: what a service signs, others can check; what anybody changes afterwards, is found.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use plimsoll::report::sign::{
    self, OpenError, PREDICATE_TYPE, Predicate, PublicKey, SignError, SigningKey, Statement, claims,
};
use plimsoll::report::verify::{Provenance, Verified, verify, verify_signed};
use plimsoll::report::{ArtifactRecord, ReportOrigin};
use serde_json::{Value, json};

use crate::python;
use crate::samples::{self, Sample};

const SCHEMA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/schema/predicate.schema.json");

fn key() -> SigningKey {
    SigningKey::generate().unwrap()
}

fn report_json(root: &Path) -> Vec<u8> {
    fs::read(root.join("report/report.json")).unwrap()
}

/// Writes a sample as a service does, with its signature.
fn commit(mut sample: Sample, key: &SigningKey, root: &Path) -> Vec<u8> {
    sample.report.origin = ReportOrigin::Service;
    let report = sample.commit(root);
    let envelope = sign::envelope(key, &report_json(root), &claims(&report)).unwrap();
    fs::write(root.join("report/report.dsse.json"), &envelope).unwrap();
    envelope
}

fn check(root: &Path, keys: &[PublicKey]) -> Verified {
    let outputs = Some(root.join("outputs")).filter(|p| p.exists());
    verify_signed(&root.join("report"), outputs.as_deref(), keys).unwrap()
}

fn faults(verified: &Verified) -> String {
    verified.faults.iter().map(|f| format!("{f}\n")).collect()
}

/// Every sample that a run could have written; see `verify.rs` about the one left out.
fn honest() -> impl Iterator<Item = (&'static str, Sample)> {
    samples::all().into_iter().filter(|(name, _)| *name != "hostile")
}

#[test]
fn every_report_can_be_signed_and_is_then_proven() {
    for (name, sample) in honest() {
        let (root, key) = (tempfile::tempdir().unwrap(), key());
        let envelope = commit(sample, &key, root.path());
        let verified = check(root.path(), &[self::key().public().clone(), key.public().clone()]);
        assert!(verified.consistent(), "{name}: {}", faults(&verified));
        let Provenance::Proven { signer, claimed } = verified.provenance else { panic!("{name} is not proven") };
        assert_eq!(signer.key_id, key.public().id());
        assert_eq!(signer.host, fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim());
        assert!(claimed.contains(&"/ci".to_owned()), "{claimed:?}");
        let statement = sign::open(&envelope, &[key.public().clone()]).unwrap();
        assert_eq!(Some(&statement.predicate.report), verified.report.as_ref());
        // Without the key it is consistent, and nothing is proven by that.
        let outputs = root.path().join("outputs");
        let outputs = outputs.exists().then_some(outputs.as_path());
        let verified = verify(&root.path().join("report"), outputs).unwrap();
        assert!(verified.consistent() && verified.provenance == Provenance::NotProven, "{}", faults(&verified));
        assert!(verified.unchecked.iter().any(|u| u.contains("no key was given")), "{:?}", verified.unchecked);
    }
}

#[test]
fn subjects_are_the_record_the_artifacts_and_the_outputs() {
    let (root, key) = (tempfile::tempdir().unwrap(), key());
    let mut sample = samples::passed();
    let artifact = |format: &str| ArtifactRecord {
        source: "x".to_owned(),
        format: format.to_owned(),
        sha256: samples::hex64('e'),
        files: 1,
        bytes: 1,
    };
    sample.report.steps[0].artifact = Some(artifact("tar.zst"));
    let envelope = commit(sample, &key, root.path());
    let Statement { subject, predicate, .. } = sign::open(&envelope, &[key.public().clone()]).unwrap();
    let names: Vec<&str> = subject.iter().map(|s| s.name.as_str()).collect();
    assert_eq!(
        names,
        ["report.json", "steps/1/artifact", "steps/1/outputs/report.xml", "steps/1/outputs/out/summary.txt"]
    );
    let sha256 = |bytes: &[u8]| plimsoll::spec::Sha256Digest::of(bytes).to_string().replace("sha256:", "");
    assert_eq!(subject[0].digest.sha256, sha256(&report_json(root.path())));
    assert_eq!(subject[1].digest.sha256, samples::hex64('e'));
    let output = root.path().join("outputs/01-unit-tests-of-the-generated-patch/out/summary.txt");
    assert_eq!(subject[3].digest.sha256, sha256(&fs::read(output).unwrap()));
    assert_eq!(predicate.claimed, ["/ci", "/steps/0/artifact/source", "/steps/0/name"]);

    // The digest of a directory is that of a listing, which no tool finds in a file.
    let mut sample = samples::passed();
    sample.report.steps[0].artifact = Some(artifact("directory"));
    let root = tempfile::tempdir().unwrap();
    let statement = sign::open(&commit(sample, &key, root.path()), &[key.public().clone()]).unwrap();
    assert_eq!(statement.subject[1].name, "steps/1/artifact.listing");

    // Refused before anything was read: the statement is about the report.
    let mut sample = samples::refused();
    sample.report.steps[0].artifact = None;
    let root = tempfile::tempdir().unwrap();
    let statement = sign::open(&commit(sample, &key, root.path()), &[key.public().clone()]).unwrap();
    assert_eq!(statement.subject.len(), 1);
    assert_eq!(statement.subject[0].digest.sha256, sha256(&report_json(root.path())));
    assert!(check(root.path(), &[key.public().clone()]).consistent());
}

/// Every regular file below a directory.
fn files(at: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(at).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files(&path, found) } else { found.push(path) }
    }
}

#[test]
fn a_flipped_bit_is_found_wherever_it_is() {
    let (root, key) = (tempfile::tempdir().unwrap(), key());
    commit(samples::passed(), &key, root.path());
    let keys = [key.public().clone()];
    assert!(check(root.path(), &keys).consistent());
    let mut all = Vec::new();
    files(root.path(), &mut all);
    assert!(all.len() > 8, "{all:?}");
    let mut tried = 0;
    for path in &all {
        let bytes = fs::read(path).unwrap();
        // Every byte of a small file, a sample of a larger one; more of the envelope, whose own digest nothing holds.
        let envelope = path.ends_with("report/report.dsse.json");
        let (most, ends, bits) = if envelope { (300, 250, &[0x01, 0x20][..]) } else { (100, 0, &[0x01][..]) };
        let step = if bytes.len() <= 300 { 1 } else { bytes.len().div_ceil(most) };
        let ends = (0..bytes.len().min(ends)).chain(bytes.len().saturating_sub(ends)..bytes.len());
        for at in ends.chain((0..bytes.len()).step_by(step)) {
            // The lowest bit, and the one that tells a capital letter from a small one and a space from nothing.
            for bit in bits {
                let mut changed = bytes.clone();
                changed[at] ^= bit;
                fs::write(path, &changed).unwrap();
                let verified = check(root.path(), &keys);
                let proven = verified.consistent() || verified.provenance != Provenance::NotProven;
                assert!(!proven, "{} at {at}, {bit:#x}", path.display());
                tried += 1;
            }
        }
        for changed in [&bytes[..bytes.len().saturating_sub(1)], &[&bytes[..], b"\n"].concat()] {
            if *changed != bytes {
                fs::write(path, changed).unwrap();
                assert!(!check(root.path(), &keys).consistent(), "{}, another length", path.display());
            }
        }
        fs::write(path, &bytes).unwrap();
    }
    assert!(tried > 1500, "{tried}");
    assert!(check(root.path(), &keys).consistent(), "as it was");
}

#[test]
fn white_space_of_the_record_is_signed_too() {
    let (root, key) = (tempfile::tempdir().unwrap(), key());
    commit(samples::passed(), &key, root.path());
    let path = root.path().join("report/report.json");
    let compact = serde_json::from_slice::<Value>(&report_json(root.path())).unwrap().to_string();
    fs::write(&path, compact).unwrap();
    let verified = check(root.path(), &[key.public().clone()]);
    assert_eq!(faults(&verified), "report.dsse.json: was made for another report.json\n");
}

#[test]
fn a_report_without_a_signature_proves_nothing() {
    let (root, key) = (tempfile::tempdir().unwrap(), key());
    commit(samples::passed(), &key, root.path());
    fs::remove_file(root.path().join("report/report.dsse.json")).unwrap();
    // It says that it is a service's, so it is inconsistent with or without a key.
    let plain = verify(&root.path().join("report"), None).unwrap();
    for verified in [check(root.path(), &[key.public().clone()]), plain] {
        assert!(faults(&verified).contains("origin: is service, but there is no report.dsse.json"));
        assert_eq!(verified.exit().code(), 15);
    }
    // A job's own.
    let root = tempfile::tempdir().unwrap();
    samples::passed().commit(root.path());
    let verified = check(root.path(), &[key.public().clone()]);
    assert!(faults(&verified).contains("report.dsse.json: is missing: no service signed"), "{}", faults(&verified));
    assert_eq!((verified.exit().code(), verified.provenance), (15, Provenance::NotProven));
}

#[test]
fn a_signature_that_is_not_by_a_trusted_key_proves_nothing() {
    let (root, forger, trusted) = (tempfile::tempdir().unwrap(), key(), key());
    let envelope = commit(samples::passed(), &forger, root.path());
    let keys = [trusted.public().clone()];
    assert!(faults(&check(root.path(), &keys)).contains("which is not among those given"));
    assert!(faults(&check(root.path(), &[])).contains("which is not among those given"));
    // The forger writes the trusted key's id over its own, in the envelope and in the statement.
    let path = root.path().join("report/report.dsse.json");
    let text = String::from_utf8(envelope).unwrap();
    let mut value: Value = serde_json::from_str(&text).unwrap();
    let payload = String::from_utf8(BASE64.decode(value["payload"].as_str().unwrap()).unwrap()).unwrap();
    let renamed = payload.replace(forger.public().id(), trusted.public().id());
    assert_ne!(payload, renamed);
    for payload in [&payload, &renamed] {
        value["payload"] = BASE64.encode(payload).into();
        value["signatures"][0]["keyid"] = trusted.public().id().into();
        fs::write(&path, format!("{value}\n")).unwrap();
        let verified = check(root.path(), &keys);
        assert_eq!(faults(&verified).lines().count(), 1, "{}", faults(&verified));
        assert!(faults(&verified).contains("the signature is not the key's"), "{}", faults(&verified));
    }
}

#[test]
fn an_old_signature_does_not_fit_another_report() {
    let (old, new, key) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), key());
    let envelope = commit(samples::passed(), &key, old.path());
    commit(samples::failed(), &key, new.path());
    fs::write(new.path().join("report/report.dsse.json"), envelope).unwrap();
    let verified = check(new.path(), &[key.public().clone()]);
    assert!(faults(&verified).contains("was made for another report.json"), "{}", faults(&verified));
    // The whole of the old report is as good as it ever was: a signature proves an origin, not a time.
    assert!(check(old.path(), &[key.public().clone()]).consistent());
}

#[test]
fn a_link_in_the_place_of_the_signature_is_not_followed() {
    let (root, key) = (tempfile::tempdir().unwrap(), key());
    commit(samples::passed(), &key, root.path());
    let path = root.path().join("report/report.dsse.json");
    let elsewhere = root.path().join("elsewhere.json");
    fs::rename(&path, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
    assert!(faults(&check(root.path(), &[key.public().clone()])).contains("report.dsse.json: cannot be read"));
}

#[test]
fn what_is_no_services_report_is_not_signed() {
    let (root, key) = (tempfile::tempdir().unwrap(), key());
    let report = samples::passed().commit(root.path());
    let local = report_json(root.path());
    assert!(matches!(sign::envelope(&key, &local, &claims(&report)), Err(SignError::Origin)));
    assert!(matches!(sign::envelope(&key, b"{}", &[]), Err(SignError::Read(_))));
    commit(samples::passed(), &key, root.path());
    let service = report_json(root.path());
    for pointer in ["", "ci", "/cj", "/steps/7/name", "/steps/-", "/ci/"] {
        let said = sign::envelope(&key, &service, &[pointer.to_owned()]).unwrap_err().to_string();
        assert!(said.contains("points at nothing"), "{pointer}: {said}");
    }
    // A list of claims is a set.
    let twice = ["/steps/0/name".to_owned(), "/ci".to_owned(), "/ci".to_owned()];
    let statement = sign::open(&sign::envelope(&key, &service, &twice).unwrap(), &[key.public().clone()]).unwrap();
    assert_eq!(statement.predicate.claimed, ["/ci", "/steps/0/name"]);
    // An artifact without a digest is nothing to make a statement about.
    let mut sample = samples::passed();
    sample.report.origin = ReportOrigin::Service;
    if let Some(artifact) = &mut sample.report.steps[0].artifact {
        artifact.sha256 = "unknown".to_owned();
    }
    let root = tempfile::tempdir().unwrap();
    sample.commit(root.path());
    let said = sign::envelope(&key, &report_json(root.path()), &[]).unwrap_err().to_string();
    assert!(said.contains("no SHA-256"), "{said}");
}

/// Not even the key's owner gets something past that plimsoll would not have written.
#[test]
fn a_signed_statement_that_does_not_hold_together_is_refused() {
    let (root, key) = (tempfile::tempdir().unwrap(), key());
    let envelope = commit(samples::passed(), &key, root.path());
    let file = root.path().join("service.key");
    key.save(&file).unwrap();
    let resign = |change: &dyn Fn(&mut Value)| -> Result<Statement, OpenError> {
        let outer: Value = serde_json::from_slice(&envelope).unwrap();
        let payload = BASE64.decode(outer["payload"].as_str().unwrap()).unwrap();
        let mut value: Value = serde_json::from_slice(&payload).unwrap();
        change(&mut value);
        let payload = plimsoll::report::canonical::canonical(&value);
        let message = [format!("DSSEv1 28 {} {} ", sign::PAYLOAD_TYPE, payload.len()).as_bytes(), &payload].concat();
        let sig = openssl_sign(&file, &message)?;
        let sealed = json!({"payload": BASE64.encode(&payload), "payloadType": sign::PAYLOAD_TYPE,
            "signatures": [{"keyid": key.public().id(), "sig": BASE64.encode(sig)}]});
        sign::open(format!("{sealed}\n").as_bytes(), &[key.public().clone()])
    };
    let Ok(_) = resign(&|_| ()) else { return eprintln!("skipped: openssl is not installed") };
    type Change = (&'static str, fn(&mut Value));
    let changes: [Change; 9] = [
        ("no in-toto statement v1", |v| v["_type"] = "https://in-toto.io/Statement/v0.1".into()),
        ("of another type", |v| v["predicateType"] = "https://slsa.dev/provenance/v1".into()),
        ("subjects are not those", |v| v["subject"][0]["digest"]["sha256"] = samples::hex64('0').into()),
        ("subjects are not those", |v| drop(v["subject"].as_array_mut().unwrap().pop())),
        ("subjects are not those", |v| v["subject"] = json!([])),
        ("unknown field", |v| v["predicate"]["extra"] = 1.into()),
        ("canonical form", |v| v["predicate"]["report"]["host"]["extra"] = 1.into()),
        ("origin is not `service`", |v| v["predicate"]["report"]["origin"] = "local".into()),
        ("points at nothing", |v| v["predicate"]["claimed"] = json!(["/nothing"])),
    ];
    for (why, change) in changes {
        let said = resign(&change).unwrap_err().to_string();
        assert!(said.contains(why), "{why}: {said}");
    }
    let said = resign(&|v| v["predicate"]["signer"]["key_id"] = samples::hex64('0').into()).unwrap_err().to_string();
    assert!(said.contains("another key than the envelope"), "{said}");
}

/// An Ed25519 signature by OpenSSL, from the key file that we wrote; an error only where there is no OpenSSL.
fn openssl_sign(key: &Path, message: &[u8]) -> Result<Vec<u8>, OpenError> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("m"), message).unwrap();
    let mut command = Command::new("openssl");
    command.args(["pkeyutl", "-sign", "-rawin", "-in", "m", "-out", "s", "-inkey"]).arg(key).current_dir(dir.path());
    let Ok(output) = command.output() else {
        assert!(!must_work("openssl"), "openssl is not installed");
        return Err(OpenError::Signature);
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(fs::read(dir.path().join("s")).unwrap())
}

fn must_work(what: &str) -> bool {
    std::env::var("PLIMSOLL_MUST_WORK").unwrap_or_default().split(',').any(|word| word == what || word == "all")
}

#[test]
fn openssl_verifies_the_signature_and_names_the_key_alike() {
    let (root, key) = (tempfile::tempdir().unwrap(), key());
    let envelope: Value = serde_json::from_slice(&commit(samples::passed(), &key, root.path())).unwrap();
    let payload = BASE64.decode(envelope["payload"].as_str().unwrap()).unwrap();
    let message = [format!("DSSEv1 28 {} {} ", sign::PAYLOAD_TYPE, payload.len()).as_bytes(), &payload].concat();
    fs::write(root.path().join("message"), message).unwrap();
    let sig = BASE64.decode(envelope["signatures"][0]["sig"].as_str().unwrap()).unwrap();
    fs::write(root.path().join("sig"), sig).unwrap();
    // As `plimsoll setup service` writes it: comments, then keys.
    let old = self::key();
    let text = format!("# in use\n{}# before\n{}", key.public().pem(), old.public().pem());
    fs::write(root.path().join("service.pub"), text).unwrap();
    let script = "set -e; openssl pkeyutl -verify -rawin -pubin -inkey service.pub -in message -sigfile sig; \
                  openssl pkey -pubin -in service.pub -outform DER | sha256sum";
    if let Err(e) = Command::new("openssl").arg("version").output() {
        assert!(!must_work("openssl"), "{e}");
        return eprintln!("skipped: openssl is not installed");
    }
    let output = Command::new("sh").args(["-c", script]).current_dir(root.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("Signature Verified Successfully") && said.contains(key.public().id()), "{said}");
}

/// The envelope by securesystemslib, which is the reference implementation of DSSE in Python, and the statement by in-toto's own
/// library.
const OTHERS: &str = r#"
import json, os
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from google.protobuf import json_format
import in_toto_attestation.v1.statement_pb2 as pb
from in_toto_attestation.v1.statement import Statement
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import SSlibKey
for root in sys.argv[1:]:
    data = json.load(open(os.path.join(root, 'report/report.dsse.json')))
    pem = open(os.path.join(root, 'service.pub'), 'rb').read()
    key = SSlibKey.from_crypto(load_pem_public_key(pem), keyid=data['signatures'][0]['keyid'])
    envelope = Envelope.from_dict(data)
    assert list(envelope.verify([key], 1)) == [key.keyid]
    statement = json_format.Parse(envelope.payload, pb.Statement())
    Statement.copy_from_pb(statement).validate()
    assert statement.predicate['report']['verdict'] == json.load(open(os.path.join(root, 'report/report.json')))['verdict']
    envelope.payload = envelope.payload.replace(b'plimsoll', b'plimsolL', 1)
    try: envelope.verify([key], 1)
    except VerificationError: pass
    else: raise AssertionError('a changed payload was taken')
print('checked', len(sys.argv) - 1)
"#;

#[test]
fn securesystemslib_and_in_toto_take_what_we_sign() {
    let root = tempfile::tempdir().unwrap();
    let mut roots = Vec::new();
    for (name, sample) in honest() {
        let (root, key) = (root.path().join(name), key());
        fs::create_dir(&root).unwrap();
        commit(sample, &key, &root);
        fs::write(root.join("service.pub"), key.public().pem()).unwrap();
        roots.push(root);
    }
    let count = roots.len();
    if let Some(said) = python("securesystemslib, in_toto_attestation", OTHERS, &roots) {
        assert_eq!(said.trim(), format!("checked {count}"));
    }
}

#[test]
fn the_committed_schema_of_the_predicate_is_the_one_of_the_types() {
    let mut text = serde_json::to_string_pretty(&Predicate::json_schema()).unwrap();
    text.push('\n');
    if std::env::var_os("UPDATE_SCHEMAS").is_some() {
        fs::write(SCHEMA, &text).unwrap();
    }
    assert!(fs::read_to_string(SCHEMA).unwrap() == text, "{SCHEMA} is out of date; run with UPDATE_SCHEMAS=1");
}

#[test]
fn every_predicate_is_valid_under_the_schema() {
    let root = tempfile::tempdir().unwrap();
    let mut all = vec![PathBuf::from(SCHEMA)];
    for (name, sample) in honest() {
        let (at, key) = (root.path().join(name), key());
        fs::create_dir(&at).unwrap();
        let envelope: Value = serde_json::from_slice(&commit(sample, &key, &at)).unwrap();
        let payload = BASE64.decode(envelope["payload"].as_str().unwrap()).unwrap();
        let statement: Value = serde_json::from_slice(&payload).unwrap();
        assert_eq!(statement["predicateType"], PREDICATE_TYPE);
        all.push(at.join("predicate.json"));
        fs::write(at.join("predicate.json"), statement["predicate"].to_string()).unwrap();
    }
    let program = "import json, jsonschema\nschema = json.load(open(sys.argv[1]))\njsonschema.Draft202012Validator.check_schema(schema)\n\
                   for f in sys.argv[2:]: jsonschema.validate(json.load(open(f)), schema, cls=jsonschema.Draft202012Validator)\n";
    python("jsonschema", program, &all);
}
