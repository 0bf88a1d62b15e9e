//! Which features of a back end are used (virtio 1.2, sections 2.2 and 5.1.3).

use std::fmt;

use virtio_bindings::virtio_config::{VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN,
    VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_USO4,
    VIRTIO_NET_F_GUEST_USO6, VIRTIO_NET_F_HASH_REPORT, VIRTIO_NET_F_HOST_ECN,
    VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_USO, VIRTIO_NET_F_MQ,
    VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU, VIRTIO_NET_HDR_GSO_ECN, VIRTIO_NET_HDR_GSO_NONE,
    VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6, VIRTIO_NET_HDR_GSO_UDP_L4,
};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

/// The back end speaks the vhost-user protocol's own features (`VHOST_USER_F_PROTOCOL_FEATURES`).
pub const VHOST_USER_F_PROTOCOL_FEATURES: u32 = 30;

/// Bytes of a virtio header (`virtio_net_hdr_mrg_rxbuf`).
const HEADER_BYTES: u32 = 12;
/// The same where the device reports hashes (`virtio_net_hdr_v1_hash`).
const HEADER_WITH_HASH_BYTES: u32 = 20;

/// A feature that we use where it is offered.
struct Usable {
    bit: u32,
    /// As the specification names it.
    name: &'static str,
    /// It takes one of these; each stands in a row above. None: it stands alone.
    takes: &'static [u32],
}

/// All that is ever accepted. `GUEST_UFO` and `HOST_UFO` are not: such a packet is one datagram to
/// be fragmented, which is not what coalescing makes or cuts. `IN_ORDER` would bind the device to
/// an order that nothing here relies on.
const USABLE: [Usable; 20] = [
    alone(VIRTIO_F_VERSION_1, "version_1"),
    alone(VHOST_USER_F_PROTOCOL_FEATURES, "protocol_features"),
    alone(VIRTIO_F_RING_PACKED, "ring_packed"),
    alone(VIRTIO_RING_F_EVENT_IDX, "event_idx"),
    alone(VIRTIO_NET_F_MRG_RXBUF, "mrg_rxbuf"),
    alone(VIRTIO_NET_F_MTU, "mtu"),
    alone(VIRTIO_NET_F_CTRL_VQ, "ctrl_vq"),
    one_of(VIRTIO_NET_F_MQ, "mq", &[VIRTIO_NET_F_CTRL_VQ]),
    one_of(VIRTIO_NET_F_HASH_REPORT, "hash_report", &[VIRTIO_NET_F_CTRL_VQ]),
    alone(VIRTIO_NET_F_GUEST_CSUM, "guest_csum"),
    one_of(VIRTIO_NET_F_GUEST_TSO4, "guest_tso4", &[VIRTIO_NET_F_GUEST_CSUM]),
    one_of(VIRTIO_NET_F_GUEST_TSO6, "guest_tso6", &[VIRTIO_NET_F_GUEST_CSUM]),
    one_of(
        VIRTIO_NET_F_GUEST_ECN,
        "guest_ecn",
        &[VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6],
    ),
    one_of(VIRTIO_NET_F_GUEST_USO4, "guest_uso4", &[VIRTIO_NET_F_GUEST_CSUM]),
    one_of(VIRTIO_NET_F_GUEST_USO6, "guest_uso6", &[VIRTIO_NET_F_GUEST_CSUM]),
    alone(VIRTIO_NET_F_CSUM, "csum"),
    one_of(VIRTIO_NET_F_HOST_TSO4, "host_tso4", &[VIRTIO_NET_F_CSUM]),
    one_of(VIRTIO_NET_F_HOST_TSO6, "host_tso6", &[VIRTIO_NET_F_CSUM]),
    one_of(VIRTIO_NET_F_HOST_ECN, "host_ecn", &[VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6]),
    one_of(VIRTIO_NET_F_HOST_USO, "host_uso", &[VIRTIO_NET_F_CSUM]),
];

