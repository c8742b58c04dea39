//! The agent as process 1 of a microVM: from the kernel's first instruction of user space to a channel over vsock.
//!
//! The initramfs holds the agent as `/init` and kernel modules in the order in which they are loaded, below
//! [`MODULES`]. [`boot`] loads them, mounts the root file system's drive with a `tmpfs` over it that takes all writes,
//! makes that the root directory, and waits for the one connection that the runner makes. Nothing of the image is
//! executed or read meanwhile, and drives with the step's own content are mounted at dispatch ([`mount_drives`]).
//!
//! The kernel's command line says what the runner wants: `plimsoll.disk=BYTES`.

use std::ffi::CString;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, chmod, makedev, mknodat, open, openat, openat2};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount, mount_bind, mount_move};
use rustix::time::{ClockId, Timespec, clock_settime};

use super::place::{Corner, WORKSPACE};
use super::{Transport, sys};
use crate::wire::{Dispatch, Drive};

/// The vsock port that the agent listens on. Below 1024, so that no program without privilege takes its place.
pub const PORT: u32 = 52;
/// Path of the agent in the initramfs, and its first argument there.
pub const INIT: &str = "/init";
/// Kernel modules in the initramfs; their names begin with a number that orders them.
pub const MODULES: &str = "/modules";
/// The drive with the root file system.
const ROOT_DRIVE: &str = "/dev/vda";
/// Word of the kernel's command line that sizes the space for writing, bytes.
const DISK: &str = "plimsoll.disk=";
/// How long a drive may take to appear once its driver is loaded.
const DRIVE_PATIENCE: Duration = Duration::from_secs(5);
/// Of the machine's memory, the part that files may take, so that the agent still runs when they do: 3/4.
const FILES_SHARE: (u64, u64) = (3, 4);

/// Whether this process is the first of a microVM.
#[must_use]
pub fn is_init() -> bool {
    rustix::process::getpid().is_init() && std::env::args_os().next().is_some_and(|name| name == INIT)
}

/// Ends the machine.
pub fn end() {
    sys::restart();
}

fn failed<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> io::Error {
    let what = what.into();
    move |why| {
        let why = why.into();
        io::Error::new(why.kind(), format!("cannot {what}: {why}"))
    }
}

/// Brings the machine up, and waits for the runner. What went wrong on the way, if anything, is for the runner to hear:
/// there is no other way out of here.
///
/// # Errors
/// If there is no channel.
pub fn boot() -> io::Result<(Transport, Result<Corner, io::Error>)> {
    let quiet = MountFlags::NOSUID | MountFlags::NOEXEC;
    make("/dev")?;
    // The kernel may have mounted it already.
    let _ = mount("devtmpfs", "/dev", "devtmpfs", quiet, None);
    standard_streams()?;
    make("/proc")?;
    mount("proc", "/proc", "proc", quiet | MountFlags::NODEV, None).map_err(failed("mount /proc"))?;
    load_modules()?;
    let listener = sys::listen_vsock(PORT).map_err(failed("listen on vsock"))?;
    let corner = root();
    let connection = sys::accept_vsock(&listener).map_err(failed("accept the runner"))?;
    // Nobody else connects, ever.
    drop(listener);
    let input = connection.try_clone()?;
    Ok((Transport::new(input, connection), corner))
}

/// Process 1 starts without any.
fn standard_streams() -> io::Result<()> {
    let null = open("/dev/null", OFlags::RDWR, Mode::empty()).map_err(failed("open /dev/null"))?;
    if null.as_raw_fd() > 2 {
        rustix::stdio::dup2_stdin(&null)?;
        rustix::stdio::dup2_stdout(&null)?;
        rustix::stdio::dup2_stderr(&null)?;
        return Ok(());
    }
    // The lowest free numbers are the ones that are missing.
    for _ in 0..2 {
        std::mem::forget(null.try_clone());
        std::mem::forget(open("/dev/null", OFlags::RDWR, Mode::empty())?);
    }
    std::mem::forget(null);
    Ok(())
}

fn make(path: impl AsRef<Path>) -> io::Result<()> {
    let path = path.as_ref();
    match DirBuilder::new().mode(0o755).create(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(failed(format!("make {}", path.display()))(e)),
        _ => Ok(()),
    }
}

