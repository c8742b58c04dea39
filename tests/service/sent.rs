//! What a step names that is not its artifact's own files: mounts, images of a registry, artifacts of a forge. The client
//! brings them, with its own rights; the service takes copies, and opens and asks nobody.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::symlink;

use plimsoll::artifact::Digest;

use crate::common::{Run, backend, busybox, fixture};
use crate::server::{ARCH, Image, Reply, Server};
use crate::support::{Place, Service, two_users};

/// The pointers that a report's signature lists as claimed.
fn claimed(place: &Place, service: &Service) -> String {
    let key = service.dir.path().join("service.pub");
    let ran = place.plimsoll(&["verify", "plimsoll-report", "--key"]).args([key]).run().exits(0);
    ran.stdout.lines().find(|line| line.contains("claimed by the job")).unwrap().to_owned()
}

#[test]
fn a_mounted_directory_and_file_are_what_the_caller_could_read() {
    if !two_users() || !backend("gvisor") {
        return;
    }
    let (service, place) = (Service::start(), Place::new());
    place.write("src/x", "");
    place.write("wheels/a.txt", "from the mount\n");
    place.write("wheels/.git/config", "kept\n");
    place.write("one.txt", "one file\n");
    symlink("/etc/shadow", place.path("wheels/link")).unwrap();
    let script = "cat /w/a.txt /w/.git/config /one; readlink /w/link; touch /w/b || echo read-only";
    let arguments = [
        "--artifact",
        "src",
        "--backend",
        "gvisor",
        "--mount",
        "wheels:/w",
        "--mount",
        "one.txt:/one",
        "--run",
        script,
    ];
    let ran = place.run(&service, &arguments).run().exits(0);
    for line in ["│ from the mount", "│ kept", "│ one file", "│ /etc/shadow", "│ read-only"] {
        assert!(ran.stderr.contains(line), "{line}: {}", ran.all());
    }
    let report = place.report();
    assert_eq!(report["origin"], "service");
    let grants = report["steps"][0]["grants"].as_array().unwrap();
    let mount = grants.iter().position(|words| words == "mount: wheels at /w (read-only)");
    let mount = mount.unwrap_or_else(|| panic!("{grants:?}"));
    let claimed = claimed(&place, &service);
    assert!(claimed.contains(&format!("/steps/0/grants/{mount}")), "{claimed}");
}

#[test]
fn a_mount_that_the_caller_can_not_read_is_not_sent() {
    if !two_users() {
        return;
    }
    let (service, place) = (Service::start(), Place::new());
    let fifo = place.path("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    std::os::unix::fs::chown(&fifo, Some(crate::support::USERS[0].0), None).unwrap();
    for (mount, why) in [
        ("/etc/shadow:/m", "can't be read"),
        ("fifo:/m", "neither a file nor a directory"),
        ("/proc/self/environ:/m", "made up by the kernel"),
    ] {
        let ran =
            place.run(&service, &["--artifact", "pass.wat", "--run", "pass.wat", "--mount", mount]).run().exits(13);
        assert!(ran.stdout.contains(why), "{}", ran.all());
        assert_eq!(place.report()["steps"][0]["dispatched"], "no");
    }
}

#[test]
fn a_full_temporary_directory_is_no_fault_of_the_artifact() {
    if !two_users() {
        return;
    }
    let (service, place) = (Service::start(), Place::new());
    place.write("src/x", "x");
    // A directory goes as a copy.
    let ran = place.run(&service, &["--artifact", "src", "--run", "x"]).env("TMPDIR", "/proc").run().exits(1);
    assert!(ran.stdout.contains("failed to write in the temporary directory /proc"), "{}", ran.all());
    assert!(ran.stdout.contains("set TMPDIR"), "{}", ran.all());
    let step = &place.report()["steps"][0];
    assert_eq!([&step["refusal"]["reason"], &step["dispatched"]], ["temporary", "no"]);
}

#[test]
fn a_step_file_gets_nothing_of_the_jobs_environment_by_way_of_procfs() {
    if !two_users() {
        return;
    }
    let (service, place) = (Service::start(), Place::new());
    for artifact in ["/proc/self/environ", "/proc/self/task/../environ", "/sys/kernel/mm/ksm/run"] {
        let ran = place.run(&service, &["--artifact", artifact, "--run", "pass.wat"]).run().exits(13);
        assert!(ran.stdout.contains("made up by the kernel"), "{artifact}: {}", ran.all());
        assert_eq!(place.report()["steps"][0]["dispatched"], "no");
    }
}

/// A step whose artifact is the first descriptor and whose mount is the second.
fn mounting(kind: &str) -> String {
    let step = r#"{"run":"x.wat","sandbox":{"mounts":[{"path":"/etc","at":"/m"}]}}"#;
    let artifact = r#"{"fd":0,"kind":"file","name":"x.wat"}"#;
    format!(
        r#"{{"steps":[{{"index":1,"step":{step},"artifact":{artifact},"mounts":[{{"fd":1,"kind":"{kind}","name":"m"}}]}}],"jobs":1}}"#
    )
}

fn asked(service: &Service, json: &str, fds: &[OwnedFd]) -> (u8, String) {
    let mut raw = service.connect();
    raw.hello();
    raw.request(json, &fds.iter().map(AsFd::as_fd).collect::<Vec<_>>());
    let (kind, body) = raw.last().unwrap();
    (kind, String::from_utf8_lossy(&body).into_owned())
}

fn holding(bytes: &[u8]) -> OwnedFd {
    let mut file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut file, bytes).unwrap();
    file.into()
}

