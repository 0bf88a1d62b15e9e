//! Reassembly: fragments become datagrams again, byte for byte, or are dropped with a reason, in
//! bounded memory.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod flood;
pub(crate) mod frames;
mod laws;
mod links;
mod moving;

use forebay_buf::Pool;
use forebay_rx::Packet;
use forebay_rx::packet::Shape;
use forebay_rx::parse::{Checksum, Fragment, Headers, Link, Transport, Verify, parse};
use forebay_stack::network::NetworkDrop;
use forebay_stack::network::reassembly::{
    Failures, Fragments, FragmentsConfig, GivenUp, Reassembly, ReassemblyLimits,
};
use frames::{Datagram, IP, IPV4_DATA, IPV6_DATA, Version, packet, pool, resum};

const SECOND_NS: u64 = 1_000_000_000;

/// The fragments under test, and an account of all frames.
struct Rig {
    fragments: Fragments,
    pool: Pool,
    given_up: GivenUp,
    added: u64,
    /// Number of frames dropped and returned.
    gone: u64,
}

impl Rig {
    fn new(config: FragmentsConfig, pool: Pool) -> Self {
        Self::of_cpus(1, config, pool)
    }

    fn of_cpus(cpus: usize, config: FragmentsConfig, pool: Pool) -> Self {
        let fragments = Fragments::shared(config, cpus);
        Self { fragments, pool, given_up: GivenUp::default(), added: 0, gone: 0 }
    }

    fn of_defaults() -> Self {
        Self::new(FragmentsConfig::default(), pool(300, 3))
    }

    /// Adds a frame; returns the packet that it completes.
    fn add(&mut self, bytes: &[u8], now_ns: u64) -> Option<Packet> {
        let packet = packet(&mut self.pool, bytes);
        self.added += 1;
        match self.fragments.add(packet, now_ns, &mut self.pool, &mut self.given_up) {
            Reassembly::Waits => None,
            Reassembly::Complete(packet) => Some(packet),
            Reassembly::Dropped(packet, why) => {
                self.given_up.packets.push((packet, why));
                None
            }
        }
    }

    /// Adds frames; returns the bytes of the datagrams that they complete.
    fn add_all<'a>(&mut self, frames: impl IntoIterator<Item = &'a Vec<u8>>) -> Vec<Vec<u8>> {
        let mut whole = Vec::new();
        for bytes in frames {
            if let Some(packet) = self.add(bytes, 0) {
                whole.push(bytes_of(&packet));
                self.pool.put(packet.frame);
            }
        }
        whole
    }

    /// Drop reasons since the last call. The frames are returned to the pool.
    fn reasons(&mut self) -> Vec<NetworkDrop> {
        let dropped = self.given_up.packets.drain(..).map(|(packet, why)| {
            self.pool.put(packet.frame);
            why
        });
        let reasons: Vec<_> = dropped.collect();
        self.gone += u64::try_from(reasons.len()).unwrap();
        reasons
    }

    /// Checks that every frame is waiting, was joined or was dropped, and that all are returned in
    /// the end.
    fn all_are_accounted_for(mut self) {
        self.reasons();
        let waiting = u64::from(self.fragments.frames());
        assert_eq!(self.added, waiting + self.fragments.joined() + self.gone);
        self.fragments.clear(&mut self.given_up);
        assert_eq!((self.fragments.frames(), self.fragments.held_bytes()), (0, [0, 0]));
        self.reasons();
        assert_eq!(self.added, self.fragments.joined() + self.gone);
        assert_eq!(self.pool.in_use(), 0, "all frames are home");
    }
}

fn bytes_of(packet: &Packet) -> Vec<u8> {
    packet.fragments().flatten().copied().collect()
}

fn versions() -> [Version; 2] {
    [Version::V4, Version::V6]
}

#[test]
fn fragmented_datagram_is_restored() {
    for version in versions() {
        let mut rig = Rig::of_defaults();
        let datagram = Datagram::new(version, 1, 77, 5000);
        let mut pieces = datagram.pieces(1480);
        pieces.reverse();
        let last = pieces.pop().unwrap();
        assert!(rig.add_all(&pieces).is_empty());
        assert_eq!(rig.fragments.frames(), 3);
        let packet = rig.add(&last, 0).unwrap();
        assert!(!packet.is_merged());
        assert_eq!(packet.frame.data(), datagram.whole);
        assert_eq!(packet.wire_len, packet.frame.len_bytes());
        let wire_len = packet.wire_len;
        let expected = parse(&datagram.whole, wire_len, Link::Ethernet, Verify::Checksums);
        assert_eq!((expected.l4_checksum, expected.fragment), (Checksum::Good, Fragment::Whole));
        let expected = Headers { fragment: Fragment::Atomic, ..expected };
        assert_eq!(packet.headers, expected);
        assert_eq!((packet.hash.0, packet.gso_size()), (9, 0));
        rig.pool.put(packet.frame);
        rig.all_are_accounted_for();
    }
}

