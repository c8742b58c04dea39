//! What a registry may answer when it is broken, or when somebody made it to hurt.

use std::net::UdpSocket;
use std::sync::atomic::{AtomicUsize, Ordering};

use plimsoll::artifact::Digest;

use crate::common::available;
use crate::server::{Asked, Image, Reply, Server, User};

#[test]
fn a_harmless_image_comes_and_stays() {
    let image = Image::new();
    let served = image.clone();
    let server = Server::start(move |asked| served.answer(asked));
    let user = User::new();
    let name = format!("{}/x:1", server.host);
    user.pull(&name).run().exits(0).prints(&format!("{name} sha256:{}", image.digest()));
    let tree = user.entry("image").join("tree");
    assert_eq!(std::fs::read_to_string(tree.join("etc/name")).unwrap(), "plimsoll");
    // The tag is asked for again, the image is not fetched again; by its digest nobody is asked.
    let before = server.asked().len();
    user.pull(&name).run().exits(0);
    let asked = server.asked();
    assert!(!asked[before..].is_empty() && asked[before..].iter().all(|a| !a.path.contains("/blobs/")), "{asked:?}");
    user.pull(&format!("{}/x@sha256:{}", server.host, image.digest())).run().exits(0);
    assert_eq!(server.asked().len(), asked.len());
}

#[test]
fn a_byte_that_flipped_in_the_cache_is_never_used() {
    let image = Image::new();
    let served = image.clone();
    let server = Server::start(move |asked| served.answer(asked));
    let user = User::new();
    let name = format!("{}/x@sha256:{}", server.host, image.digest());
    user.pull(&name).run().exits(0);
    // In the tree, and in the copy that waits for the next run: it is unpacked again.
    let file = user.entry("image").join("tree/etc/name");
    let flip = || {
        let names = std::fs::read_dir(user.cache()).unwrap().map(|e| e.unwrap().path().join("tree/etc/name"));
        let files: Vec<_> = names.filter(|name| name.is_file()).collect();
        assert_eq!(files.len(), 2, "the tree and a copy of it: {files:?}");
        for file in files {
            std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
            std::fs::write(&file, "plimsolL").unwrap();
        }
    };
    flip();
    user.pull(&name).run().exits(0);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "plimsoll");
    // In the layers as well: they are fetched again.
    let before = server.asked().len();
    let layer = user.entry("pulled").join("blobs/sha256").join(Digest::of(&image.layer).to_string());
    let mut bytes = std::fs::read(&layer).unwrap();
    bytes[600] ^= 1;
    std::fs::write(&layer, bytes).unwrap();
    flip();
    user.pull(&name).run().exits(0);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "plimsoll");
    assert!(server.asked().len() > before);
}

/// Pulls from a registry that answers honestly but for what `lie` changes.
fn lied_to(lie: impl Fn(&Image, &str, Reply) -> Reply + Send + Sync + 'static) -> (crate::common::Ran, User, Image) {
    let image = Image::new();
    let served = image.clone();
    let server = Server::start(move |asked| lie(&served, &asked.path, served.answer(asked)));
    let user = User::new();
    let ran = user.pull(&format!("{}/x:1", server.host)).run();
    (ran, user, image)
}

