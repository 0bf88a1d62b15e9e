//! Options of a virtio device.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use forebay_sys::error::Error;

/// Minimum number of entries of a ring.
pub const QUEUE_SIZE_MIN: u16 = 16;
/// Maximum number of entries of a split ring (virtio 1.2, section 2.7).
pub const QUEUE_SIZE_MAX: u16 = 1 << 15;
/// Default number of entries, as in DPDK and QEMU.
pub const QUEUE_SIZE_DEFAULT: u16 = 256;

/// Options of a vhost-user device: its socket, rings and receive buffers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VirtioOptions {
    /// Side that listens at the socket.
    pub role: Role,
    /// Entries of each ring: a power of two from [`QUEUE_SIZE_MIN`] to [`QUEUE_SIZE_MAX`].
    pub queue_size: u16,
    /// True to use packed rings if the back end offers them.
    pub packed: bool,
    /// Size of receive buffers.
    pub rx_buffers: RxBufferSizing,
    /// Upper limit of `auto`, virtio header included, in bytes: at most [`RX_BUFFER_BYTES_MAX`].
    pub rx_buffer_max_bytes: u32,
    /// True to accept the receive offloads: partial and verified checksums, and large packets of
    /// many segments (`GUEST_CSUM`, `GUEST_TSO4` and the like).
    pub rx_offloads: bool,
}

/// Largest receive buffer, virtio header included: larger ones gained nothing
/// (docs/src/concepts/virtio-receive-buffers.md). The largest ring full of them takes less than the
/// 4 GiB that its memory may have.
pub const RX_BUFFER_BYTES_MAX: u32 = 16 << 10;
/// Default of the largest receive buffer of `auto`.
pub const RX_BUFFER_MAX_BYTES_DEFAULT: u32 = RX_BUFFER_BYTES_MAX;

impl Default for VirtioOptions {
    /// Default options: connect, split rings of 256 entries, buffers by the average packet.
    fn default() -> Self {
        Self {
            role: Role::Connect,
            queue_size: QUEUE_SIZE_DEFAULT,
            packed: false,
            rx_buffers: RxBufferSizing::Auto,
            rx_buffer_max_bytes: RX_BUFFER_MAX_BYTES_DEFAULT,
            rx_offloads: true,
        }
    }
}

/// Side that listens at the vhost-user socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Role {
    /// Client: the back end listens, this side connects.
    #[default]
    Connect,
    /// Server: this side listens, the back end connects.
    Listen,
}

/// Size of receive buffers (VIO-1).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RxBufferSizing {
    /// By the average length of received packets (VIO-2).
    #[default]
    Auto,
    /// One Ethernet frame: 1518 bytes and the virtio header.
    Mtu,
    /// One page.
    Page,
    /// Fixed size in bytes, virtio header included: at most [`RX_BUFFER_BYTES_MAX`].
    Fixed(NonZeroU32),
}

impl fmt::Display for RxBufferSizing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Mtu => f.write_str("mtu"),
            Self::Page => f.write_str("page"),
            Self::Fixed(bytes) => bytes.fmt(f),
        }
    }
}

impl FromStr for RxBufferSizing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "mtu" => Ok(Self::Mtu),
            "page" => Ok(Self::Page),
            bytes => bytes.parse().map(Self::Fixed).map_err(|_| {
                format!("{text:?} is not a size of receive buffers: give auto, mtu, page or bytes")
            }),
        }
    }
}

impl VirtioOptions {
    /// Validates the options.
    ///
    /// # Errors
    /// If an option is out of its limits: the first such one.
    pub fn check(&self) -> Result<(), Error> {
        let sizes = QUEUE_SIZE_MIN..=QUEUE_SIZE_MAX;
        if !self.queue_size.is_power_of_two() || !sizes.contains(&self.queue_size) {
            return Err(Error::Setting {
                what: "queue-size",
                value: self.queue_size.to_string(),
                why: format!("it is a power of two from {QUEUE_SIZE_MIN} to {QUEUE_SIZE_MAX}"),
            });
        }
        let (what, bytes) = match self.rx_buffers {
            RxBufferSizing::Fixed(bytes) => ("rx-buffers", bytes.get()),
            RxBufferSizing::Auto | RxBufferSizing::Mtu | RxBufferSizing::Page => {
                ("rx-buffer-max", self.rx_buffer_max_bytes)
            }
        };
        if bytes > RX_BUFFER_BYTES_MAX {
            return Err(Error::Setting {
                what,
                value: bytes.to_string(),
                why: format!("a receive buffer has {RX_BUFFER_BYTES_MAX} bytes at most"),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes beyond the limit would not fit into the memory of a ring.
    #[test]
    fn vio_1_receive_buffers_are_bounded() {
        for bytes in [1, 2048, RX_BUFFER_BYTES_MAX, RX_BUFFER_BYTES_MAX + 1, u32::MAX] {
            let is_allowed = bytes <= RX_BUFFER_BYTES_MAX;
            let fixed = RxBufferSizing::Fixed(NonZeroU32::new(bytes).unwrap());
            let options = VirtioOptions { rx_buffers: fixed, ..VirtioOptions::default() };
            assert_eq!(options.check().is_ok(), is_allowed, "{bytes}");
            let options = VirtioOptions { rx_buffer_max_bytes: bytes, ..VirtioOptions::default() };
            assert_eq!(options.check().is_ok(), is_allowed, "{bytes}");
        }
    }

    #[test]
    fn policy_round_trips() {
        for text in ["auto", "mtu", "page", "9216"] {
            assert_eq!(
                text.parse::<RxBufferSizing>().map(|policy| policy.to_string()),
                Ok(text.into())
            );
        }
        for text in ["", "0", "-1", "big", "99999999999"] {
            assert!(text.parse::<RxBufferSizing>().is_err(), "{text}");
        }
    }

    #[test]
    fn ring_sizes_are_powers_of_two() {
        let of = |queue_size| VirtioOptions { queue_size, ..VirtioOptions::default() }.check();
        assert!([16, 256, 1 << 15].into_iter().all(|size| of(size).is_ok()));
        assert!([0, 8, 100, 1025].into_iter().all(|size| of(size).is_err()));
    }
}