fn member(name: &str, content: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_ustar();
    header.set_mode(0o644);
    header.set_size(content.len() as u64);
    // Not through the builder, which refuses hostile names.
    header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
    header.set_cksum();
    let mut builder = tar::Builder::new(Vec::new());
    builder.append(&header, content).unwrap();
    builder.into_inner().unwrap()
}

#[test]
fn mounts_that_are_traps() {
    if !backend("wasm") {
        return;
    }
    let service = Service::start();
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let bomb = {
        let encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        let mut builder = tar::Builder::new(encoder);
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(160 << 20);
        let zeros = std::io::Read::take(std::io::repeat(0), 160 << 20);
        builder.append_data(&mut header, "zeros", zeros).unwrap();
        builder.into_inner().unwrap().finish().unwrap()
    };
    let artifact = || OwnedFd::from(File::open(fixture("forge/project/pass.wat")).unwrap());
    let hostile: [(&str, &str, OwnedFd); 6] = [
        ("a FIFO that never ends", "file", File::options().read(true).write(true).open(&fifo).unwrap().into()),
        ("a FIFO as a tree", "tree", File::options().read(true).write(true).open(&fifo).unwrap().into()),
        ("a directory of the service's host", "file", File::open("/etc").unwrap().into()),
        ("a directory as a tree", "tree", File::open("/etc").unwrap().into()),
        ("a bomb", "tree", holding(&bomb)),
        ("a name that leads out", "tree", holding(&member("../../escaped", b"x"))),
    ];
    for (what, kind, fd) in hostile {
        let (frame, body) = asked(&service, &mounting(kind), &[artifact(), fd]);
        assert!(frame == 66 && body.contains("not-usable"), "{what}: {frame} {body}");
    }
    // The harmless control: the same request with what is meant.
    for (kind, fd) in [("file", holding(b"x")), ("tree", holding(&member("a", b"x")))] {
        let (frame, body) = asked(&service, &mounting(kind), &[artifact(), fd]);
        assert_eq!(frame, 76, "{body}");
    }
    service.wait_until_idle();
}

/// With the address of the test's forge, and a token that only the client has.
fn at(run: Run, forge: &Server) -> Run {
    run.env("GITHUB_API_URL", format!("http://{}", forge.host))
        .env("GITHUB_REPOSITORY", "o/r")
        .env("GITHUB_TOKEN", "t0ken")
}