#[test]
fn chunkless_datagram_keeps_verified_frames() {
    for version in versions() {
        for damage in [false, true] {
            let mut rig = Rig::new(FragmentsConfig::default(), pool(60, 0));
            let datagram = Datagram::new(version, 1, 5, 20_001);
            let mut pieces = datagram.pieces(1000);
            if damage {
                *pieces[7].last_mut().unwrap() ^= 1;
            }
            // Padding after a fragment does not belong to the datagram.
            pieces[4].extend([0xee; 30]);
            pieces.swap(0, 20);
            let last = pieces.pop().unwrap();
            assert!(rig.add_all(&pieces).is_empty());
            let packet = rig.add(&last, 0).unwrap();
            assert_eq!((packet.segment_count(), packet.shape()), (1, Shape::FragList));
            assert_eq!(packet.frame.follower_count(), 20);
            assert_eq!(bytes_of(&packet) == datagram.whole, !damage);
            let sum = if damage { Checksum::Bad } else { Checksum::Good };
            assert_eq!((packet.headers.l4_checksum, packet.headers.payload_len), (sum, 20_001));
            rig.pool.put(packet.frame);
            rig.all_are_accounted_for();
        }
    }
}

#[test]
fn duplicate_dropped_overlap_ends_datagram() {
    for version in versions() {
        let datagram = Datagram::new(version, 1, 3, 92);
        let cut = |start, end| datagram.cut(start, end);
        let whole = [datagram.whole.clone()];
        let cases = [
            ("again", vec![cut(0, 40), cut(0, 40), cut(40, 100)], 1, vec![NetworkDrop::DupFrag]),
            (
                "a part of one run",
                vec![cut(0, 40), cut(40, 80), cut(16, 64), cut(80, 100)],
                1,
                vec![NetworkDrop::DupFrag],
            ),
            (
                "overlaps by eight bytes",
                vec![cut(0, 40), cut(32, 100)],
                0,
                vec![NetworkDrop::FragOverlap; 2],
            ),
            (
                "across two runs",
                vec![cut(40, 80), cut(0, 40), cut(32, 48)],
                0,
                vec![NetworkDrop::FragOverlap; 3],
            ),
            ("begins anew", vec![cut(0, 40), cut(32, 48), cut(40, 100), cut(0, 40)], 1, {
                vec![NetworkDrop::FragOverlap; 2]
            }),
            ("no length", vec![cut(0, 40), datagram.piece(40, &[], true)], 0, {
                vec![NetworkDrop::FragInvalid; 2]
            }),
            (
                "two ends",
                vec![cut(80, 100), datagram.piece(40, &[1; 16], true)],
                0,
                vec![NetworkDrop::FragInvalid; 2],
            ),
            (
                "more behind the end",
                vec![datagram.piece(40, &[1; 16], true), datagram.piece(48, &[1; 16], false)],
                0,
                vec![NetworkDrop::FragInvalid; 2],
            ),
        ];
        for (name, frames, complete, reasons) in cases {
            let mut rig = Rig::of_defaults();
            let out = rig.add_all(&frames);
            assert_eq!(out, whole[..complete], "{version:?} {name}");
            assert_eq!(rig.reasons(), reasons, "{version:?} {name}");
            let fails = u64::from(!reasons.is_empty() && reasons[0] != NetworkDrop::DupFrag);
            let failures = rig.given_up.failures.map(|failures| failures.fails);
            assert_eq!(failures.iter().sum::<u64>(), fails, "{version:?} {name}");
            rig.all_are_accounted_for();
        }
    }
}

/// IPv4 lengths are rounded down to a multiple of 8, IPv6 ones are refused, and no datagram is
/// longer than 64 KiB.
#[test]
fn impossible_lengths_judged_as_kernel() {
    let datagram = Datagram::new(Version::V4, 1, 3, 92);
    let odd = datagram.piece(0, &datagram.data()[..45], false);
    let mut rig = Rig::of_defaults();
    assert_eq!(rig.add_all(&[odd, datagram.cut(40, 100)]), [datagram.whole]);
    let too_far = Datagram::new(Version::V4, 1, 3, 0);
    let chunk = vec![1; 1480];
    let start = 65_528 - 1480;
    let last = too_far.piece(start, &chunk, true);
    let mut pieces: Vec<_> =
        (0..start).step_by(1480).map(|at| too_far.piece(at, &chunk, false)).collect();
    pieces.push(last);
    // 44 * 1480 are not 65,528 - 1480: the last one but one overlaps unless it is shorter.
    let before = start / 1480 * 1480;
    pieces[start / 1480] = too_far.piece(before, &chunk[..start - before], false);
    assert!(rig.add_all(&pieces).is_empty());
    assert!(rig.reasons().iter().all(|&why| why == NetworkDrop::FragInvalid));
    assert_eq!(rig.fragments.frames(), 0);

    let datagram = Datagram::new(Version::V6, 1, 3, 92);
    let odd = datagram.piece(0, &datagram.data()[..45], false);
    let too_far = datagram.piece(65_528, &[1; 8], true);
    let mut rig = Rig::of_defaults();
    assert!(rig.add_all(&[odd, too_far]).is_empty());
    assert_eq!(rig.reasons(), [NetworkDrop::FragInvalid; 2]);
}

