//! Files as bodies, piece by piece.

use std::io;
use std::path::Path;

use bytes::BytesMut;
use futures_util::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_LENGTH, HeaderValue};
use hyper::{Response, StatusCode};
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::service::{Body, text};

/// Bytes read from a file at a time.
const PIECE_BYTES: usize = 256 << 10;

/// Answers with a file.
///
/// # Errors
/// If it cannot be read, or is none.
pub(crate) async fn send(path: &Path) -> io::Result<Response<Body>> {
    check(path).await?;
    let file = File::open(path).await?;
    let len = file.metadata().await?.len();
    let pieces = stream::try_unfold(file, |mut file| async move {
        let mut piece = BytesMut::with_capacity(PIECE_BYTES);
        Ok(match file.read_buf(&mut piece).await? {
            0 => None,
            _ => Some((Frame::data(piece.freeze()), file)),
        })
    });
    let mut response = Response::new(BodyExt::boxed(StreamBody::new(Box::pin(pieces))));
    response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(len));
    Ok(response)
}

/// Stores the body of a request as a file.
///
/// # Errors
/// If the body breaks off, or the file cannot be written.
pub(crate) async fn store(path: &Path, mut body: Incoming) -> io::Result<Response<Body>> {
    match check(path).await {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = File::create(path).await?;
    let mut len = 0;
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame.map_err(io::Error::other)?.into_data() {
            len += data.len();
            file.write_all(&data).await?;
        }
    }
    file.flush().await?;
    Ok(text(StatusCode::CREATED, &format!("{}\n", serde_json::json!({ "bytes": len }))))
}

/// Refuses what is no file before it is opened: a directory has no bytes to send, and a thread that opens a FIFO waits
/// for its other end.
async fn check(path: &Path) -> io::Result<()> {
    match tokio::fs::metadata(path).await?.is_file() {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::PermissionDenied, "not a regular file")),
    }
}
