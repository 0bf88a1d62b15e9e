//! Part of the flows of TCP and UDP, for processes that share them: the same by address and port, and as classic BPF.

use std::net::{IpAddr, SocketAddr};

use forebay_sys::socket_filter::FilterInstruction;

use super::FilterProtocol;
use super::filter::{
    A_TO_X, ADD_X, AND, IF_ANY_BIT, IF_EQUAL, IF_NOT_BELOW, JUMP, LOAD_HALF_AT_X, LOAD_IMMEDIATE,
    LOAD_MEMORY, LOAD_WORD_AT_X, NONE, PROTOCOL, SHIFT_RIGHT, SOURCE, SOURCE_WORDS, STORE_MEMORY,
    WHOLE,
};

/// Number of buckets that flows fall into.
pub const BUCKETS: usize = 64;

/// Buckets of the flows of TCP and UDP that a socket takes. Flows fall into them by a hash of the peer's end and the local port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlowShare {
    /// Key of the hash.
    pub key: u32,
    /// Bit of each bucket that is taken.
    pub buckets: u64,
}

// linux/bpf_common.h
const LOAD_X_MEMORY: u16 = 0x61;
const MULTIPLY: u16 = 0x24;
const XOR_X: u16 = 0xac;
const SHIFT_LEFT_X: u16 = 0x6c;

/// Memory word that holds the sum so far.
const SUM: u32 = SOURCE + SOURCE_WORDS;

/// Words that are hashed: both ports, and the peer's address.
const WORDS: usize = 1 + SOURCE_WORDS as usize;
const HALF_BITS: u32 = 16;

/// Factors and shifts that mix the sum (the finaliser of MurmurHash3).
const FACTORS: [u32; 2] = [0x85eb_ca6b, 0xc2b2_ae35];
const SHIFTS: [u32; 2] = [16, 13];
/// Distance of the numbers that the factors of the words are made from (2^32 divided by the golden ratio).
const KEY_STEP: u32 = 0x9e37_79b9;
const BUCKET_SHIFT: u32 = u32::BITS - BUCKETS.trailing_zeros();
const WORD_BITS: u32 = u32::BITS;

impl FlowShare {
    /// Bucket of the flows from a peer's end to a local port, for a key.
    #[must_use]
    pub fn bucket(key: u32, peer: SocketAddr, local_port: u16) -> usize {
        let address = match peer.ip() {
            IpAddr::V4(address) => address.to_bits().into(),
            IpAddr::V6(address) => address.to_bits(),
        };
        let [ports, source @ ..] = word_factors(key);
        let mut sum = u32::from(peer.port()) << HALF_BITS | u32::from(local_port);
        sum =
            sum.wrapping_mul(ports[0]).wrapping_add(u32::from(peer.port()).wrapping_mul(ports[1]));
        for (word, factors) in address.to_be_bytes().as_chunks::<4>().0.iter().zip(source) {
            let word = u32::from_be_bytes(*word);
            sum = sum.wrapping_add(word.wrapping_mul(factors[0]));
            sum = sum.wrapping_add((word >> HALF_BITS).wrapping_mul(factors[1]));
        }
        let mut hash = (sum ^ sum >> SHIFTS[0]).wrapping_mul(FACTORS[0]);
        hash = (hash ^ hash >> SHIFTS[1]).wrapping_mul(FACTORS[1]);
        usize::try_from(hash >> BUCKET_SHIFT).unwrap_or(0)
    }

