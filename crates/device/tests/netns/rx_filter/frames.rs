//! Frames of every kind that the filter may meet, intact and damaged.

use forebay_rx::parse::Link;
use proptest::prelude::*;
use proptest::sample::select;

/// Parts of a frame, outermost first. The parts need not be consistent.
#[derive(Clone, Debug)]
struct Pieces {
    link: Link,
    tags: Vec<u16>,
    ethertype: Option<u16>,
    packet: Packet,
    ports: [u16; 2],
    payload: Vec<u8>,
    /// Type of an ICMP error, and the packet that it is about.
    quoted: (u8, Packet),
}

#[derive(Clone, Debug)]
enum Packet {
    V4 { version_and_words: u8, fragment: u16, protocol: u8 },
    V6 { version: u8, extensions: Vec<(u8, u8)>, protocol: u8 },
}

/// Any frame, with its link type.
pub(crate) fn any_frame() -> impl Strategy<Value = (Link, Vec<u8>)> {
    let damage = proptest::option::weighted(0.3, (any::<prop::sample::Index>(), any::<u8>()));
    let cut = proptest::option::weighted(0.3, any::<prop::sample::Index>());
    (any_pieces(), damage, cut).prop_map(|(pieces, damage, cut)| {
        let mut frame = pieces.written();
        if let Some((at, to)) = damage {
            *at.get_mut(&mut frame) = to;
        }
        if let Some(len) = cut {
            frame.truncate(len.index(frame.len()));
        }
        (pieces.link, frame)
    })
}

/// Ports at the limits of the tested lists, and their neighbours.
pub(crate) const PORTS: [u16; 12] = [0, 1, 52, 53, 54, 443, 999, 1000, 1500, 2000, 2001, u16::MAX];

fn any_pieces() -> impl Strategy<Value = Pieces> {
    let link = prop_oneof![4 => Just(Link::Ethernet), 1 => Just(Link::Ip)];
    let tags = prop::collection::vec(select(vec![0x8100, 0x88a8, 0x9100]), 0..=3);
    let wrong = select(vec![0x0800, 0x86dd, 0x0806, 0x0600, 0x05dc, 0x8847]);
    let ethertype = proptest::option::weighted(0.1, wrong);
    let port = prop_oneof![9 => select(&PORTS[..]), 1 => any::<u16>()];
    let payload = prop::collection::vec(any::<u8>(), 4..40);
    let quoted = (0..=13_u8, any_packet(vec![6, 6, 6, 17]));
    let packet = any_packet(vec![17, 6, 17, 6, 1, 58, 1, 58, 132, 59, 0, 44, 51]);
    (link, tags, ethertype, packet, [port.clone(), port], payload, quoted).prop_map(
        |(link, tags, ethertype, packet, ports, payload, quoted)| Pieces {
            link,
            tags,
            ethertype,
            packet,
            ports,
            payload,
            quoted,
        },
    )
}

fn any_packet(protocols: Vec<u8>) -> impl Strategy<Value = Packet> {
    let protocol = select(protocols);
    let version_and_words = prop_oneof![
        6 => Just(0x45_u8), 2 => 0x46..=0x4f_u8, 1 => 0x40..=0x44_u8, 1 => any::<u8>(),
    ];
    let fragment = prop_oneof![
        8 => select(vec![0, 0x4000, 0x8000]), 2 => select(vec![0x2000, 0x0001, 0x1fff, 0x2001]),
    ];
    let extension = (select(vec![0, 43, 60, 0, 43, 60, 44, 51, 135]), 0..=3_u8);
    let version = prop_oneof![9 => Just(6_u8), 1 => 0..16_u8];
    let v4 = (version_and_words, fragment, protocol.clone()).prop_map(
        |(version_and_words, fragment, protocol)| Packet::V4 {
            version_and_words,
            fragment,
            protocol,
        },
    );
    let v6 = (version, prop::collection::vec(extension, 0..=5), protocol)
        .prop_map(|(version, extensions, protocol)| Packet::V6 { version, extensions, protocol });
    prop_oneof![v4, v6]
}

impl Pieces {
    fn written(&self) -> Vec<u8> {
        let mut frame = Vec::new();
        if self.link == Link::Ethernet {
            frame.extend([2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2]);
            for (number, tag) in (1_u16..).zip(&self.tags) {
                frame.extend(tag.to_be_bytes());
                frame.extend(number.to_be_bytes());
            }
            let matching = match self.packet {
                Packet::V4 { .. } => 0x0800,
                Packet::V6 { .. } => 0x86dd_u16,
            };
            frame.extend(self.ethertype.unwrap_or(matching).to_be_bytes());
        }
        let payload_len = u16::try_from(self.payload.len()).unwrap();
        self.packet.write_to(&mut frame, payload_len);
        if matches!(self.packet.protocol(), 1 | 58) {
            let (kind, quoted) = &self.quoted;
            frame.extend([*kind, 0, 0, 0, 0, 0, 0, 0]);
            quoted.write_to(&mut frame, payload_len);
        }
        frame.extend(self.ports.iter().flat_map(|port| port.to_be_bytes()));
        // Consistent with TCP (a header of 20 bytes) and UDP (the length of the rest).
        frame.extend(u16::try_from(self.payload.len() + 4).unwrap().to_be_bytes());
        frame.extend(&self.payload);
        frame
    }
}

impl Packet {
    fn protocol(&self) -> u8 {
        let (Self::V4 { protocol, .. } | Self::V6 { protocol, .. }) = self;
        *protocol
    }

    fn write_to(&self, frame: &mut Vec<u8>, payload_len: u16) {
        match self {
            Self::V4 { version_and_words, fragment, protocol } => {
                let header_len = usize::from(version_and_words & 0x0f) * 4;
                let total_len = u16::try_from(header_len).unwrap() + 6 + payload_len;
                frame.extend([*version_and_words, 0]);
                frame.extend(total_len.to_be_bytes());
                frame.extend([0, 1]);
                frame.extend(fragment.to_be_bytes());
                frame.extend([64, *protocol, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]);
                frame.extend(std::iter::repeat_n(1, header_len.saturating_sub(20)));
            }
            Self::V6 { version, extensions, protocol } => {
                let chain_len: usize =
                    extensions.iter().map(|&(_, len)| extension_bytes(len)).sum();
                let kinds = extensions.iter().map(|&(kind, _)| kind).chain([*protocol]);
                let mut next = kinds.clone();
                frame.extend([version << 4, 0, 0, 0]);
                frame.extend((u16::try_from(chain_len).unwrap() + 6 + payload_len).to_be_bytes());
                frame.extend([next.next().unwrap(), 64]);
                frame.extend([0x20; 32]);
                for (&(_, len), kind) in extensions.iter().zip(next) {
                    frame.extend([kind, len]);
                    frame.extend(std::iter::repeat_n(0, extension_bytes(len) - 2));
                }
            }
        }
    }
}

fn extension_bytes(len: u8) -> usize {
    (usize::from(len) + 1) * 8
}
