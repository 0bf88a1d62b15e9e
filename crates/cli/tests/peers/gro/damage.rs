//! Flaws in a frame's lengths. Checksums are corrected, so that only the length is wrong.

use crate::gro::wire::{Wire, be16, put16};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Damage {
    /// An IPv4 header of 16 bytes.
    HeaderLength,
    /// An IP packet that is longer than its frame.
    IpLength,
    /// A TCP header of 16 bytes.
    TcpHeaderLength,
    /// A snap length that cuts the payload.
    Cut,
    CutInHeader,
    UdpLengthLong,
    UdpLengthShort,
}

const CUT_BYTES: usize = 30;
const BEYOND_BYTES: u16 = 1000;

impl Damage {
    /// Applies the flaw to a well-formed frame.
    pub(crate) fn apply(self, bytes: &mut Vec<u8>) {
        let whole = bytes.clone();
        let wire = Wire::read(&whole).unwrap();
        let (ip_at, transport_at) = (wire.ip_at, wire.transport_at);
        let length_at = ip_at + if bytes[ip_at] >> 4 == 4 { 2 } else { 4 };
        match self {
            Self::HeaderLength => bytes[ip_at] = 0x44,
            Self::IpLength => add(bytes, length_at, BEYOND_BYTES),
            Self::TcpHeaderLength => bytes[transport_at + 12] = 4 << 4,
            Self::Cut => return bytes.truncate(whole.len() - CUT_BYTES),
            Self::CutInHeader => return bytes.truncate(transport_at + 9),
            Self::UdpLengthLong => add(bytes, transport_at + 4, 8),
            Self::UdpLengthShort => put16(bytes, transport_at + 4, 7),
        }
        *bytes = wire.mend(std::mem::take(bytes));
    }
}

fn add(bytes: &mut [u8], at: usize, extra: u16) {
    let value = be16(bytes, at).unwrap();
    put16(bytes, at, value + extra);
}
