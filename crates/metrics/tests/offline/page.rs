//! The page: its documents, answers about a run, and changes of knobs.

use std::net::SocketAddr;
use std::thread::{self, JoinHandle};

use forebay::net::counters::SocketCounts;
use forebay::{Control, CpuId, CpuList, Stopper};
use forebay_metrics::{Metrics, MetricsServer, ServerAccess, TOKEN_HEADER};
use serde_json::{Value, json};

use crate::client::{Answer, ask, get, samples, send, sum};
use crate::scrape::engine;

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// A running engine, with a server beside it.
struct Served {
    control: Control,
    server: MetricsServer,
    stopper: Stopper,
    run: Option<JoinHandle<()>>,
}

impl Served {
    fn at(address: &str, token: Option<&str>) -> Self {
        let engine = engine(1, u64::MAX);
        let control = Control::of(&engine);
        let metrics = Metrics::new().with_engine(control.clone());
        let page_token = token.map(|token| token.parse().unwrap());
        let access = ServerAccess { page_token, ..ServerAccess::default() };
        let server = MetricsServer::bind(address.parse().unwrap(), &access, metrics).unwrap();
        let stopper = engine.stopper();
        let run = thread::spawn(move || drop(engine.run().unwrap()));
        Self { control, server, stopper, run: Some(run) }
    }

    /// Address by which this machine reaches the server.
    fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.server.address().port()))
    }

    fn get(&self, path: &str, headers: &str) -> Answer {
        get(self.address(), path, headers)
    }

    /// Answer to a change of the mask, with these headers.
    fn set(&self, headers: &str, body: &str) -> Answer {
        let (address, len) = (self.address(), body.len());
        let request = format!(
            "POST /api/set HTTP/1.1\r\nHost: {address}\r\nContent-Length: {len}\r\n{headers}\r\n{body}"
        );
        ask(address, request.as_bytes())
    }

    fn mask(&self) -> String {
        self.control.knob("rps_cpus").unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stopper.stop();
        self.run.take().into_iter().for_each(|run| run.join().unwrap());
    }
}

fn json_of(answer: &Answer) -> Value {
    serde_json::from_str(&answer.body).unwrap()
}

/// Also texts that are not the page's: another site's page in the same browser must not load them.
#[test]
fn pag_1_no_answer_is_for_other_sites() {
    let served = Served::at("127.0.0.1:0", None);
    for path in ["/metrics", "/healthz", "/nothing", "/api/set"] {
        let answer = served.get(path, "");
        for header in ["cross-origin-resource-policy: same-origin", "x-frame-options: deny"] {
            assert!(answer.head.contains(header), "{path}: {header} is not in {}", answer.head);
        }
    }
}

#[test]
fn pag_1_page_is_kept_from_others() {
    let served = Served::at("127.0.0.1:0", None);
    for (path, kind) in [
        ("/", "text/html"),
        ("/page.js", "text/javascript"),
        ("/page.css", "text/css"),
        ("/api/state", "application/json"),
    ] {
        let answer = served.get(path, "");
        assert_eq!(answer.status(), 200, "{path}");
        let policy = "content-security-policy: default-src 'none'; script-src 'self';";
        for header in [
            &format!("content-type: {kind}"),
            policy,
            "x-frame-options: deny",
            "x-content-type-options: nosniff",
            "cross-origin-resource-policy: same-origin",
            "cache-control: no-store",
        ] {
            assert!(answer.head.contains(header), "{path}: {header} is not in {}", answer.head);
        }
        assert!(!answer.head.contains("unsafe") && !answer.head.contains("access-control"));
    }
}