#[test]
fn ipv6_first_fragment_needs_transport_header() {
    let datagram = Datagram::new(Version::V6, 1, 3, 92);
    let options = [&[17, 0, 1, 4, 0, 0, 0, 0], datagram.data()].concat();
    for (next, data, is_kept) in [
        (17, &datagram.data()[..8], true),
        (6, &datagram.data()[..16], false),
        (6, &datagram.data()[..24], true),
        (60, &options[..8], false),
        (60, &options[..16], true),
        (59, &options[..8], true),
        (253, &options[..8], true),
    ] {
        let mut bytes = datagram.piece(0, data, false);
        bytes[IPV6_DATA] = next;
        let mut rig = Rig::of_defaults();
        assert!(rig.add(&bytes, 0).is_none());
        assert_eq!(rig.fragments.frames(), u32::from(is_kept), "{next} {}", data.len());
    }
}

#[test]
fn rfc_3168_congestion_marks_are_kept_not_invented() {
    const CASES: [([u8; 3], Option<u8>); 7] = [
        ([0, 0, 0], Some(0)),
        ([2, 2, 2], Some(2)),
        ([1, 2, 2], Some(1)),
        ([2, 3, 2], Some(3)),
        ([3, 1, 2], Some(3)),
        ([0, 2, 2], None),
        ([0, 0, 3], None),
    ];
    for version in versions() {
        for (ecns, expected) in CASES {
            let datagram = Datagram::new(version, 1, 3, 92);
            let mut pieces = datagram.pieces(40);
            for (bytes, ecn) in pieces.iter_mut().zip(ecns) {
                match version {
                    Version::V4 => {
                        bytes[IP + 1] = 0xb8 | ecn;
                        resum(bytes);
                    }
                    Version::V6 => bytes[IP + 1] |= ecn << 4,
                }
            }
            let mut rig = Rig::of_defaults();
            let out = rig.add_all(&pieces);
            let ecn = out.first().map(|bytes| match version {
                Version::V4 => bytes[IP + 1] & 3,
                Version::V6 => bytes[IP + 1] >> 4 & 3,
            });
            assert_eq!(ecn, expected, "{version:?} {ecns:?}");
            assert_eq!(rig.reasons().len(), if ecn.is_some() { 0 } else { 3 });
        }
    }
}

