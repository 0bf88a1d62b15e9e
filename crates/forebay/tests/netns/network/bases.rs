//! Valid frames, and every single-field change of them.

use std::net::Ipv6Addr;

use crate::network::addresses::{DESTINATIONS_V4, DESTINATIONS_V6, SOURCES_V4, SOURCES_V6};
use crate::network::frames::{
    ETHERNET_BYTES, MAC, OWN_V4, OWN_V6, PEER_MAC, UDP, parsed, sum_up_header, udp_checksum,
};

/// A valid frame; any byte of its headers may be changed.
pub(crate) struct Base {
    pub(crate) frame: Vec<u8>,
    /// Offset of its UDP payload.
    pub(crate) header_len: usize,
    network_offset: usize,
    is_ipv6: bool,
}

/// Frames with many headers.
pub(crate) fn bases() -> Vec<Base> {
    let route_and_times =
        [7, 7, 4, 0, 0, 0, 0, 68, 12, 5, 1, 0, 0, 0, 0, 0, 0, 0, 0, 148, 4, 0, 0, 0];
    let headers: [&[u8]; 4] = [
        &[60, 0, 5, 2, 0, 0, 1, 0], // hop-by-hop options: router alert
        &[43, 1, 0x1e, 3, 1, 2, 3, 4, 1, 4, 0, 0, 0, 0, 0, 0], // destination options
        &[44, 0, 0, 0, 0, 0, 0, 0], // routing, where it has led to
        &[17, 0, 0, 0, 1, 2, 3, 4], // an atomic fragment
    ];
    vec![
        Base::ipv4(&[], &[]),
        Base::ipv4(&[0x81, 0, 0xe0, 0], &[]),
        Base::ipv4(&[], &route_and_times),
        Base::ipv6(UDP, &[]),
        Base::ipv6(0, &headers.concat()),
    ]
}

/// Options and padding in a header, around the maximum number.
pub(crate) fn options_in_a_row() -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    for kind in [0, 60] {
        for count in 7..=10 {
            let options = [0x1e, 2, 0, 0].repeat(count);
            let padding = [[1, 0].as_slice(), &[0; 2], &[1, 2, 0, 0]];
            frames.extend(padding.map(|padding| (kind, [&options, padding].concat())));
        }
        for count in 4..=9 {
            let zeros = vec![0; count];
            let padded = [&[1, u8::try_from(count).unwrap()], zeros.as_slice()].concat();
            frames.push((kind, zeros.clone()));
            frames.push((kind, [&zeros, [0x1e, 0].as_slice(), &zeros].concat()));
            frames.push((kind, [[0].as_slice(), &padded].concat()));
            frames.push((kind, padded));
        }
    }
    let framed = frames.into_iter().map(|(kind, options)| {
        let mut header = [[UDP, 0].as_slice(), &options].concat();
        if !header.len().is_multiple_of(8) {
            header.extend([0x1e, 0]);
        }
        while !header.len().is_multiple_of(8) {
            header.push(0);
        }
        header[1] = u8::try_from(header.len() / 8 - 1).unwrap();
        let base = Base::ipv6(kind, &header);
        let mut frame = base.frame.clone();
        base.sum_up(&mut frame);
        frame
    });
    framed.collect()
}

/// Frames from every address in the lists to every other.
pub(crate) fn address_pairs() -> Vec<Vec<u8>> {
    let (v4, v6) = (Base::ipv4(&[], &[]), Base::ipv6(UDP, &[]));
    let pairs_v4 = SOURCES_V4.iter().flat_map(|source| {
        DESTINATIONS_V4.iter().map(move |destination| [source.as_slice(), destination].concat())
    });
    let octets = |address: &&str| parsed(address).octets();
    let pairs_v6 = SOURCES_V6.iter().flat_map(|source| {
        let from = octets(source);
        DESTINATIONS_V6.iter().map(move |destination| [from, octets(destination)].concat())
    });
    let with = |base: &Base, at: usize, pair: Vec<u8>| {
        let mut frame = base.frame.clone();
        frame[at..at + pair.len()].copy_from_slice(&pair);
        base.sum_up(&mut frame);
        frame
    };
    let framed_v4 = pairs_v4.map(|pair| with(&v4, ETHERNET_BYTES + 12, pair));
    let framed_v6 = pairs_v6.map(|pair| with(&v6, ETHERNET_BYTES + 8, pair));
    framed_v4.chain(framed_v6).collect()
}

impl Base {
    fn ipv4(tags: &[u8], options: &[u8]) -> Self {
        let header_len = u8::try_from(20 + options.len()).unwrap();
        let total_len = header_len + 8 + 16;
        let [source, destination] = [[10, 9, 0, 2], OWN_V4[0].0.octets()];
        let mut packet = vec![0x40 + header_len / 4, 0, 0, total_len, 1, 2, 0, 0, 64, UDP, 0, 0];
        packet.extend([source, destination].concat());
        packet.extend(options);
        Self::new(&[tags, &[8, 0]].concat(), packet, false)
    }

    fn ipv6(next: u8, headers: &[u8]) -> Self {
        let payload_len = u8::try_from(headers.len() + 8 + 16).unwrap();
        let mut packet = vec![0x60, 0, 0, 0, 0, payload_len, next, 64];
        packet.extend([parsed("fd00:9::2").octets(), OWN_V6[0].0.octets()].concat());
        packet.extend(headers);
        Self::new(&[0x86, 0xdd], packet, true)
    }

    fn new(behind_macs: &[u8], mut headers: Vec<u8>, is_ipv6: bool) -> Self {
        let link = [MAC.as_slice(), &PEER_MAC, behind_macs].concat();
        let network_offset = link.len();
        headers.extend([3, 232, 0, 53, 0, 24, 0, 0]);
        let frame = [link.as_slice(), &headers, &[0x5a; 16]].concat();
        Self { header_len: frame.len() - 16, frame, network_offset, is_ipv6 }
    }

    /// Corrects checksums after a change. UDP over IPv4 has none here.
    pub(crate) fn sum_up(&self, frame: &mut [u8]) {
        let packet = &mut frame[self.network_offset..];
        if !self.is_ipv6 {
            return sum_up_header(packet);
        }
        let address =
            |at: usize| Ipv6Addr::from(<[u8; 16]>::try_from(&packet[at..at + 16]).unwrap());
        let (source, destination) = (address(8), address(24));
        let udp = &mut frame[self.header_len - 8..];
        udp[6..8].fill(0);
        let len = u16::from_be_bytes([udp[4], udp[5]]);
        let checksum = udp_checksum(udp, len, source.into(), destination.into());
        udp[6..8].copy_from_slice(&checksum.to_be_bytes());
    }
}
