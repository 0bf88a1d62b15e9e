//! Record of the frames that entered, against which every packet that leaves is checked.

use std::collections::HashMap;

use forebay_buf::Pool;
use forebay_rx::Packet;
use forebay_rx::coalesce::gso::{VirtioNetHdrTunnel, describe_tunnel};
use forebay_rx::coalesce::{
    CoalesceMode, TCP_SEGMENTS_MAX, UDP_SEGMENTS_MAX, innermost, resegment,
};
use forebay_rx::counters::{CoalesceCounters, Counter};
use forebay_rx::hash::FlowHash;
use forebay_rx::packet::Arrival;
use forebay_rx::parse::{
    Checksum, DeviceSum, Fragment, Headers, Link, Network, Transport, Verify, View, parse,
};

const IP_PACKET_BYTES_MAX: usize = 65_535;

/// Frame at its arrival.
struct Entered {
    bytes: Vec<u8>,
    wire_len: u32,
    timestamp_ns: u64,
    hash: FlowHash,
    headers: Headers,
    device_sum: Option<DeviceSum>,
}

/// Bytes of a packet, with its pieces.
fn bytes_of(packet: &Packet) -> Vec<u8> {
    packet.fragments().flatten().copied().collect()
}

impl Entered {
    /// Payload of TCP or UDP, inside a tunnel if it is in one.
    fn payload(&self) -> Vec<u8> {
        let inner = innermost(&self.bytes, self.wire_len, &self.headers);
        View::new(&self.bytes, &inner.unwrap_or(self.headers)).payload().to_vec()
    }

    /// Headers of the frame, parsed with checksums verified.
    fn verified(&self) -> Headers {
        parse(&self.bytes, self.wire_len, self.headers.link, Verify::Checksums)
    }
}

/// All frames in the order of arrival, and counts of those that left.
#[derive(Default)]
pub(crate) struct Ledger {
    entered: Vec<Entered>,
    left: u64,
    packets_left: u64,
    bytes_left: u64,
    /// Last frame of each hash that left.
    last: HashMap<FlowHash, Arrival>,
    /// Last fragment of each pair of addresses that left.
    last_fragment: HashMap<Vec<u8>, Arrival>,
}

impl Ledger {
    pub(crate) fn next_frame(&self) -> u64 {
        self.entered.len() as u64
    }

    pub(crate) fn enter(&mut self, packet: &Packet) {
        let Packet { wire_len, timestamp_ns, hash, headers, device_sum, .. } = packet;
        self.entered.push(Entered {
            bytes: bytes_of(packet),
            wire_len: *wire_len,
            timestamp_ns: *timestamp_ns,
            hash: *hash,
            headers: *headers,
            device_sum: *device_sum,
        });
    }

    /// Counts packets that leave coalescing.
    pub(crate) fn count(&mut self, packets: &[Packet]) {
        self.packets_left += packets.len() as u64;
        self.bytes_left += packets.iter().map(|packet| u64::from(packet.wire_len)).sum::<u64>();
    }

    /// Checks a packet, merged in this mode or alone, and returns its frames.
    pub(crate) fn judge(&mut self, mut packet: Packet, mode: CoalesceMode, pool: &mut Pool) {
        let is_merged = packet.segment_count() > 1;
        assert_eq!(is_merged, packet.gso_size() > 0);
        if is_merged {
            self.judge_whole(&packet);
        }
        let arrivals: Vec<_> = packet.segments().map(|segment| segment.arrival).collect();
        assert_eq!(arrivals.len(), packet.segment_count() as usize);
        assert_eq!(arrivals.last(), Some(&packet.last_arrival()));
        self.judge_order(&packet, &arrivals);
        if let Some(hdr) = describe_tunnel(&mut packet) {
            let VirtioNetHdrTunnel { plain, outer_th_offset, inner_nh_offset } = hdr;
            assert!(outer_th_offset >= 14 + 20 && inner_nh_offset >= outer_th_offset + 8);
            assert!(plain.csum_start >= inner_nh_offset + 20 && plain.hdr_len > plain.csum_start);
            assert!(usize::from(plain.hdr_len) <= packet.frame.data().len());
        }
        let mut segments = Vec::new();
        resegment(packet, &mut segments);
        assert!(segments.iter().map(|segment| segment.arrival).eq(arrivals));
        for segment in segments {
            self.judge_segment(&segment, is_merged, mode);
            self.left += 1;
            pool.put(segment.frame);
        }
    }

