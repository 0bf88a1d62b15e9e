//! The transmit side against a device that puts together what it reads, and cuts it by nothing but
//! the header before it.

use std::collections::VecDeque;
use std::sync::Arc;

use etherparse::{IpHeaders, Ipv4Header, Ipv6Header, PacketBuilder, ip_number};
use mem::Region;
use mem::pool::{ChunkClass, carve, region_bytes};
use path::coalesce::gso::{GSO_NONE, NEEDS_CSUM, VirtioNetHdr};
use path::coalesce::{CoalesceConfig, Coalescer, FlushReason, cut};
use path::hash::FlowHash;
use path::packet::Arrival;
use path::parse::{Link, Verify, parse_packet};
use proptest::prelude::*;
use proptest::sample::select;
use virtio_bindings::virtio_config::{VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_HASH_REPORT,
};

use super::*;
use crate::device::egress::{Egress, EgressSink};
use crate::device::sink::{Sink, SinkCounters};
use crate::device::virtio::VirtioOptions;
use crate::device::virtio::features::Wishes;
use crate::device::virtio::memory::MemoryPlan;
use crate::sys::virtio::SharedMemory;
use crate::sys::virtio::twin::{Got, Twin};

const CWR: u8 = 0x80;
const PSH: u8 = 0x08;
const FIN: u8 = 0x01;
const ACK: u8 = 0x10;

/// All that a device can offer for what is sent to it.
const ALL: [u32; 5] = [
    VIRTIO_NET_F_CSUM,
    VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_HOST_ECN,
    VIRTIO_NET_F_HOST_USO,
];

/// A queue, two CPUs that send, and the device.
struct Rig {
    transmit: Transmit,
    sinks: Vec<EgressSink>,
    pool: Pool,
    device: Option<Twin>,
    /// What was handed in, by CPU.
    handed: Vec<u64>,
    _memory: SharedMemory,
}

impl Rig {
    fn new(queue_size: u16) -> Self {
        let plan = MemoryPlan::of(&VirtioOptions { queue_size, ..VirtioOptions::default() });
        let memory = SharedMemory::new(plan.len_bytes(1)).unwrap();
        let [_, place] = plan.rings(&memory, 0);
        let (egress, departures) = Egress::new();
        let transmit = Transmit::new(departures, place, plan.slots(&memory, 0));
        let queues = [egress];
        let sinks = (0..2).map(|_| EgressSink::new("twin".to_owned(), &queues)).collect();
        let class = |chunk_bytes, chunks| ChunkClass { chunk_bytes, chunks };
        let shares = [vec![class(2048, 3000), class(1 << 14, 64), class(1 << 17, 8)]];
        let pool = carve(Region::allocate(region_bytes(&shares)), &shares).unwrap().remove(0);
        Self { transmit, sinks, pool, device: None, handed: vec![0; 2], _memory: memory }
    }

    fn begin(&mut self, offered: &[u32], mtu: Option<u16>) {
        let wishes = Wishes {
            packed: offered.contains(&VIRTIO_F_RING_PACKED),
            device_hash: offered.contains(&VIRTIO_NET_F_HASH_REPORT),
        };
        let bits = offered.iter().fold(1 << VIRTIO_F_VERSION_1, |bits, bit| bits | 1_u64 << bit);
        self.device = None; // it holds the ring's memory
        self.transmit.end();
        self.transmit.begin(Features::negotiate(bits, wishes).unwrap(), mtu);
        self.device = self.transmit.ring.as_ref().map(Twin::of);
    }

    fn packet(&mut self, bytes: &[u8]) -> Packet {
        let mut frame = self.pool.allocate(len(bytes)).unwrap();
        frame.copy_from(bytes);
        let mut packet = Packet::received(frame, Arrival(0), len(bytes), Link::Ethernet);
        parse_packet(&mut packet, Verify::Checksums, &mut self.pool).unwrap();
        packet.hash = FlowHash::computed(7);
        packet
    }

