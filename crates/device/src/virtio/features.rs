//! Feature negotiation with a back end (virtio 1.2, sections 2.2 and 5.1.3).

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

use super::header::{HASH_HEADER_BYTES, HEADER_BYTES};

/// Bit that announces vhost-user protocol features (`VHOST_USER_F_PROTOCOL_FEATURES`).
pub(super) const VHOST_USER_F_PROTOCOL_FEATURES: u32 = 30;

/// Feature that is accepted if offered.
struct Usable {
    bit: u32,
    /// Name in the specification.
    name: &'static str,
    /// Prerequisites, any one of which suffices; each must be in an earlier row. Empty: none.
    takes: &'static [u32],
}

/// All features that are ever accepted. `GUEST_UFO` and `HOST_UFO` are not: their packets are one
/// datagram to be fragmented, which coalescing neither makes nor cuts. `IN_ORDER` would bind the
/// device to an order that nothing here relies on.
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

/// Optional features requested of a back end, beyond those that are always accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct RequestedFeatures {
    /// Packed rings.
    pub(super) packed: bool,
    /// Hashes computed by the device.
    pub(super) device_hash: bool,
    /// No receive offloads (`GUEST_*`): packets as on the wire.
    pub(super) without_offloads: bool,
    /// No large packets (`GUEST_TSO4` and the like): a ring of small buffers has no room for one.
    pub(super) without_large: bool,
}

/// Features that both sides agreed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Features(u64);

