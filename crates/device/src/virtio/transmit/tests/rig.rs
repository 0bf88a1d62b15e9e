//! A transmit queue between CPUs and a device.

use std::sync::Arc;

use forebay_buf::Region;
use forebay_buf::frags::FRAG_TABLE_BYTES;
use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_rx::coalesce::gso::VirtioNetHdr;
use forebay_rx::coalesce::{CoalesceConfig, Coalescer, FlushReason};
use forebay_rx::hash::FlowHash;
use forebay_rx::packet::Arrival;
use forebay_rx::parse::{Link, Verify, parse_packet};
use forebay_rx::sink::{Sink, SinkCounters};
use forebay_sys::virtio::SharedMemory;
use forebay_sys::virtio::reference::{Got, ReferenceDevice};
use virtio_bindings::virtio_config::{VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_net::VIRTIO_NET_F_HASH_REPORT;

use super::super::*;
use super::wire::{CWR, TCP_FLAGS, add, len, says_cwr};
use crate::config::virtio::VirtioOptions;
use crate::tx_queue::{TxQueue, TxQueueSink};
use crate::virtio::features::RequestedFeatures;
use crate::virtio::memory::MemoryPlan;

/// Queue, two sending CPUs, and the device.
pub(super) struct Rig {
    pub(super) transmit: VirtioTransmit,
    pub(super) sinks: Vec<TxQueueSink>,
    pub(super) pool: Pool,
    pub(super) device: Option<ReferenceDevice>,
    /// Number of packets handed in, by CPU.
    pub(super) handed: Vec<u64>,
    /// Memory of receive buffers.
    pub(super) buffers: PageFragCache,
    pub(super) _memory: SharedMemory,
}

impl Rig {
    pub(super) fn new(queue_size: u16) -> Self {
        let plan = MemoryPlan::of(&VirtioOptions { queue_size, ..VirtioOptions::default() });
        let memory = SharedMemory::new(plan.len_bytes(1)).unwrap();
        let [_, place] = plan.rings(&memory, 0);
        let (tx_queue, consumer) = TxQueue::new();
        let transmit = VirtioTransmit::new(consumer, place, plan.slots(&memory, 0));
        let queues = [tx_queue];
        let sinks = (0..2).map(|_| TxQueueSink::new("twin".to_owned(), &queues)).collect();
        let class = |chunk_bytes, chunks| ChunkClass { chunk_bytes, chunks };
        let shares = [vec![class(2048, 3000), class(1 << 14, 64), class(1 << 17, 8)]];
        let pool = carve(Region::allocate(region_bytes(&shares)), &shares).unwrap().remove(0);
        Self {
            transmit,
            sinks,
            pool,
            device: None,
            handed: vec![0; 2],
            buffers: plan.cache(&memory, 0),
            _memory: memory,
        }
    }

    pub(super) fn begin(&mut self, offered: &[u32], mtu: Option<u16>) {
        let requested = RequestedFeatures {
            packed: offered.contains(&VIRTIO_F_RING_PACKED),
            device_hash: offered.contains(&VIRTIO_NET_F_HASH_REPORT),
            ..RequestedFeatures::default()
        };
        let bits = offered.iter().fold(1 << VIRTIO_F_VERSION_1, |bits, bit| bits | 1_u64 << bit);
        self.device = None; // it holds the ring's memory
        self.transmit.end();
        self.transmit.place.clear();
        self.transmit.begin(Features::negotiate(bits, requested).unwrap(), mtu);
        self.device = self.transmit.ring.as_ref().map(ReferenceDevice::of);
    }

    pub(super) fn packet(&mut self, bytes: &[u8]) -> Packet {
        let mut frame = self.pool.allocate(len(bytes)).unwrap();
        frame.copy_from(bytes);
        let mut packet = Packet::received(frame, Arrival(0), len(bytes), Link::Ethernet);
        parse_packet(&mut packet, Verify::Checksums, &mut self.pool).unwrap();
        packet.hash = FlowHash::computed(7);
        packet
    }

    /// Coalesces frames into one packet. Frames with CWR are not coalesced: see [`Self::whole`].
    pub(super) fn merged(&mut self, frames: &[Vec<u8>]) -> Packet {
        if says_cwr(&frames[0]) {
            return self.whole(frames);
        }
        let mut packets: Vec<_> = frames.iter().map(|bytes| self.packet(bytes)).collect();
        let mut coalescer = Coalescer::new(CoalesceConfig::default(), Arc::default());
        let mut out = Vec::new();
        coalescer.coalesce(&mut packets, 0, &mut out);
        coalescer.flush(FlushReason::PollEnd, &mut out);
        assert_eq!(out.len(), 1, "they are one packet");
        out.remove(0)
    }

    /// Merges frames to a packet in one frame (GSO).
    pub(super) fn whole(&mut self, frames: &[Vec<u8>]) -> Packet {
        let mut first = frames[0].clone();
        let is_cwr = says_cwr(&first);
        if is_cwr {
            first[TCP_FLAGS] &= !CWR;
            add(&mut first, TCP_FLAGS + 3, u32::from(CWR)); // the checksum
        }
        let merged = self.merged(&[&[first], &frames[1..]].concat());
        let mut whole = merged.copied(&mut self.pool).unwrap();
        self.pool.put(merged.frame);
        if is_cwr {
            whole.frame.data_mut()[TCP_FLAGS] |= CWR;
        }
        assert!(whole.is_gso());
        whole
    }

    /// Moves all but the first bytes of a packet into receive buffers.
    pub(super) fn in_pieces(&mut self, packet: Packet) -> Packet {
        let (head, rest) = packet.frame.data().split_at(100);
        let mut frame = self.pool.allocate(len(head) + FRAG_TABLE_BYTES).unwrap();
        frame.copy_from(head);
        for bytes in rest.chunks(1501) {
            let mut frag = self.buffers.cut(1536).unwrap();
            frag.copy_out(0, bytes);
            frag.set_len(len(bytes));
            frame.attach(frag).unwrap();
        }
        self.pool.put(packet.frame);
        let in_pieces = Packet { frame, ..packet };
        assert!(in_pieces.is_nonlinear());
        in_pieces
    }

    /// Hands packets in on a CPU. Returns the number of packets without room.
    pub(super) fn hand(&mut self, cpu: usize, packets: impl IntoIterator<Item = Packet>) -> usize {
        let mut packets: Vec<_> = packets.into_iter().collect();
        self.handed[cpu] += packets.len() as u64;
        self.sinks[cpu].send(&mut packets).unwrap();
        let left = packets.len();
        packets.drain(..).for_each(|packet| self.pool.put(packet.frame));
        left
    }

    pub(super) fn step(&mut self) -> TransmitStep {
        self.transmit.step(&mut self.pool, || true)
    }

    /// Takes the next buffer that the device finds.
    pub(super) fn got(&mut self) -> Option<Got> {
        self.device.as_mut().unwrap().take()
    }

    pub(super) fn give(&mut self, id: u16) {
        self.device.as_mut().unwrap().give(id, 0);
    }

    /// Returns the contents of a buffer: the device's header, and the bytes behind it.
    pub(super) fn read(&self, got: &Got) -> (VirtioNetHdr, Vec<u8>) {
        let mut all = Vec::new();
        for &(address, len_bytes, is_writable) in &got.pieces {
            assert!(!is_writable && (1..=SLOT_BYTES).contains(&len_bytes));
            let mut slots = self.transmit.slots.slots.iter();
            let slot = slots.find(|slot| slot.address() == address).expect("one of ours");
            let begin = all.len();
            all.resize(begin + len_bytes as usize, 0);
            slot.copy_in(0, &mut all[begin..]);
        }
        let header_bytes = self.transmit.limits.features.header_bytes() as usize;
        let bytes = all.split_off(header_bytes);
        assert!(all[10..].iter().all(|&byte| byte == 0), "no buffers are counted, nothing hashed");
        (VirtioNetHdr::from_bytes(*all.first_chunk().unwrap()), bytes)
    }

    /// Sends all that the device finds, and uses its buffers at once.
    pub(super) fn sent(&mut self) -> Vec<(VirtioNetHdr, Vec<u8>)> {
        let mut sent = Vec::new();
        loop {
            let count = self.step().count;
            while let Some(got) = self.got() {
                sent.push(self.read(&got));
                self.give(got.id);
            }
            if count == 0 {
                return sent;
            }
        }
    }

    pub(super) fn counters(&self, cpu: usize) -> &SinkCounters {
        self.sinks[cpu].counters()
    }
}
