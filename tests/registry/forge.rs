//! A step whose artifact another job left at the forge.

use std::fs;

use plimsoll::artifact::Digest;

use crate::common::{Ran, backend};
use crate::server::{Reply, Server, User};

const HELLO: &str = r#"(module
  (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 16) "from the forge\n")
  (func (export "_start")
    (i32.store (i32.const 0) (i32.const 16))
    (i32.store (i32.const 4) (i32.const 15))
    (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))))"#;

/// What is uploaded: not a zip, as the same service may have it.
fn archive(members: &[(&str, &str)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in members {
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.set_cksum();
        builder.append(&header, content.as_bytes()).unwrap();
    }
    builder.into_inner().unwrap()
}

/// Runs a step with an artifact that the API announces under that digest; says what it did and its report.
fn run(stored: Vec<u8>, digest: &str) -> (Ran, serde_json::Value) {
    let store = Server::start(move |_| Reply::new(200, stored.clone()));
    let (digest, place) = (digest.to_owned(), format!("http://{}/blob?signature=hush", store.host));
    let api = Server::start(move |asked| {
        assert_eq!(asked.headers.get("authorization").map(String::as_str), Some("Bearer t0ken"));
        if asked.path.starts_with("/repos/o/r/actions/runs/7/artifacts?") {
            let list = format!(r#"{{"artifacts":[{{"id":3,"name":"patch","digest":"sha256:{digest}"}}]}}"#);
            return Reply::new(200, list);
        }
        assert_eq!(asked.path, "/repos/o/r/actions/artifacts/3/zip");
        Reply::new(302, "").header("location", place.clone())
    });
    let user = User::new();
    let dir = user.dir.path();
    let spec =
        "version: 1\nsteps:\n  - name: fetched\n    artifact: { github: patch, run-id: 7 }\n    run: hello.wat\n";
    fs::write(dir.join("plimsoll.yml"), spec).unwrap();
    let ran = user
        .run(["run"])
        .dir(dir)
        .env("GITHUB_API_URL", format!("http://{}", api.host))
        .env("GITHUB_REPOSITORY", "o/r")
        .env("GITHUB_TOKEN", "t0ken")
        .run();
    assert!(store.asked().iter().all(|asked| !asked.headers.contains_key("authorization")), "{:?}", store.asked());
    assert!(!ran.all().contains("t0ken") && !ran.all().contains("hush"), "{}", ran.all());
    let report = fs::read_to_string(dir.join("plimsoll-report/report.json")).unwrap();
    assert!(!report.contains("t0ken") && !report.contains("hush"), "{report}");
    (ran, serde_json::from_str(&report).unwrap())
}

#[test]
fn what_the_forge_keeps_is_fetched_verified_and_run() {
    if !backend("wasm") {
        return;
    }
    let stored = archive(&[("hello.wat", HELLO)]);
    let digest = Digest::of(&stored).to_string();
    let (ran, report) = run(stored, &digest);
    assert!(ran.exits(0).all().contains("from the forge"));
    let artifact = &report["steps"][0]["artifact"];
    assert_eq!((&artifact["source"], &artifact["sha256"]), (&"github:patch@7".into(), &digest.into()));
}

#[test]
fn what_is_not_what_the_forge_says_or_leads_out_of_the_tree_is_refused() {
    let stored = archive(&[("hello.wat", HELLO)]);
    let (ran, report) = run(stored, &Digest::of(b"something else").to_string());
    ran.exits(13);
    assert_eq!(report["steps"][0]["refusal"]["reason"], "sha256");
    assert_eq!(report["steps"][0]["dispatched"], "no");
    // It goes the same way as any other archive.
    let stored = archive(&[("../hello.wat", HELLO)]);
    let digest = Digest::of(&stored).to_string();
    let (ran, report) = run(stored, &digest);
    ran.exits(13);
    assert_eq!(report["steps"][0]["refusal"]["reason"], "path");
}