impl Features {
    /// Returns the features accepted of `offered`: never a bit that is not offered (FEAT1), never
    /// one without its required features (FEAT2); unknown bits are ignored (FEAT3).
    ///
    /// # Errors
    /// If the back end does not offer `VERSION_1` (FEAT4).
    pub(super) fn negotiate(offered: u64, requested: RequestedFeatures) -> Result<Self, String> {
        let is_mergeable = offered >> VIRTIO_NET_F_MRG_RXBUF & 1 == 1;
        let is_wished = |bit| match bit {
            // Without mergeable buffers, each buffer would have to hold 64 KiB (NET2).
            VIRTIO_NET_F_GUEST_TSO4
            | VIRTIO_NET_F_GUEST_TSO6
            | VIRTIO_NET_F_GUEST_USO4
            | VIRTIO_NET_F_GUEST_USO6 => is_mergeable && !requested.without_large,
            VIRTIO_NET_F_GUEST_CSUM => !requested.without_offloads,
            VIRTIO_F_RING_PACKED => requested.packed,
            VIRTIO_NET_F_HASH_REPORT => requested.device_hash,
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

    /// Returns the bits for `SET_FEATURES`.
    #[must_use]
    pub(super) fn bits(self) -> u64 {
        self.0
    }

    /// True if a feature was accepted, by its bit number in `virtio_bindings`.
    #[must_use]
    pub(super) fn has(self, bit: u32) -> bool {
        1_u64.checked_shl(bit).is_some_and(|mask| self.0 & mask != 0)
    }

    /// Returns the length of the header in front of each packet, in both directions.
    #[must_use]
    pub(super) fn header_bytes(self) -> u32 {
        if self.has(VIRTIO_NET_F_HASH_REPORT) { HASH_HEADER_BYTES } else { HEADER_BYTES }
    }

    /// True if a packet may span several buffers.
    #[must_use]
    pub(super) fn mergeable(self) -> bool {
        self.has(VIRTIO_NET_F_MRG_RXBUF)
    }

    /// True if a received packet may have that `gso_type` (NET11).
    #[must_use]
    pub(super) fn accepts_gso(self, gso_type: u8) -> bool {
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
    /// Writes the names, as in `mrg_rxbuf guest_csum`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let accepted = USABLE.iter().filter(|feature| self.has(feature.bit));
        for (at, feature) in accepted.enumerate() {
            let space = if at == 0 { "" } else { " " };
            write!(f, "{space}{}", feature.name)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;

    /// Requirements between features in the specification (5.1.3.1), by bits.
    const TAKES: [(u32, &[u32]); 21] = [
        (7, &[1]),
        (8, &[1]),
        (9, &[7, 8]),
        (10, &[1]),
        (54, &[1]),
        (55, &[1]),
        (11, &[0]),
        (12, &[0]),
        (13, &[11, 12]),
        (14, &[0]),
        (56, &[0]),
        (18, &[17]),
        (19, &[17]),
        (21, &[17]),
        (22, &[17]),
        (23, &[17]),
        (57, &[17]),
        (60, &[17]),
        (61, &[11, 12]),
        (53, &[17]),
        (52, &[17]),
    ];

    fn requested() -> impl Strategy<Value = RequestedFeatures> {
        any::<[bool; 4]>().prop_map(|[packed, device_hash, without_offloads, without_large]| {
            RequestedFeatures { packed, device_hash, without_offloads, without_large }
        })
    }

    proptest! {
        #[test]
        fn feat_1_2_3_accepted_features_offered_with_dependencies(
            offered: u64,
            requested in requested(),
        ) {
            let features = Features::negotiate(offered | VERSION_1, requested).unwrap();
            prop_assert_eq!(features.bits() & !(offered | VERSION_1), 0);
            prop_assert!(features.has(VIRTIO_F_VERSION_1));
            for (bit, takes) in TAKES {
                prop_assert!(!features.has(bit) || takes.iter().any(|&bit| features.has(bit)));
            }
            prop_assert!(requested.packed || !features.has(VIRTIO_F_RING_PACKED));
            prop_assert!(requested.device_hash || !features.has(VIRTIO_NET_F_HASH_REPORT));
            let has_large = [1, 4, 5].into_iter().any(|gso_type| features.accepts_gso(gso_type));
            prop_assert!(!requested.without_large || !has_large);
        }

        #[test]
        fn feat_4_device_without_version_1_is_refused(offered: u64, requested in requested()) {
            let refused = Features::negotiate(offered & !VERSION_1, requested);
            prop_assert!(refused.unwrap_err().contains("VIRTIO_F_VERSION_1"));
        }
    }

    #[test]
    fn feat_2_dependent_bit_alone_is_dropped() {
        for (bit, _) in TAKES {
            let offered = VERSION_1 | 1 << bit;
            let requested =
                RequestedFeatures { packed: true, device_hash: true, ..Default::default() };
            assert_eq!(Features::negotiate(offered, requested).unwrap().bits(), VERSION_1, "{bit}");
        }
    }

    #[test]
    fn all_usable_features_are_accepted() {
        let all = Features::negotiate(
            u64::MAX,
            RequestedFeatures { packed: true, device_hash: true, ..Default::default() },
        );
        let all = all.unwrap();
        assert!(USABLE.iter().all(|feature| all.has(feature.bit)));
        assert_eq!(all.bits().count_ones(), u32::try_from(USABLE.len()).unwrap());
        assert_eq!((all.header_bytes(), all.mergeable()), (20, true));
        let plain = Features::negotiate(VERSION_1, RequestedFeatures::default()).unwrap();
        assert_eq!((plain.header_bytes(), plain.mergeable()), (12, false));
        assert_eq!(plain.to_string(), "version_1");
    }

    #[test]
    fn net_11_gso_type_needs_its_feature() {
        let without = |bits: &[u32], merged| {
            let offered = bits.iter().fold(VERSION_1 | merged, |offered, bit| offered | 1 << bit);
            Features::negotiate(offered, RequestedFeatures::default()).unwrap()
        };
        let of = |bits: &[u32]| without(bits, 1 << VIRTIO_NET_F_MRG_RXBUF);
        let accepted = |features: Features| -> Vec<u8> {
            (0..=u8::MAX).filter(|&gso_type| features.accepts_gso(gso_type)).collect()
        };
        assert_eq!(accepted(of(&[])), [0]);
        assert_eq!(accepted(of(&[1, 7])), [0, 1]);
        assert_eq!(accepted(of(&[1, 8])), [0, 4]);
        assert_eq!(accepted(of(&[1, 7, 8, 9])), [0, 1, 4, 0x81, 0x84]);
        assert_eq!(accepted(of(&[1, 54])), [0, 5]);
        assert_eq!(accepted(of(&[1, 10])), [0], "UFO is never accepted");
        assert_eq!(accepted(without(&[1, 7, 8, 9, 54], 0)), [0], "each buffer would hold 64 KiB");
    }
}