    /// What coalescing makes of these. It leaves alone what says CWR: that comes whole.
    fn merged(&mut self, frames: &[Vec<u8>]) -> Packet {
        if says_cwr(&frames[0]) {
            return self.whole(frames);
        }
        let mut packets: Vec<_> = frames.iter().map(|bytes| self.packet(bytes)).collect();
        let mut coalescer = Coalescer::new(CoalesceConfig::default(), Arc::default());
        let mut out = Vec::new();
        coalescer.coalesce(&mut packets, 0, &mut out);
        coalescer.flush(FlushReason::PollEnd, &mut out);
        assert_eq!(out.len(), 1, "they are one packet");
        out.remove(0)
    }

    /// The same in one frame.
    fn whole(&mut self, frames: &[Vec<u8>]) -> Packet {
        let mut first = frames[0].clone();
        let is_cwr = says_cwr(&first);
        if is_cwr {
            first[TCP_FLAGS] &= !CWR;
            add(&mut first, TCP_FLAGS + 3, u32::from(CWR)); // the checksum
        }
        let merged = self.merged(&[&[first], &frames[1..]].concat());
        let mut whole = merged.copied(&mut self.pool).unwrap();
        self.pool.put(merged.frame);
        if is_cwr {
            whole.frame.data_mut()[TCP_FLAGS] |= CWR;
        }
        assert!(whole.is_whole_gso());
        whole
    }

    /// Hands packets in on a CPU. Returns how many found no room.
    fn hand(&mut self, cpu: usize, packets: impl IntoIterator<Item = Packet>) -> usize {
        let mut packets: Vec<_> = packets.into_iter().collect();
        self.handed[cpu] += packets.len() as u64;
        self.sinks[cpu].send(&mut packets).unwrap();
        let left = packets.len();
        packets.drain(..).for_each(|packet| self.pool.put(packet.frame));
        left
    }

    fn step(&mut self) -> Step {
        self.transmit.step(&mut self.pool)
    }

    /// The next buffer that the device finds.
    fn got(&mut self) -> Option<Got> {
        self.device.as_mut().unwrap().take()
    }

    fn give(&mut self, id: u16) {
        self.device.as_mut().unwrap().give(id, 0);
    }

    /// What is in a buffer: the device's header, and the bytes behind it.
    fn read(&self, got: &Got) -> (VirtioNetHdr, Vec<u8>) {
        let mut all = Vec::new();
        for &(address, len_bytes, is_writable) in &got.pieces {
            assert!(!is_writable && (1..=SLOT_BYTES).contains(&len_bytes));
            let mut slots = self.transmit.slots.slots.iter();
            let slot = slots.find(|slot| slot.address() == address).expect("one of ours");
            let begin = all.len();
            all.resize(begin + len_bytes as usize, 0);
            slot.copy_in(0, &mut all[begin..]);
        }
        let header_bytes = self.transmit.limits.features.header_bytes() as usize;
        let bytes = all.split_off(header_bytes);
        assert!(all[10..].iter().all(|&byte| byte == 0), "no buffers are counted, nothing hashed");
        (VirtioNetHdr::from_bytes(*all.first_chunk().unwrap()), bytes)
    }

    /// All that the device finds, which it sends at once.
    fn sent(&mut self) -> Vec<(VirtioNetHdr, Vec<u8>)> {
        let mut sent = Vec::new();
        loop {
            let count = self.step().count;
            while let Some(got) = self.got() {
                sent.push(self.read(&got));
                self.give(got.id);
            }
            if count == 0 {
                return sent;
            }
        }
    }

    fn counters(&self, cpu: usize) -> &SinkCounters {
        self.sinks[cpu].counters()
    }
}

/// TCP's flags, over IPv4.
const TCP_FLAGS: usize = 14 + 20 + 13;

