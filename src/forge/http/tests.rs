//! Against a server on this machine. What proxies and roots do is looked at in `tests/publish`, from outside.

use super::*;
use serde_json::json;
use wiremock::matchers::{header, method, path};
use wiremock::{Mock, MockServer, ResponseTemplate};

fn client() -> Http {
    let patience =
        Patience { pause: Duration::from_millis(1), limited: Duration::from_millis(1), ..Patience::default() };
    Http::new(&Env::default()).unwrap().with_patience(patience)
}

fn url(server: &MockServer, path: &str) -> Url {
    Url::parse(&server.uri()).unwrap().join(path).unwrap()
}

fn answer(status: u16) -> ResponseTemplate {
    ResponseTemplate::new(status)
}

#[tokio::test]
async fn a_body_is_read_up_to_its_limit_and_no_further() {
    let server = MockServer::start().await;
    Mock::given(path("/x")).respond_with(answer(200).set_body_json(json!({"a": 1}))).mount(&server).await;
    let client = client();
    let get = || client.send(Request::get(url(&server, "/x")));
    assert_eq!(get().await.unwrap().json::<serde_json::Value>(7).await.unwrap(), json!({"a": 1}));
    let error = get().await.unwrap().bytes(6).await.unwrap_err();
    assert!(matches!(error, HttpError::TooLarge { limit: 6, .. }), "{error}");
}

#[tokio::test]
async fn faults_and_limits_are_tried_again_and_refusals_are_not() {
    for (status, asked) in [(500, 4), (429, 4), (403, 1), (404, 1), (422, 1), (401, 1)] {
        let server = MockServer::start().await;
        Mock::given(method("POST")).respond_with(answer(status)).expect(asked).mount(&server).await;
        let request = Request::new(Method::POST, url(&server, "/x")).json(&json!({}));
        let response = client().send(request).await.unwrap();
        assert_eq!(response.status.as_u16(), status);
        server.verify().await;
    }
}

#[tokio::test]
async fn a_fault_that_passes_leaves_no_trace() {
    let server = MockServer::start().await;
    Mock::given(path("/x")).respond_with(answer(502)).up_to_n_times(2).mount(&server).await;
    Mock::given(path("/x")).respond_with(answer(200).set_body_string("ok")).mount(&server).await;
    let body = client().send(Request::get(url(&server, "/x"))).await.unwrap().bytes(10).await.unwrap();
    assert_eq!(&body[..], b"ok");
}

#[tokio::test]
async fn the_wait_that_a_server_asks_for_is_not_begun_if_it_is_too_long() {
    let server = MockServer::start().await;
    let limited = answer(429).insert_header("retry-after", "86400");
    Mock::given(path("/x")).respond_with(limited).expect(1).mount(&server).await;
    assert_eq!(client().send(Request::get(url(&server, "/x"))).await.unwrap().status.as_u16(), 429);
}

#[tokio::test]
async fn a_redirect_to_another_host_comes_without_the_credential() {
    let (api, store) = (MockServer::start().await, MockServer::start().await);
    let to_store = answer(302).insert_header("location", format!("{}/blob?sig=hush", store.uri()));
    Mock::given(path("/zip")).and(header("authorization", "Bearer t0ken")).respond_with(to_store).mount(&api).await;
    Mock::given(path("/blob")).respond_with(answer(200).set_body_string("bytes")).mount(&store).await;
    let request = Request::download(url(&api, "/zip")).bearer(&Secret::new("t0ken"));
    let body = client().send(request).await.unwrap().bytes(100).await.unwrap();
    assert_eq!(&body[..], b"bytes");
    let seen = store.received_requests().await.unwrap();
    assert_eq!(seen.len(), 1);
    assert!(!seen[0].headers.contains_key("authorization"));
}

#[tokio::test]
async fn a_renamed_repository_is_written_to_and_another_host_is_not() {
    let (api, other) = (MockServer::start().await, MockServer::start().await);
    let renamed = answer(307).insert_header("location", "/new");
    Mock::given(path("/old")).respond_with(renamed).mount(&api).await;
    let moved = Mock::given(path("/new")).and(method("POST")).and(header("authorization", "Bearer t0ken"));
    moved.respond_with(answer(201)).expect(1).mount(&api).await;
    let away = answer(307).insert_header("location", format!("{}/x", other.uri()));
    Mock::given(path("/away")).respond_with(away).mount(&api).await;
    let post = |path: &str| {
        let request = Request::new(Method::POST, url(&api, path)).bearer(&Secret::new("t0ken")).json(&json!({}));
        let client = client();
        async move { client.send(request).await }
    };
    assert_eq!(post("/old").await.unwrap().status.as_u16(), 201);
    let error = post("/away").await.unwrap_err();
    assert!(error.to_string().contains("to another host"), "{error}");
    assert!(other.received_requests().await.unwrap().is_empty());
}

#[tokio::test]
async fn redirects_end() {
    let server = MockServer::start().await;
    Mock::given(path("/x")).respond_with(answer(302).insert_header("location", "/x")).mount(&server).await;
    let error = client().send(Request::get(url(&server, "/x"))).await.unwrap_err();
    assert!(error.to_string().ends_with("redirects too often"), "{error}");
}

#[tokio::test]
async fn an_error_holds_its_causes_and_no_secret() {
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = Url::parse(&format!("http://user:hush@127.0.0.1:{port}/x?sig=hush")).unwrap();
    let error = client().send(Request::get(address).bearer(&Secret::new("hush"))).await.unwrap_err();
    let text = crate::text::chain(&error);
    assert!(!text.contains("hush") && !format!("{error:?}").contains("hush"), "{text}");
    assert!(text.contains("refused"), "{text}");
}

#[test]
fn a_proxy_that_is_none_is_named_without_its_password() {
    let env: Env = [(Var::HttpsProxy, "gopher://u:hush@[nonsense")].into_iter().collect();
    let text = crate::text::chain(&Http::new(&env).unwrap_err());
    assert!(text.contains("HTTPS_PROXY") && !text.contains("hush"), "{text}");
}

#[test]
fn a_file_of_roots_that_holds_none_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ca.pem");
    std::fs::write(&file, "nothing").unwrap();
    for path in [file, dir.path().join("absent")] {
        let env: Env = [(Var::SslCertFile, path.as_os_str())].into_iter().collect();
        let text = crate::text::chain(&Http::new(&env).unwrap_err());
        assert!(text.contains("SSL_CERT_FILE"), "{text}");
    }
}

#[test]
fn addresses_of_apis_are_plain() {
    assert!(base("CI_API_V4_URL", "https://example.com/gitlab/api/v4").is_ok());
    for bad in ["", "example.com", "file:///x", "https://u:p@example.com", "https://example.com/?q", "https://e/#f"] {
        assert!(base("CI_API_V4_URL", bad).is_err(), "{bad}");
    }
}
