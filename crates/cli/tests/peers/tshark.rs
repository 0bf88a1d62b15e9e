//! tshark's fields of each frame compared with `parse.csv`.
//!
//! Options that make tshark treat each frame by itself: no reassembly, and all checksums verified.
//! The columns `hash` and `verdict` are not compared.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use forebay_sys::random::Random;

use crate::frames::{self, Frame};
use crate::{Judgement, captures, program};

const FRAMES: usize = 1500;
const SEEDS: [u64; 2] = [1, 2];

/// Upper bound on differences shown.
const SHOWN_MAX: usize = 12;

const TAGS: [&str; 2] = ["0x8100", "0x88a8"];

const PREFERENCES: [&str; 9] = [
    "ip.check_checksum:TRUE",
    "tcp.check_checksum:TRUE",
    "udp.check_checksum:TRUE",
    "ip.defragment:FALSE",
    "ipv6.defragment:FALSE",
    "tcp.desegment_tcp_streams:FALSE",
    "tcp.relative_sequence_numbers:FALSE",
    "tcp.analyze_sequence_numbers:FALSE",
    "vlan.qinq_ethertype:0x9100",
];

const FIELDS: [&str; 40] = [
    "frame.number",
    "frame.len",
    "frame.cap_len",
    "frame.protocols",
    "eth.type",
    "vlan.etype",
    "llc.type",
    "ieee8021ad.id",
    "vlan.id",
    "ip.version",
    "ip.src",
    "ip.dst",
    "ip.proto",
    "ip.ttl",
    "ip.hdr_len",
    "ip.len",
    "ip.flags.mf",
    "ip.frag_offset",
    "ip.checksum.status",
    "ipv6.version",
    "ipv6.src",
    "ipv6.dst",
    "ipv6.nxt",
    "ipv6.hlim",
    "ipv6.plen",
    "ipv6.hopopts.nxt",
    "ipv6.dstopts.nxt",
    "ipv6.routing.nxt",
    "ipv6.fraghdr.nxt",
    "ipv6.fraghdr.offset",
    "tcp.srcport",
    "tcp.dstport",
    "tcp.seq_raw",
    "tcp.flags",
    "tcp.len",
    "tcp.checksum.status",
    "udp.srcport",
    "udp.dstport",
    "udp.length",
    "udp.checksum.status",
];

/// Reason why tshark cannot judge here.
pub(crate) fn missing() -> Option<String> {
    let version = Command::new("tshark").arg("--version").stderr(Stdio::null()).output();
    let found = version.is_ok_and(|version| version.status.success());
    (!found).then(|| "tshark is not installed (Debian: apt-get install tshark)".to_owned())
}

pub(crate) fn judge() -> Judgement {
    SEEDS.into_iter().try_for_each(|seed| {
        let mut random = Random::new(seed);
        let frames: Vec<_> = (0..FRAMES).map(|_| frames::draw(&mut random)).collect();
        let directory = tempfile::tempdir()?;
        captures::write_pcap(&directory.path().join("f.pcap"), &frames);
        let ours = parse_rows(directory.path())?;
        let theirs = tshark_rows(directory.path())?;
        compare(seed, &frames, &ours, &theirs)
    })
}

/// Rows of `parse.csv`, the header first.
fn parse_rows(directory: &Path) -> Result<Vec<Vec<String>>, libtest_mimic::Failed> {
    let args = ["f.pcap", "--trace", "t", "--trace-parse", "--deterministic", "--cpus", "1"];
    let output = program::replay(directory, args);
    if !output.status.success() {
        return Err(program::told(&output).into());
    }
    let text = fs::read_to_string(directory.join("t/parse.csv"))?;
    Ok(text.lines().map(|line| line.split(',').map(str::to_owned).collect()).collect())
}

