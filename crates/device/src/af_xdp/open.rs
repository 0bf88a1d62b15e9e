//! Opening of an interface: its program, and the source and tx queue of each queue.

use std::sync::Arc;

use forebay_sys::bpf::XdpPlace;
use forebay_sys::error::Result;
use forebay_sys::interface::Interface;

use super::source::XdpQueueConfig;
use super::{AttachOptions, Attached, XdpSource};
use crate::config::{DeviceConfig, XdpMode};
use crate::link::LINK_BYTES;
use crate::stats::Facts;
use crate::tx_queue::{TxQueue, TxQueueSink};

/// Largest MTU whose frames fit one buffer: the limit of veth for a program without multi-buffer
/// support, and of a page.
pub(super) const WHOLE_MTU_MAX: u32 = 3400;

/// Length of the largest frame of a device with that MTU.
pub(super) fn largest_frame_bytes(mtu: u32) -> u32 {
    mtu.saturating_add(LINK_BYTES)
}

/// Open device.
pub struct XdpDevice {
    interface: String,
    /// Tx queues that the device can send on.
    tx_queues: Vec<TxQueue>,
    mtu: u32,
    facts: Facts,
}

/// Purpose of opening a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Opened {
    /// Receive and send.
    Both,
    /// Send only: received packets stay with the kernel.
    ToSend,
}

impl XdpDevice {
    /// Attaches the program, and makes a source for each queue. Packets arrive once the sources are
    /// attached to an engine.
    ///
    /// `AF_XDP` does not report partial checksums: over veth, a packet from a socket of this
    /// machine may hold only the pseudo header's sum.
    ///
    /// # Errors
    /// If the kernel refuses, or the process lacks a privilege.
    pub fn open(
        interface: &Interface,
        config: &DeviceConfig,
        opened: Opened,
    ) -> Result<(Self, Vec<XdpSource>)> {
        let is_scattered = interface.mtu > WHOLE_MTU_MAX;
        let attached = match opened {
            Opened::ToSend => None,
            Opened::Both => {
                let places: &[_] = match config.xdp.mode {
                    XdpMode::Auto => &[XdpPlace::Native, XdpPlace::Generic],
                    XdpMode::Native => &[XdpPlace::Native],
                    XdpMode::Generic => &[XdpPlace::Generic],
                };
                let options = AttachOptions {
                    queues: config.queues.into(),
                    places,
                    is_multi_buffer: is_scattered,
                    device_hash: config.device_hash,
                    replace: config.xdp.replace,
                    promiscuous: config.promiscuous,
                };
                Some(Arc::new(Attached::open(interface, &config.take, &options)?))
            }
        };
        let facts =
            Facts::of(attached.iter().flat_map(|attached| attached.facts().iter().cloned()));
        let (mut sources, mut tx_queues) = (Vec::new(), Vec::new());
        for queue in 0..config.queues {
            let (tx_queue, consumer) = TxQueue::new();
            let queue_config = XdpQueueConfig {
                interface: interface.clone(),
                queue: queue.into(),
                attached: attached.clone(),
                copying: config.xdp.copy,
                busy_poll: config.xdp.busy_poll,
                is_scattered,
            };
            sources.push(XdpSource::new(queue_config, consumer, facts.clone()));
            if queue < interface.tx_queues {
                tx_queues.push(tx_queue);
            }
        }
        let (name, mtu) = (interface.name.clone(), interface.mtu);
        Ok((Self { interface: name, tx_queues, mtu, facts }, sources))
    }

    /// Returns a sink for one more CPU.
    #[must_use]
    pub fn sink(&self) -> TxQueueSink {
        TxQueueSink::new(self.interface.clone(), &self.tx_queues)
    }

    /// MTU for whose frames the sources take memory: that of the interface when it was opened.
    #[must_use]
    pub fn mtu(&self) -> u32 {
        self.mtu
    }

    /// Returns facts about the device. The copy mode is known once its queues are attached to an
    /// engine.
    #[must_use]
    pub fn facts(&self) -> &Facts {
        &self.facts
    }
}
