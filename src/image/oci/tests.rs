//! Layouts and archives made here, well and badly.

use std::fs;

use super::*;
use crate::artifact::Rule;
use crate::artifact::layers::tests::{Entry, listing, tar_of};

pub const ARCH: &str = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };

/// A layout that is made blob by blob.
pub struct Layout {
    pub dir: tempfile::TempDir,
}

pub fn descriptor(media_type: &str, content: &[u8], more: &str) -> String {
    format!(
        r#"{{"mediaType":{media_type:?},"digest":"sha256:{}","size":{}{more}}}"#,
        Digest::of(content),
        content.len()
    )
}

pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

impl Layout {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("blobs/sha256")).unwrap();
        fs::write(dir.path().join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        Layout { dir }
    }

    pub fn blob(&self, content: &[u8]) -> PathBuf {
        let path = self.dir.path().join("blobs/sha256").join(Digest::of(content).to_string());
        fs::write(&path, content).unwrap();
        path
    }

    /// An image of these uncompressed layers; its manifest.
    pub fn image(&self, layers: &[&[u8]], user: &str) -> String {
        let ids: Vec<_> = layers.iter().map(|layer| format!("\"sha256:{}\"", Digest::of(layer))).collect();
        let config = format!(
            r#"{{"os":"linux","architecture":{ARCH:?},"config":{{"User":{user:?},"Env":["A=b"],"WorkingDir":"/srv"}},"rootfs":{{"type":"layers","diff_ids":[{}]}}}}"#,
            ids.join(",")
        );
        self.blob(config.as_bytes());
        let described: Vec<_> = layers.iter().map(|layer| (self.blob(layer), descriptor(LAYER, layer, "")).1).collect();
        let config = descriptor(CONFIG, config.as_bytes(), "");
        let manifest = format!(r#"{{"schemaVersion":2,"config":{config},"layers":[{}]}}"#, described.join(","));
        self.blob(manifest.as_bytes());
        manifest
    }

    pub fn index(&self, descriptors: &[String]) -> String {
        let index = format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, descriptors.join(","));
        fs::write(self.dir.path().join("index.json"), &index).unwrap();
        index
    }

    fn open(&self, tag: Option<&str>) -> Result<Opened, OciError> {
        open_layout(self.dir.path(), tag, None)
    }
}

