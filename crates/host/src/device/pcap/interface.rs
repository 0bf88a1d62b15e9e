//! Interfaces of a capture: link types and clocks.

use path::parse::Link;
use pcap_parser::{InterfaceDescriptionBlock, OptionCode};

/// An interface of a pcapng section.
#[derive(Clone, Copy, Debug)]
pub(super) struct Interface {
    /// What its packets begin with; none if the path cannot read that.
    pub(super) link: Option<Link>,
    snaplen: u32,
    resolution: Resolution,
    offset_s: i64,
}

/// How long a tick of the interface's clock is (option `if_tsresol`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Resolution {
    /// 10^-n seconds.
    Decimal(u8),
    /// 2^-n seconds.
    Binary(u8),
}

impl Interface {
    /// What stands for one whose description cannot be read: its packets cannot be either.
    pub(super) const DAMAGED: Self =
        Self { link: None, snaplen: 0, resolution: Resolution::Decimal(6), offset_s: 0 };

    pub(super) fn of(description: &InterfaceDescriptionBlock<'_>, big_endian: bool) -> Self {
        // pcap-parser reads this option as little-endian in every section.
        let offset = description
            .options
            .iter()
            .find(|option| option.code == OptionCode::IfTsoffset)
            .and_then(|option| option.value().first_chunk().copied())
            .unwrap_or_default();
        Self {
            link: link_of(description.linktype.0),
            snaplen: description.snaplen,
            resolution: Resolution::of(description.if_tsresol),
            offset_s: if big_endian {
                i64::from_be_bytes(offset)
            } else {
                i64::from_le_bytes(offset)
            },
        }
    }

    /// A time of this interface's clock, in nanoseconds since 1970.
    pub(super) fn timestamp_ns(&self, ticks: u64) -> u64 {
        let ns = self.resolution.to_ns(ticks);
        let offset_ns = i128::from(self.offset_s) * 1_000_000_000;
        u64::try_from(i128::from(ns) + offset_ns).unwrap_or(0)
    }

    /// How much of a packet a simple packet block holds.
    pub(super) fn captured(&self, wire_len: u32) -> usize {
        let snaplen = if self.snaplen == 0 { u32::MAX } else { self.snaplen };
        wire_len.min(snaplen) as usize
    }
}

impl Resolution {
    fn of(if_tsresol: u8) -> Self {
        match if_tsresol & 0x7f {
            exponent if if_tsresol & 0x80 != 0 => Self::Binary(exponent),
            exponent => Self::Decimal(exponent),
        }
    }

    fn to_ns(self, ticks: u64) -> u64 {
        let ns = u128::from(ticks) * 1_000_000_000;
        let ns = match self {
            Self::Decimal(exponent) => {
                10u128.checked_pow(exponent.into()).map_or(0, |units| ns / units)
            }
            Self::Binary(exponent) => ns >> exponent,
        };
        u64::try_from(ns).unwrap_or(0)
    }
}

/// The link types of what is written.
pub(super) const ETHERNET: u32 = 1;
pub(super) const RAW: u32 = 101;

/// What packets of a link type (tcpdump.org/linktypes.html) begin with.
pub(super) fn link_of(link_type: i32) -> Option<Link> {
    match link_type {
        1 => Some(Link::Ethernet),
        // RAW, under its numbers on various systems; IPV4; IPV6.
        12 | 14 | 101 | 228 | 229 => Some(Link::Ip),
        _ => None,
    }
}

/// The name of a link type that is often met and not read, for messages.
pub(super) fn link_name(link_type: i32) -> &'static str {
    match link_type {
        0 => " (NULL)",
        105 => " (IEEE802_11)",
        108 => " (LOOP)",
        113 => " (LINUX_SLL)",
        127 => " (IEEE802_11_RADIOTAP)",
        195 | 230 => " (IEEE802_15_4)",
        276 => " (LINUX_SLL2)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_of_any_resolution_become_nanoseconds() {
        let second = 1_000_000_000;
        assert_eq!(Resolution::of(6).to_ns(1_500_000), second * 3 / 2);
        assert_eq!(Resolution::of(9).to_ns(7), 7);
        assert_eq!(Resolution::of(12).to_ns(7000), 7);
        assert_eq!(Resolution::of(0).to_ns(3), 3 * second);
        assert_eq!(Resolution::of(0x80 | 10).to_ns(1536), second * 3 / 2);
        assert_eq!(Resolution::of(0x7f).to_ns(u64::MAX), 0, "no clock ticks that fast");
        assert_eq!(Resolution::of(0xff).to_ns(u64::MAX), 0);
    }

    #[test]
    fn a_clock_may_be_offset_and_never_wraps() {
        let mut interface =
            Interface { link: None, snaplen: 0, resolution: Resolution::Decimal(9), offset_s: 2 };
        assert_eq!(interface.timestamp_ns(5), 2_000_000_005);
        interface.offset_s = i64::MIN;
        assert_eq!(interface.timestamp_ns(5), 0);
    }
}