fn tshark_rows(directory: &Path) -> Result<Vec<Row>, libtest_mimic::Failed> {
    let mut tshark = Command::new("tshark");
    tshark.current_dir(directory).args(["-n", "-r", "f.pcap", "-T", "fields"]);
    tshark.args(["-E", "separator=|", "-E", "occurrence=a", "-E", "aggregator=;"]);
    for field in FIELDS {
        tshark.args(["-e", field]);
    }
    for preference in PREFERENCES {
        tshark.args(["-o", preference]);
    }
    let output = tshark.output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    Ok(String::from_utf8(output.stdout)?.lines().map(Row::of).collect())
}

fn compare(seed: u64, frames: &[Frame], ours: &[Vec<String>], theirs: &[Row]) -> Judgement {
    let (header, ours) = ours.split_first().ok_or("parse.csv is empty")?;
    if [ours.len(), theirs.len()] != [frames.len(); 2] {
        let counts = (frames.len(), ours.len(), theirs.len());
        return Err(format!("frames, our rows, their rows: {counts:?}").into());
    }
    let mut differences = Vec::new();
    for ((frame, ours), theirs) in frames.iter().zip(ours).zip(theirs) {
        for ((name, ours_say), they_say) in header.iter().zip(ours).zip(theirs.as_parse_csv()) {
            if *ours_say != they_say && !is_permitted(theirs, name, ours_say, &they_say) {
                differences.push(format!(
                    "frame {} {name}: {ours_say:?}, tshark {they_say:?} ({} of {} bytes) {}",
                    ours[0],
                    frame.bytes.len(),
                    frame.wire_len,
                    hex::encode(&frame.bytes),
                ));
            }
        }
    }
    if differences.is_empty() {
        return Ok(());
    }
    let count = differences.len();
    differences.truncate(SHOWN_MAX);
    Err(format!("seed {seed}: {count} differences\n{}", differences.join("\n")).into())
}

/// True for differences that are not a mistake of ours.
fn is_permitted(theirs: &Row, name: &str, ours: &str, they_say: &str) -> bool {
    let is_snapped = theirs.number("frame.cap_len") < theirs.number("frame.len");
    match (name, ours, they_say) {
        // RFC 8200, section 8.1: a receiver must drop it. tshark calls it illegal, not bad.
        ("l4_csum", "B", "-") => theirs.first("udp.checksum.status") == "4",
        _ if !is_snapped => false,
        // Of truncated headers we report the fields that are present. tshark's units differ: before
        // IPv4's destination it needs the options, for a possible other destination,
        ("dst", _, "") => theirs.number("ip.hdr_len") > Some(20),
        // it reads IPv6's first eight bytes as a unit,
        ("ip_len", _, "") => theirs.network() == Some(6),
        // and a fragment header as a unit;
        ("proto", _, "44") | ("frag", "1", "0") => theirs.network() == Some(6),
        // we read a VLAN tag together with the EtherType after it.
        ("vlans", ..) => they_say.rsplit_once('.').map_or("", |(whole, _)| whole) == ours,
        _ => false,
    }
}

