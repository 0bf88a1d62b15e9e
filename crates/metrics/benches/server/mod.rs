//! Server of metrics, and a client that scrapes it over loopback, as Prometheus does.

use std::io::{Read, Write};
use std::net::TcpStream;

use forebay_metrics::{Metrics, MetricsServer, ServerAccess, TextFormat};

/// Serves metrics on a port of the loopback interface.
///
/// # Panics
///
/// If that cannot be had.
pub(crate) fn serve(metrics: Metrics) -> MetricsServer {
    MetricsServer::bind("127.0.0.1:0".parse().unwrap(), &ServerAccess::default(), metrics).unwrap()
}

/// Scrapes a server, and returns the length of its answer in bytes, which is in `answer` then: a client that scrapes
/// again has the memory.
///
/// # Panics
///
/// If the server does not answer with a text of OpenMetrics.
pub(crate) fn scrape(server: &MetricsServer, answer: &mut Vec<u8>) -> usize {
    let address = server.address();
    let mut stream = TcpStream::connect(address).unwrap();
    let accept = TextFormat::OpenMetrics.content_type();
    write!(stream, "GET /metrics HTTP/1.0\r\nHost: {address}\r\nAccept: {accept}\r\n\r\n").unwrap();
    answer.clear();
    stream.read_to_end(answer).unwrap();
    assert!(answer.ends_with(b"# EOF\n"), "the text is not whole");
    answer.len()
}
