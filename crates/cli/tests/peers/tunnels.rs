//! tshark's innermost flow compared with `flowkey.csv`, for frames with nested tunnels.

use std::fs;
use std::path::Path;
use std::process::Command;

use forebay_sys::random::Random;

use crate::frames::Frame;
use crate::{Judgement, captures, program};

const FRAMES: usize = 1500;
const SEEDS: [u64; 2] = [1, 2];

/// Upper bound on the nesting of tunnels.
const DEPTH_MAX: u64 = 4;

/// Upper bound on differences shown.
const SHOWN_MAX: usize = 12;

const FIELDS: [&str; 9] = [
    "frame.protocols",
    "ip.src",
    "ip.dst",
    "ipv6.src",
    "ipv6.dst",
    "udp.srcport",
    "udp.dstport",
    "tcp.srcport",
    "tcp.dstport",
];

pub(crate) fn judge() -> Judgement {
    SEEDS.into_iter().try_for_each(|seed| {
        let mut random = Random::new(seed);
        let frames: Vec<_> = (0..FRAMES).map(|_| draw(&mut random)).collect();
        let directory = tempfile::tempdir()?;
        captures::write_pcap(&directory.path().join("f.pcap"), &frames);
        let (ours, theirs) = (our_flows(directory.path())?, their_flows(directory.path())?);
        if [ours.len(), theirs.len()] != [FRAMES; 2] {
            return Err(format!("our rows, their rows: {} {}", ours.len(), theirs.len()).into());
        }
        let told = ours.iter().zip(&theirs).zip(&frames).enumerate();
        let wrong = told.filter(|(_, ((ours, theirs), _))| ours != theirs);
        let wrong = wrong.map(|(at, ((ours, theirs), frame))| {
            format!("frame {at}: {ours}, tshark {theirs}: {}", hex::encode(&frame.bytes))
        });
        let wrong: Vec<_> = wrong.take(SHOWN_MAX).collect();
        if wrong.is_empty() {
            return Ok(());
        }
        Err(format!("seed {seed}:\n{}", wrong.join("\n")).into())
    })
}

/// Innermost endpoints in `flowkey.csv`.
fn our_flows(directory: &Path) -> Result<Vec<String>, libtest_mimic::Failed> {
    let args = ["f.pcap", "--trace", "t", "--trace-parse", "--deterministic", "--cpus", "1"];
    let output = program::replay(directory, args.into_iter().chain(["--flow-key", "inner"]));
    if !output.status.success() {
        return Err(program::told(&output).into());
    }
    let text = fs::read_to_string(directory.join("t/flowkey.csv"))?;
    let flow = |line: &str| {
        let row: Vec<_> = line.split(',').collect();
        match row[..] {
            [_, _, _, source, destination, _, from, to, ..] => {
                format!("{source} {from} {destination} {to}")
            }
            _ => line.to_owned(),
        }
    };
    Ok(text.lines().skip(1).map(flow).collect())
}

/// Innermost endpoints by tshark: the last addresses and ports that it found, of the last family.
fn their_flows(directory: &Path) -> Result<Vec<String>, libtest_mimic::Failed> {
    let mut tshark = Command::new("tshark");
    tshark.current_dir(directory).args(["-n", "-r", "f.pcap", "-T", "fields"]);
    tshark.args(["-E", "separator=|", "-E", "occurrence=l"]);
    tshark.args(FIELDS.into_iter().flat_map(|field| ["-e", field]));
    let output = tshark.output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    let flow = |line: &str| {
        let row: Vec<_> = line.split('|').collect();
        let [protocols, v4, v4_to, v6, v6_to, udp, udp_to, tcp, tcp_to] = row[..] else {
            return line.to_owned();
        };
        let last = |one: &str, other: &str| {
            protocols.split(':').rfind(|layer| *layer == one || *layer == other) == Some(one)
        };
        let (source, destination) = if last("ip", "ipv6") { (v4, v4_to) } else { (v6, v6_to) };
        let (from, to) = if last("udp", "tcp") { (udp, udp_to) } else { (tcp, tcp_to) };
        format!("{source} {from} {destination} {to}")
    };
    Ok(String::from_utf8(output.stdout)?.lines().map(flow).collect())
}