const fn alone(bit: u32, name: &'static str) -> Usable {
    Usable { bit, name, takes: &[] }
}

const fn one_of(bit: u32, name: &'static str, takes: &'static [u32]) -> Usable {
    Usable { bit, name, takes }
}

/// What is asked of a back end beyond what is always welcome.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Wishes {
    /// Packed rings.
    pub packed: bool,
    /// The hashes that the device computed.
    pub device_hash: bool,
}

/// Features that both sides agreed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Features(u64);

impl Features {
    /// What is accepted of `offered`: never a bit that is not offered (FEAT1), never one without
    /// what it takes (FEAT2); what is unknown is ignored (FEAT3).
    ///
    /// # Errors
    /// Why the back end cannot be used: it does not offer `VERSION_1` (FEAT4).
    pub fn negotiate(offered: u64, wishes: Wishes) -> Result<Self, String> {
        let is_wished = |bit| match bit {
            VIRTIO_F_RING_PACKED => wishes.packed,
            VIRTIO_NET_F_HASH_REPORT => wishes.device_hash,
            _ => true,
        };
        let mut accepted = Self(0);
        for feature in &USABLE {
            let stands =
                feature.takes.is_empty() || feature.takes.iter().any(|&taken| accepted.has(taken));
            if stands && is_wished(feature.bit) {
                accepted.0 |= offered & (1 << feature.bit);
            }
        }
        if !accepted.has(VIRTIO_F_VERSION_1) {
            return Err(format!(
                "it offers the features {offered:#x}, without VIRTIO_F_VERSION_1 (bit \
                 {VIRTIO_F_VERSION_1}): a legacy device, which is not supported"
            ));
        }
        Ok(accepted)
    }

    /// As many as `SET_FEATURES` says.
    #[must_use]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Whether a feature was accepted, by its bit: one of `virtio_bindings`.
    #[must_use]
    pub fn has(self, bit: u32) -> bool {
        1_u64.checked_shl(bit).is_some_and(|mask| self.0 & mask != 0)
    }

    /// Bytes of the header in front of each packet, in both directions.
    #[must_use]
    pub fn header_bytes(self) -> u32 {
        if self.has(VIRTIO_NET_F_HASH_REPORT) { HEADER_WITH_HASH_BYTES } else { HEADER_BYTES }
    }

    /// Whether a packet may come in several buffers.
    #[must_use]
    pub fn mergeable(self) -> bool {
        self.has(VIRTIO_NET_F_MRG_RXBUF)
    }

    /// Whether a packet that comes may have that `gso_type` (NET11).
    #[must_use]
    pub fn accepts_gso(self, gso_type: u8) -> bool {
        let ecn = u32::from(gso_type) & VIRTIO_NET_HDR_GSO_ECN;
        let tcp = match u32::from(gso_type) & !VIRTIO_NET_HDR_GSO_ECN {
            VIRTIO_NET_HDR_GSO_NONE => return ecn == 0,
            VIRTIO_NET_HDR_GSO_UDP_L4 => {
                let uso = [VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6];
                return ecn == 0 && uso.into_iter().any(|bit| self.has(bit));
            }
            VIRTIO_NET_HDR_GSO_TCPV4 => VIRTIO_NET_F_GUEST_TSO4,
            VIRTIO_NET_HDR_GSO_TCPV6 => VIRTIO_NET_F_GUEST_TSO6,
            _ => return false,
        };
        self.has(tcp) && (ecn == 0 || self.has(VIRTIO_NET_F_GUEST_ECN))
    }
}

impl fmt::Display for Features {
    /// The names, as in `mrg_rxbuf guest_csum`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let accepted = USABLE.iter().filter(|feature| self.has(feature.bit));
        for (at, feature) in accepted.enumerate() {
            let space = if at == 0 { "" } else { " " };
            write!(f, "{space}{}", feature.name)?;
        }
        Ok(())
    }
}
