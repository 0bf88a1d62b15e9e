//! Fields that may advance within a packet in `lro` mode, as in the generic LRO of Linux 2.6.24
//! (`net/ipv4/inet_lro.c`): acknowledgement, window and timestamps.

use super::CoalesceMode;
use super::refusal::MergeRefusal;
use super::wire::TCP_BYTES;
use crate::packet::Packet;

/// NOP, NOP, timestamps (kind 8) of ten bytes, as sent by every stack (RFC 7323, appendix A).
const TIMESTAMPS: [u8; 4] = [1, 1, 8, 10];

/// A TCP header's timestamps, if they are its only options.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Timestamps {
    value: u32,
    echo: u32,
}

impl Timestamps {
    /// Reads all options of a header. As in `inet_lro.c`, an echo of 0 is refused.
    pub(super) fn of(options: &[u8]) -> Option<Self> {
        let options: &[u8; 12] = options.try_into().ok()?;
        let ([kind, value, echo], []) = options.as_chunks::<4>() else { return None };
        let timestamps =
            Self { value: u32::from_be_bytes(*value), echo: u32::from_be_bytes(*echo) };
        (*kind == TIMESTAMPS && timestamps.echo != 0).then_some(timestamps)
    }

    pub(super) fn to_bytes(self) -> [u8; 12] {
        let mut bytes = [0; 12];
        let words = [TIMESTAMPS, self.value.to_be_bytes(), self.echo.to_be_bytes()];
        bytes.copy_from_slice(words.as_flattened());
        bytes
    }
}

/// Fields of the latest segment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Newest {
    pub(super) acknowledgement: u32,
    pub(super) window: u16,
    pub(super) timestamps: Option<Timestamps>,
}

impl Newest {
    /// Fields of a segment; defaults in `gro` mode, in which nothing advances.
    pub(super) fn of(packet: &Packet, mode: CoalesceMode) -> Self {
        if mode == CoalesceMode::Gro {
            return Self::default();
        }
        let start = usize::from(packet.headers.transport_offset);
        let end = usize::from(packet.headers.payload_offset);
        let bytes = packet.frame.data().get(start..end).unwrap_or_default();
        let Some((header, options)) = bytes.split_first_chunk::<TCP_BYTES>() else {
            return Self::default();
        };
        Self {
            acknowledgement: u32::from_be_bytes([header[8], header[9], header[10], header[11]]),
            window: u16::from_be_bytes([header[14], header[15]]),
            timestamps: Timestamps::of(options),
        }
    }

    /// Checks that no field of `next` is older than this one's.
    pub(super) fn advances_to(&self, next: &Self) -> Result<(), MergeRefusal> {
        let goes_back = |from: u32, to: u32| to.wrapping_sub(from).cast_signed() < 0;
        if goes_back(self.acknowledgement, next.acknowledgement) {
            return Err(MergeRefusal::Acknowledgement);
        }
        match (self.timestamps, next.timestamps) {
            (Some(from), Some(to)) if goes_back(from.value, to.value) => {
                Err(MergeRefusal::OtherOptions)
            }
            (Some(_), Some(_)) | (None, None) => Ok(()),
            _ => Err(MergeRefusal::OtherOptions),
        }
    }
}
