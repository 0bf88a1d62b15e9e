//! A segment to be sent: TCP and IP headers in front of a payload.

use forebay_buf::Pool;
use forebay_rx::packet::{Arrival, Packet};

use super::super::fast_open::CookieOption;
use super::super::flow::Flow;
use super::super::seq::{Seq, len_u32};
use super::options::Options;
use super::segment::{Flags, HEADER_BYTES};
use crate::network::compose::{DEFAULT_TTL, TcpHeaders, emit_tcp};

/// Fields of a segment to be sent, and its payload in up to two parts.
#[derive(Clone, Copy, Debug)]
pub(in crate::tcp) struct Outgoing<'a> {
    pub(in crate::tcp) flow: &'a Flow,
    pub(in crate::tcp) seq: Seq,
    pub(in crate::tcp) ack: Seq,
    pub(in crate::tcp) flags: Flags,
    /// Window, scaled already.
    pub(in crate::tcp) window: u16,
    pub(in crate::tcp) urgent: u16,
    pub(in crate::tcp) options: Options,
    /// Fast Open option, of a SYN or a SYN-ACK.
    pub(in crate::tcp) fast_open: Option<&'a CookieOption>,
    /// DSCP and ECN bits.
    pub(in crate::tcp) tos: u8,
    /// Time to live, or hop limit.
    pub(in crate::tcp) ttl: u8,
    pub(in crate::tcp) payload: [&'a [u8]; 2],
    /// Payload of each segment but the last, if the packet has several; else 0 (GSO).
    pub(in crate::tcp) segment_bytes: u32,
}

/// Builds the packet, beginning with its IP header; `None` if no frame is free.
pub(in crate::tcp) fn emit(outgoing: &Outgoing<'_>, pool: &mut Pool) -> Option<Packet> {
    let mut options = outgoing.options.write();
    if let Some(option) = outgoing.fast_open {
        options.put_fast_open(option);
    }
    let [first, second] = outgoing.payload;
    let header_len = HEADER_BYTES + options.as_slice().len();
    let len = header_len + first.len() + second.len();
    let mut frame = pool.allocate(len_u32(len))?;
    frame.set_len(len_u32(len));
    let (header, payload) = frame.data_mut().split_at_mut(header_len);
    let (fields, room) = header.split_at_mut(HEADER_BYTES);
    room.copy_from_slice(options.as_slice());
    let (to_first, to_second) = payload.split_at_mut(first.len());
    to_first.copy_from_slice(first);
    to_second.copy_from_slice(second);
    if let Some(fields) = fields.first_chunk_mut() {
        *fields = outgoing.fields(header_len);
    }
    let headers = TcpHeaders {
        source: outgoing.flow.ours,
        destination: outgoing.flow.theirs,
        ttl: outgoing.ttl,
        tos: outgoing.tos,
        header_len: u8::try_from(header_len).unwrap_or(u8::MAX),
        is_gso: outgoing.segment_bytes > 0,
    };
    match emit_tcp(&mut frame, &headers) {
        Ok(described) => {
            let wire_len = frame.len_bytes();
            let mut packet = Packet::received(frame, Arrival(0), wire_len, described.link);
            packet.headers = described;
            packet.set_gso_size(u16::try_from(outgoing.segment_bytes).unwrap_or(0));
            Some(packet)
        }
        Err(_) => {
            pool.put(frame);
            None
        }
    }
}

impl<'a> Outgoing<'a> {
    /// A segment without flags, options and payload.
    pub(in crate::tcp) fn empty(flow: &'a Flow, seq: Seq) -> Self {
        Self {
            flow,
            seq,
            ack: Seq(0),
            flags: Flags::default(),
            window: 0,
            urgent: 0,
            options: Options::default(),
            fast_open: None,
            tos: 0,
            ttl: DEFAULT_TTL,
            payload: [&[], &[]],
            segment_bytes: 0,
        }
    }

    /// Segments of the packet.
    pub(in crate::tcp) fn segments(&self) -> u64 {
        let len_bytes: usize = self.payload.iter().map(|part| part.len()).sum();
        match self.segment_bytes {
            0 => 1,
            size_bytes => (len_bytes as u64).div_ceil(size_bytes.into()),
        }
    }

    fn fields(&self, header_len: usize) -> [u8; HEADER_BYTES] {
        let [p0, p1] = self.flow.ours.port().to_be_bytes();
        let [q0, q1] = self.flow.theirs.port().to_be_bytes();
        let [s0, s1, s2, s3] = self.seq.0.to_be_bytes();
        let [a0, a1, a2, a3] = self.ack.0.to_be_bytes();
        let [w0, w1] = self.window.to_be_bytes();
        let [u0, u1] = self.urgent.to_be_bytes();
        let offset = u8::try_from(header_len / 4 * 16).unwrap_or(u8::MAX);
        let flags = self.flags.0;
        [p0, p1, q0, q1, s0, s1, s2, s3, a0, a1, a2, a3, offset, flags, w0, w1, 0, 0, u0, u1]
    }
}
