//! Headers of a segment, rewritten in place: the fields that differ between the segments of a
//! packet and the packet itself.

use super::lro::Newest;
use super::wire::{IPV4_BYTES, IPV6_BYTES, TCP_BYTES, UDP_BYTES};
use crate::parse::checksum::Sum;
use crate::parse::{Headers, Network, Transport, View};

const IPV4_ID: usize = 4;

/// Header bytes of a segment that was a candidate for merging, so that all fields exist.
pub(super) struct HeaderBytes<'a> {
    bytes: &'a mut [u8],
    headers: &'a Headers,
}

impl<'a> HeaderBytes<'a> {
    /// Wraps `bytes`, which begin with the headers described by `headers`.
    pub(super) fn new(bytes: &'a mut [u8], headers: &'a Headers) -> Self {
        let header_len = usize::from(headers.payload_offset).min(bytes.len());
        let (bytes, _) = bytes.split_at_mut(header_len);
        Self { bytes, headers }
    }

    /// Sets the lengths of the IP and UDP headers, the IPv4 id if one is given, and the IPv4 header
    /// checksum.
    pub(super) fn set_lengths(&mut self, payload_len: u32, id: Option<u16>) {
        let Headers { network_offset, transport_offset, payload_offset, .. } = *self.headers;
        let transport_len = u32::from(payload_offset - transport_offset) + payload_len;
        let ip_len = u32::from(transport_offset) - u32::from(network_offset) + transport_len;
        match self.headers.network {
            Network::Ipv4 => {
                let place = network_offset.into()..transport_offset.into();
                let header = self.bytes.get_mut(place).unwrap_or_default();
                set_ipv4(header, ip_len, id);
            }
            Network::Ipv6 => {
                let Some(header) = self.network::<IPV6_BYTES>() else { return };
                [header[4], header[5]] = len_field(ip_len.saturating_sub(40));
            }
            Network::Other => {}
        }
        if self.headers.transport == Transport::Udp
            && let Some(header) = self.transport::<UDP_BYTES>()
        {
            [header[4], header[5]] = len_field(transport_len);
        }
    }

    /// Sets TCP's sequence number.
    pub(super) fn set_sequence(&mut self, sequence: u32) {
        if let Some(header) = self.transport::<TCP_BYTES>() {
            [header[4], header[5], header[6], header[7]] = sequence.to_be_bytes();
        }
    }

    /// Sets the TCP flags in `mask` to those of `flags`.
    pub(super) fn set_flags(&mut self, mask: u8, flags: u8) {
        if let Some(header) = self.transport::<TCP_BYTES>() {
            header[13] = header[13] & !mask | flags & mask;
        }
    }

    /// Sets the fields that advance in `lro` mode: acknowledgement, window, timestamps.
    pub(super) fn set_newest(&mut self, newest: &Newest) {
        if let Some(header) = self.transport::<TCP_BYTES>() {
            [header[8], header[9], header[10], header[11]] = newest.acknowledgement.to_be_bytes();
            [header[14], header[15]] = newest.window.to_be_bytes();
        }
        let start = usize::from(self.headers.transport_offset) + TCP_BYTES;
        let options = self.bytes.get_mut(start..).unwrap_or_default();
        if let (Some(field), Some(timestamps)) = (options.first_chunk_mut(), newest.timestamps) {
            *field = timestamps.to_bytes();
        }
    }

    /// Sets the transport checksum for a payload of this length and sum.
    pub(super) fn set_checksum(&mut self, payload_len: u32, payload: Sum) {
        let sum = pseudo_sum(self.bytes, self.headers, payload_len).plus(payload);
        self.set_checksum_field([0; 2]);
        let header = self.bytes.get(self.headers.transport_offset.into()..).unwrap_or_default();
        let field = match (!sum.plus(Sum::of(header)).fold(), self.headers.transport) {
            (0, Transport::Udp) => u16::MAX, // 0 means no checksum (RFC 768)
            (field, _) => field,
        };
        self.set_checksum_field(field.to_be_bytes());
    }

    /// Sets the checksum field to the pseudo header's sum, for a device that adds the rest.
    pub(super) fn set_partial_checksum(&mut self, payload_len: u32) {
        let sum = pseudo_sum(self.bytes, self.headers, payload_len);
        let field = sum.fold().to_be_bytes();
        self.set_checksum_field(field);
    }

    fn set_checksum_field(&mut self, [high, low]: [u8; 2]) {
        let is_tcp = self.headers.transport == Transport::Tcp;
        let at = usize::from(self.headers.transport_offset) + if is_tcp { 16 } else { 6 };
        if let Some(field) = self.bytes.get_mut(at..).and_then(<[u8]>::first_chunk_mut) {
            *field = [high, low];
        }
    }

    fn network<const N: usize>(&mut self) -> Option<&mut [u8; N]> {
        self.bytes.get_mut(self.headers.network_offset.into()..)?.first_chunk_mut()
    }

    fn transport<const N: usize>(&mut self) -> Option<&mut [u8; N]> {
        self.bytes.get_mut(self.headers.transport_offset.into()..)?.first_chunk_mut()
    }
}

/// Sets an IPv4 header's total length, and its id if one is given, and makes its checksum right.
pub(super) fn set_ipv4(header: &mut [u8], len: u32, id: Option<u16>) {
    let Some((header, options)) = header.split_first_chunk_mut::<IPV4_BYTES>() else {
        return;
    };
    [header[2], header[3]] = len_field(len);
    if let Some(id) = id {
        [header[IPV4_ID], header[IPV4_ID + 1]] = id.to_be_bytes();
    }
    [header[10], header[11]] = [0; 2];
    let mut sum = Sum::of_words(header.as_chunks().0);
    if !options.is_empty() {
        sum = sum.plus(Sum::of(options));
    }
    [header[10], header[11]] = (!sum.fold()).to_be_bytes();
}

/// A length as it stands in a header.
pub(super) fn len_field(len: u32) -> [u8; 2] {
    u16::try_from(len).unwrap_or(u16::MAX).to_be_bytes()
}

/// Sum of the pseudo header: addresses, protocol, and length of the transport's header and payload.
pub(super) fn pseudo_sum(bytes: &[u8], headers: &Headers, payload_len: u32) -> Sum {
    let Headers { transport_offset, payload_offset, protocol, .. } = *headers;
    let addresses = View::new(bytes, headers).address_bytes().unwrap_or_default();
    let len = usize::from(payload_offset - transport_offset) + payload_len as usize;
    Sum::of_addresses(addresses).plus_word(protocol.into()).plus_len(len)
}

/// IPv4 id of a packet.
pub(super) fn ipv4_id(bytes: &[u8], headers: &Headers) -> Option<u16> {
    let at = usize::from(headers.network_offset) + IPV4_ID;
    let field = bytes.get(at..)?.first_chunk().copied()?;
    (headers.network == Network::Ipv4).then(|| u16::from_be_bytes(field))
}
