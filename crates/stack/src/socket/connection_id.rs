//! QUIC connection IDs that encode which endpoint of a group issued them, readable only with the
//! group's key.
//!
//! ```text
//! | place, masked (2) | tag (2) | nonce (4 to 16) |
//! mask = H(key, 0, nonce)        tag = H(key, 1, nonce, place)
//! ```
//!
//! Without the key, the IDs of an endpoint are indistinguishable from random ones, and an ID can
//! neither be forged for a chosen endpoint nor changed into one of another endpoint. A guessed ID
//! has a valid tag with probability 2^-16, and then names an endpoint that the guesser does not
//! know.

use std::fmt;
use std::hash::Hasher;
use std::sync::Arc;

use forebay_rx::packet::{Packet, Shape};
use siphasher::sip::SipHasher13;

/// Shortest and longest ID, in bytes (RFC 9000, section 17.2).
pub const ID_BYTES: std::ops::RangeInclusive<usize> = 8..=20;

/// Length of the masked place and the tag, which precede the nonce.
const SEALED_BYTES: usize = 4;

/// Index of an endpoint in its group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct EndpointIndex(pub u16);

/// Encoder and decoder of a group's connection IDs.
#[derive(Clone, PartialEq, Eq)]
pub struct ConnectionIds {
    key: [u64; 2],
    id_bytes: usize,
}

/// A connection ID.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectionId {
    bytes: [u8; *ID_BYTES.end()],
    len: usize,
}

/// Membership in a group whose members are selected by the connection ID of QUIC datagrams.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SelectById {
    /// Encoder and decoder of the IDs, shared by all members.
    pub ids: Arc<ConnectionIds>,
    /// Index of this member, as encoded in its IDs.
    pub place: EndpointIndex,
}

impl ConnectionIds {
    /// Creates an encoder of IDs of `id_bytes` with a secret key; `None` for a length outside
    /// [`ID_BYTES`].
    #[must_use]
    pub fn new(key: [u8; 16], id_bytes: usize) -> Option<Self> {
        let (low, high) = key.split_first_chunk::<8>()?;
        let high = high.first_chunk::<8>()?;
        let key = [u64::from_le_bytes(*low), u64::from_le_bytes(*high)];
        ID_BYTES.contains(&id_bytes).then_some(Self { key, id_bytes })
    }

    /// Length of an ID, in bytes.
    #[must_use]
    pub fn id_bytes(&self) -> usize {
        self.id_bytes
    }

    /// Encodes an ID of an endpoint. Two IDs of the endpoint differ only if their nonces do; only as
    /// many leading bytes of a nonce are used as fit into the ID.
    #[must_use]
    pub fn issue(&self, place: EndpointIndex, nonce: [u8; 16]) -> ConnectionId {
        let (nonce, _) = nonce.split_at(self.id_bytes - SEALED_BYTES);
        let mut id = ConnectionId { bytes: [0; 20], len: self.id_bytes };
        let masked = place.0 ^ self.mask(nonce);
        id.bytes[..2].copy_from_slice(&masked.to_be_bytes());
        id.bytes[2..4].copy_from_slice(&self.tag(nonce, place).to_be_bytes());
        id.bytes[4..self.id_bytes].copy_from_slice(nonce);
        id
    }

    /// Endpoint that issued an ID; `None` if no endpoint of this group did.
    #[must_use]
    pub fn place_of(&self, id: &[u8]) -> Option<EndpointIndex> {
        let (&[a, b, c, d], nonce) = id.split_first_chunk::<SEALED_BYTES>()?;
        if id.len() != self.id_bytes {
            return None;
        }
        let place = EndpointIndex(u16::from_be_bytes([a, b]) ^ self.mask(nonce));
        (self.tag(nonce, place) == u16::from_be_bytes([c, d])).then_some(place)
    }

    /// Endpoint that issued a QUIC datagram's destination connection ID. `None` for a client's
    /// first datagrams, whose destination IDs the client chose (RFC 9000, section 7.2).
    #[must_use]
    pub fn place_of_datagram(&self, datagram: &[u8]) -> Option<EndpointIndex> {
        self.place_of(destination_id(datagram, self.id_bytes)?)
    }

    fn mask(&self, nonce: &[u8]) -> u16 {
        let mut hasher = self.hasher(0);
        hasher.write(nonce);
        low_16(hasher.finish())
    }

    fn tag(&self, nonce: &[u8], place: EndpointIndex) -> u16 {
        let mut hasher = self.hasher(1);
        hasher.write(nonce);
        hasher.write_u16(place.0);
        low_16(hasher.finish())
    }

    /// Keyed hash function, independent for each purpose.
    fn hasher(&self, purpose: u8) -> SipHasher13 {
        let mut hasher = SipHasher13::new_with_keys(self.key[0], self.key[1]);
        hasher.write_u8(purpose);
        hasher
    }
}

impl ConnectionId {
    /// Bytes of the ID.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Destination connection ID of a QUIC datagram. A short header does not contain its length, which
/// is taken to be `id_bytes` (RFC 9000, section 17.3).
#[must_use]
pub fn destination_id(datagram: &[u8], id_bytes: usize) -> Option<&[u8]> {
    const LONG_HEADER: u8 = 0x80;
    match datagram {
        [first, ..] if first & LONG_HEADER != 0 => {
            let (&len, rest) = datagram.get(5..)?.split_first()?;
            rest.get(..len.into())
        }
        [_, rest @ ..] => rest.get(..id_bytes),
        [] => None,
    }
}

/// True if a merged packet contains datagrams of more than one connection.
#[must_use]
pub fn has_several(packet: &Packet, id_bytes: usize) -> bool {
    let (Shape::Gso(size) | Shape::Merged(size)) = packet.shape() else { return false };
    let of = |datagram| destination_id(datagram, id_bytes);
    let view = packet.view();
    let first = of(view.payload());
    if packet.is_gso() {
        return view.payload().chunks(size.get().into()).any(|datagram| of(datagram) != first);
    }
    packet.segments().any(|segment| of(segment.payload) != first)
}

fn low_16(hash: u64) -> u16 {
    let [a, b, ..] = hash.to_le_bytes();
    u16::from_le_bytes([a, b])
}

impl fmt::Debug for ConnectionIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnectionIds({} bytes, keyed)", self.id_bytes)
    }
}

