//! TCP validation as in `tcp_v4_rcv` and `tcp_v6_rcv`, up to the lookup of the connection, and the
//! segments that ICMP errors quote.

use std::net::{IpAddr, SocketAddr};

use forebay_rx::parse::Checksum;
use forebay_rx::parse::checksum::{Sum, judge};

use super::drop::NetworkDrop;
use super::icmp::{DEST_UNREACH, DEST_UNREACH_V6, HEADER_BYTES as ICMP_BYTES};
use super::transport::TransportBytes;
use super::{ipv4, ipv6};
use crate::tcp::{Flow, IcmpMessage, PathError, Seq, TcpError};

pub(super) const TCP: u8 = 6;
const HEADER_BYTES: usize = 20;
const TIME_EXCEEDED: u8 = 11;
/// Code of it: fragments did not come in time.
const FRAGMENTS_LATE: u8 = 1;
const PARAMETER_PROBLEM: u8 = 12;
const PACKET_TOO_BIG_V6: u8 = 2;
const TIME_EXCEEDED_V6: u8 = 3;
const PARAMETER_PROBLEM_V6: u8 = 4;
/// First type of ICMPv6 that is no error.
const FIRST_INFORMATION_V6: u8 = 128;
const OFFSET_MASK: u16 = 0x1fff;

/// A TCP header and payload, delimited by the IP header.
#[derive(Clone, Copy, Debug)]
pub(super) struct TcpBytes<'a> {
    pub(super) bytes: TransportBytes<'a>,
    /// Sum of the pseudo-header without its length: addresses and protocol.
    pub(super) pseudo_sum: Sum,
    /// Checksum state known so far.
    pub(super) checksum: Checksum,
}

/// Validates a segment. Returns its length, and that of its header.
pub(super) fn receive(segment: &TcpBytes<'_>) -> Result<(usize, usize), NetworkDrop> {
    let header = segment.bytes.first();
    let Some(&[.., offset, _, _, _, _, _, _, _]) = header.first_chunk::<HEADER_BYTES>() else {
        return Err(NetworkDrop::PktTooSmall);
    };
    let header_len = usize::from(offset >> 4) * 4;
    let len = segment.bytes.len();
    if header_len < HEADER_BYTES || header_len > header.len().min(len) {
        return Err(NetworkDrop::PktTooSmall);
    }
    let checksum = match segment.checksum {
        Checksum::Unknown => judge(segment.pseudo_sum.plus_len(len).plus(segment.bytes.sum(len))),
        known => known,
    };
    if checksum == Checksum::Bad {
        return Err(NetworkDrop::TcpCsum);
    }
    Ok((len, header_len))
}

/// Error about a segment of ours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TcpPathError {
    /// Ends of the connection.
    pub flow: Flow,
    /// Sequence number of the segment.
    pub seq: Seq,
    /// Meaning.
    pub error: PathError,
}

/// Segment quoted by an ICMP error (`tcp_v4_err`, `tcp_v6_err`). `None` for other messages.
pub(super) fn quoted(message: &[u8], from: Option<IpAddr>, is_ipv6: bool) -> Option<TcpPathError> {
    let (&[kind, code, _, _, m0, m1, m2, m3], quoted) =
        message.split_first_chunk::<ICMP_BYTES>()?;
    let mtu = [m0, m1, m2, m3];
    let (ours, theirs, header): (IpAddr, IpAddr, &[u8]) = if is_ipv6 {
        let (source, destination) = ipv6::addresses(quoted)?;
        let &[.., next, _] = quoted.first_chunk::<8>()?;
        (
            source.into(),
            destination.into(),
            quoted.get(ipv6::FIXED_BYTES..).filter(|_| next == TCP)?,
        )
    } else {
        let (source, destination) = ipv4::addresses(quoted)?;
        let &[first, _, _, _, _, _, flags, place, _, protocol] = quoted.first_chunk::<10>()?;
        let is_first = u16::from_be_bytes([flags, place]) & OFFSET_MASK == 0;
        let header_len = usize::from(first & 0xf) * 4;
        let header = quoted.get(header_len..).filter(|_| is_first && protocol == TCP)?;
        (source.into(), destination.into(), header)
    };
    let mut error = if is_ipv6 { meaning_v6(kind, code, mtu)? } else { meaning(kind, code, mtu)? };
    if let PathError::Unreachable { message, .. } = &mut error {
        message.from = from;
    }
    let &[p0, p1, q0, q1, s0, s1, s2, s3] = header.first_chunk::<8>()?;
    let flow = Flow {
        ours: SocketAddr::new(ours, u16::from_be_bytes([p0, p1])),
        theirs: SocketAddr::new(theirs, u16::from_be_bytes([q0, q1])),
    };
    Some(TcpPathError { flow, seq: Seq(u32::from_be_bytes([s0, s1, s2, s3])), error })
}