    /// Checks that a merged packet is valid if parsed as a received one.
    fn judge_whole(&self, packet: &Packet) {
        let bytes = bytes_of(packet);
        assert_eq!(packet.wire_len as usize, bytes.len());
        let headers = parse(&bytes, packet.wire_len, packet.headers.link, Verify::Checksums);
        let inner = innermost(&bytes, packet.wire_len, &headers);
        assert_eq!(inner.is_some(), packet.is_merged_tunnel());
        match inner {
            None => {
                assert_eq!(headers, packet.headers);
                assert_eq!(headers.l4_checksum, Checksum::Good);
            }
            Some(inner) => {
                let Headers { transport, payload_offset, payload_len, .. } = packet.headers;
                assert_eq!(transport, Transport::Tunnel);
                let outer = Headers { transport, payload_offset, payload_len, ..headers };
                assert_eq!(outer, packet.headers);
                assert_eq!(
                    (payload_offset, payload_len),
                    (inner.payload_offset, inner.payload_len)
                );
                assert_ne!(headers.l4_checksum, Checksum::Bad);
                let inside = &bytes[inner.network_offset.into()..];
                let len = u32::try_from(inside.len()).expect("short");
                let inside = parse(inside, len, Link::Ip, Verify::Checksums);
                assert_eq!((inside.l4_checksum, inside.flaw), (Checksum::Good, None));
            }
        }
        assert_eq!((headers.flaw, headers.fragment), (None, Fragment::Whole));
        assert_eq!(headers.ip_checksum == Checksum::Good, headers.network == Network::Ipv4);
        assert!(bytes.len() - usize::from(headers.network_offset) <= IP_PACKET_BYTES_MAX);
        let headers = inner.unwrap_or(headers);
        let count_max = match headers.transport {
            Transport::Tcp => TCP_SEGMENTS_MAX,
            _ => UDP_SEGMENTS_MAX,
        };
        assert!(packet.segment_count() <= count_max);
        assert_eq!(packet.device_sum, None);
        let mut joined = Vec::new();
        for segment in packet.segments() {
            let entered = &self.entered[segment.arrival.0 as usize];
            assert_eq!(segment.offset as usize, joined.len());
            let payload: Vec<u8> = segment.payload_fragments().flatten().copied().collect();
            assert_eq!(payload, entered.payload());
            assert_eq!(segment.timestamp_ns, entered.timestamp_ns);
            joined.extend(payload);
        }
        assert_eq!(joined, View::new(&bytes, &headers).payload());
    }

    fn judge_order(&mut self, packet: &Packet, arrivals: &[Arrival]) {
        for &arrival in arrivals {
            let last = self.last.insert(packet.hash, arrival);
            assert!(last.is_none_or(|last| arrival.is_after(last)), "{last:?} overtook {packet:?}");
        }
        let view = packet.view();
        let Some(addresses) = view.address_bytes().map(<[u8]>::to_vec) else { return };
        let fragment = self.last_fragment.get(&addresses);
        assert!(fragment.is_none_or(|&fragment| packet.arrival.is_after(fragment)), "{packet:?}");
        if view.is_fragment() && packet.headers.flaw.is_none() {
            self.last_fragment.insert(addresses, packet.arrival);
        }
    }

    fn judge_segment(&self, segment: &Packet, was_merged: bool, mode: CoalesceMode) {
        let entered = &self.entered[segment.arrival.0 as usize];
        assert_eq!(segment.hash, entered.hash);
        assert_eq!(segment.timestamp_ns, entered.timestamp_ns);
        assert_eq!(segment.wire_len, entered.wire_len);
        if !was_merged {
            assert_eq!(segment.headers, entered.headers);
            assert_eq!(segment.device_sum, entered.device_sum);
        }
        if was_merged && mode == CoalesceMode::Lro {
            let bytes = bytes_of(segment);
            let headers = parse(&bytes, segment.wire_len, segment.headers.link, Verify::Checksums);
            assert_eq!(headers, segment.headers);
            assert_eq!(headers.l4_checksum, Checksum::Good);
            assert_eq!(View::new(&bytes, &headers).payload(), entered.payload());
        } else {
            assert_eq!(bytes_of(segment), entered.bytes);
        }
        if was_merged {
            assert_eq!(segment.headers, entered.verified());
        }
    }

    /// Checks that no more frames left than entered, and that the counters agree.
    pub(crate) fn account(&self, counters: &CoalesceCounters) {
        let came = self.entered.len() as u64;
        assert!(self.left <= came);
        assert_eq!(counters.segments_in.get(), came);
        assert_eq!(counters.packets_out.get(), self.packets_left);
        assert_eq!(counters.bytes_out.get(), self.bytes_left);
    }

    /// Checks that everything has left: each packet was refused or flushed, for a counted reason.
    pub(crate) fn close(&self, counters: &CoalesceCounters) {
        self.account(counters);
        assert_eq!(self.left, self.entered.len() as u64);
        let sum = |counters: &[Counter]| counters.iter().map(Counter::get).sum::<u64>();
        let let_go = sum(&counters.flushes);
        assert!(let_go <= self.packets_left);
        assert!(self.packets_left - let_go <= sum(&counters.refused));
    }
}
