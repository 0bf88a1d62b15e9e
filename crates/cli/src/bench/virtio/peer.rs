//! Words that DPDK's side of the comparison, the peer's `bench_virtio --role vhost-tx`, shares in
//! the file `SOCK.shm`: how much it has sent, and whether it is to end. Where there is no such
//! file, the sender is another one, and is ended by whoever has started it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Offsets of the words in `struct c2c` of the peer's `common.h`, in bytes; each has 64 bits.
const TX_PKTS_AT: u64 = 512;
const STOP_AT: u64 = 528;
const LEN_BYTES_MIN: u64 = STOP_AT + 8;

/// The file. The sender is asked to end when this goes, whatever became of the measurement.
pub(super) struct BenchPeer(File);

/// Counters of the sender.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PeerSent {
    packets: u64,
    /// In its bursts that sent any, by the CPU's time stamp counter.
    busy_cycles: u64,
}

impl BenchPeer {
    /// The one whose socket this is, if it shares anything.
    pub(super) fn beside(sock: &Path) -> Option<Self> {
        let mut path = sock.as_os_str().to_owned();
        path.push(".shm");
        let file = OpenOptions::new().read(true).write(true).open(path).ok()?;
        let is_whole = file.metadata().is_ok_and(|file| file.len() >= LEN_BYTES_MIN);
        is_whole.then_some(Self(file))
    }

    /// Counters of the sender now.
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
    /// For each packet sent between two looks; none if there was none.
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
