//! Headers around the packets of a flow.

use forebay_rx::parse::checksum::Sum;

use crate::flows::Change;

/// Headers outside.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tunnel {
    Nothing,
    Ipip,
    /// GRE with a key and a checksum, over IPv6, which may have a routing header without segments
    /// left.
    Gre6 {
        is_routed: bool,
    },
    Vxlan {
        is_summed: bool,
    },
    /// VXLAN-GPE, behind which comes the IP packet.
    VxlanGpe,
    /// GENEVE with an option of eight bytes, behind which comes an Ethernet frame.
    Geneve,
    Pppoe,
    /// Deeper than is merged.
    IpipInIpip,
}

impl Tunnel {
    /// The frame with the headers outside, which go before what lies from `network` on.
    pub(crate) fn wrap(self, bytes: &[u8], network: usize, id: u16, change: Change) -> Vec<u8> {
        let (link, packet) = bytes.split_at(network.min(bytes.len()));
        let is_v6 = packet.first().is_some_and(|first| first >> 4 == 6);
        let ip = if is_v6 { 41 } else { 4 };
        let ethertype = if is_v6 { [0x86, 0xdd] } else { [8, 0] };
        let (outside, around): ([u8; 2], Vec<u8>) = match self {
            Self::Nothing => return bytes.to_vec(),
            Self::Ipip => ([8, 0], ipv4(ip, id, packet, change)),
            Self::Gre6 { is_routed } => {
                let head = [0xa0, 0, ethertype[0], ethertype[1], 0, 0, 0, 0, 0, 0, 0, 9];
                let mut gre = [&head, packet].concat();
                let sum = !Sum::of(&gre).fold();
                gre[4..6].copy_from_slice(&sum.to_be_bytes());
                let routing = [&[47, 2, 4, 0, 0, 0, 0, 0], &[0xfe; 16][..], &gre].concat();
                let outside =
                    if is_routed { ipv6(43, &routing, change) } else { ipv6(47, &gre, change) };
                ([0x86, 0xdd], outside)
            }
            Self::Vxlan { is_summed } => {
                let inner = [&[2; 12], &ethertype[..], packet].concat();
                let vxlan = [&[8, 0, 0, 0, 0, 0, 7, 0], &inner[..]].concat();
                let mut udp = udp(4789, &vxlan);
                if is_summed {
                    let sum = Sum::of(&udp).plus(Sum::of(&ADDRESSES)).plus_word(17);
                    let sum = !sum.plus_len(udp.len()).fold();
                    udp[6..8].copy_from_slice(&if sum == 0 { u16::MAX } else { sum }.to_be_bytes());
                }
                ([8, 0], ipv4(17, id, &udp, change))
            }
            Self::VxlanGpe => {
                let next = if is_v6 { 2 } else { 1 };
                let gpe = [&[0x0c, 0, 0, next, 0, 0, 7, 0], packet].concat();
                ([8, 0], ipv4(17, id, &udp(4790, &gpe), change))
            }
            Self::Geneve => {
                let head = [2, 0, 0x65, 0x58, 0, 0, 7, 0, 1, 2, 3, 1, 9, 9, 9, 9];
                let geneve = [&head, &[2; 12][..], &ethertype, packet].concat();
                ([8, 0], ipv4(17, id, &udp(6081, &geneve), change))
            }
            Self::Pppoe => {
                let len = u16_of(packet.len() + 2).to_be_bytes();
                let protocol = if is_v6 { 0x57 } else { 0x21 };
                let mut head = [0x11, 0, 0, 9, len[0], len[1], 0, protocol];
                if let Change::Outside { at, bits, .. } = change {
                    head[usize::from(at) % 8] ^= bits;
                }
                ([0x88, 0x64], [&head, packet].concat())
            }
            Self::IpipInIpip => {
                let inner = ipv4(ip, id, packet, Change::Nothing);
                ([8, 0], ipv4(4, id, &inner, change))
            }
        };
        let mut frame = link.to_vec();
        if let Some(field) = frame.last_chunk_mut() {
            *field = outside;
        }
        frame.extend(around);
        frame
    }
}

/// Datagram to this port, without a checksum.
fn udp(port: u16, payload: &[u8]) -> Vec<u8> {
    let [port_high, port_low] = port.to_be_bytes();
    let [len_high, len_low] = u16_of(payload.len() + 8).to_be_bytes();
    [&[0x80, 0, port_high, port_low, len_high, len_low, 0, 0], payload].concat()
}

const ADDRESSES: [u8; 8] = [192, 168, 0, 1, 192, 168, 0, 2];

fn ipv4(protocol: u8, id: u16, payload: &[u8], change: Change) -> Vec<u8> {
    let [len_high, len_low] = u16_of(payload.len() + 20).to_be_bytes();
    let [id_high, id_low] = id.to_be_bytes();
    let head = [0x45, 0, len_high, len_low, id_high, id_low, 0, 0, 60, protocol, 0, 0];
    let mut packet = [&head, &ADDRESSES[..], payload].concat();
    let mend = |packet: &mut [u8]| {
        packet[10..12].copy_from_slice(&[0; 2]);
        let sum = !Sum::of(&packet[..20]).fold();
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
    };
    mend(&mut packet);
    if let Change::Outside { at, bits, mended } = change {
        let at = usize::from(at) % packet.len().min(60);
        packet[at] ^= bits;
        if mended {
            mend(&mut packet);
        }
    }
    packet
}

fn ipv6(protocol: u8, payload: &[u8], change: Change) -> Vec<u8> {
    let [len_high, len_low] = u16_of(payload.len()).to_be_bytes();
    let head = [0x60, 0, 0, 0, len_high, len_low, protocol, 60];
    let mut packet = [&head, &[0xfd; 16][..], &[0xfe; 16], payload].concat();
    if let Change::Outside { at, bits, .. } = change {
        let at = usize::from(at) % packet.len().min(60);
        packet[at] ^= bits;
    }
    packet
}

fn u16_of(len: usize) -> u16 {
    u16::try_from(len).unwrap_or(u16::MAX)
}
