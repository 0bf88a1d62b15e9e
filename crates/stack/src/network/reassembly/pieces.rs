//! Pieces of one datagram, in order. Implements the kernel's rules for valid fragments, duplicates,
//! and fragments that invalidate the datagram (`ip_frag_queue`, `ip6_frag_queue`,
//! `inet_frag_queue_insert`).

use forebay_buf::Frame;
use forebay_rx::packet::Packet;
use forebay_rx::parse::Network;

use super::fragment::FragmentPart;
use crate::network::NetworkDrop;

/// Fragments of a datagram received so far.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    /// Pieces in the order of the datagram, never overlapping.
    placed: Vec<Piece>,
    /// Packets of the pieces, in the order of arrival.
    packets: Vec<Packet>,
    /// Length of the datagram, as far as known from its fragments.
    len: u32,
    /// Number of bytes present.
    here: u32,
    /// True if the last fragment has given the length, even if that fragment was dropped as a
    /// duplicate.
    is_len_known: bool,
    /// Bit mask of the ECN field values of all fragments.
    pub(super) ecn: u8,
    /// Size of the largest IPv4 fragment, and of the largest one with DF set.
    max_size: u32,
    max_df_size: u32,
}

/// Position of a piece. Pieces that arrived in order, each adjacent to the one before, form a run:
/// a fragment within a run is a duplicate, a fragment that crosses the ends of a run overlaps.
#[derive(Clone, Copy, Debug)]
struct Piece {
    start: u32,
    end: u32,
    run_start: u32,
    /// Offset of the piece's bytes in its packet's frame.
    data_at: u16,
    /// Index of the piece's packet.
    packet: u16,
}

/// Result of comparing a fragment with the pieces present.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(super) enum Fit {
    /// The fragment fits into this gap.
    Fits(Gap),
    /// The fragment is already present, and is dropped.
    Duplicate,
    /// The fragment is invalid, and so is the whole datagram.
    Spoils(NetworkDrop),
}

/// Position of a fragment among the pieces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Gap {
    at: usize,
    start: u32,
    end: u32,
    run_start: u32,
}

/// Limit on pieces, more than a datagram can have.
const PIECES_MAX: usize = 1 << 14;

impl Pieces {
    /// Validates a fragment. As in the kernel, the datagram's length is learned even from a
    /// duplicate.
    pub(super) fn fit(&mut self, fragment: &FragmentPart, network: Network) -> Fit {
        let FragmentPart { start, mut end, is_last, .. } = *fragment;
        if is_last {
            if end < self.len || (self.is_len_known && end != self.len) {
                // The end contradicts data beyond it, or another last fragment.
                return Fit::Spoils(NetworkDrop::FragInvalid);
            }
            (self.is_len_known, self.len) = (true, end);
        } else {
            if network == Network::Ipv4 {
                end &= !7; // IPv6 ones were refused by `fragment::ipv6`
            }
            if end > self.len {
                if self.is_len_known {
                    // Data beyond the end that the last fragment has given.
                    return Fit::Spoils(NetworkDrop::FragInvalid);
                }
                self.len = end;
            }
        }
        if end <= start || self.placed.len() >= PIECES_MAX {
            // An empty fragment, or more pieces than a datagram can have.
            return Fit::Spoils(NetworkDrop::FragInvalid);
        }
        self.find_gap(start, end)
    }

    /// Detects duplicates, which are dropped, and overlaps, which invalidate the datagram (RFC
    /// 5722, and its erratum 3089).
    fn find_gap(&self, start: u32, end: u32) -> Fit {
        let at = self.placed.partition_point(|piece| piece.start < end);
        let is_tail = at == self.placed.len();
        let before = at.checked_sub(1).and_then(|before| self.placed.get(before));
        match before {
            None => Fit::Fits(Gap { at, start, end, run_start: start }),
            // Only a piece appended behind all others continues a run.
            Some(before) if before.end == start && is_tail => {
                Fit::Fits(Gap { at, start, end, run_start: before.run_start })
            }
            Some(before) if before.end <= start => {
                Fit::Fits(Gap { at, start, end, run_start: start })
            }
            // The next piece begins at or after `end`, so a fragment beyond `before` is beyond its
            // run.
            Some(before) if before.run_start <= start && end <= before.end => Fit::Duplicate,
            Some(_) => Fit::Spoils(NetworkDrop::FragOverlap),
        }
    }

