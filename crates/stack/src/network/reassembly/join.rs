//! Turns a complete datagram into one packet (`ip_frag_reasm`, `ip6_frag_reasm`).

use forebay_buf::{Frame, Pool};
use forebay_rx::packet::Packet;
use forebay_rx::parse::checksum::{Sum, judge};
use forebay_rx::parse::{Checksum, Fragment, Headers, Network, Transport, Verify, parse_into};

use super::fragment::fragment_header;
use super::pieces::Pieces;
use crate::network::NetworkDrop;

const IPV6_BYTES: usize = 40;
const FRAGMENT_HEADER_BYTES: usize = 8;

/// Complete pieces that do not form a valid datagram, and the reason.
#[derive(Debug)]
pub(super) struct NoDatagram {
    pub(super) pieces: Pieces,
    pub(super) why: NetworkDrop,
}

/// Header fields of the datagram.
#[derive(Clone, Copy, Debug)]
struct WholeDatagram {
    network: Network,
    network_offset: usize,
    /// Offsets of the fragment header to be removed, and of the field that announces it; IPv6 only.
    fragment_header: Option<(usize, usize)>,
    /// Value of the length field.
    len_field: u16,
    /// Bits to be set in the ECN field.
    ecn: u8,
    is_df: bool,
    /// Length of the frame.
    total_len: u32,
}

/// Joins complete pieces into one packet: in one frame if the pool has one that is large enough,
/// else in their own frames, chained. Frames no longer needed go back to the pool.
///
/// The headers are the first fragment's. Arrival and timestamp are those of the latest fragment.
pub(super) fn join(pieces: Pieces, pool: &mut Pool) -> Result<Packet, Box<NoDatagram>> {
    let whole = match WholeDatagram::of(&pieces) {
        Ok(whole) => whole,
        Err(why) => return Err(Box::new(NoDatagram { pieces, why })),
    };
    let latest = pieces.latest().map(|packet| (packet.arrival, packet.timestamp_ns));
    let mut packet = match (pool.allocate(whole.total_len), pieces.head()) {
        (Some(frame), Some((head, _))) => {
            let flat = Packet::received(frame, head.arrival, whole.total_len, head.headers.link);
            let mut flat = Packet { hash: head.hash, ..flat };
            flatten(&mut flat.frame, &pieces, &whole);
            pieces.into_packets().into_iter().for_each(|packet| pool.put(packet.frame));
            flat
        }
        (unused, _) => {
            unused.into_iter().for_each(|frame| pool.put(frame));
            let why = NetworkDrop::FragInvalid;
            let Some(chain) = pieces.into_chain() else {
                return Err(Box::new(NoDatagram { pieces: Pieces::default(), why }));
            };
            with_one_header(chain, &whole)
        }
    };
    if let Some((arrival, timestamp_ns)) = latest {
        (packet.arrival, packet.timestamp_ns) = (arrival, timestamp_ns);
    }
    whole.write_header(packet.frame.data_mut());
    let Packet { frame, headers, .. } = &mut packet;
    *headers = Headers { link: headers.link, ..Headers::default() };
    parse_into(headers, frame.data(), whole.total_len, None, Verify::Checksums);
    if packet.is_chain() {
        judge_chain(&mut packet);
    }
    packet.headers.fragment = Fragment::Atomic;
    Ok(packet)
}

impl WholeDatagram {
    fn of(pieces: &Pieces) -> Result<Self, NetworkDrop> {
        let invalid = NetworkDrop::FragInvalid;
        let ecn = joined_ecn(pieces.ecn).ok_or(invalid)?;
        let (head, data_at) = pieces.head().ok_or(invalid)?;
        let network = head.headers.network;
        let network_offset = usize::from(head.headers.network_offset);
        let (data_at, len) = (usize::from(data_at), pieces.len_bytes() as usize);
        let (fragment_header, before_data, before_len) = if network == Network::Ipv6 {
            let found = fragment_header(head.frame.data(), network_offset).ok_or(invalid)?;
            (Some((found.at, found.named_at)), found.at, network_offset + IPV6_BYTES)
        } else {
            (None, data_at, network_offset)
        };
        // A datagram longer than the length field allows is invalid.
        let len_field = u16::try_from(before_data - before_len + len).map_err(|_| invalid)?;
        Ok(Self {
            network,
            network_offset,
            fragment_header,
            len_field,
            ecn,
            is_df: pieces.is_df(),
            // Lossless: headers and a datagram of at most 64 KiB.
            total_len: u32::try_from(before_data + len).map_err(|_| invalid)?,
        })
    }