/// A forge that keeps one artifact, and says which digest it has.
fn forge(stored: Vec<u8>, digest: String) -> Server {
    Server::start(move |asked| {
        assert_eq!(asked.headers.get("authorization").map(String::as_str), Some("Bearer t0ken"));
        if asked.path.starts_with("/repos/o/r/actions/runs/7/artifacts?") {
            let list = format!(r#"{{"artifacts":[{{"id":3,"name":"patch","digest":"sha256:{digest}"}}]}}"#);
            return Reply::new(200, list);
        }
        Reply::new(200, stored.clone())
    })
}

#[test]
fn a_forges_artifact_is_fetched_by_the_caller() {
    if !backend("wasm") {
        return;
    }
    let (service, place) = (Service::start(), Place::new());
    let stored = member("pass.wat", &fs::read(fixture("forge/project/pass.wat")).unwrap());
    let digest = Digest::of(&stored).to_string();
    place.write(
        "plimsoll.yml",
        "version: 1\nsteps: [{artifact: {github: patch, run-id: 7}, run: pass.wat}, {artifact: {github: patch, run-id: 7}, run: pass.wat}]\n",
    );
    let keeps = forge(stored.clone(), digest.clone());
    let ran = at(place.run(&service, &[]), &keeps).run().exits(0).says("hello from inside");
    let report = place.report();
    assert_eq!(report["origin"], "service", "{}", ran.all());
    for step in report["steps"].as_array().unwrap() {
        assert_eq!(
            (&step["artifact"]["source"], &step["artifact"]["sha256"]),
            (&"github:patch@7".into(), &digest.clone().into())
        );
    }
    assert_eq!(keeps.asked().iter().filter(|asked| asked.path.ends_with("/zip")).count(), 1, "fetched once");
    assert!(claimed(&place, &service).contains("/steps/0/artifact/source"));
    assert!(!service.log().contains("t0ken") && !ran.all().contains("t0ken"));
    let left = fs::read_dir(place.dir.path()).unwrap().flatten().map(|e| e.file_name().into_string().unwrap());
    let left: Vec<String> = left
        .filter(|name| name.starts_with("plimsoll-") && !name.ends_with("report") && !name.ends_with("outputs"))
        .collect();
    assert!(left.iter().all(|name| name.parse::<u32>().is_ok()), "the client's copy is gone: {left:?}");

    let lies = forge(stored, Digest::of(b"something else").to_string());
    let ran = at(place.run(&service, &[]), &lies).run().exits(13);
    let refusal = &place.report()["steps"][0]["refusal"];
    assert_eq!((&refusal["stage"], &refusal["reason"]), (&"artifact".into(), &"sha256".into()), "{}", ran.all());
}

#[test]
fn a_digest_that_the_step_names_is_compared_by_the_service() {
    if !backend("wasm") {
        return;
    }
    let service = Service::start();
    let step = |sha256: String| {
        format!(
            r#"{{"steps":[{{"index":1,"step":{{"run":"x.wat","artifact":{{"path":"x.wat","sha256":"{sha256}"}}}},"artifact":{{"fd":0,"kind":"file","name":"x.wat"}}}}],"jobs":1}}"#
        )
    };
    let bytes = fs::read(fixture("forge/project/pass.wat")).unwrap();
    for (sha256, exit) in [(Digest::of(&bytes), 0), (Digest::of(b"other"), 13)] {
        let (frame, body) = asked(&service, &step(sha256.to_string()), &[holding(&bytes)]);
        assert_eq!(frame, 76, "{body}");
        assert!(body.contains(&format!(":{exit}")), "{body}");
    }
}

#[test]
fn a_registrys_image_is_pulled_by_the_caller() {
    if !two_users() || !backend("gvisor") {
        return;
    }
    let Some(shell) = busybox("gvisor") else { return };
    let mut builder = tar::Builder::new(Vec::new());
    let program = fs::read(shell).unwrap();
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o755);
    header.set_size(program.len() as u64);
    builder.append_data(&mut header, "bin/sh", program.as_slice()).unwrap();
    let image = Image::of(builder.into_inner().unwrap(), ARCH);
    let served = image.clone();
    let registry = Server::start(move |asked| served.answer(asked));
    let (service, place) = (Service::start(), Place::new());
    place.write("src/x", "");
    let run = |name: &str, more: &[&str]| {
        let arguments = ["--artifact", "src", "--backend", "gvisor", "--run", "echo from $A", "--image", name];
        place.run(&service, &[&arguments[..], more].concat()).run()
    };
    let name = format!("{}/x:1", registry.host);
    run(&name, &[]).exits(0).says("│ from b");
    let report = place.report();
    assert_eq!(report["origin"], "service");
    assert_eq!(report["steps"][0]["image"]["reference"], name.as_str());
    assert_eq!(report["steps"][0]["image"]["digest"], image.digest().to_string());
    let claims = claimed(&place, &service);
    assert!(claims.contains("/steps/0/image/reference") && !claims.contains("/steps/0/image/digest"), "{claims}");
    // By its digest nobody is asked again: it is in the caller's cache.
    let before = registry.asked().len();
    run(&format!("{}/x@sha256:{}", registry.host, image.digest()), &[]).exits(0);
    assert_eq!(registry.asked().len(), before);
    let wrong = format!("sha256:{}", "0".repeat(64));
    run(&name, &["--image-digest", &wrong]).exits(13);
}

#[test]
fn a_layout_that_is_another_image_than_its_name_says() {
    if !backend("gvisor") {
        return;
    }
    let (service, place) = (Service::start(), Place::new());
    let image = Image::new();
    let served = image.clone();
    let registry = Server::start(move |asked| served.answer(asked));
    place.plimsoll(&["image", "pull", &format!("{}/x:1", registry.host)]).run().exits(0);
    let listed = place.plimsoll(&["image", "list", "--json"]).run().exits(0).stdout;
    let listed: Vec<serde_json::Value> = serde_json::from_str(&listed).unwrap();
    let layout = listed.iter().find(|one| one["form"] == "pulled").unwrap()["path"].as_str().unwrap().to_owned();
    let mut builder = tar::Builder::new(Vec::new());
    builder.append_dir_all(".", layout).unwrap();
    let layout = builder.into_inner().unwrap();
    for (digest, taken) in [(image.digest().to_string(), true), ("0".repeat(64), false)] {
        let json = format!(
            r#"{{"steps":[{{"index":1,"step":{{"run":"true","sandbox":{{"backend":"gvisor","image":"registry.invalid/x@sha256:{digest}"}}}},"artifact":{{"fd":0,"kind":"tree","name":"a"}},"image":{{"fd":1,"kind":"tree","name":"layout"}}}}],"jobs":1}}"#
        );
        let mut raw = service.connect();
        raw.hello();
        let (artifact, layout) = (holding(&member("a", b"x")), holding(&layout));
        raw.request(&json, &[artifact.as_fd(), layout.as_fd()]);
        let mut said = String::new();
        while let Some((_, body)) = raw.hear() {
            said.push_str(&String::from_utf8_lossy(&body));
        }
        assert_eq!(said.contains("\"reason\":\"sha256\"") || said.contains("\"reason\": \"sha256\""), !taken, "{said}");
    }
}
