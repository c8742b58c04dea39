//! The note on a merge request.

use crate::env::{Env, Var};
use crate::forge::Http;
use crate::forge::gitlab::{ApiError, Gitlab, Note, PER_PAGE};
use crate::publish::body::Section;
use crate::publish::sticky::{self, Post, Stuck, Thread};
use crate::publish::{Outcome, Publication, Publisher, Target};

/// Publishes the note.
#[derive(Debug)]
pub struct NotePublisher<'a> {
    /// Names the API, the project and the token.
    pub env: &'a Env,
    /// The client.
    pub http: Http,
}

impl Publisher for NotePublisher<'_> {
    async fn publish(&self, what: &Publication) -> Outcome {
        let Some(request) = what.request() else {
            return Outcome::Skipped("the pipeline belongs to no merge request, or to several".to_owned());
        };
        // A fork's pipeline runs in the fork; its merge request is the target project's.
        let project = self.env.number(Var::CiMergeRequestProjectId).or_else(|| self.env.number(Var::CiProjectId));
        let Some(project) = project else { return Outcome::Skipped("CI_PROJECT_ID is not set".to_owned()) };
        if let Some(skipped) = super::without_token(self.env) {
            return skipped;
        }
        let put = async {
            let gitlab = Gitlab::new(self.env, self.http.clone())?;
            let me = gitlab.me().await?.id;
            let mut thread = Notes { gitlab, project, request, me, server: self.server() };
            sticky::put(&mut thread, &Section::of(what), sticky::SETTLE).await
        };
        match put.await {
            Ok(Stuck::Posted(url)) => Outcome::Posted { url },
            Ok(Stuck::Updated(url)) => Outcome::Updated { url },
            Ok(Stuck::Unchanged(url)) => Outcome::Unchanged { url },
            Ok(Stuck::Outdated) => Outcome::Skipped("a later pipeline has written the note already".to_owned()),
            Ok(Stuck::Lost) => Outcome::Failed("other jobs wrote over it each time".to_owned()),
            Err(error) => super::outcome(&error, Target::GitlabNote),
        }
    }
}

impl NotePublisher<'_> {
    /// Address of the merge requests' pages: answers about notes have no links.
    fn server(&self) -> Option<String> {
        let api = self.env.text(Var::CiApiV4Url)?.trim_end_matches('/').strip_suffix("/api/v4")?;
        let project = self.env.text(Var::CiMergeRequestProjectPath).or_else(|| self.env.text(Var::CiProjectPath))?;
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'/');
        project.bytes().all(plain).then(|| format!("{api}/{project}"))
    }
}

struct Notes {
    gitlab: Gitlab,
    project: u64,
    request: u64,
    me: u64,
    server: Option<String>,
}

impl Notes {
    fn post(&self, note: Note) -> Post {
        let own = !note.system && note.author.as_ref().is_some_and(|author| author.id == self.me);
        let request = self.request;
        let url = self.server.as_ref().map(|s| format!("{s}/-/merge_requests/{request}#note_{}", note.id));
        Post { id: note.id, own, body: note.body, url }
    }
}

impl Thread for Notes {
    type Error = ApiError;
    const LIMIT: usize = 1_000_000;

    async fn page(&self, page: usize) -> Result<(Vec<Post>, bool), ApiError> {
        let notes = self.gitlab.notes(self.project, self.request, page).await?;
        let last = notes.len() < PER_PAGE;
        Ok((notes.into_iter().map(|n| self.post(n)).collect(), last))
    }

    async fn read(&self, id: u64) -> Result<Post, ApiError> {
        Ok(self.post(self.gitlab.note(self.project, self.request, id).await?))
    }

    async fn create(&mut self, body: &str) -> Result<Post, ApiError> {
        Ok(self.post(self.gitlab.create_note(self.project, self.request, body).await?))
    }

    async fn update(&self, id: u64, body: &str) -> Result<Post, ApiError> {
        Ok(self.post(self.gitlab.update_note(self.project, self.request, id, body).await?))
    }

    async fn delete(&self, id: u64) -> Result<(), ApiError> {
        self.gitlab.delete_note(self.project, self.request, id).await
    }
}