/// An inner packet to be wrapped in tunnels.
struct Inner {
    is_v6: bool,
    bytes: Vec<u8>,
}

impl Inner {
    fn ethertype(&self) -> [u8; 2] {
        if self.is_v6 { [0x86, 0xdd] } else { [8, 0] }
    }

    fn ethernet(&self) -> Vec<u8> {
        [&[2; 12][..], &self.ethertype(), &self.bytes].concat()
    }

    /// PPP's protocol field and the packet.
    fn ppp(&self) -> Vec<u8> {
        [&[0, if self.is_v6 { 0x57 } else { 0x21 }], &self.bytes[..]].concat()
    }
}

fn draw(random: &mut Random) -> Frame {
    let ports = [20_000 + number(random, 9_000), 20_000 + number(random, 9_000)];
    let payload = vec![b'x'; usize::from(number(random, 40))];
    let (protocol, transport) = match random.below(2) {
        0 => (17, udp(ports, &payload)),
        _ => (6, tcp(ports, &payload)),
    };
    let mut inner = ip(random, protocol, &transport);
    for _ in 0..random.below(DEPTH_MAX + 1) {
        inner = tunnel(random, &inner);
    }
    let mut bytes = match random.below(10) {
        0 => {
            let labels = [&[0, 1, 0, 64, 0, 2, 1, 64][..], &inner.bytes].concat();
            [&[2; 12][..], &[0x88, 0x47], &labels].concat()
        }
        1 => {
            let ppp = inner.ppp();
            let head = [&[2; 12][..], &[0x88, 0x64, 0x11, 0, 0, 9], &len(ppp.len())].concat();
            [head, ppp].concat()
        }
        2 => {
            let ppp = inner.ppp();
            let head = [&[0x88, 0x64, 0x11, 0, 0, 9][..], &len(ppp.len())].concat();
            pseudowire(&[head, ppp].concat())
        }
        3 => pseudowire(&[&[0x88, 0x47, 0, 3, 1, 64][..], &inner.bytes].concat()),
        4 => {
            let vlan = [0x81, 0, 0, 5];
            [&[2; 12][..], &vlan, &inner.ethertype(), &inner.bytes].concat()
        }
        _ => inner.ethernet(),
    };
    if random.below(8) == 0 {
        bytes.extend([0xfc; 4]); // a frame check sequence that was captured
    }
    Frame { wire_len: u32::try_from(bytes.len()).unwrap(), bytes }
}

/// Frame in a pseudowire, from its EtherType on.
fn pseudowire(rest: &[u8]) -> Vec<u8> {
    let head = [&[2; 12][..], &[0x88, 0x47, 0, 2, 1, 64, 0, 0, 0, 0]].concat();
    [&head[..], &[2; 12], rest].concat()
}

