//! Opening of a device: memory shared with its back end, and the source and tx queue of each queue
//! pair.

use std::io;
use std::path::Path;
use std::sync::Arc;

use forebay_sys::error::{Error, Result};
use forebay_sys::virtio::{SharedMemory, VirtqueueLayout};

use super::VirtioSource;
use super::buffers::{Buffers, Sizing};
use super::features::RequestedFeatures;
use super::frontend::{MemoryTable, PairRings, QueueRings};
use super::memory::{MemoryPlan, RingPlace};
use super::receive::{COUNTS, VirtioReceiver};
use super::session::{VhostSession, VhostSessionConfig};
use super::transmit::VirtioTransmit;
use crate::config::virtio::VirtioOptions;
use crate::tx_queue::{TxQueue, TxQueueSink};
use crate::{BackEndLink, DeviceConfig, Facts, KernelCounts, RxBuffers};

/// Open device, and the session thread that connects to its back end.
pub struct VirtioDevice {
    /// Session thread; ends with the device and the last of its sources.
    link: Arc<VhostSession>,
    /// Path of the socket.
    name: String,
    /// Tx queues, by queue pair, as the next two fields.
    tx_queues: Vec<TxQueue>,
    counts: Vec<Arc<KernelCounts>>,
    rx_buffers: Vec<Arc<RxBuffers>>,
    facts: Facts,
}

impl VirtioDevice {
    /// Creates shared memory for the requested queue pairs, and begins to look for a back end.
    ///
    /// # Errors
    /// If there can never be a back end at `config.name`, the options are invalid, or memory is
    /// lacking.
    pub fn open(config: &DeviceConfig) -> Result<(Self, Vec<VirtioSource>)> {
        let options = &config.virtio;
        options.check()?;
        let pairs = usize::from(config.queues.max(1));
        let plan = MemoryPlan::of(options);
        let bytes = plan.len_bytes(pairs);
        let no_memory = |source| Error::Memory { bytes, source };
        let memory = SharedMemory::new(bytes).map_err(no_memory)?;
        let facts = Facts::default();
        let pages = if memory.is_huge() { "huge" } else { "as the kernel gives them" };
        facts.set("pages", pages.to_owned());
        let rings: Vec<_> = (0..pairs).map(|pair| plan.rings(&memory, pair)).collect();
        let (link, ports) = VhostSession::start(VhostSessionConfig {
            path: Path::new(&config.name),
            role: options.role,
            requested: RequestedFeatures {
                packed: options.packed,
                device_hash: config.device_hash,
                without_offloads: !options.rx_offloads,
                without_large: !Sizing::of(options).has_room_for_largest(options.queue_size),
            },
            memory: memory_table(&memory).map_err(no_memory)?,
            queues: rings.iter().map(|pair| queue_rings(pair, options)).collect(),
            places: rings.iter().flatten().cloned().collect(),
            control: plan.control(&memory, pairs),
            facts: facts.clone(),
        })?;
        let mut device = Self {
            link: Arc::new(link),
            name: config.name.clone(),
            tx_queues: Vec::new(),
            counts: Vec::new(),
            rx_buffers: Vec::new(),
            facts,
        };
        let sources = (0..).zip(ports).zip(rings).map(|((pair, port), [rx, tx])| {
            let (tx_queue, consumer) = TxQueue::new();
            let (counts, shown) = (KernelCounts::new(&COUNTS), Arc::<RxBuffers>::default());
            let cache = plan.cache(&memory, pair);
            let buffers = Buffers::new(Sizing::of(options), cache, rx.size(), Arc::clone(&shown));
            let receiver =
                VirtioReceiver::new(rx, buffers, config.device_hash, Arc::clone(&counts));
            let transmit = VirtioTransmit::new(consumer, tx, plan.slots(&memory, pair));
            device.tx_queues.push(tx_queue);
            device.counts.push(counts);
            device.rx_buffers.push(shown);
            VirtioSource::new(Arc::clone(&device.link), port, receiver, transmit)
        });
        let sources = sources.collect();
        Ok((device, sources))
    }

    /// Returns a sink for one more CPU.
    pub(crate) fn sink(&self) -> TxQueueSink {
        TxQueueSink::among(self.name.clone(), &self.tx_queues, self.link.usable())
    }

    /// Returns the driver's counters, by queue.
    pub(crate) fn counts(&self) -> Vec<Arc<KernelCounts>> {
        self.counts.clone()
    }

    /// Returns the receive buffers of each queue, for reports.
    pub(crate) fn rx_buffers(&self) -> Vec<Arc<RxBuffers>> {
        self.rx_buffers.clone()
    }

    /// Returns the connection to the back end.
    pub(crate) fn back_end(&self) -> Arc<BackEndLink> {
        self.link.back_end()
    }

    /// Returns facts about the session and its negotiated features.
    pub(crate) fn facts(&self) -> &Facts {
        &self.facts
    }
}

/// Describes the shared memory for a back end.
fn memory_table(memory: &SharedMemory) -> io::Result<MemoryTable> {
    Ok(MemoryTable {
        descriptor: memory.descriptor().try_clone_to_owned()?,
        base_address: memory.base_address(),
        len_bytes: memory.len_bytes() as u64,
    })
}

/// Describes the rings of a queue pair for a back end.
fn queue_rings([rx, tx]: &[RingPlace; 2], options: &VirtioOptions) -> QueueRings {
    let pair = |layout| PairRings { rx: rx.addresses(layout), tx: tx.addresses(layout) };
    QueueRings {
        size: options.queue_size,
        split: pair(VirtqueueLayout::Split),
        packed: options.packed.then(|| pair(VirtqueueLayout::Packed)),
    }
}