#[test]
fn pag_2_state_agrees_with_counters() {
    let engine = engine(2, 20_000);
    let metrics = Metrics::new().with_engine(Control::of(&engine));
    let address = "127.0.0.1:0".parse().unwrap();
    let access = ServerAccess::default();
    let server = MetricsServer::bind(address, &access, metrics.clone()).unwrap();
    let outcome = engine.run().unwrap();
    let state = json_of(&get(server.address(), "/api/state", ""));
    let text = get(server.address(), "/metrics", "").body;
    let samples = samples(&text);
    let all = |part: &str, name: &str| -> u64 {
        let each = state[part].as_array().unwrap().iter();
        each.map(|of| of[name].as_u64().unwrap()).sum()
    };
    for (part, name, metric) in [
        ("cpus", "packets", "forebay_packets_delivered_total"),
        ("cpus", "bytes", "forebay_delivered_bytes_total"),
        ("cpus", "queued", "forebay_backlog_packets"),
        ("cpus", "waits", "forebay_backlog_wait_seconds_count"),
        ("queues", "packets", "forebay_packets_received_total"),
        ("queues", "moves", "forebay_flow_moves_total"),
        ("queues", "holds", "forebay_flow_holds_total"),
    ] {
        assert_eq!(all(part, name).to_string(), sum(&samples, metric).to_string(), "{name}");
    }
    assert_eq!((all("cpus", "packets"), all("queues", "packets")), (40_000, 40_000));
    for (cpu, outcome) in state["cpus"].as_array().unwrap().iter().zip(&outcome.cpus) {
        assert_eq!(cpu["cpu"], outcome.cpu.0);
        assert_eq!(cpu["packets"], outcome.delivery.frames.get());
        assert_eq!(cpu["busy_ns"], outcome.busy_ns);
        let reasons = cpu["reasons"].as_object().unwrap().values();
        assert_eq!(reasons.map(|count| count.as_u64().unwrap()).sum::<u64>(), cpu["packets"]);
    }
    assert_eq!(state["drops"], json!({}));
}

#[test]
fn pag_2_busiest_sockets_are_listed() {
    let sockets = || {
        let socket = |number: u16| {
            let queued = u64::from(number);
            let (by_cpu, rcvbuf_errors, rmem, rcvbuf) = (Vec::new(), 2, 3, 4);
            let counts = SocketCounts { queued, by_cpu, rcvbuf_errors, rmem, rcvbuf };
            (usize::from(number), SocketAddr::from(([10, 0, 0, 1], number)), counts)
        };
        (1..=60).map(socket).collect()
    };
    let engine = engine(1, 1);
    let metrics = Metrics::new().with_engine(Control::of(&engine)).with_socket_counts(sockets);
    let (address, access) = ("127.0.0.1:0".parse().unwrap(), ServerAccess::default());
    let server = MetricsServer::bind(address, &access, metrics).unwrap();
    let state = json_of(&get(server.address(), "/api/state", ""));
    assert_eq!(state["sockets"]["bound"], 60);
    let shown = state["sockets"]["shown"].as_array().unwrap();
    let datagrams: Vec<_> = shown.iter().map(|of| of["datagrams"].as_u64().unwrap()).collect();
    assert_eq!(datagrams, (11..=60).rev().collect::<Vec<_>>());
    let first = json!({
        "socket": 60, "local": "10.0.0.1:60", "datagrams": 60, "memory": 3, "buffer": 4, "errors": 2,
    });
    assert_eq!(shown[0], first);
    assert_eq!(state["drops"], json!({ "socket_receive_buffer": 120 }));
}

#[test]
fn pag_2_map_agrees_with_mask() {
    let served = Served::at("127.0.0.1:0", None);
    for (mask, cpus) in [(vec![1], vec![1]), (vec![0, 1], vec![0, 1])] {
        let mask = CpuList::new(mask.into_iter().map(CpuId));
        served.control.set("rps_spread", "always").unwrap();
        served.control.set("rps_cpus", &mask.to_mask(8)).unwrap();
        // A map is sent again for a while.
        let map = loop {
            let map = json_of(&served.get("/api/map", ""));
            let runs = map["queues"][0]["runs"].as_array().cloned().unwrap_or_default();
            if runs.iter().map(|run| run["cpu"].as_u64().unwrap()).eq(cpus.iter().copied()) {
                break map;
            }
        };
        let runs = map["queues"][0]["runs"].as_array().unwrap();
        let ranges = runs.iter().map(|run| run["ranges"].as_u64().unwrap());
        assert!(ranges.clone().all(|ranges| ranges == 256 / cpus.len() as u64), "{map}");
        assert_eq!(ranges.sum::<u64>(), 256);
        assert!(runs.iter().all(|run| run["because"] == "rps"), "{map}");
    }
}

#[test]
fn pag_2_flow_has_words_of_explain() {
    let served = Served::at("127.0.0.1:0", None);
    let answer = served.get("/api/explain?flow=10.0.0.1%3A5+%3E+10.0.0.2:6", "");
    let document = json_of(&answer);
    assert_eq!(answer.status(), 200, "{document}");
    let text = document["text"].as_str().unwrap();
    assert!(text.starts_with("flow 10.0.0.1:5 > 10.0.0.2:6, hash "), "{text}");
    assert!(text.contains(&format!("hash {}", document["explanation"]["hash"].as_str().unwrap())));
    assert_eq!(document["explanation"]["queues"][0]["queue"], "rx-0");
    for (query, why) in [("", "the request has no flow"), ("?flow=nobody", "neither an address")] {
        let answer = served.get(&format!("/api/explain{query}"), "");
        assert_eq!(answer.status(), 400, "{query}");
        assert!(json_of(&answer)["error"].as_str().unwrap().contains(why), "{}", answer.body);
    }
}