fn says_cwr(frame: &[u8]) -> bool {
    frame[12..14] == [8, 0] && frame[23] == 6 && frame[TCP_FLAGS] & CWR != 0
}

fn len(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap()
}

/// A frame that is nobody's, in a station's hands.
fn frame(len: usize) -> Vec<u8> {
    let mut bytes: Vec<_> = (0..len).map(|at| (at * 7 + at / 251).to_le_bytes()[0]).collect();
    bytes[12..14].copy_from_slice(&[0x88, 0xb5]); // for experiments
    bytes
}

/// What is merged of which frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Flow {
    Tcp4,
    Tcp6,
    /// With a first segment that says that congestion was heeded.
    Tcp4Cwr,
    Udp4,
    Udp6,
}

const FLOWS: [Flow; 5] = [Flow::Tcp4, Flow::Tcp6, Flow::Tcp4Cwr, Flow::Udp4, Flow::Udp6];

/// Frames of one flow, by etherparse: all of them `size` bytes of payload, the last one less.
fn segments(flow: Flow, count: u16, size: usize) -> Vec<Vec<u8>> {
    let segment = |number: u16| {
        let is_last = number + 1 == count;
        let is_v6 = matches!(flow, Flow::Tcp6 | Flow::Udp6);
        let ip = if is_v6 {
            let ends =
                Ipv6Header { source: [0x20; 16], destination: [0xfd; 16], ..Default::default() };
            IpHeaders::Ipv6(Ipv6Header { hop_limit: 64, ..ends }, Default::default())
        } else {
            let (from, to) = ([10, 0, 0, 1], [10, 0, 0, 2]);
            let mut header = Ipv4Header::new(0, 64, ip_number::UDP, from, to).unwrap();
            header.identification = number.wrapping_sub(2);
            header.dont_fragment = true;
            IpHeaders::Ipv4(header, Default::default())
        };
        let step = PacketBuilder::ethernet2([2; 6], [4; 6]).ip(ip);
        let len = if is_last { size / 3 + 1 } else { size };
        let payload: Vec<_> =
            (0..len).map(|at| (at * 5 + usize::from(number)).to_le_bytes()[0]).collect();
        let mut bytes = Vec::new();
        match flow {
            Flow::Udp4 | Flow::Udp6 => step.udp(1000, 443).write(&mut bytes, &payload),
            _ => {
                let ahead = u32::from(number) * u32::try_from(size).unwrap();
                let step = step.tcp(1000, 443, 0xffff_ff00_u32.wrapping_add(ahead), 512).ack(9);
                let step = if is_last { step.psh() } else { step };
                let is_cwr = flow == Flow::Tcp4Cwr && number == 0;
                if is_cwr { step.cwr() } else { step }.write(&mut bytes, &payload)
            }
        }
        .unwrap();
        bytes
    };
    (0..count).map(segment).collect()
}

/// The Internet's sum of some bytes.
fn sum(bytes: &[u8]) -> u32 {
    let words = bytes
        .chunks(2)
        .map(|word| u32::from(word[0]) << 8 | word.get(1).map_or(0, |&low| u32::from(low)));
    words.sum()
}

fn folded(mut sum: u32) -> [u8; 2] {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap().to_be_bytes()
}

fn add(bytes: &mut [u8], at: usize, ahead: u32) {
    let field: &mut [u8; 2] = bytes[at..].first_chunk_mut().unwrap();
    let sum = u32::from(u16::from_be_bytes(*field)).wrapping_add(ahead) & 0xffff;
    *field = u16::try_from(sum).unwrap().to_be_bytes();
}

