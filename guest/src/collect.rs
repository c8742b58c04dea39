//! Sending output files back: the files below a workspace that a step's `outputs` name.
//!
//! [`send`] walks the tree by directory descriptors, one component at a time and never through a symbolic link, so
//! that nothing outside the workspace can be named by what the program left in it (`openat2` would say the same in
//! one call, but gVisor does not have it). Only regular files are sent. It runs when the program and everything that
//! it started is gone; what is left out, and why, is told in a [`FromGuest::Notice`].
//!
//! Patterns are matched per component: `*`, `?` and `[…]` stay within a name, `**` crosses directories, and a pattern
//! that names a directory means everything below it.

use std::ffi::{CStr, CString};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use glob::Pattern;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, fstat, openat, statat};

use crate::wire::{FrameError, FromGuest, MAX_CHUNK, OutputBudget};

/// Directories deeper than this are left out.
const MAX_DEPTH: usize = 64;
/// Directory entries looked at in all; a tree of millions of names does not hold up the result for long.
const MAX_ENTRIES: u64 = 1_000_000;
/// Remarks about single files; the rest is one count.
const MAX_REMARKS: u64 = 16;

/// Sends every regular file below `workspace` that one of `patterns` names, in order of path, within `budget`.
///
/// `sink` writes one message; its error ends the sending.
///
/// # Errors
/// Only what `sink` returns. A file that cannot be read is a notice.
pub fn send(
    workspace: BorrowedFd<'_>,
    patterns: &[String],
    budget: OutputBudget,
    sink: &mut dyn FnMut(&FromGuest) -> Result<(), FrameError>,
) -> Result<(), FrameError> {
    let mut walk = Walk { sink, budget, entries: 0, remarks: 0, unremarked: 0, matched: vec![false; patterns.len()] };
    let mut globs = Vec::new();
    for (index, text) in patterns.iter().enumerate() {
        match parse(text) {
            Ok(parts) => globs.push(Glob { index, parts }),
            Err(why) => {
                walk.matched[index] = true;
                walk.remark(format!("outputs: pattern {text:?} cannot be used: {why}"))?;
            }
        }
    }
    if globs.is_empty() {
        return Ok(());
    }
    let start = Reached { at: globs.iter().map(|g| g.start()).collect(), whole: Vec::new() };
    walk.directory(workspace, "", &globs, &start, 0)?;
    for (index, pattern) in patterns.iter().enumerate() {
        if !walk.matched[index] {
            walk.remark(format!("outputs: nothing matches {pattern:?}"))?;
        }
    }
    match walk.unremarked {
        0 => Ok(()),
        n => (walk.sink)(&FromGuest::Notice(format!("outputs: {n} more were left out"))),
    }
}

/// One component of a pattern.
enum Part {
    /// `**`: any number of components.
    Any,
    /// One name.
    One(Pattern),
}

struct Glob {
    index: usize,
    parts: Vec<Part>,
}

impl Glob {
    /// Positions in `parts` that nothing consumed so far leads to.
    fn start(&self) -> Vec<usize> {
        self.close(vec![0])
    }

    /// `**` may stand for nothing, so its successor is reached too.
    fn close(&self, mut at: Vec<usize>) -> Vec<usize> {
        let mut next = 0;
        while let Some(&position) = at.get(next) {
            next += 1;
            if matches!(self.parts.get(position), Some(Part::Any)) && !at.contains(&(position + 1)) {
                at.push(position + 1);
            }
        }
        at
    }

    fn step(&self, at: &[usize], name: &str) -> Vec<usize> {
        let mut reached = Vec::new();
        for &position in at {
            let next = match self.parts.get(position) {
                Some(Part::Any) => position,
                Some(Part::One(pattern)) if pattern.matches(name) => position + 1,
                _ => continue,
            };
            if !reached.contains(&next) {
                reached.push(next);
            }
        }
        self.close(reached)
    }

    fn accepts(&self, at: &[usize]) -> bool {
        at.contains(&self.parts.len())
    }
}