    /// Narrows a [`filter`](super::filter()) of ports to these buckets, and to all that is neither TCP nor UDP. One that takes
    /// every frame stays as it is.
    #[must_use]
    pub fn narrow(&self, filter: &[FilterInstruction]) -> Vec<FilterInstruction> {
        let [before @ .., FilterInstruction { code: JUMP, .. }, WHOLE, NONE] = filter else {
            return filter.to_vec();
        };
        let run = |code, k| FilterInstruction { code, jt: 0, jf: 0, k };
        let jump = |code, k, jt, jf| FilterInstruction { code, jt, jf, k };
        let [tcp, udp] = [FilterProtocol::Tcp, FilterProtocol::Udp].map(|it| it.number().into());
        let low = u32::try_from(self.buckets & u64::from(u32::MAX)).unwrap_or(0);
        let high = u32::try_from(self.buckets >> WORD_BITS).unwrap_or(0);
        let [ports, source @ ..] = word_factors(self.key);
        let protocol = [
            run(LOAD_MEMORY, PROTOCOL),
            jump(IF_EQUAL, tcp, 2, 0),
            jump(IF_EQUAL, udp, 1, 0),
            WHOLE,
        ];
        let both_ports = [
            run(LOAD_WORD_AT_X, 0),
            run(MULTIPLY, ports[0]),
            run(STORE_MEMORY, SUM),
            run(LOAD_HALF_AT_X, 0), // the peer's
            run(MULTIPLY, ports[1]),
            run(LOAD_X_MEMORY, SUM),
            run(ADD_X, 0),
            run(A_TO_X, 0),
        ];
        let address = (SOURCE..).zip(source).flat_map(|(word, factors)| {
            [
                run(LOAD_MEMORY, word),
                run(MULTIPLY, factors[0]),
                run(ADD_X, 0),
                run(A_TO_X, 0),
                run(LOAD_MEMORY, word),
                run(SHIFT_RIGHT, HALF_BITS),
                run(MULTIPLY, factors[1]),
                run(ADD_X, 0),
                run(A_TO_X, 0),
            ]
        });
        let is_taken = [
            run(SHIFT_RIGHT, SHIFTS[0]),
            run(XOR_X, 0),
            run(MULTIPLY, FACTORS[0]),
            run(A_TO_X, 0),
            run(SHIFT_RIGHT, SHIFTS[1]),
            run(XOR_X, 0),
            run(MULTIPLY, FACTORS[1]),
            run(SHIFT_RIGHT, BUCKET_SHIFT),
            jump(IF_NOT_BELOW, WORD_BITS, 5, 0),
            run(A_TO_X, 0),
            run(LOAD_IMMEDIATE, 1),
            run(SHIFT_LEFT_X, 0),
            jump(IF_ANY_BIT, low, 7, 0),
            NONE,
            run(AND, WORD_BITS - 1),
            run(A_TO_X, 0),
            run(LOAD_IMMEDIATE, 1),
            run(SHIFT_LEFT_X, 0),
            jump(IF_ANY_BIT, high, 1, 0),
            NONE,
            WHOLE,
        ];
        let share: Vec<_> =
            protocol.into_iter().chain(both_ports).chain(address).chain(is_taken).collect();
        let behind = run(JUMP, u32::try_from(share.len()).unwrap_or(0));
        [before, &[behind], &share, &[NONE]].concat()
    }
}

