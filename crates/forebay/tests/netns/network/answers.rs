//! Answers to packets, compared with the kernel's.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, OwnedFd};

use etherparse::{Icmpv6Type, PacketBuilder};
use forebay_rx::parse::Verify;
use forebay_testkit::namespaces::{command, ip};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, socket};

use crate::network::Test;
use crate::network::frames::{JOINED_V4, JOINED_V6, MAC, OWN_V4, OWN_V6, PEER_MAC};
use crate::network::kernel::{Kernel, NAME};
use crate::network::local_addresses::Us;

pub(crate) const TESTS: &[Test] = &[("echo_and_unreachable_match_kernel", answers)];

const PEER_V4: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
const PEER_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, 2);
/// A port without a socket.
const CLOSED: u16 = 9;
const IP: usize = 14;

fn answers() {
    let (mut kernel, mut us) = (Kernel::new(), Us::new());
    kernel.join();
    command("sysctl -qw net.ipv4.icmp_msgs_per_sec=1000 net.ipv4.icmp_msgs_burst=1000");
    command("sysctl -qw net.ipv4.icmp_ratelimit=0 net.ipv6.icmp.ratelimit=0");
    let lladdr = PEER_MAC.map(|byte| format!("{byte:02x}")).join(":");
    for peer in [PEER_V4.to_string(), PEER_V6.to_string(), "fe80::2".into()] {
        ip(&format!("neigh replace {peer} lladdr {lladdr} dev {NAME} nud permanent"));
    }
    let (family, kind, every) = (AddressFamily::Packet, SockType::Raw, SockProtocol::EthAll);
    let wire = socket(family, kind, SockFlag::SOCK_NONBLOCK, every).unwrap();
    let mut answered = 0;
    for (name, frame) in frames() {
        kernel.offer(&frame);
        let kernels = sent(&wire);
        us.offer(&frame, Verify::Checksums);
        let ours: Vec<_> = us.answers.drain(..).map(comparable).collect();
        assert_eq!(hexes(&ours), hexes(&kernels), "we, and the kernel, to {name}");
        answered += ours.len();
    }
    assert_eq!(answered, ANSWERED);
}

/// Number of these frames that are answered.
const ANSWERED: usize = 14;

fn frames() -> Vec<(&'static str, Vec<u8>)> {
    let v4 = |to: Ipv4Addr| {
        PacketBuilder::ethernet2(PEER_MAC, MAC).ipv4(PEER_V4.octets(), to.octets(), 1)
    };
    let v6 = |from: &str, to: Ipv6Addr| {
        let from: Ipv6Addr = from.parse().unwrap();
        PacketBuilder::ethernet2(PEER_MAC, MAC).ipv6(from.octets(), to.octets(), 1)
    };
    let (own4, own6, local6) = (OWN_V4[0].0, OWN_V6[0].0, OWN_V6[1].0);
    let all6: Ipv6Addr = "ff02::1".parse().unwrap();
    let mut frames = Vec::new();
    for (name, len) in [("an echo request", 56), ("an odd one", 57), ("an empty one", 0)] {
        let payload = vec![0xa5; len];
        frames.push((name, written(|out| v4(own4).icmpv4_echo_request(1, 2).write(out, &payload))));
        let request = |from, to| v6(from, to).icmpv6_echo_request(1, 2);
        frames.push((name, written(|out| request("fd00:9::2", own6).write(out, &payload))));
    }
    let echo6 =
        |from, to| written(|out| v6(from, to).icmpv6_echo_request(1, 2).write(out, &[1; 9]));
    frames.push(("an echo request to all nodes", echo6("fd00:9::2", all6)));
    frames.push(("one from the link to all nodes", echo6("fe80::2", all6)));
    frames.push(("one of the link", echo6("fe80::2", local6)));
    frames.push(("one from nobody", echo6("::", own6)));
    let all4 = Ipv4Addr::new(10, 9, 0, 255);
    let echo4 = |to| written(|out| v4(to).icmpv4_echo_request(1, 2).write(out, &[1; 9]));
    frames.push(("an echo request to all", echo4(all4)));
    let reply = |out: &mut Vec<u8>| v4(own4).icmpv4_echo_reply(1, 2).write(out, &[1; 9]);
    frames.push(("an echo reply", written(reply)));
    let unknown = |out: &mut Vec<u8>| {
        let kind = Icmpv6Type::Unknown { type_u8: 200, code_u8: 0, bytes5to8: [0; 4] };
        v6("fd00:9::2", own6).icmpv6(kind).write(out, &[1; 9])
    };
    frames.push(("an unknown message", written(unknown)));
    for (name, len) in [("a short datagram", 8), ("a long one", 1400)] {
        let payload = vec![0x5a; len];
        frames.push((name, written(|out| v4(own4).udp(1000, CLOSED).write(out, &payload))));
        let datagram = v6("fd00:9::2", own6).udp(1000, CLOSED);
        frames.push((name, written(|out| datagram.write(out, &payload))));
    }
    let closed4 = |to| written(|out| v4(to).udp(1000, CLOSED).write(out, &[1; 9]));
    frames.push(("a datagram to all", closed4(all4)));
    frames.push(("a datagram to a group", closed4(JOINED_V4)));
    let mut to_all = closed4(own4);
    to_all[..6].fill(0xff);
    frames.push(("a datagram to all stations", to_all));
    let closed6 = |from, to| written(|out| v6(from, to).udp(1000, CLOSED).write(out, &[1; 9]));
    frames.push(("a datagram to a group", closed6("fd00:9::2", JOINED_V6)));
    frames.push(("a datagram from nobody", closed6("::", own6)));
    let mut with_tos = closed4(own4);
    with_tos[IP + 1] = 0xff;
    crate::network::frames::sum_up_header(&mut with_tos[IP..]);
    frames.push(("a datagram of a class", with_tos));
    frames
}

fn written<E: std::fmt::Debug>(write: impl FnOnce(&mut Vec<u8>) -> Result<(), E>) -> Vec<u8> {
    let mut frame = Vec::new();
    write(&mut frame).unwrap();
    frame
}

/// Frames that the kernel has sent since the last call.
fn sent(wire: &OwnedFd) -> Vec<Vec<u8>> {
    let mut bytes = vec![0; 1 << 16];
    let mut sent = Vec::new();
    while let Ok(len) = recv(wire.as_raw_fd(), &mut bytes, MsgFlags::empty()) {
        let frame = &bytes[..len];
        // Skip the frames that the kernel received, and those that it multicasts.
        if frame.starts_with(&[PEER_MAC, MAC].concat()) {
            sent.push(comparable(frame.to_vec()));
        }
    }
    sent
}

/// Removes fields that every sender chooses: the IPv4 identification, with the checksum over it,
/// and the IPv6 flow label.
fn comparable(mut frame: Vec<u8>) -> Vec<u8> {
    match frame[12..14] {
        [8, 0] => {
            frame[IP + 4..IP + 6].fill(0);
            frame[IP + 10..IP + 12].fill(0);
        }
        _ => {
            frame[IP + 1] &= 0xf0;
            frame[IP + 2..IP + 4].fill(0);
        }
    }
    frame
}

fn hexes(frames: &[Vec<u8>]) -> Vec<String> {
    frames.iter().map(hex::encode).collect()
}