fn parse(text: &str) -> Result<Vec<Part>, String> {
    let mut parts = Vec::new();
    for part in text.split('/') {
        match part {
            "" | "." => {}
            ".." => return Err("it leaves the workspace".to_owned()),
            "**" => parts.push(Part::Any),
            part => parts.push(Part::One(Pattern::new(part).map_err(|e| e.msg.to_owned())?)),
        }
    }
    if text.starts_with('/') {
        return Err("it is absolute".to_owned());
    }
    if parts.is_empty() { Err("it names nothing".to_owned()) } else { Ok(parts) }
}

/// How far each pattern has come on the way to a directory.
struct Reached {
    /// Positions of each glob.
    at: Vec<Vec<usize>>,
    /// Indices of patterns that name a directory on the way: everything below is meant.
    whole: Vec<usize>,
}

impl Reached {
    fn step(&self, globs: &[Glob], name: &str) -> Self {
        let at: Vec<Vec<usize>> = globs.iter().zip(&self.at).map(|(glob, at)| glob.step(at, name)).collect();
        let mut whole = self.whole.clone();
        for (glob, at) in globs.iter().zip(&at) {
            if glob.accepts(at) && !whole.contains(&glob.index) {
                whole.push(glob.index);
            }
        }
        Self { at, whole }
    }

    fn hopeless(&self) -> bool {
        self.whole.is_empty() && self.at.iter().all(Vec::is_empty)
    }
}

struct Walk<'a> {
    sink: &'a mut dyn FnMut(&FromGuest) -> Result<(), FrameError>,
    budget: OutputBudget,
    entries: u64,
    remarks: u64,
    unremarked: u64,
    matched: Vec<bool>,
}

impl Walk<'_> {
    fn remark(&mut self, text: String) -> Result<(), FrameError> {
        if self.remarks == MAX_REMARKS {
            self.unremarked += 1;
            return Ok(());
        }
        self.remarks += 1;
        (self.sink)(&FromGuest::Notice(text))
    }

    fn directory(
        &mut self,
        directory: BorrowedFd<'_>,
        path: &str,
        globs: &[Glob],
        reached: &Reached,
        depth: usize,
    ) -> Result<(), FrameError> {
        let names = match self.names(directory) {
            Ok(names) => names,
            Err(e) => return self.remark(format!("output {path:?} left out: {e}")),
        };
        for name in names {
            let text = name.to_string_lossy();
            let here = if path.is_empty() { text.clone().into_owned() } else { format!("{path}/{text}") };
            let next = reached.step(globs, &text);
            if next.hopeless() {
                continue;
            }
            let kind = match statat(directory, &*name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => FileType::from_raw_mode(stat.st_mode),
                Err(e) => {
                    self.remark(format!("output {here:?} left out: {e}"))?;
                    continue;
                }
            };
            if kind == FileType::Directory {
                if depth == MAX_DEPTH {
                    self.remark(format!("output {here:?} left out: deeper than {MAX_DEPTH} directories"))?;
                    continue;
                }
                match open(directory, &name, OFlags::DIRECTORY) {
                    Ok(child) => self.directory(child.as_fd(), &here, globs, &next, depth + 1)?,
                    Err(e) => self.remark(format!("output {here:?} left out: {e}"))?,
                }
            } else if !next.whole.is_empty() {
                for &index in &next.whole {
                    self.matched[index] = true;
                }
                if kind != FileType::RegularFile {
                    self.remark(format!("output {here:?} left out: it is {}", describe(kind)))?;
                } else if name.to_str().is_err() {
                    self.remark(format!("output {here:?} left out: its name is not UTF-8"))?;
                } else {
                    match open(directory, &name, OFlags::NONBLOCK) {
                        Ok(file) => self.file(file, &here)?,
                        Err(e) => self.remark(format!("output {here:?} left out: {e}"))?,
                    }
                }
            }
        }
        Ok(())
    }

    /// Names in a directory, sorted so that the same tree is always sent in the same order.
    fn names(&mut self, directory: BorrowedFd<'_>) -> io::Result<Vec<CString>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            self.entries += 1;
            if self.entries > MAX_ENTRIES {
                return Err(io::Error::other(format!("the workspace has more than {MAX_ENTRIES} entries")));
            }
            names.push(name.to_owned());
        }
        names.sort();
        Ok(names)
    }

    fn file(&mut self, file: OwnedFd, path: &str) -> Result<(), FrameError> {
        let stat = match fstat(&file) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => stat,
            Ok(_) => return self.remark(format!("output {path:?} left out: it is no regular file any more")),
            Err(e) => return self.remark(format!("output {path:?} left out: {e}")),
        };
        let bytes = u64::try_from(stat.st_size).unwrap_or(0);
        if self.budget.files == 0 {
            return self.remark(format!("output {path:?} left out: the number of files is used up"));
        }
        if bytes > self.budget.bytes {
            return self
                .remark(format!("output {path:?} left out: {bytes} bytes, {} are left to send", self.budget.bytes));
        }
        self.budget.files -= 1;
        self.budget.bytes -= bytes;
        (self.sink)(&FromGuest::FileBegin { path: path.to_owned(), bytes })?;
        let mut file = io::Read::take(std::fs::File::from(file), bytes);
        let mut buffer = vec![0u8; MAX_CHUNK.min(usize::try_from(bytes).unwrap_or(MAX_CHUNK))];
        loop {
            match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => (self.sink)(&FromGuest::FileData(buffer[..n].to_vec()))?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    self.remark(format!("output {path:?} is cut: {e}"))?;
                    break;
                }
            }
        }
        (self.sink)(&FromGuest::FileEnd)
    }
}

