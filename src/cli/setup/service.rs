//! `plimsoll setup service`.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, ValueHint};
use rustix::fs::OFlags;

use super::root::{Change, Root, failed};
use super::{keys, units};
use crate::cli::CommonArgs;
use crate::cli::failure::Failure;
use crate::cli::output::Log;
use crate::env::Env;
use crate::exit::Exit;

const UNITS: &str = "etc/systemd/system";
const SERVICE_UNIT: &str = "plimsoll.service";
const SOCKET_UNIT: &str = "plimsoll.socket";
const POLICY: &str = "etc/plimsoll/policy.yml";
const EXAMPLE: &str = include_str!("../../../packaging/policy.yml");
/// What a unit in an image starts unless it is told otherwise.
const INSTALLED: &str = "/usr/local/bin/plimsoll";

/// Arguments.
#[derive(Debug, Args)]
pub struct ServiceArgs {
    /// Make a new key; the old public key stays in service.pub, the old private key is destroyed
    #[arg(long)]
    pub rotate_key: bool,

    /// Only this group may connect; it is made if need be. Without it everybody may, and the policy decides
    #[arg(long, value_name = "NAME")]
    pub group: Option<String>,

    /// The plimsoll that the unit starts, otherwise this one (with --root, /usr/local/bin/plimsoll)
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub exec: Option<PathBuf>,

    /// Enable the socket and start it
    #[arg(long, conflicts_with_all = ["root", "dry_run"])]
    pub now: bool,

    /// Set up an image that is being built in this directory. It gets no key, since every copy of it would have the same
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub root: Option<PathBuf>,

    /// Make a key in an image all the same, for one that is never copied
    #[arg(long, requires = "root")]
    pub with_key: bool,

    /// Say what would be done, and change nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// Sets the service up.
pub fn service(args: &ServiceArgs, common: &CommonArgs, _env: &Env) -> Result<Exit, Failure> {
    let here = args.root.is_none();
    if here && !args.dry_run && !rustix::process::geteuid().is_root() {
        return Err(Failure::usage("only root can set up the service of this host")
            .with_help("`sudo plimsoll setup service`; `--dry-run` shows what it would do"));
    }
    if args.rotate_key && !here && !args.with_key {
        return Err(Failure::usage("--rotate-key: an image has no key, unless it is made --with-key"));
    }
    let root = Root::open(args.root.as_deref().unwrap_or(Path::new("/")), args.dry_run)?;
    let mut said = Said { log: Log::data(), dry: args.dry_run, quiet: common.quiet };
    let exec = exec(args, &root, &mut said)?;
    // All that can be refused is, before anything is written.
    let service_unit = units::service(&exec)?;
    let mut group = args.group.clone();
    if let Some(directory) = root.directory(UNITS)? {
        for name in [SERVICE_UNIT, SOCKET_UNIT] {
            let Some(unit) = directory.read(name)? else { continue };
            units::ours(&unit, &directory.shown(name))?;
            group = group.or_else(|| units::group_of(&unit));
        }
    }
    let socket_unit = units::socket(group.as_deref())?;
    if let Some(group) = &args.group {
        make_group(group, args, &mut said)?;
    }

    if here || args.with_key {
        let keys = keys::set_up(&root, args.rotate_key)?;
        let id = keys.id.map(|id| format!(" (key {id})")).unwrap_or_default();
        said.file(keys.private, &root.shown("etc/plimsoll/service.key"), "which only root can read");
        said.file(keys.public, &root.shown("etc/plimsoll/service.pub"), &format!("for `plimsoll verify --key`{id}"));
        if keys.private == Change::Replaced && !args.dry_run {
            said.line("the old private key is destroyed; its public key stays in service.pub");
        }
    }
    let policy = match root.at(POLICY, OFlags::PATH | OFlags::NOFOLLOW) {
        Ok(_) => Change::Unchanged,
        Err(_) => root.write(POLICY, EXAMPLE.as_bytes(), 0o644)?,
    };
    said.file(policy, &root.shown(POLICY), "an example that sets no rule: say there who may ask, and for what");
    let mut replaced = false;
    for (name, text) in [(SOCKET_UNIT, &socket_unit), (SERVICE_UNIT, &service_unit)] {
        let path = format!("{UNITS}/{name}");
        let change = root.write(&path, text.as_bytes(), 0o644)?;
        replaced |= name == SERVICE_UNIT && change == Change::Replaced;
        said.file(change, &root.shown(&path), "");
    }

    if args.now {
        systemctl(&["daemon-reload"], &mut said)?;
        systemctl(&["enable", "--now", "plimsoll.socket"], &mut said)?;
        // One that runs has the old unit; its runs are cancelled. (The key is read anew for each run.)
        if replaced {
            systemctl(&["try-restart", "plimsoll.service"], &mut said)?;
        }
    } else if !here {
        let key = if args.with_key { "" } else { "plimsoll setup service && " };
        said.line(&format!("next, on each host that boots it: {key}systemctl enable --now plimsoll.socket"));
    } else {
        let restart = if replaced { " && systemctl try-restart plimsoll.service" } else { "" };
        said.line(&format!("next: systemctl daemon-reload && systemctl enable --now plimsoll.socket{restart}"));
    }
    Ok(Exit::Passed)
}

/// What is printed.
struct Said {
    log: Log,
    dry: bool,
    quiet: bool,
}

impl Said {
    fn line(&mut self, text: &str) {
        if !self.quiet {
            self.log.line(text);
        }
    }

