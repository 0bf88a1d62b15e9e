//! Opening of an interface: its program, and the source and the way out of each queue.

use std::sync::Arc;

use forebay_sys::bpf::XdpPlace;
use forebay_sys::error::Result;
use forebay_sys::interface::Interface;

use super::source::XdpQueueConfig;
use super::{AttachOptions, Attached, XdpSource};
use crate::config::{DeviceConfig, XdpMode};
use crate::stats::Facts;
use crate::tx_queue::{TxQueue, TxQueueSink};

/// The largest MTU whose frames come in one piece: what veth allows a program that takes no pieces,
/// and a page holds.
pub(super) const WHOLE_MTU_MAX: u32 = 3400;

/// Bytes before and behind an IP packet: an Ethernet header with a VLAN tag.
pub(super) const LINK_BYTES: u32 = 18;

/// The largest frame of a device with that MTU.
pub(super) fn largest_frame_bytes(mtu: u32) -> u32 {
    mtu.saturating_add(LINK_BYTES)
}

/// An open device.
pub struct XdpDevice {
    interface: String,
    /// Of each queue that can send.
    egress: Vec<TxQueue>,
    facts: Facts,
}

/// Purpose that a device is opened for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Opened {
    /// To receive, and to send.
    Both,
    /// To send: its packets stay the kernel's.
    ToSend,
}

impl XdpDevice {
    /// Attaches the program, and makes a source for each queue. Packets come once the sources are
    /// attached to an engine.
    ///
    /// `AF_XDP` does not tell if a packet from a socket of this machine has its checksum: over veth, it
    /// has only the pseudo header's sum.
    ///
    /// # Errors
    /// When the kernel refuses, or this process may not.
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
        let (mut sources, mut egress) = (Vec::new(), Vec::new());
        for queue in 0..config.queues {
            let (way_in, departures) = TxQueue::new();
            let queue_config = XdpQueueConfig {
                interface: interface.clone(),
                queue: queue.into(),
                attached: attached.clone(),
                copying: config.xdp.copy,
                busy_poll: config.xdp.busy_poll,
                is_scattered,
            };
            sources.push(XdpSource::new(queue_config, departures, facts.clone()));
            if queue < interface.tx_queues {
                egress.push(way_in);
            }
        }
        Ok((Self { interface: interface.name.clone(), egress, facts }, sources))
    }

    /// A way out for one more CPU.
    #[must_use]
    pub fn sink(&self) -> TxQueueSink {
        TxQueueSink::new(self.interface.clone(), &self.egress)
    }

    /// Facts found out about it; how packets are copied once its queues are attached to an engine.
    #[must_use]
    pub fn facts(&self) -> &Facts {
        &self.facts
    }
}