    /// Inserts a fragment into the gap that it [fits](Self::fit).
    pub(super) fn place(&mut self, gap: Gap, fragment: &FragmentPart, packet: Packet) {
        let Gap { at, start, end, run_start } = gap;
        // Lossless: fewer than PIECES_MAX.
        let place = u16::try_from(self.packets.len()).unwrap_or(u16::MAX);
        let piece = Piece { start, end, run_start, data_at: fragment.data_at, packet: place };
        self.placed.insert(at, piece);
        self.packets.push(packet);
        self.here += end - start;
        self.ecn |= fragment.ecn;
        let size = end - start + fragment.header_len;
        self.max_size = self.max_size.max(size);
        if fragment.has_df {
            self.max_df_size = self.max_df_size.max(size);
        }
    }

    /// True if the datagram is complete.
    pub(super) fn is_whole(&self) -> bool {
        self.is_len_known
            && self.here == self.len
            && self.placed.first().is_some_and(|piece| piece.start == 0)
    }

    /// True if no fragment is present.
    pub(super) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Length of the datagram.
    pub(super) fn len_bytes(&self) -> u32 {
        self.len
    }

    /// True if the largest fragment had DF set.
    pub(super) fn is_df(&self) -> bool {
        self.max_df_size == self.max_size
    }

    /// Number of fragments present.
    pub(super) fn count(&self) -> u32 {
        // Lossless: at most PIECES_MAX.
        u32::try_from(self.packets.len()).unwrap_or(u32::MAX)
    }

    /// Packet of the first piece, and the offset of its bytes. Present if the datagram is complete.
    pub(super) fn head(&self) -> Option<(&Packet, u16)> {
        let piece = self.placed.first()?;
        Some((self.packets.get(usize::from(piece.packet))?, piece.data_at))
    }

    /// The packet that arrived last.
    pub(super) fn latest(&self) -> Option<&Packet> {
        self.packets.last()
    }

    /// Bytes of the pieces, in order.
    pub(super) fn data(&self) -> impl Iterator<Item = &[u8]> {
        self.placed.iter().map(|piece| {
            let frame = self.packets.get(usize::from(piece.packet)).map(|packet| &packet.frame);
            frame.and_then(|frame| frame.data().get(piece.range())).unwrap_or_default()
        })
    }

    /// The packets, in order of arrival.
    pub(super) fn into_packets(self) -> Vec<Packet> {
        self.packets
    }

    /// Converts the pieces into the first one's packet, with the frames of the others chained to
    /// it. Each frame is trimmed to the end of its piece, and all but the first also to the start.
    pub(super) fn into_chain(self) -> Option<Packet> {
        let mut packets: Vec<_> = self.packets.into_iter().map(Some).collect();
        let mut pieces = self.placed.iter();
        let mut taken = |piece: &Piece| packets.get_mut(usize::from(piece.packet))?.take();
        let first = pieces.next()?;
        let mut head = taken(first)?;
        cut(&mut head.frame, first.range().end);
        for piece in pieces {
            let mut frame = taken(piece)?.frame;
            cut(&mut frame, piece.range().end);
            frame.pull(piece.data_at.into());
            head.frame.append(frame);
        }
        Some(head)
    }

    /// Starts over with another datagram of the same key, as the kernel's `ip_frag_reinit` does:
    /// the maximum sizes are kept.
    pub(super) fn restart(&mut self) -> Vec<Packet> {
        let Self { max_size, max_df_size, .. } = *self;
        let before = std::mem::replace(self, Self { max_size, max_df_size, ..Self::default() });
        before.packets
    }
}

impl Piece {
    /// Range of the piece's bytes in the frame.
    fn range(&self) -> std::ops::Range<usize> {
        let (at, len) = (usize::from(self.data_at), (self.end - self.start) as usize);
        at..at + len
    }
}

/// Truncates a frame to `len` bytes.
fn cut(frame: &mut Frame, len: usize) {
    let len = u32::try_from(len).unwrap_or(u32::MAX);
    frame.set_len(len.min(frame.len_bytes()));
}
