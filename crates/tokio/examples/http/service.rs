//! Requests and answers.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use forebay::net::Net;
use http_body_util::Full;
use http_body_util::combinators::BoxBody;
use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode};

use crate::files;

/// Served directory, and the net whose counters are served.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) root: PathBuf,
    pub(crate) net: Option<Net>,
}

/// Body of an answer.
pub(crate) type Body = BoxBody<Bytes, io::Error>;

/// Answers a request.
///
/// # Errors
/// None: a request that fails gets an answer that says so.
pub(crate) async fn answer(
    request: Request<Incoming>,
    site: &Site,
) -> Result<Response<Body>, hyper::Error> {
    let method = request.method().clone();
    let Some(path) = file_of(&site.root, request.uri().path()) else {
        return Ok(text(StatusCode::BAD_REQUEST, "a name without directories, please\n"));
    };
    let answer = match method {
        Method::GET if request.uri().path() == "/counters" => Ok(counters(site)),
        Method::GET => files::send(&path).await,
        Method::PUT => files::store(&path, request.into_body()).await,
        _ => Ok(text(StatusCode::METHOD_NOT_ALLOWED, "GET or PUT, please\n")),
    };
    Ok(answer.unwrap_or_else(|error| {
        let status = match error.kind() {
            io::ErrorKind::NotFound => StatusCode::NOT_FOUND,
            io::ErrorKind::PermissionDenied => StatusCode::FORBIDDEN,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        text(status, &format!("{}: {error}\n", path.display()))
    }))
}

/// File of a request: a name in the directory itself.
fn file_of(root: &Path, path: &str) -> Option<PathBuf> {
    let name = path.strip_prefix('/')?;
    let is_plain = !name.is_empty() && !name.contains(['/', '\\', '%']) && !name.starts_with('.');
    is_plain.then(|| root.join(name))
}

/// Counters of TCP, by their names in the kernel.
fn counters(site: &Site) -> Response<Body> {
    let lines = site.net.as_ref().map_or(String::new(), |net| net.snmp() + &net.netstat());
    let lines: Vec<&str> = lines.lines().collect();
    let mut counters = BTreeMap::new();
    for pair in lines.chunks_exact(2).filter(|pair| pair[0].starts_with("Tcp")) {
        let named = pair[0].split(' ').zip(pair[1].split(' ')).skip(1);
        counters.extend(named.map(|(name, value)| (name, value.parse().unwrap_or(0_u64))));
    }
    text(StatusCode::OK, &format!("{}\n", serde_json::json!(counters)))
}

pub(crate) fn text(status: StatusCode, text: &str) -> Response<Body> {
    use http_body_util::BodyExt;
    let body = Full::new(Bytes::from(text.to_owned())).map_err(|never| match never {}).boxed();
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response
}