    /// Updates the header, without the fragment header, to describe the whole packet.
    fn write_header(&self, bytes: &mut [u8]) {
        let Some(header) = bytes.get_mut(self.network_offset..) else { return };
        let [len_high, len_low] = self.len_field.to_be_bytes();
        if self.network == Network::Ipv6 {
            if let Some([_, class, _, _, high, low, ..]) = header.first_chunk_mut::<IPV6_BYTES>() {
                *class |= self.ecn << 4;
                (*high, *low) = (len_high, len_low);
            }
            return;
        }
        let header_len = header.first().map_or(0, |first| usize::from(first & 0x0f) * 4);
        let Some(header) = header.get_mut(..header_len) else { return };
        if let Some([_, tos, high, low, _, _, flags, offset, _, _, sum @ ..]) =
            header.first_chunk_mut::<12>()
        {
            const DO_NOT_FRAGMENT: u8 = 0x40;
            *tos |= self.ecn;
            (*high, *low) = (len_high, len_low);
            (*flags, *offset) = (if self.is_df { DO_NOT_FRAGMENT } else { 0 }, 0);
            *sum = [0; 2];
        }
        let sum = !Sum::of(header).fold();
        if let Some([.., high, low]) = header.first_chunk_mut::<12>() {
            [*high, *low] = sum.to_be_bytes();
        }
    }
}

/// ECN field of the whole datagram, from those of the fragments (RFC 3168, section 5.3; the
/// kernel's `ip_frag_ecn_table`): a CE mark on any fragment is kept. `None` if ECT and not-ECT
/// fragments are mixed.
fn joined_ecn(bits: u8) -> Option<u8> {
    const NOT_ECT: u8 = 1 << 0;
    const CE: u8 = 1 << 3;
    const CONGESTION_EXPERIENCED: u8 = 3;
    if bits & NOT_ECT != 0 && bits != NOT_ECT {
        return None;
    }
    Some(if bits & CE != 0 { CONGESTION_EXPERIENCED } else { 0 })
}

/// Copies all pieces into one frame, which must be large enough.
fn flatten(frame: &mut Frame, pieces: &Pieces, whole: &WholeDatagram) {
    frame.set_len(whole.total_len);
    let Some((head, data_at)) = pieces.head() else { return };
    let before_data = whole.fragment_header.map_or(data_at.into(), |(at, _)| at);
    let mut rest = frame.data_mut();
    let headers = head.frame.data().get(..before_data).unwrap_or_default();
    for bytes in std::iter::once(headers).chain(pieces.data()) {
        let Some((to, behind)) = rest.split_at_mut_checked(bytes.len()) else { return };
        to.copy_from_slice(bytes);
        rest = behind;
    }
    if let Some((at, named_at)) = whole.fragment_header {
        name_next(frame, named_at, head.frame.data().get(at).copied());
    }
}

/// Removes the fragment header from the first frame of a chain.
fn with_one_header(mut chain: Packet, whole: &WholeDatagram) -> Packet {
    chain.wire_len = whole.total_len;
    chain.device_sum = None;
    chain.set_gso_size(0);
    let Some((at, named_at)) = whole.fragment_header else { return chain };
    let next = chain.frame.data().get(at).copied();
    name_next(&mut chain.frame, named_at, next);
    if at + FRAGMENT_HEADER_BYTES <= chain.frame.data().len() {
        chain.frame.data_mut().copy_within(..at, FRAGMENT_HEADER_BYTES);
        chain.frame.pull(8);
    }
    chain
}

/// Makes the header before the fragment header announce the header after it.
fn name_next(frame: &mut Frame, named_at: usize, next: Option<u8>) {
    if let (Some(field), Some(next)) = (frame.data_mut().get_mut(named_at), next) {
        *field = next;
    }
}

/// Validates the transport checksum over all frames of a chain, as parsing has seen only the first.
/// All pieces but the last have an even length, so 16-bit words do not cross frames.
fn judge_chain(packet: &mut Packet) {
    let Headers { transport, transport_offset, payload_offset, payload_len, .. } = packet.headers;
    if !matches!(transport, Transport::Tcp | Transport::Udp)
        || packet.headers.l4_checksum != Checksum::Unknown
    {
        return;
    }
    let bytes = packet.frame.data();
    let Some(header) = bytes.get(transport_offset.into()..) else { return };
    let is_unsummed = header.get(6..8) == Some([0; 2].as_slice());
    let Some(addresses) = packet.view().address_bytes() else { return };
    if transport == Transport::Udp && is_unsummed {
        return;
    }
    let len = usize::from(payload_offset - transport_offset) + usize::from(payload_len);
    let mut sum = Sum::of(addresses).plus_word(packet.headers.protocol.into()).plus_len(len);
    let mut left = len;
    for piece in std::iter::once(header).chain(packet.frame.followers().map(Frame::data)) {
        let piece = piece.get(..left.min(piece.len())).unwrap_or_default();
        sum = sum.plus(Sum::of(piece));
        left -= piece.len();
    }
    packet.headers.l4_checksum = judge(sum);
}