/// `icmp_err_convert`, and what `tcp_v4_err` does.
fn meaning(kind: u8, code: u8, [_, _, high, low]: [u8; 4]) -> Option<PathError> {
    let error = match (kind, code) {
        // As the kernel: the peer may lack one fragment and have others.
        (TIME_EXCEEDED, FRAGMENTS_LATE) => return None,
        (DEST_UNREACH, 0 | 6 | 9 | 11) => TcpError::NetworkUnreachable,
        (DEST_UNREACH, 2) => TcpError::NoProtocol,
        (DEST_UNREACH, 3) => TcpError::Refused,
        (DEST_UNREACH, 4) => {
            let mtu_bytes = u16::from_be_bytes([high, low]).into();
            return Some(PathError::TooBig { mtu_bytes });
        }
        (DEST_UNREACH, 5) => TcpError::NoSourceRoute,
        (DEST_UNREACH, 7) => TcpError::HostUnknown,
        (DEST_UNREACH, 8) => TcpError::HostIsolated,
        (DEST_UNREACH, ..=15) | (TIME_EXCEEDED, _) => TcpError::HostUnreachable,
        (PARAMETER_PROBLEM, _) => TcpError::BadHeader,
        _ => return None,
    };
    let is_of_route = kind == DEST_UNREACH && code <= 1;
    let ends_handshake = is_of_route || kind != DEST_UNREACH;
    let message = IcmpMessage { from: None, kind, code };
    Some(PathError::Unreachable { error, ends_handshake, is_of_route, message })
}

/// `icmpv6_err_convert`, and what `tcp_v6_err` does.
fn meaning_v6(kind: u8, code: u8, mtu: [u8; 4]) -> Option<PathError> {
    let (error, ends_handshake) = match (kind, code) {
        (PACKET_TOO_BIG_V6, _) => {
            return Some(PathError::TooBig { mtu_bytes: u32::from_be_bytes(mtu) });
        }
        (DEST_UNREACH_V6, 0) => (TcpError::NetworkUnreachable, false),
        (DEST_UNREACH_V6, 1 | 5 | 6) => (TcpError::Prohibited, true),
        (DEST_UNREACH_V6, 4) => (TcpError::Refused, true),
        (DEST_UNREACH_V6, 2 | 3) | (TIME_EXCEEDED_V6, _) => (TcpError::HostUnreachable, false),
        (DEST_UNREACH_V6 | PARAMETER_PROBLEM_V6, _) => (TcpError::BadHeader, true),
        // RFC 4443, section 2.4: errors of unknown types are told, too.
        (..FIRST_INFORMATION_V6, _) => (TcpError::BadHeader, false),
        _ => return None,
    };
    let is_of_route = (kind, code) == (DEST_UNREACH_V6, 0);
    let message = IcmpMessage { from: None, kind, code };
    Some(PathError::Unreachable { error, ends_handshake, is_of_route, message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_14_errors_mean_what_kernel_takes() {
        let error_of = |told: Option<PathError>| match told {
            Some(PathError::Unreachable { error, ends_handshake, .. }) => {
                Some((error, ends_handshake))
            }
            _ => None,
        };
        let v4 = |kind, code| error_of(meaning(kind, code, [0; 4]));
        let v6 = |kind, code| error_of(meaning_v6(kind, code, [0; 4]));
        assert_eq!(v4(TIME_EXCEEDED, 0), Some((TcpError::HostUnreachable, true)));
        assert_eq!(v4(TIME_EXCEEDED, FRAGMENTS_LATE), None);
        assert_eq!([4, 5, 13].map(|kind| v4(kind, 0)), [None; 3]);
        assert_eq!(v6(TIME_EXCEEDED_V6, 1), Some((TcpError::HostUnreachable, false)));
        assert_eq!(
            [0, 5, 100, 127].map(|kind| v6(kind, 1)),
            [Some((TcpError::BadHeader, false)); 4]
        );
        assert_eq!([128, 137, 255].map(|kind| v6(kind, 0)), [None; 3]);
    }
}
