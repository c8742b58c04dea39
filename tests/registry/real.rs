//! Debian's `docker-registry` with a login, images that `buildah` made, and what `umoci` unpacks of them.

use std::collections::BTreeMap;
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{available, backend, busybox, installed, plimsoll};
use crate::server::User;

/// "tester:pass-w0rd".
const LOGIN: &str = "dGVzdGVyOnBhc3MtdzByZA==";
const TOOLS: [&str; 5] = ["docker-registry", "htpasswd", "buildah", "skopeo", "umoci"];

struct Registry {
    dir: tempfile::TempDir,
    host: String,
    child: Child,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // What buildah keeps has files without write permission.
        let _ = Command::new("chmod").args(["-R", "u+w"]).arg(self.dir.path()).status();
    }
}

impl Registry {
    /// Starts one, if everything for it is here.
    fn start() -> Option<Self> {
        let missing = TOOLS.iter().try_for_each(|tool| installed(tool));
        let root = if rustix::process::geteuid().is_root() { Ok(()) } else { Err("buildah mounts as root".to_owned()) };
        if !available("registry", missing.and(root)) {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let passwords = Command::new("htpasswd").args(["-Bbn", "tester", "pass-w0rd"]).output().unwrap();
        fs::write(dir.path().join("passwords"), passwords.stdout).unwrap();
        let host = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let path = dir.path().display();
        let config = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {path}/storage}}}}\n\
             http: {{addr: \"{host}\"}}\nauth: {{htpasswd: {{realm: test, path: {path}/passwords}}}}\n"
        );
        fs::write(dir.path().join("config.yml"), config).unwrap();
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(dir.path().join("config.yml"))
            .env("OTEL_TRACES_EXPORTER", "none")
            .stdout(Stdio::null())
            .stderr(fs::File::create(dir.path().join("log")).unwrap())
            .spawn()
            .unwrap();
        let began = Instant::now();
        while TcpStream::connect(&host).is_err() {
            let log = fs::read_to_string(dir.path().join("log")).unwrap();
            assert!(began.elapsed() < Duration::from_secs(30), "no registry: {log}");
            std::thread::sleep(Duration::from_millis(20));
        }
        fs::write(dir.path().join("policy.json"), r#"{"default":[{"type":"insecureAcceptAnything"}]}"#).unwrap();
        fs::write(dir.path().join("registries.conf"), "unqualified-search-registries = []\n").unwrap();
        Some(Registry { dir, host, child })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn tool(&self, name: &str, arguments: &[&str]) -> String {
        let mut command = Command::new(name);
        if name == "buildah" {
            let (root, run) = (self.path("containers"), self.path("run"));
            command.arg("--root").arg(root).arg("--runroot").arg(run);
            command.arg("--registries-conf").arg(self.path("registries.conf"));
        }
        let output = command
            .args(arguments)
            .env("BUILDAH_ISOLATION", "chroot")
            .env("STORAGE_DRIVER", "vfs")
            .env("HOME", self.dir.path())
            .env("XDG_RUNTIME_DIR", self.dir.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{name} {arguments:?}: {said}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    /// Makes an image out of another one, or of nothing: one layer more.
    fn layer(&self, from: &str, name: &str, change: impl Fn(&Path)) {
        let container = self.tool("buildah", &["from", "--pull-never", from]);
        let root = PathBuf::from(self.tool("buildah", &["mount", &container]));
        change(&root);
        self.tool("buildah", &["config", "--env", "LEVEL=image", "--workingdir", "/", &container]);
        self.tool("buildah", &["umount", &container]);
        let policy = self.path("policy.json");
        let policy = policy.to_str().unwrap();
        self.tool("buildah", &["commit", "--quiet", "--signature-policy", policy, &container, name]);
        self.tool("buildah", &["rm", &container]);
    }

    fn push(&self, what: &[&str], name: &str) {
        let (policy, to) = (self.path("policy.json"), format!("docker://{}/{name}", self.host));
        let policy = policy.to_str().unwrap();
        let mut all = what.to_vec();
        let from = all.pop().unwrap();
        let more = ["--tls-verify=false", "--creds", "tester:pass-w0rd", "--signature-policy", policy, from, &to];
        all.extend(more);
        self.tool("buildah", &all);
    }

    fn name(&self, rest: &str) -> String {
        format!("{}/{rest}", self.host)
    }

    /// What umoci makes of an image there.
    fn umoci(&self, image: &str, digest: &str) -> PathBuf {
        let (layout, bundle) = (self.path(&format!("layout-{digest}")), self.path(&format!("bundle-{digest}")));
        let policy = self.path("policy.json");
        let (layout, bundle) = (layout.to_str().unwrap(), bundle.to_str().unwrap());
        let from = format!("docker://{}", self.name(image));
        let to = format!("oci:{layout}:t");
        let login = ["--src-tls-verify=false", "--src-creds", "tester:pass-w0rd"];
        let first = ["--policy", policy.to_str().unwrap(), "copy", "--quiet"];
        self.tool("skopeo", &[&first[..], &login, &[from.as_str(), &to]].concat());
        self.tool("umoci", &["unpack", "--image", &format!("{layout}:t"), bundle]);
        Path::new(bundle).join("rootfs")
    }
}

/// Everything in a tree: kind, whether it is executable, content.
fn listing(root: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut todo = vec![root.to_owned()];
    while let Some(directory) = todo.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let meta = fs::symlink_metadata(&path).unwrap();
            let what = if meta.is_dir() {
                todo.push(path.clone());
                "directory".to_owned()
            } else if meta.is_symlink() {
                format!("-> {}", fs::read_link(&path).unwrap().display())
            } else {
                let executable = if meta.permissions().mode() & 0o111 == 0 { "file" } else { "program" };
                format!("{executable} {}", plimsoll::artifact::Digest::of(&fs::read(&path).unwrap()))
            };
            found.insert(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned(), what);
        }
    }
    found
}

fn write(root: &Path, name: &str, content: &str) {
    fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
    fs::write(root.join(name), content).unwrap();
}

/// The shell and what it needs from this host, or a tree without one.
fn with_a_shell(root: &Path) -> bool {
    fs::create_dir_all(root.join("bin")).unwrap();
    let Some(busybox) = busybox("registry") else { return false };
    fs::copy(busybox, root.join("bin/busybox")).unwrap();
    symlink("busybox", root.join("bin/sh")).unwrap();
    symlink("busybox", root.join("bin/cat")).unwrap();
    // A busybox that is not static needs its loader and libraries.
    let needed = Command::new("ldd").arg(busybox).output().map(|o| String::from_utf8_lossy(&o.stdout).into_owned());
    for word in needed.unwrap_or_default().split_whitespace().filter(|word| word.starts_with('/')) {
        let to = root.join(word.trim_start_matches('/'));
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(word, to).unwrap();
    }
    true
}

#[test]
fn what_is_pulled_is_what_others_pull() {
    let Some(registry) = Registry::start() else { return };
    let shell = std::cell::Cell::new(false);
    registry.layer("scratch", "localhost/one", |root| {
        shell.set(with_a_shell(root));
        for name in ["d/a", "d/b", "d/e/f", "opaque/x", "opaque/y", "gone/z", "usr/lib/x", "file-then-directory"] {
            write(root, name, name);
        }
        fs::hard_link(root.join("d/a"), root.join("d/hard")).unwrap();
        symlink("usr/lib", root.join("linked")).unwrap();
        symlink("/nowhere/at/all", root.join("dangling")).unwrap();
    });
    registry.layer("localhost/one", "localhost/two", |root| {
        fs::remove_file(root.join("d/a")).unwrap();
        fs::remove_dir_all(root.join("gone")).unwrap();
        fs::remove_dir_all(root.join("opaque")).unwrap();
        write(root, "opaque/new", "new");
        fs::remove_file(root.join("file-then-directory")).unwrap();
        write(root, "file-then-directory/x", "x");
    });
    registry.layer("localhost/two", "localhost/three", |root| {
        fs::remove_file(root.join("linked")).unwrap();
        write(root, "linked/now", "a directory");
        write(root, "d/b", "changed");
    });
    registry.push(&["push", "--quiet", "localhost/three"], "team/app:1");
    registry.push(&["push", "--quiet", "--format", "v2s2", "localhost/two"], "team/docker:1");

    // Logged in by the configuration's own words.
    let user = User::logged_in(&registry.host, LOGIN);
    let name = registry.name("team/app:1");
    let pulled = user.pull(&name).run().exits(0);
    assert!(!pulled.all().contains("pass-w0rd"));
    let digest = pulled.stdout.split("sha256:").nth(1).unwrap()[..64].to_owned();
    let inspect = ["inspect", "--tls-verify=false", "--creds", "tester:pass-w0rd", "--format", "{{.Digest}}"];
    let said = registry.tool("skopeo", &[&inspect[..], &[&format!("docker://{name}")]].concat());
    assert_eq!(said, format!("sha256:{digest}"));
    let ours = listing(&user.entry("image").join("tree"));
    assert_eq!(ours, listing(&registry.umoci("team/app:1", &digest)));
    assert_eq!(ours["d/b"], format!("file {}", plimsoll::artifact::Digest::of(b"changed")));
    for hidden in ["d/a", "gone", "opaque/x", "linked/x"] {
        assert!(!ours.contains_key(hidden), "{hidden}");
    }

    // Docker's own kind of manifest, and a login from a helper.
    let other = User::new();
    let helper = other.dir.path().join("docker-credential-test");
    fs::write(&helper, "#!/bin/sh\ncat > /dev/null\necho '{\"Username\":\"tester\",\"Secret\":\"pass-w0rd\"}'\n")
        .unwrap();
    fs::set_permissions(&helper, fs::Permissions::from_mode(0o755)).unwrap();
    let config = format!(r#"{{"credHelpers":{{{:?}:"test"}}}}"#, registry.host);
    fs::write(other.dir.path().join("docker/config.json"), config).unwrap();
    let path = format!("{}:{}", other.dir.path().display(), std::env::var("PATH").unwrap());
    other.pull(&registry.name("team/docker:1")).env("PATH", &path).run().exits(0);
    assert_eq!(listing(&other.entry("image").join("tree")), listing(&registry.umoci("team/docker:1", "docker")));

    // Nobody, and somebody else.
    User::new().pull(&name).run().exits(13).says("log in");
    User::logged_in(&registry.host, "dGVzdGVyOndyb25n").pull(&name).run().exits(13).says("log in");
    user.pull(&registry.name("team/none:1")).run().exits(13).says("image's name");

    a_run_says_what_it_ran(&registry, &user, &digest, shell.get());
    an_index_leads_to_this_machines_image(&registry, &user);
}

/// In a boundary, by tag and pinned by digest.
fn a_run_says_what_it_ran(registry: &Registry, user: &User, digest: &str, shell: bool) {
    if !shell || !backend("gvisor") {
        return;
    }
    let report = user.dir.path().join("report");
    let outputs = user.dir.path().join("outputs");
    let artifact = user.dir.path().join("artifact");
    fs::create_dir_all(&artifact).unwrap();
    let run = |image: &str, pin: Option<&str>| {
        let mut arguments = vec!["run", "--backend", "gvisor", "--image", image, "--run", "cat /d/b; echo $LEVEL"];
        arguments.extend(["--artifact", artifact.to_str().unwrap(), "--report-dir", report.to_str().unwrap()]);
        arguments.extend(["--outputs-dir", outputs.to_str().unwrap()]);
        arguments.extend(pin.into_iter().flat_map(|pin| ["--image-digest", pin]));
        user.run(arguments).run()
    };
    let name = registry.name("team/app:1");
    run(&name, None).exits(0);
    let said: serde_json::Value = serde_json::from_slice(&fs::read(report.join("report.json")).unwrap()).unwrap();
    assert_eq!(said["steps"][0]["image"]["reference"], name.as_str());
    assert_eq!(said["steps"][0]["image"]["digest"], digest);
    let log = fs::read_dir(report.join("steps")).unwrap().next().unwrap().unwrap().path().join("stdout.log");
    assert_eq!(fs::read_to_string(log).unwrap(), "changedimage\n");
    run(&name, Some(&format!("sha256:{digest}"))).exits(0);
    run(&name, Some(&format!("sha256:{}", "0".repeat(64)))).exits(13).prints("image's name");
}

fn an_index_leads_to_this_machines_image(registry: &Registry, user: &User) {
    registry.tool("buildah", &["manifest", "create", "localhost/list"]);
    registry
        .tool("buildah", &["manifest", "add", "--os", "linux", "--arch", "s390x", "localhost/list", "localhost/one"]);
    let arch = crate::server::ARCH;
    registry.tool("buildah", &["manifest", "add", "--os", "linux", "--arch", arch, "localhost/list", "localhost/two"]);
    registry.push(&["manifest", "push", "--all", "--quiet", "localhost/list"], "team/list:1");
    let name = registry.name("team/list:1");
    let pulled = user.pull(&name).run().exits(0).stdout;
    let listed = user.run(["image", "list", "--json"]).run().exits(0).stdout;
    let all: Vec<serde_json::Value> = serde_json::from_str(&listed).unwrap();
    let one = all.iter().find(|one| one["reference"] == name.as_str() && one["form"] == "pulled").unwrap();
    assert!(pulled.contains(one["digest"].as_str().unwrap()) && one["index"].is_string(), "{listed}");
    // Both digests name it.
    for key in ["digest", "index"] {
        user.pull(&registry.name(&format!("team/list@sha256:{}", one[key].as_str().unwrap()))).run().exits(0);
    }
    plimsoll(["image", "list"]).env("XDG_CACHE_HOME", user.dir.path()).run().exits(0).prints("team/list:1");
}
