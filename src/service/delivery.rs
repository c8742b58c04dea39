//! The result on its way to the client: every file of the report and of the outputs, as bytes.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use super::link::{Link, LinkError};
use super::protocol::{self, PIECE, ToClient, Tree};
use super::stream::STALL;

/// Why a result did not arrive.
#[derive(Debug, thiserror::Error)]
pub enum DeliveryError {
    /// The client is gone or doesn't read.
    #[error("the client did not take the result")]
    Client(#[source] LinkError),
    /// The client takes nothing.
    #[error("the client took nothing for {} s", STALL.as_secs())]
    Stalled,
    /// A file of ours.
    #[error("failed to read the result")]
    Io(#[from] io::Error),
}

/// Sends what is below a directory. Regular files only; what plimsoll writes has nothing else.
///
/// # Errors
/// As [`DeliveryError`] says.
pub async fn send_tree(link: &mut Link, tree: Tree, root: &Path) -> Result<(), DeliveryError> {
    let mut files = Vec::new();
    list(root, String::new(), &mut files)?;
    for path in files {
        let mut file = File::open(root.join(&path))?;
        let bytes = file.metadata()?.len();
        send(link, &ToClient::File(protocol::File { tree, path, bytes })).await?;
        let mut left = bytes;
        while left > 0 {
            let want = PIECE.min(usize::try_from(left).unwrap_or(PIECE));
            let mut piece = vec![0; want];
            file.read_exact(&mut piece)?;
            send(link, &ToClient::Data(piece)).await?;
            left -= want as u64;
        }
    }
    Ok(())
}

/// Sends one message; a client that takes nothing of it for long is given up.
///
/// # Errors
/// As [`DeliveryError`] says.
pub async fn send(link: &mut Link, message: &ToClient) -> Result<(), DeliveryError> {
    let frame = message.encode();
    match tokio::time::timeout(STALL, link.send(&frame, &[])).await {
        Ok(sent) => sent.map_err(DeliveryError::Client),
        Err(_) => Err(DeliveryError::Stalled),
    }
}

fn list(root: &Path, below: String, files: &mut Vec<String>) -> io::Result<()> {
    let mut entries = fs::read_dir(root.join(&below))?.collect::<io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        // Names of outputs are made storable, and so are text.
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = if below.is_empty() { name } else { format!("{below}/{name}") };
        let kind = entry.file_type()?;
        if kind.is_dir() {
            list(root, path, files)?;
        } else if kind.is_file() && path != ".gitignore" {
            files.push(path);
        }
    }
    Ok(())
}
