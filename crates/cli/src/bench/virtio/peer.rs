//! Words that DPDK's side of the comparison, the peer's `bench_virtio --role vhost-tx`, shares in
//! the file `SOCK.shm`: the number of packets sent, and a request to stop. Without the file, the
//! sender is another program, which its user has to stop.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Offsets of the 64-bit words in `struct c2c` of the peer's `common.h`, in bytes.
const TX_PKTS_AT: u64 = 512;
const STOP_AT: u64 = 528;
const LEN_BYTES_MIN: u64 = STOP_AT + 8;

/// The shared file. Drop asks the sender to stop, whatever the result of the measurement.
pub(super) struct BenchPeer(File);

/// Counters of the sender.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PeerSent {
    packets: u64,
    /// Time spent in bursts with packets, in cycles of the time stamp counter.
    busy_cycles: u64,
}

impl BenchPeer {
    /// Opens the shared file of the peer at this socket, if there is one.
    pub(super) fn beside(sock: &Path) -> Option<Self> {
        let mut path = sock.as_os_str().to_owned();
        path.push(".shm");
        let file = OpenOptions::new().read(true).write(true).open(path).ok()?;
        let is_whole = file.metadata().is_ok_and(|file| file.len() >= LEN_BYTES_MIN);
        is_whole.then_some(Self(file))
    }

    /// Current counters of the sender.
    pub(super) fn sent(&self) -> Option<PeerSent> {
        let mut words = [0; 16];
        self.0.read_exact_at(&mut words, TX_PKTS_AT).ok()?;
        let (packets, busy_cycles) = words.split_at(8);
        let word = |bytes: &[u8]| bytes.try_into().map(u64::from_ne_bytes).ok();
        Some(PeerSent { packets: word(packets)?, busy_cycles: word(busy_cycles)? })
    }
}

impl Drop for BenchPeer {
    fn drop(&mut self) {
        if let Err(error) = self.0.write_all_at(&1u64.to_ne_bytes(), STOP_AT) {
            eprintln!("forebay: the sender could not be asked to end: {error}");
        }
    }
}

impl PeerSent {
    /// Busy cycles per packet sent between two readings; `None` if no packet was sent.
    pub(super) fn busy_cycles_per_packet(before: Self, after: Self) -> Option<f64> {
        let packets = after.packets.checked_sub(before.packets).filter(|packets| *packets > 0)?;
        let cycles = after.busy_cycles.checked_sub(before.busy_cycles)?;
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        Some(cycles as f64 / packets as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sender_is_heard_and_ended() {
        let directory = tempfile::tempdir().unwrap();
        let sock = directory.path().join("s");
        assert!(BenchPeer::beside(&sock).is_none(), "there is no file");
        let shared = directory.path().join("s.shm");
        std::fs::write(&shared, [0; 100]).unwrap();
        assert!(BenchPeer::beside(&sock).is_none(), "it is another's");
        let mut words = [0u64; 80];
        (words[64], words[65]) = (10, 3000);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        std::fs::write(&shared, &bytes).unwrap();
        let peer = BenchPeer::beside(&sock).unwrap();
        let sent = peer.sent().unwrap();
        assert_eq!(sent, PeerSent { packets: 10, busy_cycles: 3000 });
        let before = PeerSent { packets: 5, busy_cycles: 2500 };
        assert_eq!(PeerSent::busy_cycles_per_packet(before, sent), Some(100.0));
        assert_eq!(PeerSent::busy_cycles_per_packet(sent, sent), None);
        drop(peer);
        words[66] = 1;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(std::fs::read(&shared).unwrap(), bytes);
    }
}
