//! Order of the datagrams of a flow, while its senders go from CPU to CPU.
//!
//! A send may return before its packet has left: another thread uses the sink, and sends it. A thread that
//! then goes on by another CPU's transmitter would overtake its own packet. So a flow keeps to the
//! transmitter that has packets of it, as the kernel's connected sockets keep to their tx queue
//! (`sk_tx_queue_mapping`).

use std::net::{IpAddr, SocketAddr};
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU64, Ordering};

use super::super::shared::CpuIndex;
use super::{SendMark, Transmitter};

/// Groups of flows, by their destinations. Threads that send to different ones seldom share a group.
const GROUPS: usize = 8;
/// Bits of a transmitter's index.
const INDEX_BITS: u32 = 16;

/// Transmitter that took the last packet of each group of a socket's flows, with its mark.
#[derive(Debug, Default)]
pub(in crate::net) struct LastSent([AtomicU64; GROUPS]);

impl LastSent {
    /// Records that a transmitter, which the caller has locked, takes the next packets to a destination. Returns
    /// false if another transmitter may still have earlier ones.
    pub(in crate::net) fn stay(
        &self,
        by: CpuIndex,
        destination: SocketAddr,
        transmitter: &Transmitter,
    ) -> bool {
        let last = &self.0[group_of(destination)];
        let (before, now) = (last.load(Ordering::Acquire), packed(by, transmitter.mark()));
        let is_own = unpacked(before).is_none_or(|(of, _)| of == by);
        let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
        // Nobody changes the mark of now as long as the transmitter is locked.
        before == now || is_own && last.compare_exchange(before, now, success, failure).is_ok()
    }

    /// Locks the transmitter for the next packets to a destination: that of the CPU `wanted`, or the
    /// last one until it has sent what it had. Returns its index, too. What is gathered before it is
    /// unlocked stays in order.
    pub(in crate::net) fn next<'a>(
        &self,
        wanted: CpuIndex,
        destination: SocketAddr,
        transmitter_of: impl Fn(CpuIndex) -> MutexGuard<'a, Transmitter>,
    ) -> (CpuIndex, MutexGuard<'a, Transmitter>) {
        let last = &self.0[group_of(destination)];
        loop {
            let before = last.load(Ordering::Acquire);
            let by = match unpacked(before) {
                Some((by, mark)) if by != wanted && !transmitter_of(by).has_cleared(mark) => by,
                _ => wanted,
            };
            let transmitter = transmitter_of(by);
            let now = packed(by, transmitter.mark());
            // Whoever finds this mark waits for the lock, and so sees what is gathered. Nobody changes it as long
            // as the transmitter is locked.
            let (success, failure) = (Ordering::AcqRel, Ordering::Relaxed);
            if before == now || last.compare_exchange(before, now, success, failure).is_ok() {
                return (by, transmitter);
            }
        }
    }
}

/// Index and mark in one word. 0 stands for none: the index is stored as one more.
fn packed(CpuIndex(by): CpuIndex, SendMark(mark): SendMark) -> u64 {
    let by = by as u64 + 1;
    mark << INDEX_BITS | by & ((1 << INDEX_BITS) - 1)
}

fn unpacked(word: u64) -> Option<(CpuIndex, SendMark)> {
    let by = usize::try_from(word & ((1 << INDEX_BITS) - 1)).ok()?.checked_sub(1)?;
    Some((CpuIndex(by), SendMark(word >> INDEX_BITS)))
}

fn group_of(destination: SocketAddr) -> usize {
    let last = match destination.ip() {
        IpAddr::V4(address) => address.octets()[3],
        IpAddr::V6(address) => address.octets()[15],
    };
    let [high, low] = destination.port().to_be_bytes();
    usize::from(last ^ high ^ low) % GROUPS
}