#[cfg(test)]
mod tests {
    use forebay_buf::Region;
    use forebay_buf::pool::{ChunkClass, carve, region_bytes};
    use forebay_rx::packet::Arrival;
    use proptest::prelude::*;

    use crate::network::compose::{UdpHeaders, emit_udp};

    use super::*;

    proptest! {
        #[test]
        fn udp_12_ids_say_their_endpoint(
            key: [u8; 16], id_bytes in ID_BYTES, place: u16, nonce: [u8; 16], bit in 0usize..160,
        ) {
            let ids = ConnectionIds::new(key, id_bytes).unwrap();
            let id = ids.issue(EndpointIndex(place), nonce);
            prop_assert_eq!(ids.place_of(id.as_bytes()), Some(EndpointIndex(place)));
            let mut short = vec![0x41];
            short.extend(id.as_bytes());
            prop_assert_eq!(ids.place_of_datagram(&short), Some(EndpointIndex(place)));
            let mut long = vec![0xc3, 0, 0, 0, 1, u8::try_from(id_bytes).unwrap()];
            long.extend(id.as_bytes());
            prop_assert_eq!(ids.place_of_datagram(&long), Some(EndpointIndex(place)));
            // An ID with one bit of its masked place flipped never decodes to the same endpoint.
            let mut forged = id.as_bytes().to_vec();
            forged[bit / 8 % 2] ^= 1 << (bit % 8);
            let led = ids.place_of(&forged);
            prop_assert!(led.is_none_or(|led| led != EndpointIndex(place)));
        }

        #[test]
        fn udp_12_any_datagram_is_read(datagram: Vec<u8>, id_bytes in ID_BYTES) {
            let ids = ConnectionIds::new([7; 16], id_bytes).unwrap();
            let _ = ids.place_of_datagram(&datagram);
        }
    }

    /// Guessed IDs have a valid tag no more often than chance allows.
    #[test]
    fn udp_12_strangers_cannot_aim() {
        let ids = ConnectionIds::new([3; 16], 12).unwrap();
        let of_other = ConnectionIds::new([4; 16], 12).unwrap();
        let (mut hits, guesses) = (0u32, 1u32 << 20);
        let mut places = [0u32; 8];
        for number in 0..guesses {
            let mut nonce = [0; 16];
            nonce[..4].copy_from_slice(&number.to_be_bytes());
            // IDs issued by a stranger with another key, tested against a group of eight endpoints.
            let guess = of_other.issue(EndpointIndex(0), nonce);
            hits += u32::from(ids.place_of(guess.as_bytes()).is_some_and(|place| place.0 < 8));
            // Masked places of one endpoint's IDs, as seen without the key: uniformly distributed.
            let id = ids.issue(EndpointIndex(5), nonce);
            places[usize::from(id.as_bytes()[1] & 7)] += 1;
        }
        assert!(hits <= 1, "{hits} of 2^20, where 2^-29 of them fit by chance");
        let share = f64::from(guesses) / 8.0;
        assert!(places.iter().all(|&of| (f64::from(of) / share - 1.0).abs() < 0.02), "{places:?}");
    }

    /// Merged datagrams of one connection are accepted; those of several connections are detected.
    #[test]
    fn udp_12_merged_connections_are_told_apart() {
        const SEGMENT: usize = 100;
        let share = vec![ChunkClass { chunk_bytes: 4 << 10, chunks: 1 }];
        let region = Region::allocate(region_bytes(std::slice::from_ref(&share)));
        let mut pool = carve(region, &[share]).unwrap().remove(0);
        let ids = ConnectionIds::new([6; 16], 12).unwrap();
        let address = |last| std::net::SocketAddr::from(([10, 0, 0, last], 443));
        for (others, expected) in [([1, 1, 1], false), ([1, 1, 2], true), ([2, 1, 1], true)] {
            let mut payload = Vec::new();
            for nonce in others {
                let id = ids.issue(EndpointIndex(0), [nonce; 16]);
                payload.extend([&[0x40 | nonce], id.as_bytes(), &[nonce; SEGMENT - 13]].concat());
            }
            let mut frame = pool.allocate(1000).unwrap();
            frame.copy_from(&payload);
            let gso_size = u16::try_from(SEGMENT).unwrap();
            let (source, destination) = (address(1), address(2));
            let to = UdpHeaders {
                link_addresses: None,
                source,
                destination,
                ttl: 64,
                tos: 0,
                gso_size,
                identification: None,
            };
            let headers = emit_udp(&mut frame, &to).unwrap();
            let len_bytes = frame.len_bytes();
            let mut packet = Packet::received(frame, Arrival(0), len_bytes, headers.link);
            packet.headers = headers;
            assert!(!has_several(&packet, 12), "one datagram");
            packet.set_gso_size(gso_size);
            assert_eq!(has_several(&packet, 12), expected, "{others:?}");
            pool.put(packet.frame);
        }
    }
}