/// What a device does that is asked to cut a packet: it goes by the header, and by section 5.1.6.2.
fn cut_by_header(header: VirtioNetHdr, bytes: &[u8]) -> Vec<Vec<u8>> {
    if header.gso_type == GSO_NONE {
        assert_eq!(header, VirtioNetHdr::default());
        return vec![bytes.to_vec()];
    }
    assert_eq!(header.flags, NEEDS_CSUM);
    let start = usize::from(header.csum_start);
    let field = start + usize::from(header.csum_offset);
    let (head, payload) = bytes.split_at(header.hdr_len.into());
    let is_v4 = bytes[12..14] == [8, 0];
    let (is_udp, is_ecn) = (header.gso_type == GSO_UDP_L4, header.gso_type & GSO_ECN != 0);
    assert_eq!(is_ecn, !is_udp && head[start + 13] & CWR != 0);
    let parts: Vec<_> = payload.chunks(header.gso_size.into()).collect();
    let last = parts.len() - 1;
    let segments = parts.iter().enumerate().map(|(number, part)| {
        let mut segment = [head, part].concat();
        let shorter = (len(payload) - len(part)).wrapping_neg();
        add(&mut segment, if is_v4 { 16 } else { 18 }, shorter);
        if is_v4 {
            add(&mut segment, 18, u32::try_from(number).unwrap());
            segment[24..26].fill(0);
            let sum = folded(sum(&segment[14..34])).map(|byte| !byte);
            segment[24..26].copy_from_slice(&sum);
        }
        if is_udp {
            add(&mut segment, start + 4, shorter);
        } else {
            let sequence = u32::from_be_bytes(*segment[start + 4..].first_chunk().unwrap());
            let ahead = u32::try_from(number * usize::from(header.gso_size)).unwrap();
            segment[start + 4..start + 8]
                .copy_from_slice(&sequence.wrapping_add(ahead).to_be_bytes());
            segment[start + 13] &= if number < last { !(PSH | FIN) } else { !0 };
            segment[start + 13] &= if number > 0 { !CWR } else { !0 };
            assert_ne!(segment[start + 13] & ACK, 0);
        }
        // The field holds the sum of the pseudo header, whose length is the whole's.
        let before = u32::from(u16::from_be_bytes(*segment[field..].first_chunk().unwrap()));
        let pseudo =
            before + 0xffff - u32::from(u16::from_be_bytes(folded(len(payload) - len(part))));
        segment[field..field + 2].fill(0);
        let sum = folded(pseudo + sum(&segment[start..])).map(|byte| !byte);
        segment[field..field + 2].copy_from_slice(&sum);
        segment
    });
    segments.collect()
}

#[test]
fn a_packet_of_any_length_leaves_as_it_is_behind_a_header_that_says_nothing() {
    let slot = SLOT_BYTES as usize;
    let lens = [14, 60, 1514, slot - 21, slot - 20, slot - 12, slot - 11, 9018, 65_535 + 14];
    for layout in [&[][..], &[VIRTIO_F_RING_PACKED]] {
        for header in [&[][..], &[VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_HASH_REPORT]] {
            let mut rig = Rig::new(64);
            rig.begin(&[layout, header].concat(), None);
            for len in lens {
                let packet = rig.packet(&frame(len));
                rig.hand(0, [packet]);
                assert_eq!(rig.sent(), [(VirtioNetHdr::default(), frame(len))], "{len}");
            }
            let counters = rig.counters(0);
            let bytes = lens.iter().sum::<usize>() as u64;
            let expected = (lens.len() as u64, lens.len() as u64, bytes);
            assert_eq!((counters.packets(), counters.frames(), counters.bytes()), expected);
            assert_eq!(rig.pool.away(), 0);
        }
    }
}

