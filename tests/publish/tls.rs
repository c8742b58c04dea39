//! A company's own certificates, and its proxy.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use plimsoll::env::Var;
use plimsoll::publish::Target::GithubStatus;
use wiremock::matchers::{method, path};
use wiremock::{Mock, MockServer, ResponseTemplate};

use crate::common::{available, fixture, installed};
use crate::samples;
use crate::{Case, HEAD, github_env, only};

struct Server {
    process: Child,
    port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A forge behind HTTPS whose certificate nobody knows but whoever has `ca.pem`.
fn server(directory: &Path) -> Option<Server> {
    let tools = installed("openssl").and_then(|()| installed("plimsoll-test-python"));
    if !available("openssl", tools) {
        return None;
    }
    let openssl = |arguments: &str| {
        let ran = Command::new("openssl").args(arguments.split(' ')).current_dir(directory).output().unwrap();
        assert!(ran.status.success(), "{arguments}: {}", String::from_utf8_lossy(&ran.stderr));
    };
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    openssl(&format!(
        "req -x509 {key} -keyout ca.key -out ca.pem -days 2 -subj /CN=Acme -addext basicConstraints=critical,CA:TRUE"
    ));
    openssl(&format!("req {key} -keyout server.key -out server.csr -subj /CN=forge"));
    fs::write(directory.join("names"), "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth\n").unwrap();
    openssl("x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out server.pem -days 2 -extfile names");
    let mut process = Command::new("plimsoll-test-python")
        .arg(fixture("publish/https.py"))
        .current_dir(directory)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut port = String::new();
    let mut out = process.stdout.take().unwrap();
    let mut byte = [0];
    while out.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {
        port.push(char::from(byte[0]));
    }
    Some(Server { process, port: port.parse().unwrap() })
}

#[tokio::test]
async fn a_company_has_its_own_certificates() {
    let directory = tempfile::tempdir().unwrap();
    let Some(server) = server(directory.path()) else { return };
    let api = format!("https://127.0.0.1:{}", server.port);
    let case = Case::own(samples::passed(), github_env("pull_request", &api));
    let case = case.set(Var::SslCertFile, directory.path().join("ca.pem").to_str().unwrap());
    assert_eq!(only(&case.publish(&[GithubStatus]).await).0, "posted");
    // With others than its own, the error says what it is about, to the last cause.
    let others = case.set(Var::SslCertFile, directory.path().join("server.pem").to_str().unwrap());
    let (outcome, reason) = only(&others.publish(&[GithubStatus]).await);
    assert!(outcome == "failed" && reason.contains("certificate"), "{outcome} {reason}");
}

#[tokio::test]
async fn a_company_has_its_proxy() {
    let proxy = MockServer::start().await;
    let created = ResponseTemplate::new(201).set_body_string("{}");
    let status = format!("/repos/octo/widgets/statuses/{HEAD}");
    Mock::given(method("POST")).and(path(status)).respond_with(created).mount(&proxy).await;
    // A name that leads nowhere but through the proxy.
    let case = Case::own(samples::passed(), github_env("pull_request", "http://api.forge.invalid"));
    let case = case.set(Var::HttpProxyLower, &proxy.uri());
    assert_eq!(only(&case.publish(&[GithubStatus]).await).0, "posted");
    let past = case.set(Var::NoProxy, "forge.invalid");
    let seen = proxy.received_requests().await.unwrap().len();
    let begun = plimsoll::publish::Publication::begun(past.what.context.clone(), past.options.clone());
    let told = plimsoll::publish::pending(&begun, &[GithubStatus], &crate::snapshot(&past.env)).await;
    assert_eq!(told[0].1.name(), "failed", "{told:?}");
    assert_eq!(proxy.received_requests().await.unwrap().len(), seen, "not through the proxy");
}
