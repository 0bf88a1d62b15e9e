//! Interfaces of a capture: link types and clocks.

use pcap_parser::{InterfaceDescriptionBlock, OptionCode};

use super::link::LinkType;

/// Interface of a pcapng section.
#[derive(Clone, Copy, Debug)]
pub(super) struct CaptureInterface {
    /// Link type of the interface's packets.
    pub(super) link_type: LinkType,
    snaplen: u32,
    resolution: Resolution,
    offset_s: i64,
}

/// Tick length of the interface's clock (option `if_tsresol`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Resolution {
    /// 10^-n seconds.
    Decimal(u8),
    /// 2^-n seconds.
    Binary(u8),
}

impl CaptureInterface {
    /// Placeholder for an interface with an unreadable description: its packets are unreadable too.
    pub(super) const DAMAGED: Self = Self {
        link_type: LinkType::DAMAGED,
        snaplen: 0,
        resolution: Resolution::Decimal(6),
        offset_s: 0,
    };

    pub(super) fn of(description: &InterfaceDescriptionBlock<'_>, big_endian: bool) -> Self {
        // pcap-parser decodes this option as little-endian in every section.
        let offset = description
            .options
            .iter()
            .find(|option| option.code == OptionCode::IfTsoffset)
            .and_then(|option| option.value().first_chunk().copied())
            .unwrap_or_default();
        Self {
            link_type: LinkType::of(description.linktype.0),
            snaplen: description.snaplen,
            resolution: Resolution::of(description.if_tsresol),
            offset_s: if big_endian {
                i64::from_be_bytes(offset)
            } else {
                i64::from_le_bytes(offset)
            },
        }
    }

    /// Converts a timestamp of this interface to nanoseconds since 1970.
    pub(super) fn timestamp_ns(&self, ticks: u64) -> u64 {
        let ns = self.resolution.to_ns(ticks);
        let offset_ns = i128::from(self.offset_s) * 1_000_000_000;
        u64::try_from(i128::from(ns) + offset_ns).unwrap_or(0)
    }

    /// Number of captured bytes in a simple packet block.
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
