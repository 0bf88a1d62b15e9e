//! virtio-net over vhost-user: a driver in user space, safe against a device that lies.
//!
//! ```text
//!  back end ══ used ring ══► receive ─► head in a private frame, pieces where the device put them
//!     ▲                        │ ▲
//!     ╚════ avail ring ════ buffers ◄── average of packet lengths
//! ```
//!
//! Memory is shared with the back end, which may write anything anywhere in it at any time: rings,
//! receive buffers and what is to be sent. All that the driver goes by is private: which buffers the
//! device has, where they are, how long; and what is parsed was copied in before.

mod memory; //   what is shared with it
mod connect; //  the socket that it is reached by
mod frontend; // what is said there
mod config; //   what a device says of itself
mod features; // what is agreed on
mod commands; // what a device is told beyond that
mod control; //  the ring that it is told by
mod session; //  that there is one, time and again
mod port; //     what a queue knows of it
mod ends; //     why it went

mod average; //   how long packets are
mod buffers; //   receive buffers as large as those
mod header; //    what the device says before a packet
mod copybreak; // how much of a packet is copied in
mod receive; //   from used buffers to packets
mod transmit; //  from packets to buffers
mod source; //    one queue pair, as an engine polls it

use std::io;
use std::path::Path;
use std::sync::Arc;

pub use average::Average;
use forebay_sys::error::{Error, Result};
use forebay_sys::virtio::{SharedMemory, VirtqueueLayout};
pub use session::QUEUE_PAIRS_MAX;
pub use source::VirtioSource;

use self::buffers::{Buffers, Sizing};
use self::features::OfferedFeatures;
use self::frontend::{MemoryTable, PairRings, QueueRings};
use self::memory::{MemoryPlan, RingPlace};
use self::receive::{COUNTS, VirtioReceiver};
use self::session::{VhostSession, VhostSessionConfig};
use self::transmit::VirtioTransmit;
use super::tx_queue::{TxQueue, TxQueueSink};
use super::{DeviceConfig, Facts, KernelCounts, RxBuffers};
use crate::config::virtio::VirtioOptions;

/// A device, and the link to whoever plays it.
pub struct VirtioDevice {
    /// Ends with the device and the last of its sources.
    link: Arc<VhostSession>,
    /// The socket's path.
    name: String,
    /// By queue pair, as the three that follow.
    egress: Vec<TxQueue>,
    counts: Vec<Arc<KernelCounts>>,
    rx_buffers: Vec<Arc<RxBuffers>>,
    facts: Facts,
}

impl VirtioDevice {
    /// Shares memory for as many queue pairs as are asked for, and begins to look for a back end.
    ///
    /// # Errors
    /// When there can never be a back end at `config.name`, the options cannot be, or there is no
    /// such memory.
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
            wishes: OfferedFeatures {
                packed: options.packed,
                device_hash: config.device_hash,
                without_offloads: !options.rx_offloads,
            },
            memory: memory_table(&memory).map_err(no_memory)?,
            queues: rings.iter().map(|pair| queue_rings(pair, options)).collect(),
            control: plan.control(&memory, pairs),
            facts: facts.clone(),
        })?;
        let mut device = Self {
            link: Arc::new(link),
            name: config.name.clone(),
            egress: Vec::new(),
            counts: Vec::new(),
            rx_buffers: Vec::new(),
            facts,
        };
        let sources = (0..).zip(ports).zip(rings).map(|((pair, port), [rx, tx])| {
            let (egress, departures) = TxQueue::new();
            let (counts, shown) = (KernelCounts::new(&COUNTS), Arc::<RxBuffers>::default());
            let cache = plan.cache(&memory, pair);
            let buffers = Buffers::new(Sizing::of(options), cache, rx.size(), Arc::clone(&shown));
            let receiver =
                VirtioReceiver::new(rx, buffers, config.device_hash, Arc::clone(&counts));
            let transmit = VirtioTransmit::new(departures, tx, plan.slots(&memory, pair));
            device.egress.push(egress);
            device.counts.push(counts);
            device.rx_buffers.push(shown);
            VirtioSource::new(Arc::clone(&device.link), port, receiver, transmit)
        });
        let sources = sources.collect();
        Ok((device, sources))
    }

    /// One CPU's way into the device.
    pub(super) fn sink(&self) -> TxQueueSink {
        TxQueueSink::new(self.name.clone(), &self.egress)
    }

    /// Counters of the driver, for each queue.
    pub(super) fn counts(&self) -> Vec<Arc<KernelCounts>> {
        self.counts.clone()
    }

    /// Receive buffers of each queue, for reports.
    pub(super) fn rx_buffers(&self) -> Vec<Arc<RxBuffers>> {
        self.rx_buffers.clone()
    }

    /// Facts found out about the device: of the link, of what was agreed on.
    pub(super) fn facts(&self) -> &Facts {
        &self.facts
    }
}

/// Shared memory, as a back end is told.
fn memory_table(memory: &SharedMemory) -> io::Result<MemoryTable> {
    Ok(MemoryTable {
        descriptor: memory.descriptor().try_clone_to_owned()?,
        base_address: memory.base_address(),
        len_bytes: memory.len_bytes() as u64,
    })
}

/// The rings of a queue pair, as a back end is told.
fn queue_rings([rx, tx]: &[RingPlace; 2], options: &VirtioOptions) -> QueueRings {
    let pair = |layout| PairRings { rx: rx.addresses(layout), tx: tx.addresses(layout) };
    QueueRings {
        size: options.queue_size,
        split: pair(VirtqueueLayout::Split),
        packed: options.packed.then(|| pair(VirtqueueLayout::Packed)),
    }
}