#[test]
fn lies_about_content_and_length_are_refused_and_leave_nothing() {
    type Lie = Box<dyn Fn(&Image, &str, Reply) -> Reply + Send + Sync>;
    let on_layer = |change: fn(&mut Reply)| -> Lie {
        Box::new(move |image, path, mut reply| {
            if path == image.layer_path() {
                change(&mut reply);
            }
            reply
        })
    };
    let manifest = |change: fn(&Image) -> String| -> Lie {
        Box::new(move |image, path, reply| match path.contains("/manifests/") {
            true => Reply::new(200, change(image)),
            false => reply,
        })
    };
    let cases: Vec<(&str, Lie, &str)> = vec![
        ("another layer of the same length", on_layer(|reply| reply.body[700] ^= 1), "has the sha256"),
        ("a longer layer", on_layer(|reply| reply.body.extend_from_slice(b"more")), "bytes to come"),
        ("a layer without end", on_layer(|reply| reply.endless = true), "than the"),
        (
            "layers of more bytes than anybody has",
            manifest(|image| {
                image.manifest.replace(&format!("\"size\":{}", image.layer.len()), "\"size\":18446744073709551615")
            }),
            "layers have more than",
        ),
        (
            "a manifest that is an index too",
            manifest(|image| image.manifest.replacen('{', r#"{"manifests":[],"#, 1)),
            "at once",
        ),
        ("a manifest that is none", manifest(|_| "[]".to_owned()), "manifest can't be used"),
        (
            "a digest that is a path",
            manifest(|image| image.manifest.replace("sha256:", "sha256:../../")),
            "no sha256 digest",
        ),
    ];
    for (name, lie, says) in cases {
        let (ran, user, _) = lied_to(lie);
        assert_eq!(ran.code(), 13, "{name}: {}", ran.all());
        assert!(ran.stderr.contains(says), "{name}: {}", ran.all());
        let left: Vec<_> = std::fs::read_dir(user.cache()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert!(left.iter().all(|name| name.to_string_lossy().ends_with(".lock")), "{name}: {left:?}");
    }
}

#[test]
fn answers_without_end_take_the_helpers_memory_and_no_more() {
    for what in ["/manifests/", "/v2/x/blobs/"] {
        let (ran, ..) = lied_to(move |_, path, mut reply| {
            if path.contains(what) {
                // A refusal is read whole by the library, as a manifest is.
                reply.status = if what == "/manifests/" { 200 } else { 404 };
                reply.body = vec![b' '; 1 << 20];
                reply.endless = true;
            }
            reply
        });
        ran.exits(13).says("MiB of memory that they may take");
    }
}

#[test]
fn what_breaks_off_goes_on_and_what_is_busy_is_asked_again() {
    let tries = AtomicUsize::new(0);
    let image = Image::new();
    let served = image.clone();
    let server = Server::start(move |asked| {
        let mut reply = served.answer(asked);
        if asked.path == served.layer_path() {
            match tries.fetch_add(1, Ordering::SeqCst) {
                0 => return Reply::new(503, "busy"),
                1 => reply.cut = Some(100_000),
                _ => {}
            }
        }
        reply
    });
    let user = User::new();
    user.pull(&format!("{}/x:1", server.host)).run().exits(0);
    let ranges: Vec<_> = server.asked().iter().filter_map(|asked| asked.headers.get("range").cloned()).collect();
    assert_eq!(ranges.len(), 1, "{ranges:?}");
    assert_ne!(ranges[0], "bytes=0-");
}

#[test]
fn a_registry_that_never_gets_better_is_given_up() {
    let (ran, ..) = lied_to(|_, path, reply| if path == "/v2/" { reply } else { Reply::new(503, "no") });
    ran.exits(13).says("503").says("help: look at the registry's address");
    let (ran, ..) = lied_to(|_, path, reply| if path == "/v2/" { reply } else { Reply::new(404, "no") });
    ran.exits(13).says("help: look at the image's name");
}

/// A registry that wants an access token, which `realm` gives; `token` answers there.
fn with_tokens(realm: &'static str, token: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Server {
    let image = Image::new();
    Server::start(move |asked| {
        if asked.path == "/token" {
            return token(asked);
        }
        match asked.headers.get("authorization").map(String::as_str) {
            Some("Bearer t0ken") => image.answer(asked),
            _ => {
                let realm = realm.replace("HOST", &asked.headers["host"]);
                let challenge = format!("Bearer realm=\"{realm}\",service=\"a service\"");
                Reply::new(401, "{}").header("www-authenticate", challenge)
            }
        }
    })
}

#[test]
fn an_identity_token_is_exchanged_for_an_access_token() {
    let server = with_tokens("http://HOST/token", |asked| match asked.body.ends_with("refresh_token=s3cret-one") {
        true => Reply::new(200, r#"{"access_token":"t0ken","expires_in":300,"refresh_token":"another"}"#),
        false => Reply::new(401, r#"{"details":"s3cret-other is none of ours"}"#),
    });
    let name = format!("{}/x:1", server.host);
    User::with_identity_token(&server.host, "s3cret-one").pull(&name).run().exits(0);
    let asked = server.asked();
    let exchange = &asked.iter().find(|asked| asked.path == "/token").unwrap().body;
    for part in ["grant_type=refresh_token", "service=a+service", "client_id=plimsoll", "scope=repository%3Ax%3Apull"] {
        assert!(exchange.split('&').any(|one| one == part), "{part}: {exchange}");
    }
    // From a helper, which says so by the name that it gives.
    let user = User::new();
    let helper = user.dir.path().join("docker-credential-test");
    let script = "#!/bin/sh\ncat > /dev/null\necho '{\"Username\":\"<token>\",\"Secret\":\"s3cret-one\"}'\n";
    std::fs::write(&helper, script).unwrap();
    std::fs::set_permissions(&helper, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let config = format!(r#"{{"credHelpers":{{{:?}:"test"}}}}"#, server.host);
    std::fs::write(user.dir.path().join("docker/config.json"), config).unwrap();
    let path = format!("{}:{}", user.dir.path().display(), std::env::var("PATH").unwrap());
    user.pull(&name).env("PATH", &path).run().exits(0);
    // One that is refused is said, and not repeated.
    let ran = User::with_identity_token(&server.host, "s3cret-other").pull(&name).run().exits(13);
    assert!(ran.all().contains("does not take this identity token") && !ran.all().contains("s3cret"), "{}", ran.all());
}

#[test]
fn an_identity_token_goes_nowhere_else() {
    let elsewhere = Server::start(|_| Reply::new(200, r#"{"access_token":"t0ken"}"#));
    let to = format!("http://{}/token", elsewhere.host);
    let redirecting = with_tokens("http://HOST/token", move |_| Reply::new(307, "").header("location", to.clone()));
    let plain = with_tokens("http://tokens.example/token", |_| Reply::new(500, ""));
    let none = with_tokens("no address", |_| Reply::new(500, ""));
    let empty = with_tokens("http://HOST/token", |_| Reply::new(200, r#"{"token":"s3cret"}"#));
    for (server, said) in [
        (redirecting, "the token server answers 307"),
        (plain, "sent to tokens.example without TLS"),
        (none, "names no token server"),
        (empty, "no access token"),
    ] {
        let user = User::with_identity_token(&server.host, "s3cret");
        let ran = user.pull(&format!("{}/x:1", server.host)).run().exits(13);
        assert!(ran.all().contains(said) && !ran.all().contains("s3cret"), "{said}: {}", ran.all());
    }
    assert!(elsewhere.asked().is_empty());
}

#[test]
fn a_login_goes_to_its_registry_and_not_to_where_that_redirects() {
    let image = Image::new();
    let served = image.clone();
    let store = Server::start(move |asked| {
        let path = asked.path.replace("/elsewhere/", "/v2/x/blobs/");
        let path = path.split('?').next().unwrap().to_owned();
        served.answer(&crate::server::Asked { path, ..asked.clone() })
    });
    let (served, elsewhere) = (image.clone(), store.host.clone());
    let server = Server::start(move |asked| {
        if !asked.headers.contains_key("authorization") {
            return Reply::new(401, "{}").header("www-authenticate", "Basic realm=\"x\"");
        }
        match asked.path.strip_prefix("/v2/x/blobs/") {
            Some(rest) => {
                let to = format!("http://{elsewhere}/elsewhere/{rest}?signature=s3cret");
                Reply::new(307, "").header("location", to)
            }
            None => served.answer(asked),
        }
    });
    // "me:pass-w0rd".
    let user = User::logged_in(&server.host, "bWU6cGFzcy13MHJk");
    let ran = user.pull(&format!("{}/x:1", server.host)).run().exits(0);
    assert!(!ran.all().contains("pass-w0rd") && !ran.all().contains("s3cret"), "{}", ran.all());
    assert!(!store.asked().is_empty());
    for asked in store.asked() {
        assert!(!asked.headers.contains_key("authorization"), "{asked:?}");
    }
    // Nor is the address that it gave told when that refuses.
    let gone = Server::start({
        let to = format!("http://{}/gone?signature=s3cret", store.host);
        let served = image.clone();
        move |asked| match asked.path.contains("/blobs/") {
            true => Reply::new(307, "").header("location", to.clone()),
            false => served.answer(asked),
        }
    });
    let ran = User::new().pull(&format!("{}/x:1", gone.host)).run().exits(13);
    assert!(!ran.all().contains("s3cret"), "{}", ran.all());
    // Without it, and with one for somebody else.
    User::new().pull(&format!("{}/x:1", server.host)).run().exits(13).says("log in");
    let other = User::logged_in("other.example", "bWU6cGFzcy13MHJk");
    other.pull(&format!("{}/x:1", server.host)).run().exits(13).says("log in");
}

#[test]
fn a_token_is_fetched_where_the_registry_says() {
    let image = Image::new();
    let tokens = Server::start(|_| Reply::new(200, r#"{"token":"t0ken"}"#));
    let (served, realm) = (image.clone(), format!("http://{}/token", tokens.host));
    let server = Server::start(move |asked| match asked.headers.get("authorization").map(String::as_str) {
        Some("Bearer t0ken") => served.answer(asked),
        _ => Reply::new(401, "{}").header("www-authenticate", format!("Bearer realm=\"{realm}\",service=\"s\"")),
    });
    User::new().pull(&format!("{}/x:1", server.host)).run().exits(0);
    assert!(tokens.asked()[0].path.contains("scope=repository%3Ax%3Apull"), "{:?}", tokens.asked());
}

#[test]
fn a_registry_elsewhere_is_asked_without_tls_only_when_that_is_said() {
    let own = UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.connect("192.0.2.1:9")?;
        socket.local_addr()
    });
    let address = match own {
        Ok(address) if !address.ip().is_loopback() => address.ip(),
        other => {
            available("registry", Err(format!("this machine has no address but loopback ({other:?})")));
            return;
        }
    };
    let image = Image::new();
    let served = image.clone();
    let server = Server::at(address, move |asked| served.answer(asked));
    let (user, name) = (User::new(), format!("{}/x:1", server.host));
    user.pull(&name).run().exits(13).says("--insecure-registry");
    assert!(server.asked().is_empty(), "nothing was said in the clear");
    user.run(["image", "pull", "--insecure-registry", "other.example", &name]).run().exits(13);
    user.run(["image", "pull", "--insecure-registry", &server.host, &name]).run().exits(0);
}

#[test]
fn a_pull_that_is_killed_leaves_nothing_in_the_way_of_the_next() {
    let image = Image::new();
    let served = image.clone();
    let first = AtomicUsize::new(0);
    let server = Server::start(move |asked| {
        let mut reply = served.answer(asked);
        if asked.path == served.layer_path() && first.fetch_add(1, Ordering::SeqCst) == 0 {
            // It never ends, and is killed meanwhile.
            reply.headers.push(("content-length".to_owned(), reply.body.len().to_string()));
            reply.cut = Some(0);
            reply.endless = true;
        }
        reply
    });
    let (user, name) = (User::new(), format!("{}/x:1", server.host));
    let killed = user.pull(&name).start();
    while !server.asked().iter().any(|asked| asked.path.contains("/blobs/")) {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    killed.signal("KILL");
    assert_eq!(killed.wait().code(), -1);
    // Several at once, of which one fetches it.
    let running: Vec<_> = (0..4).map(|_| user.pull(&name).start()).collect();
    for one in running {
        one.wait().exits(0);
    }
    let left: Vec<_> = std::fs::read_dir(user.cache()).unwrap().map(|e| e.unwrap().file_name()).collect();
    let left: Vec<_> = left.iter().map(|name| name.to_string_lossy()).collect();
    assert!(!left.iter().any(|name| name.ends_with(".new")), "{left:?}");
    // What a run left that was killed while it had a copy: no image, and gone with the next cleaning if its image is.
    let copy = user.cache().join("copy-0123456789abcdef");
    std::fs::create_dir_all(copy.join("tree")).unwrap();
    std::fs::write(copy.with_extension("lock"), "").unwrap();
    user.run(["image", "list"]).run().exits(0).prints("\n1 image, ");
    user.run(["clean"]).run().exits(0).prints("removed 1 unfinished image from the cache");
    assert!(!copy.exists() && !copy.with_extension("lock").exists());
    user.run(["image", "remove", &image.digest().to_string()[..12]]).run().exits(0).prints("removed image of");
    assert_eq!(user.run(["image", "list", "--json"]).run().exits(0).stdout, "[]\n");
}