fn tagged(tag: &str) -> String {
    format!(r#","annotations":{{"org.opencontainers.image.ref.name":{tag:?}}}"#)
}

fn platform(os: &str, architecture: &str) -> String {
    format!(r#","platform":{{"os":{os:?},"architecture":{architecture:?}}}"#)
}

#[test]
fn the_image_of_a_layout_is_found_with_its_layers() {
    let layout = Layout::new();
    let manifest = layout.image(&[b"one", b"two"], "app");
    layout.index(&[descriptor(MANIFEST, manifest.as_bytes(), "")]);
    let opened = layout.open(None).unwrap();
    assert_eq!((opened.digest, opened.index), (Digest::of(manifest.as_bytes()), None));
    assert_eq!(opened.facts.user, "app");
    let layers: Vec<_> = opened.layers.iter().map(|l| (l.file, l.length, l.diff_id)).collect();
    assert_eq!(layers, [(0, 3, Digest::of(b"one")), (1, 3, Digest::of(b"two"))]);
}

#[test]
fn a_tag_or_the_machine_says_which_is_meant() {
    let layout = Layout::new();
    let (one, two) = (layout.image(&[b"1"], ""), layout.image(&[b"2"], ""));
    let inner = format!(
        r#"{{"schemaVersion":2,"manifests":[{},{},{}]}}"#,
        descriptor(MANIFEST, b"not there", &platform("linux", "s390x")),
        descriptor(MANIFEST, one.as_bytes(), &platform("linux", ARCH)),
        descriptor(MANIFEST, b"an attestation", &platform("unknown", "unknown")),
    );
    layout.blob(inner.as_bytes());
    layout.index(&[
        descriptor(INDEX, inner.as_bytes(), &tagged("a")),
        descriptor(MANIFEST, two.as_bytes(), &tagged("b")),
    ]);
    let digest = |tag: &str| layout.open(Some(tag)).unwrap().digest;
    assert_eq!((digest("a"), digest("b")), (Digest::of(one.as_bytes()), Digest::of(two.as_bytes())));
    // A registry shows the digest of the index.
    let expect = |digest: &[u8]| open_layout(layout.dir.path(), Some("a"), Some(Digest::of(digest)));
    assert!(expect(inner.as_bytes()).is_ok() && expect(one.as_bytes()).is_ok());
    assert!(matches!(expect(two.as_bytes()), Err(OciError::Digest { .. })));
    for tag in [None, Some("c")] {
        let error = layout.open(tag).unwrap_err();
        assert!(matches!(&error, OciError::Choice { choices, .. } if *choices == ["a", "b"]), "{error}");
    }
    layout.index(&[descriptor(MANIFEST, one.as_bytes(), &platform("windows", ARCH))]);
    assert!(layout.open(None).unwrap_err().to_string().contains("for this machine"));
}

#[test]
fn damaged_foreign_and_hostile_layouts_are_refused() {
    let image = |damage: &dyn Fn(&Layout, &str)| {
        let layout = Layout::new();
        let manifest = layout.image(&[b"layer"], "");
        layout.index(&[descriptor(MANIFEST, manifest.as_bytes(), "")]);
        damage(&layout, &manifest);
        layout.open(None)
    };
    assert!(image(&|_, _| ()).is_ok());
    type Damage<'d> = &'d dyn Fn(&Layout, &str);
    let cases: [(&str, Damage<'_>); 9] = [
        ("no oci-layout", &|l, _| fs::remove_file(l.dir.path().join("oci-layout")).unwrap()),
        ("another version", &|l, _| {
            fs::write(l.dir.path().join("oci-layout"), r#"{"imageLayoutVersion":"2.0"}"#).unwrap();
        }),
        ("a manifest that was changed", &|l, m| {
            fs::write(l.blob(m.as_bytes()), m.replace("sha256", "shb256")).unwrap();
        }),
        ("a layer of another size", &|l, _| fs::write(l.blob(b"layer"), "longer than it was").unwrap()),
        ("a layer that is missing", &|l, _| fs::remove_file(l.blob(b"layer")).unwrap()),
        ("a layer that is a link", &|l, _| {
            let blob = l.blob(b"layer");
            fs::rename(&blob, l.dir.path().join("elsewhere")).unwrap();
            std::os::unix::fs::symlink("../../elsewhere", blob).unwrap();
        }),
        ("an index of itself", &|l, _| {
            l.index(&[descriptor(INDEX, b"", "")]);
        }),
        ("a digest that is a path", &|l, m| {
            let descriptor = descriptor(MANIFEST, m.as_bytes(), "").replace("sha256:", "sha256:../../");
            l.index(&[descriptor]);
        }),
        ("an index without end", &|l, _| {
            fs::write(l.dir.path().join("index.json"), " ".repeat(document::MAX_DOCUMENT as usize + 1)).unwrap();
        }),
    ];
    for (name, damage) in cases {
        assert!(image(damage).is_err(), "{name}");
    }
}

#[test]
fn indices_within_indices_end() {
    let layout = Layout::new();
    let mut inner = descriptor(MANIFEST, layout.image(&[], "").as_bytes(), "");
    for _ in 0..5 {
        let index = format!(r#"{{"schemaVersion":2,"manifests":[{inner}]}}"#);
        layout.blob(index.as_bytes());
        inner = descriptor(INDEX, index.as_bytes(), "");
    }
    layout.index(&[inner]);
    assert!(matches!(layout.open(None), Err(OciError::Document { .. })));
}

#[test]
fn more_layers_than_digests_or_than_anybody_has_are_refused() {
    let layout = Layout::new();
    let manifest = layout
        .image(&[b"a", b"b"], "")
        .replace("\"layers\":[", &format!("\"layers\":[{},", descriptor(LAYER, b"a", "")));
    layout.blob(manifest.as_bytes());
    layout.index(&[descriptor(MANIFEST, manifest.as_bytes(), "")]);
    assert!(layout.open(None).unwrap_err().to_string().contains("3 layers, but 2"));
    let many = vec![&b"a"[..]; MAX_LAYERS + 1];
    let manifest = layout.image(&many, "");
    layout.index(&[descriptor(MANIFEST, manifest.as_bytes(), "")]);
    assert!(layout.open(None).unwrap_err().to_string().contains("127 are allowed"));
}

/// A tar of these files, and links where the content begins with `->`.
pub fn tar(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = ::tar::Builder::new(Vec::new());
    for (name, content) in members {
        let mut header = ::tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        match content.strip_prefix(b"->") {
            Some(target) => {
                header.set_size(0);
                header.set_entry_type(::tar::EntryType::Symlink);
                builder.append_link(&mut header, name, std::str::from_utf8(target).unwrap()).unwrap();
            }
            None => builder.append_data(&mut header, name, *content).unwrap(),
        }
    }
    builder.into_inner().unwrap()
}

fn archive(members: &[(&str, &[u8])]) -> Result<Opened, OciError> {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), tar(members)).unwrap();
    open_archive(file.path(), None)
}

fn config(layers: &[&[u8]]) -> String {
    let ids: Vec<_> = layers.iter().map(|layer| format!("\"sha256:{}\"", Digest::of(layer))).collect();
    format!(r#"{{"os":"linux","architecture":{ARCH:?},"rootfs":{{"type":"layers","diff_ids":[{}]}}}}"#, ids.join(","))
}

#[test]
fn what_docker_saved_is_read_where_it_lies() {
    let config = config(&[b"one", b"two"]);
    let name = format!("{}.json", Digest::of(config.as_bytes()));
    let list = format!(r#"[{{"Config":{name:?},"RepoTags":["x:1"],"Layers":["a/layer.tar","b/layer.tar"]}}]"#);
    let members: [(&str, &[u8]); 5] = [
        ("c/layer.tar", b"one"),
        ("a/layer.tar", b"->../c/layer.tar"),
        ("b/layer.tar", b"two"),
        (&name, config.as_bytes()),
        ("manifest.json", list.as_bytes()),
    ];
    let opened = archive(&members).unwrap();
    assert_eq!(opened.digest, Digest::of(config.as_bytes()));
    let content = |layer: &Layer| {
        let mut bytes = vec![0; layer.length as usize];
        std::os::unix::fs::FileExt::read_exact_at(&opened.files[layer.file], &mut bytes, layer.offset).unwrap();
        bytes
    };
    assert_eq!(opened.layers.iter().map(content).collect::<Vec<_>>(), [b"one", b"two"]);

    let twice = [&members[..], &[("b/layer.tar", &b"xxx"[..])]].concat();
    assert!(archive(&twice).unwrap_err().to_string().contains("several files"));
    assert!(archive(&members[1..]).unwrap_err().to_string().contains("no such file"));
    let mut circle = members;
    circle[0].1 = b"->../a/layer.tar";
    assert!(archive(&circle).unwrap_err().to_string().contains("link to a link"));
    let mut renamed = members;
    let other = format!("{}.json", Digest::of(b"x"));
    let list = list.replace(&name, &other);
    renamed[3].0 = &other;
    renamed[4].1 = list.as_bytes();
    assert!(archive(&renamed).unwrap_err().to_string().contains("sha256"));
}

#[test]
fn an_archive_of_several_images_or_of_none_is_refused() {
    let config = config(&[]);
    let one = r#"{"Config":"c","RepoTags":["x:1"],"Layers":[]}"#;
    let both = format!("[{one},{}]", one.replace("x:1", "y:2"));
    let error = archive(&[("c", config.as_bytes()), ("manifest.json", both.as_bytes())]).unwrap_err();
    assert!(error.to_string().contains("there are x:1, y:2"), "{error}");
    assert!(archive(&[("manifest.json", b"[]")]).is_err());
    assert!(archive(&[("other", b"")]).unwrap_err().to_string().contains("no such file"));
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), b"\x1f\x8b\x08rest").unwrap();
    let error = open_archive(file.path(), None).unwrap_err();
    assert!(matches!(error, OciError::Archive(ArtifactError::Rejected(r)) if r.rule == Rule::Format));
    let whole = tar(&[("c", config.as_bytes())]);
    for length in [0, 100, 512, whole.len() - 1024] {
        fs::write(file.path(), &whole[..length]).unwrap();
        assert!(open_archive(file.path(), None).is_err(), "cut to {length}");
    }
}

/// Layers that do to each other what layers can.
const LAYERS: [&[Entry<'_>]; 4] = [
    &[
        ("d/", ""),
        ("d/a", "1"),
        ("d/b", "2"),
        ("d/e/", ""),
        ("d/e/f", "3"),
        ("f", "4"),
        ("l", "-> d"),
        ("usr/", ""),
        ("usr/lib/", ""),
        ("usr/lib/x", "5"),
        ("lib", "-> usr/lib"),
        ("h", "6"),
    ],
    &[("d/.wh.a", ""), ("f/", ""), ("f/x", "7"), ("lib/y", "8"), ("h2", "=> h"), ("gone/", ""), ("gone/z", "9")],
    &[("d/.wh..wh..opq", ""), ("d/new", "10"), (".wh.l", ""), ("h", "11"), ("usr/", ""), (".wh.gone", "")],
    &[("f", "12"), ("h3", "=> h2"), ("lib/.wh.x", ""), ("gone", "-> nowhere"), ("/abs", "13")],
];

#[test]
fn umoci_makes_the_same_tree_of_the_same_layers() {
    let layout = Layout::new();
    let tars = LAYERS.map(tar_of);
    let manifest = layout.image(&tars.each_ref().map(Vec::as_slice), "");
    layout.index(&[descriptor(MANIFEST, manifest.as_bytes(), &tagged("t"))]);
    let opened = layout.open(None).unwrap();
    let (ours, theirs) = (layout.dir.path().join("ours"), layout.dir.path().join("theirs"));
    fs::create_dir(&ours).unwrap();
    let request =
        crate::artifact::layers::Request { layers: opened.layers, budget: crate::artifact::Budget::default() };
    crate::artifact::layers::apply(&opened.files, File::open(&ours).unwrap().into(), &request).unwrap();
    let found = listing(&ours);
    assert_eq!((found["d/new"].as_str(), found["usr/lib/y"].as_str(), found["h3"].as_str()), ("10", "8", "6"));
    assert!(["d/a", "d/e", "l", "usr/lib/x", "gone/z"].iter().all(|name| !found.contains_key(*name)), "{found:?}");

    let image = format!("{}:t", layout.dir.path().display());
    let ran =
        std::process::Command::new("umoci").args(["unpack", "--rootless", "--image", &image]).arg(&theirs).output();
    match ran {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(e) => return eprintln!("skipped: umoci can't be run ({e})"),
    }
    assert_eq!(found, listing(&theirs.join("rootfs")));
}
