//! Hash: the number by which a flow is steered.
//!
//! TCP and UDP hash addresses and ports. Fragments, other protocols and truncated headers hash
//! addresses only, so that all fragments of a datagram go to the same CPU. A packet without
//! addresses has no hash and is not steered (RPS-4, RPS-5).

mod keyed; //        SipHash under a secret key
pub mod toeplitz; // the hash of network cards
mod indirection; //  the rx queue that a device selects by hash

use std::fmt;

pub use indirection::{Indirection, RETA_ENTRIES};
pub use keyed::{KEYED_KEY_BYTES, Keyed};
pub use toeplitz::{KeyTooShort, Toeplitz};

use crate::flow_key::{FlowKey, FlowKeyRules, KeyRule, WALKED_BYTES_MAX};
use crate::packet::Packet;
use crate::parse::{Transport, View};

/// Hash of a flow; 0 means none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct FlowHash(pub u32);

impl FlowHash {
    /// No hash: not steered.
    pub const NONE: Self = Self(0);

    /// Hash as computed: a computed 0 becomes 1, as in the kernel (`__skb_get_hash`).
    #[must_use]
    pub fn computed(hash: u32) -> Self {
        Self(hash.max(1))
    }

    /// True if there is a hash.
    #[must_use]
    pub fn is_some(self) -> bool {
        self != Self::NONE
    }
}

/// Key of the wrong length for its hash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WrongKey {
    /// Length of the given key, in bytes.
    pub have_bytes: usize,
}

impl fmt::Display for WrongKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { have_bytes } = self;
        write!(
            f,
            "a key of {have_bytes} bytes does not fit the hash: the keyed one has 16, a Toeplitz \
             one at least {}",
            toeplitz::TUPLE_KEY_BYTES
        )
    }
}

impl std::error::Error for WrongKey {}

/// Hash function of flows, and the rules that identify a flow.
#[derive(Clone, Debug)]
pub struct Hasher {
    kind: HashKind,
    rules: FlowKeyRules,
    /// True for each [kind of transport](Transport) whose packets may need more than the outermost
    /// header.
    looks_inside: [bool; Transport::ALL.len()],
}

#[derive(Clone, Debug)]
enum HashKind {
    Keyed(Keyed),
    /// Toeplitz, prepared for inputs of [`toeplitz::TUPLE_BYTES`].
    Toeplitz(Toeplitz),
}

impl Hasher {
    /// Creates a SipHash under a secret key: nobody outside can aim flows at one CPU. If
    /// `symmetric`, both directions of a flow hash alike.
    #[must_use]
    pub fn keyed(key: &[u8; KEYED_KEY_BYTES], symmetric: bool) -> Self {
        Self::new(HashKind::Keyed(Keyed::new(key, symmetric)))
    }

    /// Creates the hash that network cards compute with the same key.
    ///
    /// # Errors
    /// If the key has fewer than [`toeplitz::TUPLE_KEY_BYTES`] bytes.
    pub fn toeplitz(key: &[u8]) -> Result<Self, KeyTooShort> {
        Ok(Self::new(HashKind::Toeplitz(Toeplitz::new(key, toeplitz::TUPLE_BYTES)?)))
    }

    /// Copy of this hash function under another key.
    ///
    /// # Errors
    /// If the key's length does not fit the hash: 16 bytes for the keyed one, at least
    /// [`toeplitz::TUPLE_KEY_BYTES`] for Toeplitz.
    pub fn rekeyed(&self, key: &[u8]) -> Result<Self, WrongKey> {
        let wrong = WrongKey { have_bytes: key.len() };
        let rekeyed = match &self.kind {
            HashKind::Keyed(keyed) => {
                let key = key.try_into().map_err(|_| wrong)?;
                Self::keyed(key, keyed.is_symmetric())
            }
            HashKind::Toeplitz(_) => Self::toeplitz(key).map_err(|_| wrong)?,
        };
        Ok(rekeyed.with_rules(self.rules))
    }

    /// Copy of this hash function for flows identified by these rules; the initial rules are
    /// [`FlowKeyRules::OUTER`].
    #[must_use]
    pub fn with_rules(&self, rules: FlowKeyRules) -> Self {
        Self {
            rules,
            looks_inside: Transport::ALL.map(|kind| !rules.uses_outermost_alone(kind)),
            ..self.clone()
        }
    }

    /// Rules that identify a flow.
    #[must_use]
    pub fn rules(&self) -> &FlowKeyRules {
        &self.rules
    }

    fn new(kind: HashKind) -> Self {
        Self { kind, rules: FlowKeyRules::OUTER, looks_inside: [false; Transport::ALL.len()] }
    }

