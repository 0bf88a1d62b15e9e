//! Path in one direction that impairs packets by a seed: loss, duplicates, reordering, delay, and a
//! bottleneck with a queue.
//!
//! ```text
//!  offer ─► queue, in front of a rate ─► loss ─► delay, or a longer one ─► take
//! ```
//!
//! The path is told the time and carries any kind of packet, so tests of two machines in virtual time
//! and a bridge between devices share it.

use std::collections::BTreeMap;

/// Parts that a share is counted in.
const MILLION: u64 = 1_000_000;

/// Impairments of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Impairments {
    /// Packets lost behind the bottleneck, of a million.
    pub(crate) loss_ppm: u32,
    /// Packets that arrive twice, of a million.
    pub(crate) duplicate_ppm: u32,
    /// Packets that take longer, of a million: those behind overtake them.
    pub(crate) reorder_ppm: u32,
    /// Further delay of those, in µs.
    pub(crate) reorder_us: u32,
    /// Delay of all packets, in µs.
    pub(crate) delay_us: u32,
    /// Rate of the bottleneck, in kbit/s; 0 for none.
    pub(crate) rate_kbps: u32,
    /// Queue in front of the bottleneck, in bytes: a packet that does not fit is dropped.
    pub(crate) queue_bytes: u32,
}

/// Outcome of a packet that was offered.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Passage {
    /// Arrival, or two.
    Carried,
    /// Loss on the way.
    Lost,
    /// Drop by a full queue.
    Overflowed,
}

/// Packets of a path, by outcome.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct PassageCounts {
    /// Packets carried.
    pub(crate) carried: u64,
    /// Packets lost on the way.
    pub(crate) lost: u64,
    /// Packets dropped by a full queue.
    pub(crate) overflowed: u64,
    /// Packets carried twice.
    pub(crate) duplicated: u64,
    /// Packets that took longer.
    pub(crate) reordered: u64,
}

/// A path in one direction, and the packets on it.
#[derive(Debug)]
pub(crate) struct ImpairedPath<T> {
    impairments: Impairments,
    random: u64,
    /// Time when the bottleneck has sent all that waits for it, in ns.
    free_ns: u64,
    /// Packets under way, by arrival and number.
    under_way: BTreeMap<(u64, u64), T>,
    number: u64,
    counts: PassageCounts,
}

impl<T: Clone> ImpairedPath<T> {
    /// Creates an empty path. The seed determines all that is random.
    #[must_use]
    pub(crate) fn new(seed: u64, impairments: Impairments) -> Self {
        Self {
            impairments,
            // Neighbouring seeds must not begin alike.
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            free_ns: 0,
            under_way: BTreeMap::new(),
            number: 0,
            counts: PassageCounts::default(),
        }
    }

    /// Puts a packet of `len_bytes` on the path.
    pub(crate) fn offer(&mut self, now_ns: u64, len_bytes: usize, packet: T) -> Passage {
        let Some(sent_ns) = self.pass_bottleneck(now_ns, len_bytes) else {
            self.counts.overflowed += 1;
            return Passage::Overflowed;
        };
        let Impairments { loss_ppm, duplicate_ppm, reorder_ppm, reorder_us, delay_us, .. } =
            self.impairments;
        if self.happens(loss_ppm) {
            self.counts.lost += 1;
            return Passage::Lost;
        }
        let mut arrival_ns = sent_ns + us(delay_us);
        if self.happens(reorder_ppm) {
            self.counts.reordered += 1;
            arrival_ns += us(reorder_us);
        }
        if self.happens(duplicate_ppm) {
            self.counts.duplicated += 1;
            self.put(arrival_ns, packet.clone());
        }
        self.counts.carried += 1;
        self.put(arrival_ns, packet);
        Passage::Carried
    }

    /// Time when the bottleneck has sent a packet, in ns; `None` if the queue is full.
    fn pass_bottleneck(&mut self, now_ns: u64, len_bytes: usize) -> Option<u64> {
        let Impairments { rate_kbps, queue_bytes, .. } = self.impairments;
        if rate_kbps == 0 {
            return Some(now_ns);
        }
        let (rate_kbps, len_bytes) = (u64::from(rate_kbps), len_bytes as u64);
        let waiting_ns = self.free_ns.saturating_sub(now_ns);
        // A byte takes 8,000,000 ns at 1 kbit/s.
        let waiting_bytes = waiting_ns.saturating_mul(rate_kbps) / (8 * MILLION);
        if waiting_ns > 0 && waiting_bytes + len_bytes > u64::from(queue_bytes) {
            return None;
        }
        self.free_ns = self.free_ns.max(now_ns) + len_bytes * 8 * MILLION / rate_kbps;
        Some(self.free_ns)
    }

