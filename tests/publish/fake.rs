//! GitHub with a memory: comments that stay, and faults on demand.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use wiremock::matchers::any;
use wiremock::{Mock, MockServer, Request, Respond, ResponseTemplate};

/// The account of a workflow's own token.
pub const BOT: u64 = 41_898_282;

#[derive(Debug, Clone)]
pub struct Comment {
    pub id: u64,
    pub author: Option<(u64, &'static str)>,
    pub body: String,
}

/// A fault: how many requests of this method and path get this answer first.
pub struct Fault {
    pub method: &'static str,
    pub path: &'static str,
    pub times: usize,
    pub answer: ResponseTemplate,
}

#[derive(Default)]
pub struct State {
    pub comments: Vec<Comment>,
    pub statuses: Vec<Value>,
    pub checks: Vec<Value>,
    pub updates: Vec<Value>,
    pub faults: Vec<Fault>,
    pub pulls: Vec<Value>,
    /// The account of the token; none for an installation's.
    pub me: Option<u64>,
}

pub struct Github {
    pub server: MockServer,
    pub state: Arc<Mutex<State>>,
}

struct Answers(Arc<Mutex<State>>);

impl Github {
    pub async fn start() -> Self {
        let server = MockServer::start().await;
        let state = Arc::new(Mutex::new(State::default()));
        Mock::given(any()).respond_with(Answers(state.clone())).mount(&server).await;
        Self { server, state }
    }

    pub fn fault(self, method: &'static str, path: &'static str, times: usize, answer: ResponseTemplate) -> Self {
        self.state.lock().unwrap().faults.push(Fault { method, path, times, answer });
        self
    }

    pub fn with(self, change: impl FnOnce(&mut State)) -> Self {
        change(&mut self.state.lock().unwrap());
        self
    }

    pub fn uri(&self) -> String {
        self.server.uri()
    }

    pub fn comments(&self) -> Vec<Comment> {
        self.state.lock().unwrap().comments.clone()
    }

    pub fn statuses(&self) -> Vec<Value> {
        self.state.lock().unwrap().statuses.clone()
    }

    /// `METHOD path` of all requests so far.
    pub async fn asked(&self) -> Vec<String> {
        let requests = self.server.received_requests().await.unwrap();
        requests.iter().map(|r| format!("{} {}", r.method, r.url.path())).collect()
    }
}

/// An answer with a message, as GitHub gives refusals.
pub fn refusal(status: u16, message: &str) -> ResponseTemplate {
    let body =
        json!({"message": message, "documentation_url": "https://docs.github.com/rest", "status": status.to_string()});
    ResponseTemplate::new(status).set_body_json(body)
}

fn shown(comment: &Comment) -> Value {
    json!({
        "id": comment.id,
        "body": comment.body,
        "user": comment.author.map(|(id, login)| json!({"id": id, "login": login, "type": "Bot"})),
        "html_url": format!("https://github.com/octo/widgets/pull/31#issuecomment-{}", comment.id),
    })
}

impl Respond for Answers {
    fn respond(&self, request: &Request) -> ResponseTemplate {
        let mut state = self.0.lock().unwrap();
        let (method, path) = (request.method.as_str(), request.url.path().to_owned());
        if request.headers.get("authorization").is_none_or(|a| a != &format!("Bearer {}", crate::TOKEN)) {
            return refusal(401, "Bad credentials");
        }
        let due = state.faults.iter_mut().find(|f| f.method == method && path.contains(f.path) && f.times > 0);
        if let Some(fault) = due {
            fault.times -= 1;
            return fault.answer.clone();
        }
        let query = |name: &str| {
            request.url.query_pairs().find(|(n, _)| n == name).map(|(_, value)| value.into_owned()).unwrap_or_default()
        };
        let body: Value = serde_json::from_slice(&request.body).unwrap_or_default();
        let text = || body["body"].as_str().unwrap_or_default().to_owned();
        let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        let ok = |value: Value| ResponseTemplate::new(200).set_body_json(value);
        let id = parts.last().and_then(|p| p.parse::<u64>().ok());
        match (method, parts.as_slice()) {
            ("GET", ["user"]) => match state.me {
                Some(id) => ok(json!({"id": id, "login": "somebody"})),
                None => refusal(403, "Resource not accessible by integration"),
            },
            ("GET", ["repos", "octo", "widgets", "issues", _, "comments"]) => {
                let (page, size) =
                    (query("page").parse::<usize>().unwrap(), query("per_page").parse::<usize>().unwrap());
                let here = state.comments.iter().skip((page - 1) * size).take(size);
                ok(here.map(shown).collect::<Vec<_>>().into())
            }
            ("POST", ["repos", "octo", "widgets", "issues", _, "comments"]) => {
                if text().chars().count() > 65_536 {
                    return refusal(422, "Validation Failed: body is too long (maximum is 65536 characters)");
                }
                let id = state.comments.iter().map(|c| c.id).max().unwrap_or(0) + 1;
                let author = Some(state.me.map_or((BOT, "github-actions[bot]"), |id| (id, "somebody")));
                let comment = Comment { id, author, body: text() };
                state.comments.push(comment.clone());
                ResponseTemplate::new(201).set_body_json(shown(&comment))
            }
            (_, ["repos", "octo", "widgets", "issues", "comments", _]) => {
                let Some(at) = state.comments.iter().position(|c| Some(c.id) == id) else {
                    return refusal(404, "Not Found");
                };
                match method {
                    "PATCH" => state.comments[at].body = text(),
                    "DELETE" => {
                        state.comments.remove(at);
                        return ResponseTemplate::new(204);
                    }
                    _ => {}
                }
                ok(shown(&state.comments[at]))
            }
            ("POST", ["repos", "octo", "widgets", "statuses", sha]) => {
                if body["description"].as_str().unwrap_or_default().chars().count() > 140 {
                    return refusal(422, "description is too long (maximum is 140 characters)");
                }
                let mut status = body.clone();
                status["sha"] = (*sha).into();
                state.statuses.push(status);
                ResponseTemplate::new(201).set_body_json(json!({"id": 1}))
            }
            ("POST", ["repos", "octo", "widgets", "check-runs"]) => {
                state.checks.push(body);
                let url = "https://github.com/octo/widgets/runs/4";
                ResponseTemplate::new(201).set_body_json(json!({"id": 4, "html_url": url}))
            }
            ("PATCH", ["repos", "octo", "widgets", "check-runs", "4"]) => {
                state.updates.push(body);
                ok(json!({"id": 4}))
            }
            ("GET", ["repos", "octo", "widgets", "pulls"] | ["repos", "octo", "widgets", "commits", _, "pulls"]) => {
                ok(state.pulls.clone().into())
            }
            _ => refusal(404, "Not Found"),
        }
    }
}