    /// Hash of a packet, linear or not: the device's, if the device looked at all bytes that
    /// identify the flow.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "once for a packet")]
    #[must_use]
    pub fn hash_packet(&self, packet: &Packet) -> FlowHash {
        if self.looks_inside[packet.headers.transport as usize] {
            return self.hash_inside(packet);
        }
        if packet.hash.is_some() { packet.hash } else { self.hash_outermost(&packet.view()) }
    }

    /// Hash of a parsed packet of which the view has all bytes.
    #[must_use]
    pub fn hash(&self, view: &View<'_>) -> FlowHash {
        let wire_len = u32::try_from(view.bytes().len()).unwrap_or(u32::MAX);
        self.hash_of(view, wire_len, FlowHash::NONE)
    }

    /// Hash of a parsed packet of this length on the wire, with this hash from its device, if any. A
    /// device looks at the outermost header only, so a key from inner headers takes precedence.
    #[must_use]
    pub fn hash_of(&self, view: &View<'_>, wire_len: u32, device_hash: FlowHash) -> FlowHash {
        if self.looks_inside[view.headers().transport as usize] {
            let key = FlowKey::of(view, wire_len, &self.rules);
            if device_hash.is_some() && key.is_outermost() {
                return device_hash;
            }
            return self.hash_key(&key);
        }
        if device_hash.is_some() { device_hash } else { self.hash_outermost(view) }
    }

    fn hash_outermost(&self, view: &View<'_>) -> FlowHash {
        let Some(addresses) = view.address_bytes() else { return FlowHash::NONE };
        self.hash_tuple(addresses, if view.is_fragment() { None } else { view.port_bytes() })
    }

    #[cold]
    fn hash_inside(&self, packet: &Packet) -> FlowHash {
        if !packet.is_nonlinear() {
            return self.hash_of(&packet.view(), packet.wire_len, packet.hash);
        }
        let mut bytes = [0; WALKED_BYTES_MAX];
        let key = self.key_of_pieces(packet, &mut bytes);
        if !key.is_outermost() {
            return self.hash_key(&key);
        }
        // The outermost headers are in the linear part, however far they reach.
        if packet.hash.is_some() { packet.hash } else { self.hash_outermost(&packet.view()) }
    }

    /// Key of a nonlinear packet, whose first bytes are gathered in `bytes`.
    fn key_of_pieces<'a>(
        &self,
        packet: &'a Packet,
        bytes: &'a mut [u8; WALKED_BYTES_MAX],
    ) -> FlowKey<'a> {
        let mut len = 0;
        for piece in packet.fragments() {
            let room = &mut bytes[len..];
            let taken = piece.len().min(room.len());
            room[..taken].copy_from_slice(&piece[..taken]);
            len += taken;
        }
        let view = View::new(&bytes[..len], &packet.headers);
        FlowKey::of(&view, packet.wire_len, &self.rules)
    }

    /// Rule that makes the key of a parsed packet.
    #[cold]
    pub(crate) fn rule_of(&self, packet: &Packet) -> KeyRule {
        if packet.is_nonlinear() {
            return self.key_of_pieces(packet, &mut [0; WALKED_BYTES_MAX]).rule;
        }
        FlowKey::of(&packet.view(), packet.wire_len, &self.rules).rule
    }

    /// Hash of a pair of addresses (4 + 4 or 16 + 16 bytes) and optionally a pair of ports, all in
    /// network byte order.
    #[inline]
    #[must_use]
    pub fn hash_tuple(&self, addresses: &[u8], ports: Option<&[u8; 4]>) -> FlowHash {
        FlowHash::computed(match &self.kind {
            HashKind::Keyed(keyed) => keyed.hash(addresses, ports),
            HashKind::Toeplitz(toeplitz) => toeplitz.hash_tuple(addresses, ports),
        })
    }

    /// Hash of a flow key.
    #[must_use]
    pub fn hash_key(&self, key: &FlowKey<'_>) -> FlowHash {
        let of_tuple =
            |addresses: &[u8], ports: Option<&[u8; 4]>| self.hash_tuple(addresses, ports);
        key.hashed(of_tuple, |id| self.hash_id(id)).unwrap_or(FlowHash::NONE)
    }

    /// Hash of a connection ID of at most 20 bytes.
    fn hash_id(&self, id: &[u8]) -> FlowHash {
        FlowHash::computed(match &self.kind {
            HashKind::Keyed(keyed) => keyed.hash_id(id),
            HashKind::Toeplitz(toeplitz) => toeplitz.hash_tuple(id, None),
        })
    }
}
