//! Jobs of a plain user's with the action under `act` and the component under `gitlab-ci-local`, on a machine with a
//! service.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{Ran, available, backend, binary, fixture, installed, repository};
use crate::support::{Place, Service, two_users};

/// Where the forge tools are installed: the directory above the one in `PATH` that holds one of them.
fn tools(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap();
    let bin = std::env::split_paths(&path).find(|dir| dir.join(name).is_file())?;
    bin.parent().map(Path::to_owned)
}

/// A checkout of the caller's.
fn project(files: &[(&str, &str)]) -> Place {
    let place = Place::new();
    for (name, text) in files {
        place.write(name, text);
    }
    let git = |arguments: &[&str]| {
        place.program(Path::new("git")).args(arguments).run().exits(0);
    };
    git(&["init", "--quiet", "--initial-branch=main"]);
    git(&["remote", "add", "origin", "https://forge.invalid/octo/widgets.git"]);
    git(&["add", "--all"]);
    git(&["-c", "user.name=t", "-c", "user.email=t@t.invalid", "commit", "--quiet", "--message=x"]);
    place
}

/// Runs a tool as the caller, who may not be able to go where it is installed: it is shown in the place, in a mount
/// namespace of its own.
fn run(place: &Place, name: &str, arguments: &[&str]) -> Ran {
    let tools = tools(name).unwrap();
    let shown = tempfile::tempdir().unwrap();
    fs::set_permissions(shown.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", shown.path().join("bin").display(), std::env::var("PATH").unwrap());
    place
        .program_after("mount --bind \"$0\" \"$1\"", &[&tools, shown.path()], Path::new(name))
        .args(arguments)
        .env("PATH", path)
        .env("XDG_CACHE_HOME", place.path(".cache"))
        .run()
}

/// The program where a plain user's job can start it; it may have been built where that user cannot go.
fn shown_program() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let program = directory.path().join("plimsoll");
    fs::copy(binary(), &program).unwrap();
    (directory, program)
}

fn ready(name: &str) -> bool {
    two_users() && available(name, installed(name)) && backend("wasm")
}

/// The report says that the service ran it, for this job.
#[track_caller]
fn is_the_services(report: &Path, provider: &str, ran: &Ran) {
    let bytes = fs::read(report).unwrap_or_else(|e| panic!("{e}: {}", ran.all()));
    let report: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(report["origin"], "service", "{}", ran.all());
    assert_eq!((report["verdict"].as_str(), report["ci"]["provider"].as_str()), (Some("passed"), Some(provider)));
}

#[test]
fn the_action() {
    if !ready("act") {
        return;
    }
    let (service, (_shown, program)) = (Service::start(), shown_program());
    let workflow = format!(
        "on: pull_request\npermissions: {{}}\njobs:\n  unit:\n    runs-on: self-hosted\n    steps:\n      - uses: actions/checkout@v4\n        with: {{persist-credentials: false}}\n      - uses: ./\n        with:\n          binary: \"{}\"\n          run: pass.wat\n          service: require\n          args: --service-socket={}\n      - run: cp -r plimsoll-report \"$COPY_TO\"\n",
        program.display(),
        service.socket().display(),
    );
    let action = fs::read_to_string(repository().join("action.yml")).unwrap();
    let place = project(&[("action.yml", &action), (".github/workflows/ci.yml", &workflow)]);
    let copy = place.path("copy");
    let event = fs::read_to_string(fixture("forge/events/pull_request.json")).unwrap();
    place.write(".cache/event.json", &event);
    let variable = format!("COPY_TO={}", copy.display());
    let event = place.path(".cache/event.json");
    let arguments =
        ["pull_request", "-P", "self-hosted=-self-hosted", "-e", event.to_str().unwrap(), "--env", &variable];
    let ran = run(&place, "act", &arguments).exits(0);
    assert!(ran.stdout.contains("run by the service of this machine"), "{}", ran.all());
    is_the_services(&copy.join("report.json"), "github", &ran);
    assert!(copy.join("report.dsse.json").exists());
}

#[test]
fn the_component() {
    if !ready("gitlab-ci-local") || !available("rsync", installed("rsync")) {
        return;
    }
    let (service, (_shown, program)) = (Service::start(), shown_program());
    let include = format!(
        "include:\n  - local: templates/run.yml\n    inputs:\n      binary: \"{}\"\n      run: pass.wat\n      service: require\n      args: --service-socket={}\n",
        program.display(),
        service.socket().display(),
    );
    let template = fs::read_to_string(repository().join("templates/run.yml")).unwrap();
    let place = project(&[("templates/run.yml", &template), (".gitlab-ci.yml", &include)]);
    let arguments =
        ["--force-shell-executor", "--variable", "GITLAB_CI=true", "--ignore-predefined-vars", "GITLAB_CI", "plimsoll"];
    let ran = run(&place, "gitlab-ci-local", &arguments).exits(0);
    assert!(ran.all().contains("run by the service of this machine"), "{}", ran.all());
    let artifacts = place.path(".gitlab-ci-local/artifacts/plimsoll/plimsoll-report");
    is_the_services(&artifacts.join("report.json"), "gitlab", &ran);
    assert!(artifacts.join("report.dsse.json").exists());
}
