//! One comment per change, kept up to date by many jobs that know nothing of each other.
//!
//! A comment is ours when it begins with the marker *and* our own account wrote it; anybody can write a marker. Jobs that find
//! none at once make two: each looks again after making one, puts all sections into the oldest and removes the others. Jobs
//! that write at once can write over each other: each looks again after a moment, and writes again if its section is gone.

use std::time::Duration;

use super::body::{self, MARKER, Merged, Section};

/// How often a section that is gone again is written.
const ROUNDS: usize = 4;
/// Pages of comments that are read; what stands on later ones is not found.
const MAX_PAGES: usize = 100;
/// How long others may take from reading a comment to writing it.
pub const SETTLE: Duration = Duration::from_millis(700);

/// A comment.
#[derive(Debug, Clone)]
pub struct Post {
    /// Its number; a greater one is newer.
    pub id: u64,
    /// Our own account wrote it.
    pub own: bool,
    /// Its text.
    pub body: String,
    /// Link to it.
    pub url: Option<String>,
}

/// Comments of one pull or merge request.
pub trait Thread {
    /// Why a call failed.
    type Error;
    /// Characters of a comment.
    const LIMIT: usize;
    /// A page, from 1, the oldest first; and whether it is the last.
    fn page(&self, page: usize) -> impl Future<Output = Result<(Vec<Post>, bool), Self::Error>>;
    /// One of them.
    fn read(&self, id: u64) -> impl Future<Output = Result<Post, Self::Error>>;
    /// Makes one. Knows its own account from then on.
    fn create(&mut self, body: &str) -> impl Future<Output = Result<Post, Self::Error>>;
    /// Writes one anew.
    fn update(&self, id: u64, body: &str) -> impl Future<Output = Result<Post, Self::Error>>;
    /// Removes one.
    fn delete(&self, id: u64) -> impl Future<Output = Result<(), Self::Error>>;
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stuck {
    /// The comment is new.
    Posted(Option<String>),
    /// It says it now.
    Updated(Option<String>),
    /// It said it already.
    Unchanged(Option<String>),
    /// A later run has spoken already.
    Outdated,
    /// Others wrote over it each time.
    Lost,
}

/// Puts a section into the comment.
///
/// # Errors
/// If a call fails.
pub async fn put<T: Thread>(thread: &mut T, section: &Section, settle: Duration) -> Result<Stuck, T::Error> {
    let mut created = None;
    let mut updated = false;
    for round in 0..ROUNDS {
        let mut own = ours(thread).await?.into_iter();
        let Some(oldest) = own.next() else {
            let Merged::Sections(sections) = body::merge(Vec::new(), section) else { return Ok(Stuck::Outdated) };
            created = Some(thread.create(&body::compose(&sections, T::LIMIT)).await?.id);
            // Somebody else may have made one before ours: look again.
            continue;
        };
        let others: Vec<Post> = own.collect();
        let there = std::iter::once(&oldest).chain(&others).flat_map(|post| body::parse(&post.body)).collect();
        let Merged::Sections(sections) = body::merge(there, section) else { return Ok(Stuck::Outdated) };
        let body = body::compose(&sections, T::LIMIT);
        let wrote = !same(&oldest.body, &body);
        if wrote {
            thread.update(oldest.id, &body).await?;
            updated = true;
        }
        for other in &others {
            thread.delete(other.id).await?;
        }
        if wrote {
            tokio::time::sleep(settle.mul_f64(1.0 + round as f64 / 2.0)).await;
            let now = thread.read(oldest.id).await?;
            if !body::parse(&now.body).contains(section) && same_section_fits(&sections, section, T::LIMIT) {
                continue;
            }
        }
        return Ok(match (created, updated) {
            (Some(id), _) if id == oldest.id => Stuck::Posted(oldest.url),
            (Some(_), _) | (None, true) => Stuck::Updated(oldest.url),
            (None, false) => Stuck::Unchanged(oldest.url),
        });
    }
    Ok(Stuck::Lost)
}

/// Whether the section was written whole, so that it has to be there.
fn same_section_fits(sections: &[Section], section: &Section, limit: usize) -> bool {
    body::parse(&body::compose(sections, limit)).contains(section)
}

/// Our comments, the oldest first.
async fn ours<T: Thread>(thread: &T) -> Result<Vec<Post>, T::Error> {
    let mut own = Vec::new();
    for page in 1..=MAX_PAGES {
        let (posts, last) = thread.page(page).await?;
        own.extend(posts.into_iter().filter(|post| post.own && post.body.starts_with(MARKER)));
        if last {
            break;
        }
    }
    own.sort_by_key(|post| post.id);
    Ok(own)
}

/// Whether two bodies are the same to the forge, which may trim them.
fn same(a: &str, b: &str) -> bool {
    let plain = |text: &str| text.replace("\r\n", "\n").trim_end().to_owned();
    plain(a) == plain(b)
}

#[cfg(test)]
mod tests;