    fn put(&mut self, arrival_ns: u64, packet: T) {
        self.number += 1;
        self.under_way.insert((arrival_ns, self.number), packet);
    }

    /// True with a probability of `ppm` in a million (xorshift).
    fn happens(&mut self, ppm: u32) -> bool {
        if ppm == 0 {
            return false;
        }
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        // The upper bits: the lowest ones repeat soon.
        (self.random >> 16) % MILLION < u64::from(ppm)
    }

    /// Time of the next arrival, in ns.
    #[must_use]
    pub(crate) fn next_ns(&self) -> Option<u64> {
        self.under_way.keys().next().map(|(at_ns, _)| *at_ns)
    }

    /// Takes the next packet that has arrived.
    pub(crate) fn take(&mut self, now_ns: u64) -> Option<T> {
        let first = self.under_way.first_entry().filter(|entry| entry.key().0 <= now_ns)?;
        Some(first.remove())
    }

    /// Counts of all packets so far.
    #[must_use]
    #[cfg(test)]
    pub(crate) fn counts(&self) -> PassageCounts {
        self.counts
    }
}

fn us(us: u32) -> u64 {
    u64::from(us) * 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Numbers of the packets in their order of arrival, of `count` that were offered each ms.
    fn arrivals(impairments: Impairments, count: u64) -> (Vec<u64>, PassageCounts) {
        let mut path = ImpairedPath::new(7, impairments);
        let mut arrived = Vec::new();
        for number in 0..count {
            let _ = path.offer(number * MS, 1000, number);
        }
        while let Some(now_ns) = path.next_ns() {
            arrived.extend(path.take(now_ns));
        }
        (arrived, path.counts())
    }

    #[test]
    fn tcp_24_path_without_impairments_keeps_order() {
        let (arrived, counts) =
            arrivals(Impairments { delay_us: 5000, ..Impairments::default() }, 100);
        assert_eq!(arrived, (0..100).collect::<Vec<_>>());
        assert_eq!(counts, PassageCounts { carried: 100, ..PassageCounts::default() });
    }

    #[test]
    fn tcp_24_path_impairs_by_its_shares() {
        let impairments = Impairments {
            loss_ppm: 50_000,
            duplicate_ppm: 20_000,
            reorder_ppm: 100_000,
            reorder_us: 3500,
            ..Impairments::default()
        };
        let (arrived, counts) = arrivals(impairments, 20_000);
        assert!((900..1100).contains(&counts.lost), "{counts:?}");
        assert!((320..440).contains(&counts.duplicated), "{counts:?}");
        assert!((1750..2050).contains(&counts.reordered), "{counts:?}");
        assert_eq!(counts.carried + counts.lost, 20_000);
        assert_eq!(arrived.len() as u64, counts.carried + counts.duplicated);
        let overtaken = arrived.windows(2).filter(|pair| pair[0] > pair[1]).count();
        assert!(overtaken > 1000, "{overtaken} of {counts:?}");
        assert_eq!(arrived, arrivals(impairments, 20_000).0, "a seed determines the path");
    }

    #[test]
    fn tcp_24_bottleneck_sends_by_its_rate() {
        // 1,000 bytes take 8 ms at 1 Mbit/s; four of them fit into the queue.
        let impairments =
            Impairments { rate_kbps: 1000, queue_bytes: 4000, ..Impairments::default() };
        let mut path = ImpairedPath::new(1, impairments);
        let passages: Vec<_> = (0..10).map(|number| path.offer(0, 1000, number)).collect();
        assert_eq!(passages[..4], [Passage::Carried; 4]);
        assert_eq!(passages[4..], [Passage::Overflowed; 6]);
        assert_eq!(
            (path.next_ns(), path.take(8 * MS - 1), path.take(8 * MS)),
            (Some(8 * MS), None, Some(0))
        );
        assert_eq!(path.offer(8 * MS, 1000, 10), Passage::Carried, "one has left");
        let rest: Vec<_> = std::iter::from_fn(|| path.take(40 * MS)).collect();
        assert_eq!(rest, [1, 2, 3, 10]);
    }
}