#[test]
fn pag_3_only_token_and_page_set() {
    let served = Served::at("127.0.0.1:0", Some(TOKEN));
    let origin = format!("Origin: http://{}\r\n", served.address());
    let token = format!("{TOKEN_HEADER}: {TOKEN}\r\n");
    let kind = "Content-Type: application/json\r\n";
    let right = format!("{origin}{token}{kind}");
    let change = r#"{"knob":"rps_cpus","value":"2"}"#;
    served.control.set("rps_cpus", "1").unwrap();
    let wrong_token = format!("{TOKEN_HEADER}: {}\r\n", TOKEN.replace('f', "e"));
    for (headers, status) in [
        (String::new(), 403),
        (format!("{origin}{kind}"), 403),
        (format!("{token}{kind}"), 403),
        (format!("{origin}{wrong_token}{kind}"), 403),
        (format!("{origin}{token}{token}{kind}"), 403),
        (format!("Origin: http://evil.example\r\n{token}{kind}"), 403),
        (format!("Origin: null\r\n{token}{kind}"), 403),
        (format!("{right}Sec-Fetch-Site: cross-site\r\n"), 403),
        (format!("{right}Sec-Fetch-Site: same-site\r\n"), 403),
        (format!("Cookie: {TOKEN_HEADER}={TOKEN}\r\n{origin}{kind}"), 403),
        (format!("{origin}{token}Content-Type: text/plain\r\n"), 415),
        (format!("{origin}{token}"), 415),
    ] {
        assert_eq!(served.set(&headers, change).status(), status, "{headers}");
        assert_eq!(served.mask(), "1", "{headers}");
    }
    let query = "/api/set?knob=rps_cpus&value=2";
    assert_eq!(served.get(query, &right).status(), 405, "a link changes nothing");
    for (body, status) in [
        ("", 400),
        ("{}", 400),
        (r#"{"knob":"rps_cpus","value":2}"#, 400),
        (r#"{"knob":"nobody","value":"2"}"#, 422),
        (r#"{"knob":"rps_cpus","value":"x"}"#, 422),
    ] {
        let answer = served.set(&right, body);
        assert_eq!(answer.status(), status, "{body}");
        assert!(json_of(&answer)["error"].is_string(), "{body}");
        assert_eq!(served.mask(), "1", "{body}");
    }
    let listed = || {
        let knobs = json_of(&served.get("/api/knobs", ""));
        let mut knobs = knobs["knobs"].as_array().unwrap().clone().into_iter();
        knobs.find(|knob| knob["name"] == "rx-0/rps_cpus").unwrap()["value"].clone()
    };
    assert_eq!(listed(), "1");
    let done = served.set(&right, change);
    assert_eq!(listed(), "2", "a list is kept for a while, but not beyond a change here");
    assert_eq!((done.status(), done.body.as_str()), (200, r#"{"lines":["now rx-0/rps_cpus 2"]}"#));
    assert_eq!(served.mask(), "2");
}

#[test]
fn pag_3_knobs_are_read_only_without_token() {
    let served = Served::at("127.0.0.1:0", None);
    let before = served.mask();
    let headers = format!(
        "Origin: http://{}\r\nContent-Type: application/json\r\n{TOKEN_HEADER}: \r\n",
        served.address()
    );
    let refused = served.set(&headers, r#"{"knob":"rps_cpus","value":"2"}"#);
    assert_eq!(refused.status(), 403);
    assert!(refused.body.contains("started without --page-token"), "{}", refused.body);
    assert_eq!(served.mask(), before);
    let knobs = json_of(&served.get("/api/knobs", ""));
    assert_eq!(knobs["may_set"], false);
    let of = |name: &str| {
        let mut knobs = knobs["knobs"].as_array().unwrap().iter();
        knobs.find(|knob| knob["name"] == name).unwrap().clone()
    };
    assert_eq!(of("rx-0/rps_cpus")["value"], before.as_str());
    assert_eq!(of("hash_key")["value"], "", "a reader could aim flows at one CPU");
}

#[test]
fn pag_3_hashes_are_kept_from_others() {
    let with_token = format!("{TOKEN_HEADER}: {TOKEN}\r\n");
    for (address, token, headers, status) in [
        ("127.0.0.1:0", None, "", 200),
        ("0.0.0.0:0", None, "", 403),
        ("127.0.0.1:0", Some(TOKEN), "", 403),
        ("0.0.0.0:0", Some(TOKEN), "", 403),
        ("0.0.0.0:0", Some(TOKEN), with_token.as_str(), 200),
        ("127.0.0.1:0", None, "Sec-Fetch-Site: cross-site\r\n", 403),
        // By a proxy on this machine.
        ("127.0.0.1:0", None, "X-Forwarded-For: 192.0.2.7\r\n", 403),
        ("127.0.0.1:0", None, "Forwarded: for=192.0.2.7\r\n", 403),
        ("127.0.0.1:0", None, "Via: 1.1 proxy\r\n", 403),
        ("127.0.0.1:0", Some(TOKEN), &*format!("{with_token}Via: 1.1 proxy\r\n"), 200),
    ] {
        let served = Served::at(address, token);
        let answer = served.get("/api/explain?flow=7", headers);
        assert_eq!(answer.status(), status, "{address} {token:?} {headers}");
        assert_eq!(status == 200, answer.body.contains("00000007"), "{}", answer.body);
    }
}

/// A server with an allowed name has clients elsewhere, whom a proxy on this machine serves.
#[test]
fn pag_3_allowed_name_takes_the_token() {
    let metrics = Metrics::new().with_engine(Control::of(&engine(1, 1)));
    let access = ServerAccess { hosts: vec!["metrics.example".to_owned()], page_token: None };
    let server = MetricsServer::bind("127.0.0.1:0".parse().unwrap(), &access, metrics).unwrap();
    let request = "GET /api/explain?flow=7 HTTP/1.1\r\nHost: metrics.example\r\n\r\n";
    assert_eq!(ask(server.address(), request.as_bytes()).status(), 403);
}

#[test]
fn pag_6_hostile_bodies_end_no_service() {
    let served = Served::at("127.0.0.1:0", Some(TOKEN));
    let address = served.address();
    let head = format!(
        "POST /api/set HTTP/1.1\r\nHost: {address}\r\nOrigin: http://{address}\r\n\
         Content-Type: application/json\r\n{TOKEN_HEADER}: {TOKEN}\r\n"
    );
    // Slow: a body that does not come.
    let slow = format!("{head}Content-Length: 30\r\n\r\n{{\"knob\"");
    let slow: Vec<_> = (0..3).map(|_| send(address, slow.as_bytes())).collect();
    assert_eq!(served.get("/api/state", "").status(), 200, "beside slow clients");
    // Huge: a body that is announced, and one that just goes on.
    let body = "x".repeat(1 << 20);
    let announced = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
    let chunked = format!("{head}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{body}", body.len());
    for huge in [announced, chunked] {
        // The server may close before all is sent, which loses its answer.
        let status = ask(address, huge.as_bytes()).status();
        assert!([413, 0].contains(&status), "{status}");
        assert_eq!(served.get("/healthz", "").status(), 200);
    }
    drop(slow);
    assert_eq!(served.get("/api/state", "").status(), 200);
}

/// Questions that no queue answers, since the engine does not run, keep nobody from the counters.
#[test]
fn pag_6_questions_are_few_at_once() {
    let engine = engine(1, 0);
    let metrics = Metrics::new().with_engine(Control::of(&engine));
    let access = ServerAccess::default();
    let server = MetricsServer::bind("127.0.0.1:0".parse().unwrap(), &access, metrics).unwrap();
    let address = server.address();
    let question = format!("GET /api/explain?flow=7 HTTP/1.1\r\nHost: {address}\r\n\r\n");
    loop {
        let waiting: Vec<_> = (0..8).map(|_| send(address, question.as_bytes())).collect();
        assert_eq!(get(address, "/api/state", "").status(), 200);
        let statuses = waiting.into_iter().map(|stream| Answer::read(stream).status());
        let statuses: Vec<_> = statuses.collect();
        assert!(statuses.iter().all(|status| [200, 503].contains(status)), "{statuses:?}");
        if statuses.contains(&503) && statuses.contains(&200) {
            break;
        }
    }
    let waiting = send(address, question.as_bytes());
    drop(server);
    drop(waiting);
}
