//! Unpacks 1 GiB in 10,000 files, by us and by the usual tools, in one run on one machine, and prints the ratios.
//!
//!     cargo bench --bench unpack [-- MIB FILES]
//!
//! Ours runs in process and single-threaded, as in the jail, and hashes its input on top. `tar --zstd` runs two processes
//! that work at the same time. Each is run several times in turn and the best of each counts. Set `TMPDIR` to choose
//! the file system.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::panic, reason = "a benchmark")]

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use plimsoll::artifact::{Budget, Purpose, Request, unpack};

const ROUNDS: usize = 5;

fn main() {
    // Cargo passes `--bench`.
    let mut numbers = std::env::args().skip(1).filter_map(|argument| argument.parse::<u64>().ok());
    let mib = numbers.next().unwrap_or(1024);
    let files = numbers.next().unwrap_or(10_000);
    let corpus = Corpus { files, bytes: mib << 20 };
    let place = tempfile::tempdir().unwrap();

    let tar = place.path().join("corpus.tar.zst");
    corpus.write_tar(&tar);
    race("tar.zst", "tar --zstd -x", &tar, &corpus, |out| {
        let mut command = Command::new("tar");
        command.arg("--zstd").arg("-xf").arg(&tar).arg("-C").arg(out);
        command
    });
    fs::remove_file(&tar).unwrap();

    let zip = place.path().join("corpus.zip");
    corpus.write_zip(&zip);
    race("zip", "unzip", &zip, &corpus, |out| {
        let mut command = Command::new("unzip");
        command.arg("-q").arg(&zip).arg("-d").arg(out);
        command
    });
}

/// Runs both, in turn, and prints what came out.
fn race(format: &str, tool: &str, archive: &Path, corpus: &Corpus, command: impl Fn(&Path) -> Command) {
    let out = archive.with_extension("out");
    let mut best = [Duration::MAX; 2];
    let mut missing = None;
    for _ in 0..ROUNDS {
        best[0] = best[0].min(timed(&out, corpus, || {
            let request = Request {
                file_name: "unused".to_owned(),
                executable: false,
                purpose: Purpose::Artifact,
                budget: Budget { files: corpus.files * 2, ..Budget::default() },
                sha256: None,
            };
            let summary = unpack(File::open(archive).unwrap(), File::open(&out).unwrap().into(), &request).unwrap();
            assert_eq!((summary.files, summary.bytes), (corpus.files, corpus.bytes));
        }));
        if missing.is_some() {
            continue;
        }
        let mut command = command(&out);
        let mut absent = None;
        let took = timed(&out, corpus, || match command.status() {
            Ok(status) => assert!(status.success(), "{command:?}: {status}"),
            Err(error) => absent = Some(error),
        });
        match absent {
            None => best[1] = best[1].min(took),
            Some(_) => missing = absent,
        }
    }
    let speed = |took: Duration| corpus.bytes as f64 / (1 << 20) as f64 / took.as_secs_f64();
    let packed = fs::metadata(archive).unwrap().len() >> 20;
    println!("{format}: {packed} MiB packed, {} MiB in {} files", corpus.bytes >> 20, corpus.files);
    println!("  plimsoll       {:7.0} MiB/s", speed(best[0]));
    match missing {
        Some(error) => println!("  {tool}: not run ({error})"),
        None => {
            println!("  {tool:<14} {:7.0} MiB/s", speed(best[1]));
            println!("  ratio          {:7.2}", speed(best[0]) / speed(best[1]));
        }
    }
}

fn timed(out: &Path, corpus: &Corpus, work: impl FnOnce()) -> Duration {
    fs::create_dir(out).unwrap();
    // What the run before left to be written would be charged to this one.
    assert!(Command::new("sync").arg("-f").arg(out).status().unwrap().success());
    let start = Instant::now();
    work();
    let took = start.elapsed();
    assert!(fs::read_dir(out).unwrap().count() as u64 <= corpus.files);
    fs::remove_dir_all(out).unwrap();
    took
}

/// Files that look like source and build output: words in lines, some of it binary. The same on every run.
struct Corpus {
    files: u64,
    bytes: u64,
}

impl Corpus {
    fn members(&self) -> impl Iterator<Item = (String, Vec<u8>)> {
        let (files, bytes) = (self.files, self.bytes);
        let mut random = Random(0x5eed);
        let words: Vec<String> = (0..4096)
            .map(|_| (0..3 + random.below(8)).map(|_| (b'a' + random.below(26) as u8) as char).collect())
            .collect();
        (0..files).map(move |index| {
            let size = (bytes * (index + 1) / files - bytes * index / files) as usize;
            let mut content = Vec::with_capacity(size + 16);
            while content.len() < size {
                match random.below(16) {
                    0 => content.extend_from_slice(&random.next().to_le_bytes()),
                    1 => content.push(b'\n'),
                    // Few words are frequent, most are rare.
                    _ => {
                        let word = random.below(4096) * random.below(4096) / 4096;
                        content.extend_from_slice(words[word as usize].as_bytes());
                        content.push(b' ');
                    }
                }
            }
            content.truncate(size);
            (format!("src/module{:03}/part{}/file{index:05}.txt", index / 100, index % 3), content)
        })
    }

    fn write_tar(&self, path: &Path) {
        let file = BufWriter::new(File::create(path).unwrap());
        let mut tar = tar::Builder::new(zstd::Encoder::new(file, 3).unwrap());
        for (name, content) in self.members() {
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o644);
            header.set_size(content.len() as u64);
            tar.append_data(&mut header, name, &content[..]).unwrap();
        }
        tar.into_inner().unwrap().finish().unwrap().flush().unwrap();
    }

    fn write_zip(&self, path: &Path) {
        let mut out = BufWriter::new(File::create(path).unwrap());
        let (mut central, mut offset) = (Vec::new(), 0_u32);
        for (name, content) in self.members() {
            let mut deflate = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::new(6));
            deflate.write_all(&content).unwrap();
            let packed = deflate.finish().unwrap();
            let mut crc = flate2::Crc::new();
            crc.update(&content);
            // Version 2.0, deflate, 1980-01-01; then checksum, sizes, and the lengths of name and extra field.
            let mut common = vec![20, 0, 0, 0, 8, 0, 0, 0, 0x21, 0];
            for value in [crc.sum(), packed.len() as u32, content.len() as u32, name.len() as u32] {
                common.extend_from_slice(&value.to_le_bytes());
            }
            let local = [&b"PK\x03\x04"[..], &common, name.as_bytes(), &packed].concat();
            let attributes = [&[0; 6][..], &(0o100_644_u32 << 16).to_le_bytes(), &offset.to_le_bytes()].concat();
            central.extend([&b"PK\x01\x02\x14\x03"[..], &common, &attributes, name.as_bytes()].concat());
            out.write_all(&local).unwrap();
            offset += local.len() as u32;
        }
        let count = (self.files as u16).to_le_bytes();
        let end = [
            &b"PK\x05\x06\0\0\0\0"[..],
            &count,
            &count,
            &(central.len() as u32).to_le_bytes(),
            &offset.to_le_bytes(),
            &[0, 0],
        ];
        out.write_all(&central).unwrap();
        out.write_all(&end.concat()).unwrap();
        out.flush().unwrap();
    }
}

/// xorshift64: a benchmark needs no better.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}