/// Loads the modules in the order of their names, and forgets them.
fn load_modules() -> io::Result<()> {
    let Ok(entries) = fs::read_dir(MODULES) else { return Ok(()) };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    paths.sort();
    for path in paths {
        let file = File::open(&path)?;
        match rustix::system::finit_module(&file, c"", 0) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(failed(format!("load {}", path.display()))(e)),
        }
        let _ = fs::remove_file(&path);
    }
    Ok(())
}

/// Makes the root directory of everything to come, and the agent's corner in it.
fn root() -> io::Result<Corner> {
    let restricted = MountFlags::NOSUID | MountFlags::NODEV;
    for path in ["/lower", "/scratch", "/root"] {
        make(path)?;
    }
    wait_for(Path::new(ROOT_DRIVE))?;
    mount(ROOT_DRIVE, "/lower", "squashfs", restricted | MountFlags::RDONLY, None)
        .map_err(failed("mount the root file system"))?;
    let size = space_for_writing()?;
    mount("tmpfs", "/scratch", "tmpfs", restricted, Some(option(format!("size={size},mode=0711"))?.as_c_str()))
        .map_err(failed("mount space for writing"))?;
    let private =
        |path: &str, mode: u32| DirBuilder::new().mode(mode).create(path).map_err(failed(format!("make {path}")));
    private("/scratch/root", 0o700)?;
    private("/scratch/root/upper", 0o755)?;
    private("/scratch/root/work", 0o700)?;
    let layers = c"lowerdir=/lower,upperdir=/scratch/root/upper,workdir=/scratch/root/work";
    mount("overlay", "/root", "overlay", restricted, Some(layers)).map_err(failed("lay the writes over the root"))?;

    let corner = PathBuf::from(format!("/.plimsoll-{}", fresh_name()?));
    let inside = |at: &str| PathBuf::from(format!("/root{}{at}", corner.display()));
    private(&inside("").to_string_lossy(), 0o711)?;
    for name in ["/scratch", "/lower", "/dev"] {
        private(&inside(name).to_string_lossy(), 0o700)?;
    }
    mount_move("/scratch", inside("/scratch")).map_err(failed("move the space for writing"))?;
    mount_move("/dev", inside("/dev")).map_err(failed("move /dev"))?;
    for name in ["dev", "proc", "sys", "tmp", "run", &WORKSPACE[1..]] {
        plain_directory(&Path::new("/root").join(name))?;
    }
    devices("/root/dev")?;
    let quiet = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount_move("/proc", "/root/proc").map_err(failed("move /proc"))?;
    mount("sysfs", "/root/sys", "sysfs", quiet | MountFlags::RDONLY, None).map_err(failed("mount /sys"))?;
    // What is loaded now is all there will ever be, and no key combination reaches the kernel.
    // What is asked for is promised, as on any large host; who then uses too much is killed, and that is told.
    for (setting, value) in [
        ("kernel/modules_disabled", "1"),
        ("kernel/sysrq", "0"),
        ("kernel/hostname", "plimsoll"),
        ("vm/overcommit_memory", "1"),
    ] {
        let _ = fs::write(Path::new("/root/proc/sys").join(setting), value);
    }
    let _ = sys::loopback_up();
    std::env::set_current_dir("/root")?;
    mount_move(".", "/").map_err(failed("make the new root the root"))?;
    rustix::process::chroot(".").map_err(failed("enter the new root"))?;
    std::env::set_current_dir("/")?;
    Ok(Corner::of_machine(corner))
}

fn option(text: String) -> io::Result<CString> {
    CString::new(text).map_err(io::Error::from)
}

/// A directory that is there, or can be made; never what a link leads to.
fn plain_directory(path: &Path) -> io::Result<()> {
    make(path)?;
    if fs::symlink_metadata(path)?.is_dir() {
        Ok(())
    } else {
        Err(io::Error::other(format!("{} of the image is no directory", path.display())))
    }
}

/// Bytes that files may take: what the runner says, but never so much that the machine cannot go on.
fn space_for_writing() -> io::Result<u64> {
    let line = fs::read_to_string("/proc/cmdline")?;
    let asked = line
        .split_ascii_whitespace()
        .find_map(|word| word.strip_prefix(DISK))
        .and_then(|bytes| bytes.parse::<u64>().ok())
        .ok_or_else(|| io::Error::other(format!("the kernel's command line lacks {DISK}")))?;
    let memory = rustix::system::sysinfo();
    let memory = u64::from(memory.mem_unit).saturating_mul(memory.totalram as u64);
    Ok(asked.min(memory / FILES_SHARE.1 * FILES_SHARE.0))
}

