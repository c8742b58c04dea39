//! The comment on a pull request.

use crate::env::Env;
use crate::forge::github::{Account, ApiError, Comment, Github, PER_PAGE};
use crate::forge::{Change, Http};
use crate::publish::body::Section;
use crate::publish::sticky::{self, Post, Stuck, Thread};
use crate::publish::{Outcome, Publication, Publisher, Target};

/// The account of a workflow's own token (<https://github.com/apps/github-actions>).
const ACTIONS: &str = "github-actions[bot]";

/// Publishes the comment.
#[derive(Debug)]
pub struct CommentPublisher<'a> {
    /// Names the API, the repository and the token.
    pub env: &'a Env,
    /// The client.
    pub http: Http,
}

impl Publisher for CommentPublisher<'_> {
    async fn publish(&self, what: &Publication) -> Outcome {
        if matches!(what.context.as_ref().map(|c| &c.change), Some(Change::Queued { .. })) {
            return Outcome::Skipped("a merge queue's candidate has no pull request of its own".to_owned());
        }
        let put = async {
            let github = Github::new(self.env, self.http.clone())?;
            let Some(number) = pull_request(&github, what).await? else { return Ok(None) };
            let me = Author::of(github.me().await?);
            let mut thread = Comments { github, number, me };
            sticky::put(&mut thread, &Section::of(what), sticky::SETTLE).await.map(Some)
        };
        // Without a pull request nothing is missing, a token least of all.
        let placeless = what.request().is_none() && what.context.as_ref().is_none_or(|c| c.producer.is_none());
        if placeless {
            return Outcome::Skipped("the event names no pull request".to_owned());
        }
        match put.await {
            Ok(None) => Outcome::Skipped("no open pull request has this commit as its head".to_owned()),
            Ok(Some(Stuck::Posted(url))) => Outcome::Posted { url },
            Ok(Some(Stuck::Updated(url))) => Outcome::Updated { url },
            Ok(Some(Stuck::Unchanged(url))) => Outcome::Unchanged { url },
            Ok(Some(Stuck::Outdated)) => Outcome::Skipped("a later run has written the comment already".to_owned()),
            Ok(Some(Stuck::Lost)) => Outcome::Failed("other jobs wrote over it each time".to_owned()),
            Err(error) => super::outcome(&error, Target::GithubComment, what),
        }
    }
}

use super::pull_request;

/// Whose comments are ours.
#[derive(Debug)]
enum Author {
    /// This account's.
    Account(u64),
    /// A token of an installation does not say whose it is. Most are a workflow's own; that it is another's shows in the
    /// first comment that it makes.
    Installation,
}

impl Author {
    fn of(account: Option<Account>) -> Self {
        account.map_or(Author::Installation, |account| Author::Account(account.id))
    }

    fn wrote(&self, comment: &Comment) -> bool {
        comment.user.as_ref().is_some_and(|user| match self {
            Author::Account(id) => user.id == *id,
            Author::Installation => user.login == ACTIONS,
        })
    }
}

struct Comments {
    github: Github,
    number: u64,
    me: Author,
}

impl Comments {
    fn post(&self, comment: Comment) -> Post {
        let own = self.me.wrote(&comment);
        Post { id: comment.id, own, body: comment.body.unwrap_or_default(), url: comment.html_url }
    }
}

impl Thread for Comments {
    type Error = ApiError;
    /// GitHub says "body is too long (maximum is 65536 characters)".
    const LIMIT: usize = 65_536;

    async fn page(&self, page: usize) -> Result<(Vec<Post>, bool), ApiError> {
        let comments = self.github.comments(self.number, page).await?;
        let last = comments.len() < PER_PAGE;
        Ok((comments.into_iter().map(|c| self.post(c)).collect(), last))
    }

    async fn read(&self, id: u64) -> Result<Post, ApiError> {
        Ok(self.post(self.github.comment(id).await?))
    }

    async fn create(&mut self, body: &str) -> Result<Post, ApiError> {
        let made = self.github.create_comment(self.number, body).await?;
        if let (Author::Installation, Some(user)) = (&self.me, &made.user) {
            self.me = Author::Account(user.id);
        }
        Ok(self.post(made))
    }

    async fn update(&self, id: u64, body: &str) -> Result<Post, ApiError> {
        Ok(self.post(self.github.update_comment(id, body).await?))
    }

    async fn delete(&self, id: u64) -> Result<(), ApiError> {
        self.github.delete_comment(id).await
    }
}
