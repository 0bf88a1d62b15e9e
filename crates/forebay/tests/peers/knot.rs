//! Knot DNS in a namespace, and its answers compared with ours.

use std::fs;
use std::net::UdpSocket;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use forebay_testkit::namespaces::ip;
use hickory_proto::op::Message;
use hickory_proto::rr::Record;
use tempfile::TempDir;

use crate::answer::answer;
use crate::prepared::Zone;
use crate::queries::{ANY, clients, names, query, unusual};
use crate::zone::Contents;
use crate::{KNOT, ZONE, queries};

/// Address of Knot DNS.
const ADDRESS: &str = "127.0.0.1:53";

/// Time to wait for an answer that must arrive.
const PATIENCE: Duration = Duration::from_secs(20);

/// Pause between attempts while the server starts.
const PAUSE: Duration = Duration::from_millis(30);

/// Id of the query sent after the one under test.
const THEN: [u8; 2] = *b"ok";

pub(crate) fn all_that_is_in_the_zone() {
    let both = Both::serving(ZONE);
    let mut differences = Vec::new();
    for name in names() {
        for rtype in queries::TYPES {
            for client in clients() {
                let query = query(&name, rtype, client.as_deref());
                let what = || format!("{name} type {rtype}, client {client:?}");
                differences.extend(both.differ(&query).map(|how| format!("{}\n{how}", what())));
            }
        }
    }
    check_none(&differences);
}

pub(crate) fn all_that_is_wrong() {
    let both = Both::serving(ZONE);
    let differ =
        |(what, query): (String, Vec<u8>)| both.differ(&query).map(|how| format!("{what}\n{how}"));
    check_none(&unusual().into_iter().filter_map(differ).collect::<Vec<_>>());
}

/// The zone of the benchmark.
pub(crate) fn large_zone() {
    let mut text = String::from(
        "$ORIGIN example.test.\n$TTL 3600\n@ SOA ns hostmaster 1 3600 600 86400 300\n@ NS ns\n\
         ns A 10.77.0.2\n",
    );
    for host in 0..1000 {
        text.push_str(&format!("h{host} A 192.0.2.{}\n", host % 250 + 1));
    }
    let both = Both::serving(&text);
    let mut differences = Vec::new();
    for host in 0..1010 {
        for rtype in [queries::A, queries::TXT, ANY] {
            let name = format!("H{host}.example.test");
            let how = both.differ(&query(&name, rtype, None));
            differences.extend(how.map(|how| format!("{name} type {rtype}\n{how}")));
        }
    }
    check_none(&differences);
}

fn check_none(differences: &[String]) {
    let some = differences.iter().take(10).cloned().collect::<Vec<_>>().join("\n\n");
    assert!(differences.is_empty(), "{} answers differ:\n{some}", differences.len());
}

/// Knot DNS and ourselves over the same zone.
struct Both {
    ours: Zone,
    child: Child,
    /// Kept until the server ends.
    _files: TempDir,
}

impl Both {
    fn serving(zone: &str) -> Self {
        ip("link set lo up");
        let files = TempDir::new().unwrap();
        let folder = files.path().display().to_string();
        let file = files.path().join("example.test.zone");
        fs::write(&file, zone).unwrap();
        let config = files.path().join("knot.conf");
        fs::write(&config, config_in(&folder)).unwrap();
        let mut command = Command::new(KNOT);
        command.arg("-c").arg(&config).stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.stderr(Stdio::null()).spawn().unwrap();
        let ours = Zone::new(&Contents::read(&file).unwrap());
        let both = Self { ours, child, _files: files };
        let began = Instant::now();
        let top = query("example.test", 6, None);
        // While it starts, the server answers nothing, then SERVFAIL, until the zone is loaded.
        while Self::told(&top, PAUSE).0.is_none_or(|answer| answer[3] & 0xf != 0) {
            assert!(began.elapsed() < PATIENCE, "Knot DNS does not start");
            sleep(PAUSE);
        }
        both
    }

    /// Answer of Knot DNS to a query. The server processes queries in order, so an answer to a
    /// second query proves that the first gets none. Each has a socket of its own: an answer to a query that nobody waits
    /// for any more does not count as that to the next one.
    fn told(query: &[u8], patience: Duration) -> (Option<Vec<u8>>, bool) {
        let mut then = queries::query("", queries::A, None);
        then[..2].copy_from_slice(&THEN);
        let to_knot = UdpSocket::bind("127.0.0.1:0").unwrap();
        to_knot.connect(ADDRESS).unwrap();
        to_knot.set_read_timeout(Some(patience)).unwrap();
        let (mut room, mut answer) = ([0; 65535], None);
        for query in [query, &then] {
            // The server is not listening yet.
            if to_knot.send(query).is_err() {
                return (None, false);
            }
        }
        while let Ok(len) = to_knot.recv(&mut room) {
            if room[..2] == THEN {
                return (answer, true);
            }
            answer = Some(room[..len].to_vec());
        }
        (answer, false)
    }

    /// Difference between the two answers, if any.
    fn differ(&self, query: &[u8]) -> Option<String> {
        let mut room = [0; 65535];
        let ours = answer(&self.ours, query, &mut room).map(|len| &room[..len]);
        let (theirs, is_there) = Self::told(query, PATIENCE);
        assert!(is_there, "Knot DNS does not answer any more");
        let (ours, theirs) = (ours.map(Read::new), theirs.as_deref().map(Read::new));
        let differ = ours != theirs;
        differ.then(|| format!("ours:   {ours:?}\ntheirs: {theirs:?}"))
    }
}

impl Drop for Both {
    fn drop(&mut self) {
        // Ignored: nothing can be done about a failure here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An answer as a resolver reads it: the order of records has no meaning.
#[derive(Debug, PartialEq, Eq)]
struct Read {
    /// Flags and code are compared bit by bit, and the question octet by octet.
    begin: Vec<u8>,
    sections: [Vec<String>; 3],
    edns: Option<String>,
}

impl Read {
    fn new(answer: &[u8]) -> Self {
        let message = Message::from_vec(answer).unwrap();
        let question = message.queries.first().map_or(0, |asked| asked.name().len() + 4);
        let sections = [&message.answers, &message.authorities, &message.additionals];
        let mut sections = sections.map(|records| {
            let line = |record: &Record| record.to_string().to_lowercase();
            let mut lines: Vec<String> = records.iter().map(line).collect();
            lines.sort_unstable();
            lines
        });
        let mut counts = answer[4..12].to_vec();
        if message.metadata.truncation {
            // The client asks again over TCP. Knot DNS sends as many of the addresses as fit.
            sections[2].clear();
            counts.truncate(6);
        }
        let edns = message.edns.as_ref().map(|edns| format!("{edns:?}"));
        let begin = [&answer[..4], &counts, &answer[12..12 + question]].concat();
        Self { begin, sections, edns }
    }
}

fn config_in(folder: &str) -> String {
    format!(
        "server:\n  rundir: {folder}\n  listen: 127.0.0.1@53\n  udp-workers: 1\n  tcp-workers: 1\n\
         \x20 background-workers: 1\n\
         log:\n  - target: stderr\n    any: error\n\
         database:\n  storage: {folder}/db\n\
         template:\n  - id: default\n    storage: {folder}\n    journal-content: none\n\
         \x20   zonefile-sync: -1\n    zonefile-load: whole\n\
         zone:\n  - domain: example.test\n    file: example.test.zone\n"
    )
}