#[test]
fn a_merged_packet_leaves_as_one_and_the_device_cuts_it_into_what_it_was_merged_of() {
    for flow in FLOWS {
        for (count, size) in [(3, 100), (2, 1448), (7, 1399), (44, 1448)] {
            let frames = segments(flow, count, size);
            let mut rig = Rig::new(64);
            rig.begin(&ALL, Some(1520));
            let packets = [rig.merged(&frames), rig.whole(&frames)];
            rig.hand(0, packets);
            let sent = rig.sent();
            assert_eq!(sent.len(), 2);
            for (header, bytes) in sent {
                assert_ne!(header.gso_type, GSO_NONE, "{flow:?}");
                assert_eq!(cut_by_header(header, &bytes), frames, "{flow:?} {count} of {size}");
            }
            let counters = rig.counters(0);
            assert_eq!((counters.packets(), counters.frames()), (2, 2 * u64::from(count)));
            // The same by the software that cuts where no device does.
            let (whole, mut segments) = (rig.whole(&frames), Vec::new());
            cut(whole, &mut rig.pool, &mut segments).unwrap();
            let bytes: Vec<_> = segments.iter().map(|segment| segment.frame.data()).collect();
            assert_eq!(bytes, frames);
        }
    }
}

#[test]
fn what_the_device_does_not_cut_is_cut_before() {
    let without = |left_out: u32| ALL.into_iter().filter(move |&bit| bit != left_out);
    for flow in FLOWS {
        let needed = match flow {
            Flow::Tcp4 => VIRTIO_NET_F_HOST_TSO4,
            Flow::Tcp6 => VIRTIO_NET_F_HOST_TSO6,
            Flow::Tcp4Cwr => VIRTIO_NET_F_HOST_ECN,
            Flow::Udp4 | Flow::Udp6 => VIRTIO_NET_F_HOST_USO,
        };
        let frames = segments(flow, 5, 700);
        for left_out in [needed, VIRTIO_NET_F_CSUM] {
            let mut rig = Rig::new(64);
            rig.begin(&without(left_out).collect::<Vec<_>>(), None);
            let packets = [rig.merged(&frames), rig.whole(&frames)];
            rig.hand(0, packets);
            let (headers, bytes): (Vec<_>, Vec<_>) = rig.sent().into_iter().unzip();
            assert!(headers.iter().all(|header| *header == VirtioNetHdr::default()));
            assert_eq!(bytes, [&frames[..], &frames[..]].concat(), "{flow:?}");
            let counters = rig.counters(0);
            assert_eq!((counters.packets(), counters.frames()), (2, 10));
            assert_eq!(rig.pool.away(), 0);
        }
    }
    // The ring has too few descriptors for it.
    let frames = segments(Flow::Tcp4, 40, 1448);
    let mut rig = Rig::new(16);
    rig.begin(&ALL, None);
    let merged = rig.merged(&frames);
    rig.hand(0, [merged]);
    assert_eq!(rig.sent().into_iter().map(|sent| sent.1).collect::<Vec<_>>(), frames);
    assert_eq!((rig.counters(0).packets(), rig.counters(0).frames()), (1, 40));
}

#[test]
fn promise_2_what_cannot_be_sent_is_dropped_by_name() {
    let mut rig = Rig::new(16);
    rig.begin(&ALL, Some(1500));
    let mut no_link = rig.packet(&frame(100));
    no_link.headers.link = Link::Ip;
    let mut tagged = frame(1518);
    tagged[12..14].copy_from_slice(&[0x81, 0]);
    let jumbo_segments = segments(Flow::Tcp4, 3, 1461);
    let packets = [
        no_link,
        rig.packet(&frame(1515)),
        rig.packet(&frame(1514)),
        rig.packet(&tagged),
        rig.merged(&jumbo_segments),
        rig.packet(&frame(40_000)),
    ];
    rig.hand(0, packets);
    let sent: Vec<_> = rig.sent().into_iter().map(|sent| sent.1).collect();
    assert_eq!(sent, [frame(1514), tagged]);
    let dropped = |reason| rig.counters(0).dropped(reason);
    assert_eq!((dropped(SendDrop::LinkHeader), dropped(SendDrop::TooLong)), (1, 3));
    // Without a limit of the device's, the ring's is left.
    rig.begin(&ALL, None);
    let packets = [rig.packet(&frame(16 * 2048 - 11)), rig.packet(&frame(16 * 2048 - 12))];
    rig.hand(0, packets);
    assert_eq!(rig.sent().len(), 1);
    assert_eq!(rig.counters(0).dropped(SendDrop::TooLong), 4);
    assert_eq!(rig.pool.away(), 0);
}

