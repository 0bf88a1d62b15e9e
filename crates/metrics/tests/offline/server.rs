//! Answers to clients.

use std::net::{SocketAddr, TcpListener};

use forebay::net::counters::SocketCounts;
use forebay_metrics::{CONNECTIONS_MAX, Metrics, MetricsServer, SOCKETS_LISTED_MAX, ServerAccess};

use crate::client::{Answer, ask, get, send};

fn server() -> MetricsServer {
    let (address, hosts) = ("127.0.0.1:0".parse().unwrap(), vec!["metrics.example".to_owned()]);
    let access = ServerAccess { hosts, ..ServerAccess::default() };
    MetricsServer::bind(address, &access, Metrics::new()).unwrap()
}

#[test]
fn met_1_scrape_has_asked_format() {
    let server = server();
    let open = get(server.address(), "/metrics", "Accept: application/openmetrics-text\r\n");
    assert_eq!(open.status(), 200);
    assert!(open.head.contains("content-type: application/openmetrics-text; version=1.0.0"));
    assert!(open.body.contains("# TYPE forebay_build info\nforebay_build_info{version="));
    assert!(open.body.ends_with("# EOF\n"));
    let plain = get(server.address(), "/metrics", "");
    assert!(plain.head.contains("content-type: text/plain; version=0.0.4"));
    assert!(plain.body.contains("# TYPE forebay_build_info gauge\nforebay_build_info{version="));
    assert!(!plain.body.contains("# EOF"));
}

#[test]
fn met_3_only_get_and_head_are_answered() {
    let server = server();
    let address = server.address();
    let of = |method: &str, path: &str| {
        let request = format!("{method} {path} HTTP/1.1\r\nHost: {address}\r\n\r\n");
        ask(address, request.as_bytes())
    };
    let health = of("GET", "/healthz");
    assert_eq!((health.status(), health.body.as_str()), (200, "ok\n"));
    let head = of("HEAD", "/metrics");
    assert_eq!((head.status(), head.body.as_str()), (200, ""));
    assert_eq!(of("GET", "/index.html").status(), 404);
    assert_eq!(of("GET", "/metrics/../etc/passwd").status(), 404);
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT"] {
        let path = if method == "CONNECT" { "a:1" } else { "/metrics" };
        let refused = of(method, path);
        assert_eq!(refused.status(), 405, "{method}");
        assert!(refused.head.contains("allow: get, head"), "{method}");
    }
}

#[test]
fn met_3_foreign_host_gets_no_metrics() {
    let server = server();
    let of = |host: &str| {
        let answer =
            ask(server.address(), format!("GET /metrics HTTP/1.1\r\n{host}\r\n").as_bytes());
        assert_eq!(answer.status() == 200, answer.body.contains("forebay_build"), "{host}");
        answer.status()
    };
    assert_eq!(of("Host: localhost:1\r\n"), 200);
    assert_eq!(of("Host: metrics.example\r\n"), 200);
    assert_eq!(of("Host: evil.example\r\n"), 421);
    assert_eq!(of("Host: localhost.evil.example:80\r\n"), 421);
    assert_eq!(of(""), 400);
    assert_eq!(of("Host: localhost\r\nHost: evil.example\r\n"), 400);
}

/// The target's own host is not a way around the header, nor the header around it.
#[test]
fn met_3_absolute_target_is_checked_too() {
    let server = server();
    let address = server.address();
    let of = |target: &str, host: &str| {
        let request = format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n");
        ask(address, request.as_bytes()).status()
    };
    let own = address.to_string();
    assert_eq!(of(&format!("http://{own}/metrics"), &own), 200);
    assert_eq!(of("http://evil.example/metrics", &own), 421);
    assert_eq!(of(&format!("http://{own}/metrics"), "evil.example"), 421);
    assert_eq!(of("http://localhost@evil.example/metrics", &own), 421);
}

/// Only the first of several requests is answered, and a client that reads no answer holds nobody up.
#[test]
fn met_3_connection_serves_one_request() {
    let server = server();
    let address = server.address();
    let request = format!("GET /healthz HTTP/1.1\r\nHost: {address}\r\n\r\n");
    let answer = ask(address, request.repeat(100).as_bytes());
    assert_eq!((answer.status(), answer.body.as_str()), (200, "ok\n"));
    let scrape = request.replace("/healthz", "/metrics");
    let deaf: Vec<_> =
        (0..3 * CONNECTIONS_MAX).map(|_| send(address, scrape.repeat(100).as_bytes())).collect();
    assert_eq!(get(address, "/healthz", "").status(), 200, "beside clients that read nothing");
    drop(deaf);
}

