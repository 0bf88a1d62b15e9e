//! Hash: the number by which a flow is steered.
//!
//! TCP and UDP hash addresses and ports; fragments, other protocols and headers cut short hash
//! addresses only, so that all pieces of a datagram steer alike. What has no addresses has no
//! hash and is not steered (RPS-4, RPS-5).

mod indirection;
mod keyed;
pub mod toeplitz;

use crate::parse::View;
pub use indirection::{Indirection, RETA_ENTRIES};
pub use keyed::{KEYED_KEY_BYTES, Keyed};
pub use toeplitz::{KeyTooShort, Toeplitz};

/// A flow's hash; 0 means that there is none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct FlowHash(pub u32);

impl FlowHash {
    /// No hash: not steered.
    pub const NONE: Self = Self(0);

    /// The hash of something that has one: a computed 0 becomes 1, as in the kernel
    /// (`__skb_get_hash`).
    #[must_use]
    pub fn computed(hash: u32) -> Self {
        Self(hash.max(1))
    }

    /// Whether there is one.
    #[must_use]
    pub fn is_some(self) -> bool {
        self != Self::NONE
    }
}

/// How flows are hashed.
#[derive(Debug)]
pub struct Hasher(Kind);

#[derive(Debug)]
enum Kind {
    Keyed(Keyed),
    /// Prepared for [`toeplitz::TUPLE_BYTES`].
    Toeplitz(Toeplitz),
}

impl Hasher {
    /// SipHash with a secret key: nobody outside can aim at one CPU. If `symmetric`, both
    /// directions of a flow hash alike.
    #[must_use]
    pub fn keyed(key: &[u8; KEYED_KEY_BYTES], symmetric: bool) -> Self {
        Self(Kind::Keyed(Keyed::new(key, symmetric)))
    }

    /// What network cards compute with the same key, for hashes that agree with theirs.
    ///
    /// # Errors
    /// When the key has fewer than [`toeplitz::TUPLE_KEY_BYTES`] bytes.
    pub fn toeplitz(key: &[u8]) -> Result<Self, KeyTooShort> {
        Ok(Self(Kind::Toeplitz(Toeplitz::new(key, toeplitz::TUPLE_BYTES)?)))
    }

    /// The hash of a parsed packet.
    #[must_use]
    pub fn hash(&self, view: &View<'_>) -> FlowHash {
        let Some(addresses) = view.address_bytes() else { return FlowHash::NONE };
        let ports = if view.is_fragment() { None } else { view.port_bytes() };
        FlowHash::computed(match &self.0 {
            Kind::Keyed(keyed) => keyed.hash(addresses, ports),
            Kind::Toeplitz(toeplitz) => toeplitz.hash_tuple(addresses, ports),
        })
    }
}