#[test]
fn promise_3_a_device_that_takes_nothing_holds_up_its_ring_and_the_senders_hear_of_it() {
    let mut rig = Rig::new(16);
    rig.begin(&[virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX], None);
    let mut left = 0;
    for _ in 0..30 {
        let packets: Vec<_> = (0..60).map(|_| rig.packet(&frame(60))).collect();
        left += rig.hand(0, packets) as u64;
        rig.step();
    }
    let waiting = rig.handed[0] - left - 16;
    // In the lane, taken out of it at once, and next.
    assert!(waiting <= 1024 + 64 + 1, "{waiting}");
    assert_eq!(rig.counters(0).dropped(SendDrop::Full), left);
    assert!(!rig.transmit.has_work(), "nothing can be done");
    assert!(rig.transmit.is_sending());
    let first = rig.got().unwrap();
    rig.give(first.id);
    assert!(rig.device.as_mut().unwrap().calls(), "the driver waits for that");
    assert!(rig.transmit.has_work());
    assert_eq!(rig.step().count, 1);
    let second = rig.got().unwrap();
    rig.give(second.id);
    assert!(!rig.device.as_mut().unwrap().calls(), "the driver is awake");
    assert_eq!(rig.sent().len() as u64, waiting + 14);
    assert!(!rig.transmit.has_work() && !rig.transmit.is_sending());
    assert_eq!(rig.counters(0).packets() + left, rig.handed[0]);
}

#[test]
fn promise_5_a_lie_shuts_the_queue_until_the_next_session() {
    for layout in [&[][..], &[VIRTIO_F_RING_PACKED]] {
        let lies: [fn(&mut Rig, u16); 3] = [
            |rig, _| rig.device.as_mut().unwrap().give_bad(63),
            |rig, first| {
                rig.give(first);
                rig.device.as_mut().unwrap().give_bad(first);
            },
            |rig, _| rig.device.as_mut().unwrap().give_bad(u16::MAX),
        ];
        for lie in lies {
            let mut rig = Rig::new(64);
            rig.begin(layout, None);
            let packets = [rig.packet(&frame(3000)), rig.packet(&frame(60))];
            rig.hand(0, packets);
            assert_eq!(rig.step().count, 2);
            let got = rig.got().unwrap();
            lie(&mut rig, got.id);
            let why = rig.step().lie.expect("it was found out");
            assert!(!why.is_empty());
            let packet = rig.packet(&frame(60));
            rig.hand(0, [packet]);
            assert_eq!(rig.step(), Step { count: 1, ..Step::default() }, "nothing is sent");
            assert_eq!(rig.got(), None);
            rig.begin(layout, None);
            let packet = rig.packet(&frame(61));
            rig.hand(0, [packet]);
            assert_eq!(rig.sent().len(), 1, "and now it is");
            let counters = rig.counters(0);
            assert_eq!(counters.packets() + counters.dropped(SendDrop::Down), 4);
            assert_eq!(rig.transmit.slots.free.len(), 64);
        }
    }
}

#[derive(Clone, Debug)]
enum Event {
    /// A CPU hands in packets: of that length; of so many segments.
    Single(usize, Vec<usize>),
    Merged(usize, Flow, u16),
    Turn,
    /// The device takes that many buffers.
    Take(usize),
    /// It gives back that many, the latest first or the oldest.
    Give(usize, bool),
    /// It gives back what it was not given.
    Lie,
    End,
    Begin(Vec<u32>, bool, Option<u16>),
}

