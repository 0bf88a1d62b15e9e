//! Configuration space of a device (virtio 1.2, section 5.1.4: `struct virtio_net_config`).

/// Length up to and including `mtu`, behind the MAC address, status and number of queue pairs.
pub(super) const MTU_CONFIG_BYTES: usize = 6 + 2 + 2 + 2;

/// Length up to and including `supported_hash_types`, behind speed, duplex mode and RSS limits.
pub(super) const HASH_CONFIG_BYTES: usize = MTU_CONFIG_BYTES + 4 + 1 + 1 + 2 + 4;

/// Least MTU of a device.
const MTU_MIN: u16 = 68;

/// Maximum number of queue pairs of a device (`VIRTIO_NET_CTRL_MQ_VQ_PAIRS_MAX`).
const QUEUE_PAIRS_MAX: u16 = 0x8000;

/// Fields in use. Impossible values count as absent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct VirtioNetConfig {
    /// `max_virtqueue_pairs`; valid with `MQ`.
    pub(super) queue_pairs_max: Option<u16>,
    /// `mtu`, in bytes; valid with `MTU`.
    pub(super) mtu: Option<u16>,
    /// `rss_max_key_size`; valid with `HASH_REPORT`, as is the next field.
    pub(super) hash_key_max_bytes: u8,
    /// `supported_hash_types`: bits of `VIRTIO_NET_RSS_HASH_TYPE_*`.
    pub(super) hash_types: u32,
}

impl VirtioNetConfig {
    /// Decodes the beginning of the configuration: [`MTU_CONFIG_BYTES`], [`HASH_CONFIG_BYTES`], or
    /// fewer. A truncated field counts as absent.
    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        let short = |at: usize| bytes.get(at..)?.first_chunk().copied().map(u16::from_le_bytes);
        let long = |at: usize| bytes.get(at..)?.first_chunk().copied().map(u32::from_le_bytes);
        Self {
            queue_pairs_max: short(8).filter(|pairs| (1..=QUEUE_PAIRS_MAX).contains(pairs)),
            mtu: short(10).filter(|&mtu| mtu >= MTU_MIN),
            hash_key_max_bytes: bytes.get(17).copied().unwrap_or(0),
            hash_types: long(20).unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: [u8; HASH_CONFIG_BYTES] =
        [2, 0, 0, 0, 0, 1, 1, 0, 4, 0, 0x28, 0x23, 0, 0, 0, 0, 1, 40, 128, 0, 0x3f, 1, 0, 0];

    #[test]
    fn fields_at_specified_offsets() {
        let all = VirtioNetConfig {
            queue_pairs_max: Some(4),
            mtu: Some(9000),
            hash_key_max_bytes: 40,
            hash_types: 0x13f,
        };
        assert_eq!(VirtioNetConfig::from_bytes(&BYTES), all);
        let short = VirtioNetConfig { hash_key_max_bytes: 0, hash_types: 0, ..all };
        assert_eq!(VirtioNetConfig::from_bytes(&BYTES[..MTU_CONFIG_BYTES]), short);
        assert_eq!(
            VirtioNetConfig::from_bytes(&BYTES[..11]),
            VirtioNetConfig { mtu: None, ..short }
        );
        assert_eq!(VirtioNetConfig::from_bytes(&[]), VirtioNetConfig::default());
    }

    #[test]
    fn impossible_counts_as_unsaid() {
        for (pairs, said) in [(0, None), (1, Some(1)), (0x8000, Some(0x8000)), (0x8001, None)] {
            let mut bytes = BYTES;
            bytes[8..10].copy_from_slice(&u16::to_le_bytes(pairs));
            assert_eq!(VirtioNetConfig::from_bytes(&bytes).queue_pairs_max, said);
        }
        for (mtu, said) in [(0, None), (67, None), (68, Some(68))] {
            let mut bytes = BYTES;
            bytes[10..12].copy_from_slice(&u16::to_le_bytes(mtu));
            assert_eq!(VirtioNetConfig::from_bytes(&bytes).mtu, said);
        }
    }
}