fn tunnel(random: &mut Random, inner: &Inner) -> Inner {
    let Inner { is_v6, bytes } = inner;
    let bridged = inner.ethernet();
    let udp_from = 40_000 + number(random, 9_000);
    let over = |port, parts: &[&[u8]]| (17, udp([udp_from, port], &parts.concat()));
    let (protocol, payload) = match random.below(15) {
        0 => (if *is_v6 { 41 } else { 4 }, bytes.clone()),
        1 => (47, [&[0, 0][..], &inner.ethertype(), bytes].concat()),
        2 => (47, [&[0x30, 0][..], &inner.ethertype(), &[9; 8], bytes].concat()),
        3 => (47, [&[0x20, 0, 0x65, 0x58, 0, 0, 7, 0][..], &bridged].concat()),
        4 => {
            let ppp = inner.ppp();
            (47, [&[0x30, 1, 0x88, 0x0b][..], &len(ppp.len()), &[0, 1, 0, 0, 0, 1], &ppp].concat())
        }
        5 => over(4789, &[&[8, 0, 0, 0, 0, 0, 7, 0], &bridged]),
        6 => {
            let options = [0, 1, 0x80, 1, 9, 9, 9, 9];
            over(6081, &[&[2, 0, 0x65, 0x58, 0, 0, 7, 0], &options, &bridged])
        }
        7 => {
            let next = if *is_v6 { 2 } else { 1 };
            over(4790, &[&[0x0c, 0, 0, next, 0, 0, 7, 0], bytes])
        }
        8 => {
            let erspan = [0x10, 0, 0x88, 0xbe, 0, 0, 0, 1, 0x10, 5, 0, 1, 0, 0, 0, 0];
            (47, [&erspan[..], &bridged].concat())
        }
        9 => {
            let erspan = [0x10, 0, 0x22, 0xeb, 0, 0, 0, 1, 0x20, 5, 0, 1];
            (47, [&erspan[..], &[0; 8], &bridged].concat())
        }
        10 => {
            let (ppp, numbers) = (inner.ppp(), [0, 1, 0, 2, 0, 3, 0, 4]);
            let head = [&[0x48, 2][..], &len(ppp.len() + 14), &numbers, &[0xff, 3]].concat();
            (17, udp([1701, 1701], &[head, ppp].concat()))
        }
        11 => (97, [&[0x30, 0][..], &bridged].concat()),
        12 => {
            // A session container, and a number of the message.
            let extension = [0, 9, 0, 0x85, 1, 0x10, 5, 0];
            let rest = len(bytes.len() + extension.len());
            over(2152, &[&[0x36, 255], &rest, &[0, 0, 0, 7], &extension, bytes])
        }
        13 => (47, [&[0, 0, 0x88, 0x0b][..], &inner.ppp()].concat()),
        _ => over(2152, &[&[0x30, 255], &len(bytes.len()), &[0, 0, 0, 7], bytes]),
    };
    ip(random, protocol, &payload)
}

fn ip(random: &mut Random, protocol: u8, payload: &[u8]) -> Inner {
    let [a, b] = [0; 2].map(|_: u8| u8::try_from(random.below(250)).unwrap() + 1);
    match random.below(2) {
        0 => {
            let [high, low] = len(20 + payload.len());
            let fixed = [0x45, 0, high, low, 0, 1, 0x40, 0, 64, protocol, 0, 0];
            let bytes = [&fixed[..], &[10, 0, 0, a], &[10, 0, 1, b], payload].concat();
            Inner { is_v6: false, bytes }
        }
        _ => {
            let options = [&[protocol, 0, 1, 4, 0, 0, 0, 0][..], payload].concat();
            let (protocol, payload) =
                if random.below(4) == 0 { (60, options.as_slice()) } else { (protocol, payload) };
            let [high, low] = len(payload.len());
            let address = |last| [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, last];
            let fixed = [0x60, 0, 0, 0, high, low, protocol, 64];
            let bytes = [&fixed[..], &address(a), &address(b), payload].concat();
            Inner { is_v6: true, bytes }
        }
    }
}

fn udp([from, to]: [u16; 2], payload: &[u8]) -> Vec<u8> {
    let header = [from.to_be_bytes(), to.to_be_bytes(), len(8 + payload.len()), [0, 0]];
    [header.as_flattened(), payload].concat()
}

fn tcp([from, to]: [u16; 2], payload: &[u8]) -> Vec<u8> {
    let ports = [from.to_be_bytes(), to.to_be_bytes()];
    let rest = [0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 1, 0, 0, 0, 0, 0];
    [ports.as_flattened(), &rest, payload].concat()
}

fn len(bytes: usize) -> [u8; 2] {
    u16::try_from(bytes).unwrap().to_be_bytes()
}

fn number(random: &mut Random, below: u64) -> u16 {
    u16::try_from(random.below(below)).unwrap()
}
