//! Connections that nobody has accepted, on their way from a listener to one of another process.

use std::net::{IpAddr, SocketAddr};

use super::config::MAX_WINDOW_SCALE;
use super::connection::{Agreed, WindowScales};
use super::flow::Flow;
use super::seq::Seq;

/// Received bytes that a connection may be passed on with, at most.
pub(super) const PASSED_BYTES_MAX: usize = 64 << 10;

/// A connection that waited to be accepted: what its handshake agreed on, and what the peer has sent since. Nothing
/// was sent to the peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PassedConnection {
    pub(super) flow: Flow,
    pub(super) sequence: Seq,
    pub(super) peer_sequence: Seq,
    pub(super) peer_mss: u16,
    pub(super) mtu_bytes: u32,
    pub(super) agreed: Agreed,
    /// The peer's timestamp.
    pub(super) timestamp: u32,
    pub(super) timestamp_offset: u32,
    /// The peer's window, as its segments have it.
    pub(super) window: u16,
    /// True if the peer has closed its side.
    pub(super) has_fin: bool,
    pub(super) payload: Vec<u8>,
}

/// Bound of a path's MTU, beyond that of all devices.
const MTU_BYTES_MAX: u32 = 1 << 17;

/// Length of a passed connection without its payload, as bytes.
const HEAD_BYTES: usize = 2 * 18 + 26;

/// Both shifts of windows that are not scaled.
const NO_SCALE: u8 = u8::MAX;

impl PassedConnection {
    /// Ends of the connection.
    #[must_use]
    pub fn flow(&self) -> &Flow {
        &self.flow
    }

    /// Number of the peer's SYN.
    #[must_use]
    pub fn syn(&self) -> u32 {
        self.peer_sequence.0
    }

    /// The connection as bytes, for another process of the same build.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + self.payload.len());
        for end in [self.flow.ours, self.flow.theirs] {
            let address = match end.ip() {
                IpAddr::V4(address) => address.to_ipv6_mapped(),
                IpAddr::V6(address) => address,
            };
            bytes.extend(address.octets());
            bytes.extend(end.port().to_be_bytes());
        }
        for word in [
            self.sequence.0,
            self.peer_sequence.0,
            self.mtu_bytes,
            self.timestamp,
            self.timestamp_offset,
        ] {
            bytes.extend(word.to_be_bytes());
        }
        bytes.extend(self.peer_mss.to_be_bytes());
        bytes.extend(self.window.to_be_bytes());
        let Agreed { timestamps, sack, ecn, scales } = self.agreed;
        let flags = [timestamps, sack, ecn, self.has_fin].map(u8::from);
        let scales = scales.map_or(NO_SCALE, |it| it.send | it.receive << 4);
        bytes.extend([flags[0] | flags[1] << 1 | flags[2] << 2 | flags[3] << 3, scales]);
        bytes.extend(&self.payload);
        bytes
    }

    /// Reads the bytes of a connection; `None` if they are none.
    #[must_use]
    pub fn of_bytes(bytes: &[u8]) -> Option<Self> {
        let (head, payload) = bytes.split_first_chunk::<HEAD_BYTES>()?;
        let word = |at: usize| Some(u32::from_be_bytes(*head.get(at..)?.first_chunk::<4>()?));
        let half = |at: usize| Some(u16::from_be_bytes(*head.get(at..)?.first_chunk::<2>()?));
        let end = |at: usize| {
            let address: [u8; 16] = *head.get(at..)?.first_chunk()?;
            let address = IpAddr::from(address).to_canonical();
            Some(SocketAddr::new(address, half(at + 16)?))
        };
        let [.., flags, scales] = *head;
        let has = |bit: u8| flags & 1 << bit != 0;
        let [send, receive] = [scales & 0xf, scales >> 4];
        let scales = (scales != NO_SCALE).then_some(WindowScales { send, receive });
        let passed = Self {
            flow: Flow { ours: end(0)?, theirs: end(18)? },
            sequence: Seq(word(36)?),
            peer_sequence: Seq(word(40)?),
            mtu_bytes: word(44)?,
            timestamp: word(48)?,
            timestamp_offset: word(52)?,
            peer_mss: half(56)?,
            window: half(58)?,
            agreed: Agreed { timestamps: has(0), sack: has(1), ecn: has(2), scales },
            has_fin: has(3),
            payload: payload.to_vec(),
        };
        passed.is_possible().then_some(passed)
    }

    fn is_possible(&self) -> bool {
        let Flow { ours, theirs } = self.flow;
        let scales = self.agreed.scales.map_or([0; 2], |it| [it.send, it.receive]);
        ours.is_ipv4() == theirs.is_ipv4()
            && (self.flow.header_bytes() + 1..=MTU_BYTES_MAX).contains(&self.mtu_bytes)
            && scales.iter().all(|scale| *scale <= MAX_WINDOW_SCALE)
            && self.payload.len() <= PASSED_BYTES_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exe_8_passed_connection_survives_as_bytes() {
        for (ours, theirs) in [("192.0.2.1:7", "192.0.2.2:9"), ("[fd00::1]:7", "[fd00::2]:9")] {
            for scales in [None, Some([0, 0]), Some([14, 14]), Some([7, 9])] {
                let scales = scales.map(|[send, receive]| WindowScales { send, receive });
                let flow = Flow { ours: ours.parse().unwrap(), theirs: theirs.parse().unwrap() };
                let agreed = Agreed { timestamps: true, sack: false, ecn: true, scales };
                let passed = PassedConnection {
                    flow,
                    sequence: Seq(1),
                    peer_sequence: Seq(u32::MAX),
                    peer_mss: 1460,
                    mtu_bytes: 1500,
                    agreed,
                    timestamp: 3,
                    timestamp_offset: 4,
                    window: 5,
                    has_fin: scales.is_none(),
                    payload: b"question".to_vec(),
                };
                let bytes = passed.to_bytes();
                assert_eq!(PassedConnection::of_bytes(&bytes), Some(passed));
                assert_eq!(PassedConnection::of_bytes(&bytes[..HEAD_BYTES - 1]), None);
            }
        }
    }
}