/// Sixteen hexadecimal digits. Only a name that no image has by chance, so the early pool is good enough.
fn fresh_name() -> io::Result<String> {
    let mut bytes = [0u8; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

fn wait_for(device: &Path) -> io::Result<()> {
    let until = Instant::now() + DRIVE_PATIENCE;
    while !device.exists() {
        if Instant::now() > until {
            return Err(io::Error::other(format!("{} did not appear", device.display())));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// The few devices that programs need, and none of the machine's own.
fn devices(at: &str) -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    mount("tmpfs", at, "tmpfs", flags, Some(c"size=64k,mode=0755")).map_err(failed("mount the devices"))?;
    let at = Path::new(at);
    for (name, major, minor) in
        [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)]
    {
        let path = at.join(name);
        mknodat(CWD, &path, FileType::CharacterDevice, Mode::from_raw_mode(0o666), makedev(major, minor))
            .and_then(|()| chmod(&path, Mode::from_raw_mode(0o666)))
            .map_err(failed(format!("make /dev/{name}")))?;
    }
    for (name, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("ptmx", "pts/ptmx"),
    ] {
        symlink(target, at.join(name)).map_err(failed(format!("make /dev/{name}")))?;
    }
    make(at.join("pts"))?;
    // A kernel without terminals serves too.
    let _ = mount("devpts", at.join("pts"), "devpts", flags, Some(c"newinstance,ptmxmode=0666,mode=0620"));
    Ok(())
}

/// What happens first at dispatch: the clock is set, and the kernel's randomness stirred with the host's.
///
/// # Errors
/// If the kernel refuses either.
pub fn wake(dispatch: &Dispatch) -> io::Result<()> {
    const SECOND: u64 = 1_000_000_000;
    let time = Timespec {
        tv_sec: i64::try_from(dispatch.clock_ns / SECOND).unwrap_or(0),
        tv_nsec: i64::try_from(dispatch.clock_ns % SECOND).unwrap_or(0),
    };
    clock_settime(ClockId::Realtime, time).map_err(failed("set the clock"))?;
    let urandom = open("/dev/urandom", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    sys::reseed(urandom.as_fd(), &dispatch.entropy).map_err(failed("reseed the kernel's randomness"))
}

/// Mounts the drives that hold the step's own content: the artifact into the corner, everything else where it is to
/// appear.
///
/// # Errors
/// What could not be mounted.
pub fn mount_drives(corner: &Path, drives: &[Drive]) -> io::Result<()> {
    for drive in drives {
        let device = corner.join("dev").join(&drive.device);
        wait_for(&device)?;
        let cannot = || format!("mount {} at {}", drive.device, drive.at);
        let by_number = |fd: &OwnedFd| format!("/proc/self/fd/{}", fd.as_raw_fd());
        let place = match (&drive.file, drive.at == WORKSPACE) {
            (None, true) => open_directory(&corner.join("lower"))?,
            (None, false) => mount_point(Path::new(&drive.at))?,
            (Some(_), _) => {
                let aside = corner.join(&drive.device);
                make(&aside)?;
                open_directory(&aside)?
            }
        };
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::RDONLY;
        mount(&device, by_number(&place), "squashfs", flags, None).map_err(failed(cannot()))?;
        if let Some(name) = &drive.file {
            let target = file_point(Path::new(&drive.at))?;
            mount_bind(corner.join(&drive.device).join(name), by_number(&target)).map_err(failed(cannot()))?;
        }
    }
    Ok(())
}

/// A file to mount on, made if need be; again without following a link.
fn file_point(at: &Path) -> io::Result<OwnedFd> {
    let (Some(parent), Some(name)) = (at.parent(), at.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let directory = mount_point(parent)?;
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    drop(
        openat(&directory, name, flags, Mode::from_raw_mode(0o644))
            .map_err(failed(format!("make {}", at.display())))?,
    );
    openat(&directory, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()).map_err(io::Error::from)
}

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    openat2(CWD, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty(), resolve)
        .map_err(failed(format!("open {}", path.display())))
}

/// A directory of the image, made if need be; no link of the image's is followed on the way.
fn mount_point(at: &Path) -> io::Result<OwnedFd> {
    let mut path = PathBuf::from("/");
    for component in at.components() {
        if let Component::Normal(name) = component {
            path.push(name);
            plain_directory(&path)?;
        }
    }
    open_directory(&path)
}