fn event() -> impl Strategy<Value = Event> {
    let lens = proptest::collection::vec(select(vec![10usize, 60, 1514, 2036, 2037, 9000]), 1..8);
    let begin = (proptest::sample::subsequence(ALL.to_vec(), 0..=5), any::<bool>());
    let mtu = select(vec![None, Some(1500), Some(9000)]);
    prop_oneof![
        6 => (0usize..2, lens).prop_map(|(cpu, lens)| Event::Single(cpu, lens)),
        4 => (0usize..2, select(FLOWS.to_vec()), 2u16..20)
            .prop_map(|(cpu, flow, count)| Event::Merged(cpu, flow, count)),
        8 => Just(Event::Turn),
        5 => (1usize..20).prop_map(Event::Take),
        5 => (1usize..20, any::<bool>()).prop_map(|(count, latest)| Event::Give(count, latest)),
        1 => Just(Event::Lie),
        1 => Just(Event::End),
        3 => (begin, mtu).prop_map(|((bits, packed), mtu)| Event::Begin(bits, packed, mtu)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever the CPUs, the device and the link do: each packet is counted once, as sent or
    /// as dropped by name; what the device reads is what was handed in, in that order; and no
    /// frame and no slot is lost.
    #[test]
    fn promise_2_what_was_handed_in_was_sent_or_dropped_by_name(
        size in select(vec![16u16, 64]),
        events in proptest::collection::vec(event(), 1..60),
    ) {
        let mut rig = Rig::new(size);
        // What may leave, in this order: a suffix of it is on its way still.
        let (mut expected, mut taken) = (VecDeque::<Vec<u8>>::new(), VecDeque::new());
        rig.begin(&ALL, None);
        for event in events {
            match event {
                Event::Single(cpu, lens) => {
                    let frames: Vec<_> = lens.into_iter().map(|len| frame(len.max(14))).collect();
                    let packets: Vec<_> = frames.iter().map(|bytes| rig.packet(bytes)).collect();
                    prop_assert_eq!(rig.hand(cpu, packets), 0);
                    expected.extend(frames);
                }
                Event::Merged(cpu, flow, count) => {
                    let frames = segments(flow, count, 1000);
                    let packet =
                        if count % 2 == 0 { rig.merged(&frames) } else { rig.whole(&frames) };
                    prop_assert_eq!(rig.hand(cpu, [packet]), 0);
                    expected.extend(frames);
                }
                Event::Turn => {
                    rig.step();
                }
                Event::Take(count) => {
                    for _ in 0..count {
                        let Some(got) = rig.device.as_mut().and_then(Twin::take) else { break };
                        let (header, bytes) = rig.read(&got);
                        for segment in cut_by_header(header, &bytes) {
                            // Those between were dropped.
                            let at = expected.iter().position(|frame| *frame == segment);
                            prop_assert!(at.is_some(), "{} bytes out of order", segment.len());
                            expected.drain(..=at.unwrap());
                        }
                        taken.push_back(got.id);
                    }
                }
                Event::Give(count, is_latest) => {
                    for _ in 0..count {
                        let id = if is_latest { taken.pop_back() } else { taken.pop_front() };
                        let Some(id) = id else { break };
                        rig.give(id);
                    }
                }
                Event::Lie => {
                    if let Some(device) = &mut rig.device {
                        device.give_bad(u16::MAX);
                    }
                }
                Event::End => {
                    rig.transmit.end();
                    (rig.device, taken) = (None, VecDeque::new());
                    prop_assert_eq!(rig.transmit.slots.free.len(), usize::from(size));
                }
                Event::Begin(mut bits, packed, mtu) => {
                    bits.extend(packed.then_some(VIRTIO_F_RING_PACKED));
                    rig.begin(&bits, mtu);
                    taken.clear();
                }
            }
        }
        let Rig { transmit, sinks, mut pool, handed, .. } = rig;
        drop(transmit);
        for (sink, handed) in sinks.iter().zip(handed) {
            let counters = sink.counters();
            prop_assert_eq!(counters.packets() + counters.dropped_in_all(), handed);
        }
        prop_assert_eq!(pool.away(), 0);
    }
}