/// tshark's fields of a frame, each with all occurrences, outermost first.
struct Row(HashMap<&'static str, Vec<String>>);

impl Row {
    fn of(line: &str) -> Self {
        let occurrences = |field: &str| match field {
            "" => Vec::new(),
            _ => field.split(';').map(str::to_owned).collect(),
        };
        Self(FIELDS.into_iter().zip(line.split('|').map(occurrences)).collect())
    }

    fn all(&self, name: &str) -> &[String] {
        &self.0[name]
    }

    fn first(&self, name: &str) -> String {
        self.all(name).first().cloned().unwrap_or_default()
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.first(name).parse().ok()
    }

    /// The frame's fields in the order of `parse.csv`, up to the hash.
    fn as_parse_csv(&self) -> [String; 20] {
        let network = self.network();
        let protocol = self.protocol();
        let field = |ipv4: &str, ipv6: &str| match network {
            Some(4) => self.first(ipv4),
            Some(_) => self.first(ipv6),
            None => String::new(),
        };
        // An ICMP error contains another packet's header, which is not compared.
        let of = |number, name| match protocol {
            Some(protocol) if protocol == number => self.first(name),
            _ => String::new(),
        };
        let (tcp, udp) = (|name| of(6, name), |name| of(17, name));
        let udp_len = udp("udp.length").parse::<u16>().ok();
        let vlans = [self.all("ieee8021ad.id"), self.all("vlan.id")].concat();
        [
            self.number("frame.number").map_or_else(String::new, |number| (number - 1).to_string()),
            self.first("frame.len"),
            self.first("frame.cap_len"),
            self.ethertype(),
            vlans.join("."),
            network.map_or_else(String::new, |version| version.to_string()),
            field("ip.src", "ipv6.src"),
            field("ip.dst", "ipv6.dst"),
            protocol.map_or_else(String::new, |protocol| protocol.to_string()),
            field("ip.ttl", "ipv6.hlim"),
            self.is_fragment(),
            if network == Some(6) { "40".to_owned() } else { self.first("ip.hdr_len") },
            field("ip.len", "ipv6.plen"),
            if network == Some(4) { checksum(&self.first("ip.checksum.status")) } else { "-" }
                .to_owned(),
            checksum(&(tcp("tcp.checksum.status") + &udp("udp.checksum.status"))).to_owned(),
            tcp("tcp.srcport") + &udp("udp.srcport"),
            tcp("tcp.dstport") + &udp("udp.dstport"),
            udp_len.map_or_else(|| tcp("tcp.len"), |len| (len - 8).to_string()),
            tcp("tcp.seq_raw"),
            tcp("tcp.flags"),
        ]
    }

    /// IP version of the outermost header.
    fn network(&self) -> Option<u8> {
        let protocols = self.first("frame.protocols");
        let outermost = protocols.split(':').find(|protocol| ["ip", "ipv6"].contains(protocol))?;
        self.first(&format!("{outermost}.version")).parse().ok()
    }

    fn ethertype(&self) -> String {
        let innermost = ["llc.type", "vlan.etype", "eth.type"];
        let kind = innermost.iter().find_map(|name| self.all(name).last());
        // After the last tag of an 802.3 frame there is no EtherType.
        kind.filter(|kind| !TAGS.contains(&kind.as_str())).cloned().unwrap_or_default()
    }

    /// The last next-header field of the chain.
    fn protocol(&self) -> Option<u8> {
        if self.network()? == 4 {
            return self.first("ip.proto").parse().ok();
        }
        let mut options = self.all("ipv6.dstopts.nxt").iter();
        let mut next = self.first("ipv6.nxt").parse().ok()?;
        loop {
            let following = match next {
                0 => self.all("ipv6.hopopts.nxt").first(),
                43 => self.all("ipv6.routing.nxt").first(),
                44 => return self.first("ipv6.fraghdr.nxt").parse().ok().or(Some(next)),
                60 => options.next(),
                _ => return Some(next),
            };
            match following.and_then(|next| next.parse().ok()) {
                Some(following) => next = following,
                None => return Some(next),
            }
        }
    }

    fn is_fragment(&self) -> String {
        let piece = match self.network() {
            Some(4) => self
                .number("ip.frag_offset")
                .map(|offset| offset > 0 || self.first("ip.flags.mf") == "1"),
            Some(_) => Some(!self.all("ipv6.fraghdr.nxt").is_empty()),
            None => None,
        };
        piece.map_or_else(String::new, |piece| u8::from(piece).to_string())
    }
}

/// Converts tshark's status: 0 bad, 1 good, 2 unverified, 3 not present, 4 illegal.
fn checksum(status: &str) -> &'static str {
    match status {
        "0" => "B",
        "1" => "G",
        _ => "-",
    }
}