    fn file(&mut self, change: Change, path: &Path, what: &str) {
        let word = match (change, self.dry) {
            (Change::Made, false) => "made",
            (Change::Made, true) => "would make",
            (Change::Replaced, false) => "replaced",
            (Change::Replaced, true) => "would replace",
            (Change::Unchanged, _) => "unchanged",
        };
        let what = if what.is_empty() || change == Change::Unchanged { String::new() } else { format!(", {what}") };
        self.line(&format!("{word} {}{what}", path.display()));
    }
}

/// The program that the unit starts as root: nobody but root may be able to replace it.
fn exec(args: &ServiceArgs, root: &Root, said: &mut Said) -> Result<String, Failure> {
    let path = match (&args.exec, &args.root) {
        (Some(path), _) => path.clone(),
        (None, Some(_)) => INSTALLED.into(),
        (None, None) => std::env::current_exe().map_err(|e| failed("find", Path::new("this program"), e))?,
    };
    let text = path.to_str().unwrap_or_default().to_owned();
    if args.root.is_some() {
        if root.at(text.trim_start_matches('/'), OFlags::PATH).is_err() {
            said.line(&format!(
                "not there yet: {}, which the unit starts",
                root.shown(text.trim_start_matches('/')).display()
            ));
        }
        return Ok(text);
    }
    let real = path.canonicalize().map_err(|e| failed("find", &path, e))?;
    let exposed =
        real.ancestors().find(|part| part.metadata().map_or(true, |meta| meta.uid() != 0 || meta.mode() & 0o022 != 0));
    match exposed {
        None => Ok(real.to_str().unwrap_or_default().to_owned()),
        Some(part) => Err(Failure::new(
            Exit::Refused,
            format!("others than root can change {}, which the service would run as root", part.display()),
        )
        .with_help(format!(
            "install it first: `install -o root -g root -m 755 {} {INSTALLED}`, then `{INSTALLED} setup service`",
            real.display()
        ))),
    }
}

fn make_group(group: &str, args: &ServiceArgs, said: &mut Said) -> Result<(), Failure> {
    if args.dry_run {
        said.line(&format!("would make the group {group}, if there is none"));
        return Ok(());
    }
    let mut command = Command::new("groupadd");
    command.args(["--system", "--force"]);
    if let Some(root) = &args.root {
        command.arg("--prefix").arg(root);
    }
    run(command.arg(group), &format!("make it by other means: groupadd --system {group}"))?;
    said.line(&format!("the group {group} is there; put who may ask into it: usermod --append --groups {group} USER"));
    Ok(())
}

fn systemctl(arguments: &[&str], said: &mut Said) -> Result<(), Failure> {
    run(Command::new("systemctl").args(arguments), "start `plimsoll serve` by other means where there is no systemd")?;
    said.line(&format!("did: systemctl {}", arguments.join(" ")));
    Ok(())
}

fn run(command: &mut Command, help: &str) -> Result<(), Failure> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(std::process::Stdio::null()).output();
    match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let said = said.lines().next().unwrap_or("no message").to_owned();
            Err(Failure::new(Exit::Internal, format!("`{name}` failed: {said}")).with_help(help))
        }
        Err(e) => Err(Failure::new(Exit::Internal, format!("failed to start `{name}`: {e}")).with_help(help)),
    }
}
