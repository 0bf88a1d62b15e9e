//! Properties for arbitrary fragments, and a slow reference model: a map from each offset to its
//! byte.

use std::collections::BTreeMap;

use proptest::prelude::*;

use crate::reassembly::frames::{CHUNK_BYTES, Datagram, Version, pool};
use crate::reassembly::{FragmentsConfig, ReassemblyLimits, Rig};

/// Reference model of the kernel's rules, byte by byte.
#[derive(Default)]
struct Twin {
    /// Each byte, and the run that it belongs to.
    bytes: BTreeMap<usize, (u8, usize)>,
    len: usize,
    is_len_known: bool,
    runs: usize,
}

impl Twin {
    /// Adds a fragment, and returns the datagram that it completes. An invalidated datagram starts
    /// over, empty.
    fn add(&mut self, version: Version, piece: &Piece) -> Option<Vec<u8>> {
        let start = piece.start;
        let mut data = piece.data.as_slice();
        if !piece.is_last && version == Version::V6 && !data.len().is_multiple_of(8) {
            return None;
        }
        if !piece.is_last {
            data = &data[..data.len() / 8 * 8];
        }
        let end = start + data.len();
        let is_told_otherwise = self.is_len_known && self.len != end;
        let is_wrong = if piece.is_last {
            end < self.len || is_told_otherwise
        } else {
            end > self.len && self.is_len_known
        };
        if is_wrong || data.is_empty() {
            *self = Self::default();
            return None;
        }
        self.is_len_known |= piece.is_last;
        self.len = self.len.max(end);
        let there: Vec<_> = (start..end).filter_map(|at| self.bytes.get(&at)).collect();
        if !there.is_empty() {
            let is_duplicate =
                there.len() == data.len() && there.iter().all(|(_, run)| *run == there[0].1);
            if !is_duplicate {
                *self = Self::default();
            }
            return None;
        }
        let run = match self.bytes.last_key_value() {
            Some((&last, &(_, run))) if last + 1 == start => run,
            _ => {
                self.runs += 1;
                self.runs
            }
        };
        self.bytes.extend((start..end).zip(data.iter().map(|&byte| (byte, run))));
        if !self.is_len_known || self.bytes.len() != self.len {
            return None;
        }
        Some(std::mem::take(self).bytes.into_values().map(|(byte, _)| byte).collect())
    }
}

#[derive(Clone, Debug)]
struct Piece {
    start: usize,
    data: Vec<u8>,
    is_last: bool,
}

fn versions() -> impl Strategy<Value = Version> {
    prop_oneof![Just(Version::V4), Just(Version::V6)]
}

/// Fragments that often overlap: few offsets, whole units, and a common end.
fn pieces() -> impl Strategy<Value = Vec<Piece>> {
    let piece =
        (0usize..8, 0usize..33, any::<u8>(), any::<u8>()).prop_map(|(unit, len, kind, salt)| {
            let start = unit * 8;
            let is_last = kind & 3 == 0;
            let len = match kind >> 2 {
                0..=7 => len,
                8..=31 if is_last => 64usize.saturating_sub(start),
                _ => len.next_multiple_of(8),
            };
            // First fragments of IPv6 must contain a UDP header: they have laws of their own.
            let len = if start == 0 { len.max(8) } else { len };
            let is_last = is_last && start + len > 0 && start > 0;
            let data = (0..len).map(|at| salt.wrapping_add(u8::try_from(at).unwrap())).collect();
            Piece { start, data, is_last }
        });
    proptest::collection::vec(piece, 1..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    #[test]
    fn fragments_agree_with_reference(version in versions(), pieces in pieces()) {
        let mut rig = Rig::of_defaults();
        let mut twin = Twin::default();
        let datagram = Datagram::new(version, 1, 3, 0);
        let headers = datagram.whole.len() - datagram.data().len();
        for piece in &pieces {
            let bytes = datagram.piece(piece.start, &piece.data, piece.is_last);
            let out = rig.add_all([&bytes]);
            let data: Vec<_> = out.iter().map(|bytes| bytes[headers..].to_vec()).collect();
            prop_assert_eq!(data, Vec::from_iter(twin.add(version, piece)));
        }
        rig.all_are_accounted_for();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn pieces_reassemble_in_any_order(
        version in versions(),
        payload_len in 0usize..9000,
        cuts in proptest::collection::btree_set(1usize..1125, 0..40),
        order: Vec<proptest::sample::Index>,
        again in proptest::collection::vec(any::<proptest::sample::Index>(), 0..4),
        with_large in 0u32..2,
    ) {
        let datagram = Datagram::new(version, 1, 3, payload_len);
        let len = datagram.data().len();
        let cuts = cuts.into_iter().map(|unit| unit * 8).filter(|&at| at < len);
        let starts: Vec<_> = [0].into_iter().chain(cuts).collect();
        prop_assume!(starts.len() > 1);
        let ends = starts.iter().skip(1).copied().chain([len]);
        let pieces = starts.iter().zip(ends).map(|(&start, end)| datagram.cut(start, end));
        // Pieces too long for the small chunks need large ones, so enough must exist.
        let mut pieces: Vec<_> = pieces.collect();
        let needs_large = pieces.iter().any(|piece| piece.len() > 1700);
        for again in again {
            pieces.push(again.get(&pieces).clone());
        }
        for (at, index) in order.iter().enumerate().take(pieces.len()) {
            let other = index.index(pieces.len());
            pieces.swap(at, other);
        }
        let large = if needs_large { 60 } else { with_large };
        let mut rig = Rig::new(FragmentsConfig::default(), pool(60, large));
        let out = rig.add_all(&pieces);
        prop_assert!(!out.is_empty());
        for bytes in out {
            prop_assert!(bytes == datagram.whole);
        }
        rig.all_are_accounted_for();
    }

    /// Memory limits and accounting hold for any fragments, from any sources.
    #[test]
    fn memory_bounded_frames_accounted(
        high_thresh in 0u32..200,
        cpus in 1usize..100,
        steps in proptest::collection::vec((versions(), 0u16..6, 0u32..30, 0usize..5, 0u64..4), 0..400),
    ) {
        let high_thresh = high_thresh * 1024;
        let limits = ReassemblyLimits { high_thresh, timeout_ns: 300, max_dist: 20 };
        let config = FragmentsConfig { ipv4: limits, ipv6: limits, seed: [3; 16] };
        let mut rig = Rig::of_cpus(cpus, config, pool(high_thresh / CHUNK_BYTES * 2 + 2, 1));
        let mut now_ns = 0;
        for (version, from, id, piece, later_ns) in steps {
            now_ns += later_ns;
            let datagram = Datagram::new(version, from, id, 280);
            if let Some(packet) = rig.add(&datagram.cut(piece * 64, piece * 64 + 64), now_ns) {
                prop_assert!(packet.frame.data() == datagram.whole);
                rig.pool.put(packet.frame);
            }
            prop_assert!(rig.fragments.held_bytes().into_iter().all(|bytes| bytes <= high_thresh));
            rig.reasons();
        }
        rig.all_are_accounted_for();
    }
}
