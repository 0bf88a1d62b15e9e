//! Tunnels around the frames of a case, and off them again, by the book.

use crate::frames::Frame;
use crate::gro::wire::{be16, put16, sum};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Around {
    Nothing,
    /// An IPv4 header.
    Ipv4(Outer),
    Ipv6,
    /// UDP over IPv4, with a checksum or without.
    Vxlan {
        is_summed: bool,
    },
    /// GRE over IPv4 around a frame or a packet, with a checksum or a key. With both, Linux compares
    /// the checksums where it means the keys.
    Gre {
        is_bridged: bool,
        is_summed: bool,
    },
    /// UDP over IPv4 and a GENEVE header with an option, with a checksum or without.
    Geneve {
        is_summed: bool,
    },
}

/// Fields of an IPv4 header outside, from frame to frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outer {
    IdRises,
    IdStays,
    IdStaysUnfragmented,
    IdJumps,
    TtlChanges,
    TosChanges,
    DontFragmentChanges,
}

/// Tunnels that the kernel merges without a device for them.
pub(crate) const WITHOUT_DEVICE: [Around; 2] = [Around::Ipv4(Outer::IdRises), Around::Ipv6];
/// Tunnels without a device whose fields outside matter.
pub(crate) const OUTSIDE: [Around; 6] = [
    Around::Ipv4(Outer::IdStays),
    Around::Ipv4(Outer::IdStaysUnfragmented),
    Around::Ipv4(Outer::IdJumps),
    Around::Ipv4(Outer::TtlChanges),
    Around::Ipv4(Outer::TosChanges),
    Around::Ipv4(Outer::DontFragmentChanges),
];
pub(crate) const WITH_VXLAN: [Around; 2] =
    [Around::Vxlan { is_summed: false }, Around::Vxlan { is_summed: true }];
/// Tunnels for which a guest's kernel has the modules.
pub(crate) const OF_GUEST: [Around; 5] = [
    Around::Gre { is_bridged: false, is_summed: false },
    Around::Gre { is_bridged: false, is_summed: true },
    Around::Gre { is_bridged: true, is_summed: false },
    Around::Geneve { is_summed: false },
    Around::Geneve { is_summed: true },
];

const LINK_BYTES: usize = 14;
const VXLAN: [u8; 8] = [8, 0, 0, 0, 0, 0, 7, 0];
const VXLAN_PORT: u16 = 4789;
/// One option of four bytes behind the header, around Ethernet.
const GENEVE: [u8; 16] = [2, 0, 0x65, 0x58, 0, 0, 7, 0, 0, 1, 0x80, 1, 9, 9, 9, 9];
const GENEVE_PORT: u16 = 6081;
const GRE_BYTES: usize = 8;
const GRE_KEY: [u8; 4] = [0, 0, 0, 5];

impl Around {
    /// True for a checksum over the whole frame inside.
    pub(crate) fn is_summed(self) -> bool {
        match self {
            Self::Nothing | Self::Ipv4(_) | Self::Ipv6 => false,
            Self::Vxlan { is_summed }
            | Self::Gre { is_summed, .. }
            | Self::Geneve { is_summed } => is_summed,
        }
    }

    /// True if nothing can be merged, for what differs outside.
    pub(crate) fn parts(self) -> bool {
        use Outer::{DontFragmentChanges, IdJumps, TosChanges, TtlChanges};
        matches!(self, Self::Ipv4(IdJumps | TtlChanges | TosChanges | DontFragmentChanges))
    }

    /// The frame in the tunnel, as the one of this number. It has no tags.
    pub(crate) fn wrap(self, frame: &Frame, number: u16) -> Frame {
        let (link, packet) = frame.bytes.split_at(LINK_BYTES);
        let is_v6 = link[12..] == [0x86, 0xdd];
        let outside = match self {
            Self::Nothing => return Frame { bytes: frame.bytes.clone(), ..*frame },
            Self::Ipv4(outer) => ipv4(if is_v6 { 41 } else { 4 }, outer, number, packet),
            Self::Ipv6 => ipv6(if is_v6 { 41 } else { 4 }, packet),
            Self::Vxlan { is_summed } => {
                let payload = [&VXLAN, &frame.bytes[..]].concat();
                ipv4(17, Outer::IdRises, number, &udp(VXLAN_PORT, &payload, is_summed))
            }
            Self::Geneve { is_summed } => {
                let payload = [&GENEVE, &frame.bytes[..]].concat();
                ipv4(17, Outer::IdRises, number, &udp(GENEVE_PORT, &payload, is_summed))
            }
            Self::Gre { is_bridged, is_summed } => {
                let ethertype = if is_bridged { [0x65, 0x58] } else { [link[12], link[13]] };
                let payload = if is_bridged { frame.bytes.as_slice() } else { packet };
                ipv4(47, Outer::IdRises, number, &gre(ethertype, payload, is_summed))
            }
        };
        let ethertype = if self == Self::Ipv6 { [0x86, 0xdd] } else { [8, 0] };
        let bytes = [&link[..12], &ethertype, &outside].concat();
        Frame { wire_len: u32::try_from(bytes.len()).unwrap(), bytes }
    }