#[test]
fn options_belong_to_first_fragment() {
    let datagram = Datagram::new(Version::V4, 1, 3, 92);
    let mut pieces = datagram.pieces(40);
    pieces[0].splice(IPV4_DATA..IPV4_DATA, [1, 1, 1, 0]);
    (pieces[0][IP], pieces[0][IP + 3]) = (0x46, 64);
    resum(&mut pieces[0]);
    let mut rig = Rig::of_defaults();
    let out = rig.add_all(pieces.iter().rev());
    let headers = parse(&out[0], 138, Link::Ethernet, Verify::Checksums);
    assert_eq!((out[0].len(), headers.transport_offset), (138, 38));
    assert_eq!((headers.ip_checksum, headers.l4_checksum), (Checksum::Good, Checksum::Good));

    let datagram = Datagram::new(Version::V6, 1, 3, 92);
    let mut pieces = datagram.pieces(40);
    for bytes in &mut pieces[1..] {
        bytes.splice(IPV6_DATA..IPV6_DATA, [44, 0, 1, 4, 0, 0, 0, 0]);
        bytes[IP + 5] += 8;
        bytes[IP + 6] = 60;
    }
    let mut first = pieces.remove(0);
    first.splice(IPV6_DATA..IPV6_DATA, [44, 1, 1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    first[IP + 5] += 16;
    first[IP + 6] = 60;
    pieces.push(first);
    for with_large in [0, 1] {
        let mut rig = Rig::new(FragmentsConfig::default(), pool(20, with_large));
        let out = rig.add_all(&pieces);
        let headers = parse(&out[0], 170, Link::Ethernet, Verify::Checksums);
        assert_eq!((out[0].len(), headers.transport_offset), (170, 70));
        assert_eq!((headers.transport, headers.fragment), (Transport::Udp, Fragment::Whole));
        assert_eq!((headers.l4_checksum, out[0][IPV6_DATA]), (Checksum::Good, 17));
    }
}

#[test]
fn fragments_of_datagrams_do_not_mix() {
    let mut rig = Rig::of_defaults();
    let ours = Datagram::new(Version::V4, 1, 3, 92);
    let [first, last] = [ours.cut(0, 40), ours.cut(40, 100)];
    let edited = |at: usize, value: u8| {
        let mut bytes = last.clone();
        bytes[at] = value;
        resum(&mut bytes);
        bytes
    };
    // Another id, protocol, source, destination.
    let others = [IP + 5, IP + 9, IP + 15, IP + 19].map(|at| edited(at, 99));
    assert!(rig.add_all([&first].into_iter().chain(&others)).is_empty());
    assert_eq!(rig.add_all([&last]), [ours.whole]);
    assert_eq!(rig.fragments.frames(), 4);

    // For IPv6, only the first fragment's next header counts.
    let ours = Datagram::new(Version::V6, 1, 3, 92);
    let mut last = ours.cut(40, 100);
    last[IPV6_DATA] = 99;
    assert_eq!(rig.add_all(&[ours.cut(0, 40), last]), [ours.whole]);
    rig.all_are_accounted_for();
}

#[test]
fn first_fragment_dates_the_datagram() {
    for (version, timeout_s) in [(Version::V4, 30), (Version::V6, 60)] {
        for late in [false, true] {
            let mut rig = Rig::of_defaults();
            let datagram = Datagram::new(version, 1, 3, 92);
            assert!(rig.add(&datagram.cut(0, 40), SECOND_NS).is_none());
            assert!(rig.add(&datagram.cut(40, 80), 20 * SECOND_NS).is_none());
            let now_ns = (timeout_s + 1) * SECOND_NS - u64::from(!late);
            let out = rig.add(&datagram.cut(80, 100), now_ns);
            assert_eq!(out.is_some(), !late);
            let dropped = if late { 2 } else { 0 };
            assert_eq!(rig.reasons(), vec![NetworkDrop::FragReasmTimeout; dropped]);
            let failed = Failures { fails: u64::from(late), timeouts: u64::from(late) };
            assert!(rig.given_up.failures.contains(&failed));
            let waiting = if late { 1 } else { 0 };
            assert_eq!(rig.fragments.frames(), waiting);
            rig.fragments.expire(u64::MAX, &mut rig.given_up);
            assert_eq!(rig.reasons().len(), usize::try_from(waiting).unwrap());
            assert_eq!(rig.fragments.held_bytes(), [0, 0]);
        }
    }
}

/// An identification that wraps must not complete an older datagram (the kernel's
/// `ipfrag_max_dist`).
#[test]
fn distant_fragments_do_not_join() {
    for (between, completes) in [(63, true), (64, false)] {
        let mut rig = Rig::of_defaults();
        let datagram = Datagram::new(Version::V4, 1, 0, 92);
        assert!(rig.add(&datagram.cut(0, 40), 0).is_none());
        for id in 1..=between {
            let other = Datagram::new(Version::V4, 1, id, 92);
            assert!(rig.add(&other.cut(0, 40), 0).is_none());
        }
        let out = rig.add(&datagram.cut(40, 100), 0);
        assert_eq!(out.is_some(), completes);
        let reasons = if completes { vec![] } else { vec![NetworkDrop::FragTooFar] };
        assert_eq!(rig.reasons(), reasons);
    }
}

#[test]
fn promise_3_late_turn_gives_up_some() {
    let mut rig = Rig::new(FragmentsConfig::default(), pool(1200, 1));
    let datagrams: Vec<_> =
        (0..1000).map(|id| Datagram::new(Version::V6, id, id.into(), 1600).pieces(808)).collect();
    assert!(rig.add_all(datagrams.iter().map(|pieces| &pieces[0])).is_empty());
    let late_ns = 61 * SECOND_NS;
    // The last datagram is looked up before `expire` reaches it.
    assert_eq!(rig.add(&datagrams[999][1], late_ns).map(|_| ()), None);
    assert_eq!(rig.reasons(), vec![NetworkDrop::FragReasmTimeout; 257]);
    let mut left: usize = 1000 - 257;
    while left > 0 {
        rig.fragments.expire(late_ns, &mut rig.given_up);
        assert_eq!(rig.reasons().len(), left.min(256));
        left -= left.min(256);
    }
    assert_eq!(rig.fragments.frames(), 1);
    rig.all_are_accounted_for();
}