#[test]
fn met_3_hostile_clients_end_no_service() {
    let server = server();
    let address = server.address();
    let is_served = || get(address, "/healthz", "").status() == 200;
    let line = format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\n");
    // Slow: headers that do not end.
    let slow: Vec<_> = (0..3).map(|_| send(address, line.as_bytes())).collect();
    assert!(is_served(), "beside slow clients");
    // Many: more connections than there are places.
    let many: Vec<_> = (0..3 * CONNECTIONS_MAX).map(|_| send(address, b"GET /met")).collect();
    assert!(is_served(), "beside many clients");
    // Huge: a line, and headers, without an end.
    for huge in [
        [line.as_bytes(), b"X: ", vec![b'x'; 1 << 20].as_slice()].concat(),
        [b"GET /", vec![b'x'; 1 << 20].as_slice()].concat(),
        [line.as_bytes(), b"X: y\r\n".repeat(10_000).as_slice(), b"\r\n"].concat(),
    ] {
        let answer = ask(address, &huge);
        assert!(answer.status() != 200 && !answer.body.contains("forebay_build"));
        assert!(is_served(), "after a huge request");
    }
    for noise in [b"\0\0\0\0".as_slice(), b"\x16\x03\x01\x02\0", b"\r\n\r\n", b"GET\r\n\r\n"] {
        assert_ne!(ask(address, noise).status(), 200);
        assert!(is_served(), "after noise");
    }
    drop((slow, many));
    assert!(is_served(), "after all are gone");
}

/// A scrape that takes its time is read to its end, however many others come.
#[test]
fn met_3_newcomers_cut_no_answer() {
    let sockets = || {
        let socket = |number: usize| {
            let (queued, by_cpu, rcvbuf_errors, rmem, rcvbuf) = (u64::MAX, Vec::new(), 1, 2, 3);
            let counts = SocketCounts { queued, by_cpu, rcvbuf_errors, rmem, rcvbuf };
            (number, SocketAddr::from(([u16::MAX; 8], 65_535)), counts)
        };
        (0..SOCKETS_LISTED_MAX).map(socket).collect()
    };
    let metrics = Metrics::new().with_socket_counts(sockets);
    let address = "127.0.0.1:0".parse().unwrap();
    let server = MetricsServer::bind(address, &ServerAccess::default(), metrics).unwrap();
    let address = server.address();
    let accept = "Accept: application/openmetrics-text\r\n";
    let scrape = format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\n{accept}\r\n");
    let begun = |count: usize| -> Vec<_> {
        let begun = (0..count).map(|_| send(address, scrape.as_bytes()));
        begun.inspect(|stream| assert_eq!(stream.peek(&mut [0]).unwrap(), 1)).collect()
    };
    for scrapes in [1, CONNECTIONS_MAX] {
        let begun = begun(scrapes);
        let many: Vec<_> = (0..3 * CONNECTIONS_MAX).map(|_| send(address, b"GET /met")).collect();
        // Closed at once, if all places have answers that are being written.
        let _ = get(address, "/healthz", "");
        for stream in begun {
            let answer = Answer::read(stream);
            assert_eq!(answer.status(), 200);
            assert!(answer.body.ends_with("# EOF\n"), "{} bytes", answer.body.len());
        }
        drop(many);
        assert_eq!(get(address, "/healthz", "").status(), 200, "after {scrapes}");
    }
}

#[test]
fn met_2_dropped_server_frees_address() {
    let server = server();
    let address = server.address();
    let taken = MetricsServer::bind(address, &ServerAccess::default(), Metrics::new()).unwrap_err();
    let told = taken.to_string();
    assert!(told.starts_with(&format!("cannot listen for metrics at {address}: ")), "{told}");
    let waiting = send(address, b"GET /metrics");
    drop(server);
    drop(waiting);
    assert!(TcpListener::bind(address).is_ok(), "nobody listens any more");
}