/// Factors of each word, and of its upper half: the sum of the products differs for most keys, whatever the flows.
fn word_factors(key: u32) -> [[u32; 2]; WORDS] {
    let mut number = key;
    [[(); 2]; WORDS].map(|halves| {
        halves.map(|()| {
            number = number.wrapping_add(KEY_STEP);
            let mut factor = (number ^ number >> SHIFTS[0]).wrapping_mul(FACTORS[0]);
            factor = (factor ^ factor >> SHIFTS[1]).wrapping_mul(FACTORS[1]);
            factor ^ factor >> SHIFTS[0] | 1
        })
    })
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixDatagram;

    use forebay_rx::parse::Link;
    use forebay_sys::socket_filter::attach;

    use super::super::{RxFilter, filter};
    use super::*;

    /// Packet from a peer to a local port.
    fn packet(protocol: u8, peer: SocketAddr, local_port: u16) -> Vec<u8> {
        let mut packet = match peer.ip() {
            IpAddr::V4(address) => {
                let mut header = [0; 20];
                (header[0], header[9]) = (0x45, protocol);
                header[12..16].copy_from_slice(&address.octets());
                header.to_vec()
            }
            IpAddr::V6(address) => {
                let mut header = [0; 40];
                (header[0], header[6]) = (0x60, protocol);
                header[8..24].copy_from_slice(&address.octets());
                header.to_vec()
            }
        };
        packet.extend(peer.port().to_be_bytes());
        packet.extend(local_port.to_be_bytes());
        packet.extend([0; 16]);
        packet
    }

    /// ICMP error about a segment from a local port.
    fn error(router: IpAddr, local_port: u16) -> Vec<u8> {
        let (kind, protocol) = if router.is_ipv4() { (3, 1) } else { (2, 58) };
        let mut error = packet(protocol, SocketAddr::new(router, 0), 0);
        error.truncate(error.len() - 20);
        error.extend([kind, 0, 0, 0, 0, 0, 0, 0]);
        error.extend(packet(6, SocketAddr::new(router, local_port), 1024));
        error
    }

    #[test]
    fn exe_8_filter_takes_its_buckets() {
        let (near, far) = UnixDatagram::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        let passed = |packet: &[u8]| {
            near.send(packet).unwrap();
            match far.recv(&mut [0; 200]) {
                Ok(len) => len == packet.len(),
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                    false
                }
            }
        };
        let take: RxFilter = "tcp:80-81,udp:80".parse().unwrap();
        let whole = filter(&take, Link::Ip);
        let peers =
            ["192.0.2.9", "198.51.100.77", "2001:db8::1:2:3", "fd00:ffff:8000:1:abcd:9:2:3"];
        let peers = peers.map(|ip| ip.parse().unwrap());
        let mut counts = [0; BUCKETS];
        let shares = [0, 1, 1 << 31, 1 << 32, 1 << 63, u64::MAX, 0x5555_5555_5555_5555];
        for (step, buckets) in (0_u32..).zip(shares) {
            let share = FlowShare { key: 0x9e37_79b9_u32.wrapping_mul(step), buckets };
            attach(far.as_fd(), &share.narrow(&whole)).unwrap();
            for peer in peers {
                for port in (1024_u16..1424).map(|port| port * 2) {
                    let peer = SocketAddr::new(peer, port);
                    let bucket = FlowShare::bucket(share.key, peer, 80);
                    counts[bucket] += 1;
                    let is_its = buckets & 1 << bucket != 0;
                    for protocol in [6, 17] {
                        assert_eq!(passed(&packet(protocol, peer, 80)), is_its, "{peer} {bucket}");
                    }
                }
                for (port, is_ours) in [(80, true), (82, false)] {
                    assert_eq!(passed(&error(peer, port)), is_ours, "an error comes to each");
                }
                let peer = SocketAddr::new(peer, 5);
                assert!(!passed(&packet(6, peer, 82)), "another port");
            }
        }
        let mean = counts.iter().sum::<usize>() / BUCKETS;
        assert!(counts.iter().all(|count| count.abs_diff(mean) < mean / 2), "{counts:?}");
        // Every link's filter is valid, and narrowed.
        for link in [Link::Ip, Link::Ethernet] {
            let none = FlowShare { key: 1, buckets: 0 };
            attach(far.as_fd(), &none.narrow(&filter(&take, link))).unwrap();
            assert_ne!(none.narrow(&filter(&take, link)), filter(&take, link));
        }
        let all = filter(&RxFilter::All, Link::Ip);
        assert_eq!(FlowShare { key: 1, buckets: 0 }.narrow(&all), all);
    }

    /// Flows of a peer that picks its addresses and ports, but does not know the key.
    #[test]
    fn exe_8_chosen_flows_fall_into_all_buckets() {
        const FLOWS: u32 = 8192;
        let v6 = |words: [u32; 4]| -> IpAddr {
            let [a, b, c, d] = words.map(u128::from);
            std::net::Ipv6Addr::from_bits(a << 96 | b << 64 | c << 32 | d).into()
        };
        let port = |number: u32| u16::try_from(number % (1 << 16)).unwrap();
        let top = |number: u32, bit: u32| (number >> bit & 7) << 29;
        type Family<'a> = &'a dyn Fn(u32) -> (IpAddr, u16);
        let families: [(&str, Family<'_>); 6] = [
            ("upper words", &|n| (v6([0x2001_0db8, n, 0, 1]), 1024)),
            ("upper bits", &|n| (v6([0x2001_0db8, n << 19, n >> 13, 1]), 1024)),
            ("against each other", &|n| (v6([0x2001_0db8, 0, 0, n << 16 | 1]), port(n))),
            ("IPv4 against ports", &|n| (IpAddr::V4((n << 16 | 1).into()), port(n))),
            ("top bits", &|n| {
                let words = [top(n, 0), top(n, 3), top(n, 6), top(n, 9)];
                (v6(words), port(n << 13 & 0x8000 | n))
            }),
            ("ports", &|n| ([192, 0, 2, 1].into(), port(2 * n))),
        ];
        for (name, flow) in families {
            for key in (0..20_u32).map(|step| step.wrapping_mul(0x0134_5679)) {
                let mut counts = [0_u32; BUCKETS];
                for number in 0..FLOWS {
                    let (ip, port) = flow(number);
                    counts[FlowShare::bucket(key, SocketAddr::new(ip, port), 80)] += 1;
                }
                let mean = FLOWS / u32::try_from(BUCKETS).unwrap();
                let is_even = |count: &u32| count.abs_diff(mean) < 3 * mean / 4;
                assert!(counts.iter().all(is_even), "{name}, key {key:#x}: {counts:?}");
            }
        }
    }

    #[test]
    fn exe_8_sharing_a_bucket_depends_on_key() {
        let flows: Vec<SocketAddr> = (1..100)
            .flat_map(|number: u16| {
                let ip = [0x2001, 0xdb8, number.reverse_bits(), 0, 0, 0, number, 1];
                [SocketAddr::new(ip.into(), 1024), SocketAddr::new(ip.into(), 1024 ^ number)]
            })
            .collect();
        let keys: Vec<u32> = (0..1000_u32).map(|step| step.wrapping_mul(0x9e37_79b9)).collect();
        let (first, others) = (flows[1], &flows[2..]);
        for other in others {
            let bucket = |key: u32, flow| FlowShare::bucket(key, flow, 80);
            let alike = keys.iter().filter(|key| bucket(**key, first) == bucket(**key, *other));
            let count = alike.count();
            assert!((2..50).contains(&count), "{other}: with {count} keys of 1000");
        }
    }

    /// The longest filter: the distances of all its jumps fit.
    #[test]
    fn exe_8_longest_filter_is_narrowed() {
        let (_near, far) = UnixDatagram::pair().unwrap();
        let ranges = (0..super::super::MAX_RANGES).map(|number| format!("tcp:{}", 2 * number + 1));
        let take: RxFilter = ranges.collect::<Vec<_>>().join(",").parse().unwrap();
        for link in [Link::Ip, Link::Ethernet] {
            for take in [take.clone(), take.clone().with_fragments()] {
                let whole = filter(&take, link);
                let narrowed = FlowShare { key: 1, buckets: 1 }.narrow(&whole);
                assert!(narrowed.len() > whole.len());
                attach(far.as_fd(), &narrowed).unwrap();
            }
        }
    }
}
