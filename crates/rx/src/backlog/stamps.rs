//! Stamps: the times at which packets were queued, beside a backlog ring. One stamp is for all
//! packets of a burst to one CPU.

use forebay_buf::Position;
use forebay_buf::ring::{Consumer, Producer, ring};

use crate::counters::Histogram;

/// Number of stamps in a ring. A burst that finds none free is stamped with the next one, at the
/// time of its own, unless it was delivered before.
const STAMPS: u32 = if cfg!(loom) { 1 } else { 64 };

/// Largest distance of a position that is still ahead.
const AHEAD_MAX: u32 = u32::MAX / 2;

/// Time of the packets up to a position.
#[derive(Clone, Copy, Debug)]
struct Stamp {
    /// Tail counter of the backlog after the last of these packets.
    position: Position,
    at_ns: u64,
}

/// Producing end, held by the CPU that polls.
#[derive(Debug)]
pub(super) struct StampWriter {
    stamps: Producer<Stamp>,
    /// End and time of the first burst that has no stamp yet.
    unstamped: Option<Stamp>,
}

/// Consuming end, held by the CPU that delivers.
#[derive(Debug)]
pub(super) struct StampReader {
    stamps: Consumer<Stamp>,
    /// Stamp of the next packets; at most one.
    current: Vec<Stamp>,
}

/// Creates a ring of stamps.
pub(super) fn stamps() -> (StampWriter, StampReader) {
    let (writer, reader) = ring(STAMPS, Position(0));
    (
        StampWriter { stamps: writer, unstamped: None },
        StampReader { stamps: reader, current: Vec::with_capacity(1) },
    )
}

impl StampWriter {
    /// Stamps the packets up to `position` that have no stamp yet. `head` is that of the backlog.
    pub(super) fn stamp(
        &mut self,
        position: Position,
        head: impl FnOnce() -> Position,
        now_ns: u64,
    ) {
        if let Some(first) = self.unstamped
            && head().since(first.position) <= AHEAD_MAX
        {
            // Delivered meanwhile: later packets have not waited that long.
            self.unstamped = None;
        }
        let at_ns = self.unstamped.get_or_insert(Stamp { position, at_ns: now_ns }).at_ns;
        if self.stamps.push(Stamp { position, at_ns }).is_ok() {
            self.unstamped = None;
            self.stamps.publish();
        }
    }
}

impl StampReader {
    /// Records the waits of the last `count` packets up to `taken`. Packets queued while stamps were
    /// off have none.
    pub(super) fn record(&mut self, taken: Position, count: u32, now_ns: u64, waits: &Histogram) {
        let mut left = count;
        while left > 0 {
            let Some(&Stamp { position, at_ns }) = self.current.first() else {
                if self.stamps.take(1, &mut self.current) == 0 {
                    return;
                }
                self.stamps.release();
                continue;
            };
            // The first packet that is not recorded is `left` packets before the last one taken.
            let first = Position(taken.0.wrapping_sub(left));
            let ahead = position.since(first);
            if ahead == 0 || ahead > AHEAD_MAX {
                // Of packets taken while nothing was measured.
                self.current.clear();
                continue;
            }
            let stamped = ahead.min(left);
            waits.record(now_ns.saturating_sub(at_ns), stamped.into());
            left -= stamped;
            if stamped == ahead {
                self.current.clear();
            }
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    /// Waits recorded, as upper bounds of their buckets and numbers of packets.
    fn recorded(waits: &Histogram) -> Vec<(u64, u64)> {
        let filled = waits.buckets().filter(|(_, count)| *count > 0);
        filled.map(|(bound, count)| (bound.unwrap_or(u64::MAX), count)).collect()
    }

    #[test]
    fn met_5_waits_are_of_all_packets() {
        for start in [0, u32::MAX - 4] {
            let (mut writer, mut reader) = stamps();
            let waits = Histogram::default();
            let at = |packets| Position(start).plus(packets);
            let head = || Position(start);
            writer.stamp(at(3), head, 100);
            writer.stamp(at(10), head, 164);
            reader.record(at(2), 2, 200, &waits);
            assert_eq!(recorded(&waits), [(128, 2)], "a part of a burst");
            reader.record(at(10), 8, 228, &waits);
            assert_eq!(recorded(&waits), [(64, 7), (128, 3)]);
            assert_eq!(waits.sum(), 2 * 100 + 128 + 7 * 64);
        }
    }

    #[test]
    fn met_5_unstamped_packets_are_left_out() {
        let (mut writer, mut reader) = stamps();
        let waits = Histogram::default();
        reader.record(Position(5), 5, 100, &waits);
        assert_eq!(recorded(&waits), [], "no stamps yet");
        let head = || Position(5);
        writer.stamp(Position(8), head, 100);
        writer.stamp(Position(20), head, 200);
        // The packets up to 10 were taken while nothing was measured.
        reader.record(Position(14), 4, 204, &waits);
        assert_eq!(recorded(&waits), [(4, 4)]);
    }

    #[test]
    fn met_5_excess_bursts_keep_first_time() {
        let (mut writer, mut reader) = stamps();
        let waits = Histogram::default();
        let (last, head) = (STAMPS + 3, || Position(0));
        for burst in 1..=last {
            writer.stamp(Position(burst), head, u64::from(burst));
        }
        reader.record(Position(STAMPS), STAMPS, STAMPS.into(), &waits);
        writer.stamp(Position(last + 1), head, 1000);
        reader.record(Position(last + 1), 4, 1000, &waits);
        let [.., slowest] = recorded(&waits)[..] else { panic!("nothing was recorded") };
        assert_eq!(slowest, (1024, 4), "at the time of burst {}", STAMPS + 1);
    }

    #[test]
    fn met_5_delivered_burst_lends_no_time() {
        let (mut writer, mut reader) = stamps();
        let waits = Histogram::default();
        for burst in 1..=STAMPS + 1 {
            writer.stamp(Position(burst), || Position(0), 1);
        }
        // All are delivered, also the last burst, which found no free stamp.
        reader.record(Position(STAMPS), STAMPS, 1, &waits);
        writer.stamp(Position(STAMPS + 2), || Position(STAMPS + 1), 60_000);
        reader.record(Position(STAMPS + 2), 1, 60_001, &waits);
        assert_eq!(recorded(&waits), [(1, u64::from(STAMPS) + 1)]);
    }
}