fn open(directory: BorrowedFd<'_>, name: &CStr, flags: OFlags) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY;
    Ok(openat(directory, name, flags, Mode::empty())?)
}

const fn describe(kind: FileType) -> &'static str {
    match kind {
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a named pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        _ => "no regular file",
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::{Path, PathBuf};

    use super::*;

    const AMPLE: OutputBudget = OutputBudget { files: 100, bytes: 1 << 20 };

    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("plimsoll-collect-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&root);
            fs::create_dir_all(root.join("w")).unwrap();
            Self(root)
        }

        fn workspace(&self) -> PathBuf {
            self.0.join("w")
        }

        fn file(&self, path: &str, content: &[u8]) {
            let path = self.workspace().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// What was sent: files with their content, and notices.
    fn sent(workspace: &Path, patterns: &[&str], budget: OutputBudget) -> (Vec<(String, Vec<u8>)>, Vec<String>) {
        let directory = fs::File::open(workspace).unwrap();
        let patterns: Vec<String> = patterns.iter().map(|&p| p.to_owned()).collect();
        let (mut files, mut notices, mut open): (Vec<(String, Vec<u8>)>, Vec<String>, _) = (vec![], vec![], false);
        send(directory.as_fd(), &patterns, budget, &mut |message| {
            match message {
                FromGuest::FileBegin { path, .. } => {
                    assert!(!std::mem::replace(&mut open, true));
                    files.push((path.clone(), Vec::new()));
                }
                FromGuest::FileData(bytes) => files.last_mut().unwrap().1.extend_from_slice(bytes),
                FromGuest::FileEnd => assert!(std::mem::replace(&mut open, false)),
                FromGuest::Notice(text) => notices.push(text.clone()),
                other => panic!("unexpected {other:?}"),
            }
            Ok(())
        })
        .unwrap();
        assert!(!open);
        (files, notices)
    }

    fn names(workspace: &Path, patterns: &[&str]) -> Vec<String> {
        sent(workspace, patterns, AMPLE).0.into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn files_are_sent_by_name_by_directory_and_by_pattern() {
        let tree = Tree::new("patterns");
        for path in ["report.xml", "out/a.txt", "out/deep/b.txt", "out/deep/.hidden", "src/a.txt", "a.txt"] {
            tree.file(path, path.as_bytes());
        }
        let at = tree.workspace();
        let below_out = ["out/a.txt", "out/deep/.hidden", "out/deep/b.txt"];
        assert_eq!(names(&at, &["report.xml"]), ["report.xml"]);
        assert_eq!(names(&at, &["./report.xml", "report.xml"]), ["report.xml"]);
        assert_eq!(names(&at, &["out/**"]), below_out);
        assert_eq!(names(&at, &["out"]), below_out);
        assert_eq!(names(&at, &["out/"]), below_out);
        assert_eq!(names(&at, &["out/*.txt"]), ["out/a.txt"]);
        assert_eq!(names(&at, &["**/a.txt"]), ["a.txt", "out/a.txt", "src/a.txt"]);
        assert_eq!(names(&at, &["**/deep/*.txt"]), ["out/deep/b.txt"]);
        assert_eq!(names(&at, &["*.txt"]), ["a.txt"]);
        assert_eq!(sent(&at, &["out/a.txt"], AMPLE).0[0].1, b"out/a.txt");
    }

    #[test]
    fn links_and_special_files_are_left_out_and_noted() {
        let tree = Tree::new("links");
        fs::write(tree.0.join("secret"), "host").unwrap();
        tree.file("out/plain", b"fine");
        symlink("../../secret", tree.workspace().join("out/link")).unwrap();
        symlink("/etc", tree.workspace().join("out/etc")).unwrap();
        symlink(&tree.0, tree.workspace().join("up")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            tree.workspace().join("out/fifo"),
            FileType::Fifo,
            Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        let (files, notices) = sent(&tree.workspace(), &["out/**", "up/secret"], AMPLE);
        assert_eq!(files, [("out/plain".to_owned(), b"fine".to_vec())]);
        assert_eq!(notices.len(), 4, "{notices:?}");
    }

    #[test]
    fn a_pattern_cannot_leave_the_workspace() {
        let tree = Tree::new("escape");
        fs::write(tree.0.join("secret"), "host").unwrap();
        for pattern in ["../secret", "/etc/passwd", "a/../../secret", "", ".", "["] {
            let (files, notices) = sent(&tree.workspace(), &[pattern], AMPLE);
            assert_eq!((files.len(), notices.len()), (0, 1), "{pattern}");
        }
    }

    #[test]
    fn what_exceeds_the_budget_is_left_out_and_smaller_files_still_come() {
        let tree = Tree::new("budget");
        tree.file("1-big", &[0; 500]);
        tree.file("2-small", &[0; 50]);
        tree.file("3-small", &[0; 60]);
        tree.file("4-tiny", &[]);
        let (files, notices) = sent(&tree.workspace(), &["*"], OutputBudget { files: 2, bytes: 100 });
        assert_eq!(files.iter().map(|f| f.0.as_str()).collect::<Vec<_>>(), ["2-small", "4-tiny"]);
        assert_eq!(notices.len(), 2);
        let (files, _) = sent(&tree.workspace(), &["*"], OutputBudget { files: 1, bytes: 1000 });
        assert_eq!(files.len(), 1);
    }

    #[test]
    fn a_sparse_giant_is_left_out_without_being_read() {
        let tree = Tree::new("sparse");
        fs::File::create(tree.workspace().join("giant")).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(sent(&tree.workspace(), &["giant"], AMPLE).0, []);
    }

    #[test]
    fn many_left_out_files_make_few_notices() {
        let tree = Tree::new("many");
        for n in 0..100 {
            symlink("x", tree.workspace().join(format!("l{n}"))).unwrap();
        }
        let notices = sent(&tree.workspace(), &["*"], AMPLE).1;
        assert_eq!(notices.len(), 17);
        assert!(notices[16].contains("84 more"), "{notices:?}");
    }

    #[test]
    fn a_long_file_comes_in_pieces_that_fit_a_frame() {
        let tree = Tree::new("long");
        let content: Vec<u8> = (0..MAX_CHUNK * 2 + 7).map(|n| (n % 251) as u8).collect();
        tree.file("long", &content);
        assert_eq!(sent(&tree.workspace(), &["long"], AMPLE).0, [("long".to_owned(), content)]);
    }
}
