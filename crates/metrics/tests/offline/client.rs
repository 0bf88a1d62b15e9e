//! HTTP clients, well-behaved and not.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};

/// Answer to a request.
pub(crate) struct Answer {
    /// Status line and headers.
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    /// Reads to the end of the connection.
    pub(crate) fn read(mut stream: TcpStream) -> Self {
        let mut bytes = Vec::new();
        // An error ends the connection as well.
        let _ = stream.read_to_end(&mut bytes);
        let text = String::from_utf8(bytes).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        Self { head: head.to_lowercase(), body: body.to_owned() }
    }

    pub(crate) fn status(&self) -> u16 {
        self.head.split(' ').nth(1).map_or(0, |status| status.parse().unwrap())
    }
}

/// Sends bytes on a new connection.
pub(crate) fn send(to: SocketAddr, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(to).unwrap();
    // Ignored: the server may close the connection before the end.
    let _ = stream.write_all(bytes);
    stream
}

/// Answer to these bytes, after which nothing more is sent.
pub(crate) fn ask(to: SocketAddr, bytes: &[u8]) -> Answer {
    let stream = send(to, bytes);
    let _ = stream.shutdown(Shutdown::Write);
    Answer::read(stream)
}

/// Answer to a request for `path`.
pub(crate) fn get(to: SocketAddr, path: &str, headers: &str) -> Answer {
    let request = format!("GET {path} HTTP/1.1\r\nHost: {to}\r\n{headers}\r\n");
    Answer::read(send(to, request.as_bytes()))
}

/// Samples of a text: names with labels, and values.
pub(crate) fn samples(text: &str) -> BTreeMap<String, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let samples = lines.map(|line| {
        let (name, value) = line.rsplit_once(' ').unwrap();
        (name.to_owned(), value.parse().unwrap())
    });
    samples.collect()
}

/// Sum of a metric's samples, whatever their labels.
pub(crate) fn sum(samples: &BTreeMap<String, f64>, name: &str) -> f64 {
    let of_name = |sample: &str| sample.split('{').next() == Some(name);
    let found: Vec<_> = samples.iter().filter(|(sample, _)| of_name(sample)).collect();
    assert!(!found.is_empty(), "there is no {name}");
    found.iter().map(|(_, value)| **value).sum()
}