    /// The frame inside, with the link header of this one unless it has its own.
    pub(crate) fn unwrap(self, bytes: &[u8]) -> Vec<u8> {
        let inside = |at: usize| bytes.get(at..).unwrap_or_default().to_vec();
        let at = match self {
            Self::Nothing => return bytes.to_vec(),
            Self::Vxlan { .. } => return inside(LINK_BYTES + 20 + 8 + VXLAN.len()),
            Self::Geneve { .. } => return inside(LINK_BYTES + 20 + 8 + GENEVE.len()),
            Self::Gre { is_bridged: true, .. } => return inside(LINK_BYTES + 20 + GRE_BYTES),
            Self::Gre { is_bridged: false, .. } => LINK_BYTES + 20 + GRE_BYTES,
            Self::Ipv4(_) => LINK_BYTES + 20,
            Self::Ipv6 => LINK_BYTES + 40,
        };
        let packet = inside(at);
        let is_v6 = packet.first().is_some_and(|first| first >> 4 == 6);
        let ethertype = if is_v6 { [0x86, 0xdd] } else { [8, 0] };
        [&bytes[..12], &ethertype, &packet].concat()
    }

    /// Every length outside reaches to the end, and every checksum outside is right.
    pub(crate) fn is_sound(self, bytes: &[u8]) -> bool {
        let outside = &bytes[LINK_BYTES..];
        let is_whole = match self {
            Self::Nothing => return true,
            Self::Ipv6 => be16(outside, 4).map(|len| usize::from(len) + 40) == Some(outside.len()),
            Self::Ipv4(_) | Self::Vxlan { .. } | Self::Gre { .. } | Self::Geneve { .. } => {
                be16(outside, 2).map(usize::from) == Some(outside.len())
                    && sum(&outside[..20]) == 0xffff
            }
        };
        let payload = outside.get(20..).unwrap_or_default();
        is_whole
            && match self {
                Self::Vxlan { is_summed } | Self::Geneve { is_summed } => {
                    let is_right = if is_summed {
                        sum(&[&pseudo(payload.len()), payload].concat()) == 0xffff
                    } else {
                        be16(payload, 6) == Some(0)
                    };
                    be16(payload, 4).map(usize::from) == Some(payload.len()) && is_right
                }
                Self::Gre { is_summed, .. } => !is_summed || sum(payload) == 0xffff,
                Self::Nothing | Self::Ipv4(_) | Self::Ipv6 => true,
            }
    }
}

const FROM_TO: [u8; 8] = [192, 168, 9, 1, 192, 168, 9, 2];

fn ipv4(protocol: u8, outer: Outer, number: u16, payload: &[u8]) -> Vec<u8> {
    let len = u16::try_from(payload.len() + 20).unwrap();
    let [is_odd, _] = (number % 2).to_le_bytes();
    let id = match outer {
        Outer::IdStays | Outer::IdStaysUnfragmented => 7,
        Outer::IdJumps => number.wrapping_mul(3),
        _ => number,
    };
    let dont_fragment = match outer {
        Outer::IdStaysUnfragmented => 0x40,
        Outer::DontFragmentChanges => 0x40 * is_odd,
        _ => 0,
    };
    let tos = if outer == Outer::TosChanges { is_odd * 4 } else { 0 };
    let ttl = if outer == Outer::TtlChanges { 64 + is_odd } else { 64 };
    let mut header = vec![0x45, tos, 0, 0, 0, 0, dont_fragment, 0, ttl, protocol, 0, 0];
    header.extend(FROM_TO);
    put16(&mut header, 2, len);
    put16(&mut header, 4, id);
    let checksum = !sum(&header);
    put16(&mut header, 10, checksum);
    [&header, payload].concat()
}

fn ipv6(protocol: u8, payload: &[u8]) -> Vec<u8> {
    let [high, low] = u16::try_from(payload.len()).unwrap().to_be_bytes();
    let header = [0x60, 0, 0, 0, high, low, protocol, 64];
    [&header[..], &[0xfd; 16], &[0xfe; 16], payload].concat()
}

fn pseudo(len: usize) -> Vec<u8> {
    [&FROM_TO[..], &[0, 17], &u16::try_from(len).unwrap().to_be_bytes()].concat()
}

fn udp(port: u16, payload: &[u8], is_summed: bool) -> Vec<u8> {
    let len = u16::try_from(payload.len() + 8).unwrap();
    let header = [50_000, port, len, 0].map(u16::to_be_bytes).concat();
    let mut udp = [&header[..], payload].concat();
    if is_summed {
        let checksum = match !sum(&[&pseudo(udp.len()), &udp[..]].concat()) {
            0 => 0xffff,
            checksum => checksum,
        };
        put16(&mut udp, 6, checksum);
    }
    udp
}

/// A header with a checksum (RFC 2784), or with a key (RFC 2890).
fn gre(protocol: [u8; 2], payload: &[u8], is_summed: bool) -> Vec<u8> {
    if !is_summed {
        return [&[0x20, 0], &protocol[..], &GRE_KEY, payload].concat();
    }
    let mut gre = [&[0x80, 0], &protocol[..], &[0; 4], payload].concat();
    let checksum = !sum(&gre);
    put16(&mut gre, 4, checksum);
    gre
}
