//! Flows of a burst, for those who asked.

use std::sync::mpsc::Sender;

use super::Queue;
use crate::question::{BURST_REQUESTS_MAX, SampledBurst, SampledPacket};

impl Queue {
    /// Keeps a request until the next burst, in place of the oldest if there are too many.
    pub(super) fn keep_burst_request(&mut self, request: &Sender<SampledBurst>) {
        if self.burst_requests.len() == BURST_REQUESTS_MAX {
            self.burst_requests.remove(0);
        }
        self.burst_requests.push(request.clone());
    }

    /// Answers all requests with the packets of a burst that has been steered.
    #[cold]
    pub(super) fn answer_burst_requests(&mut self, mut packets: Vec<SampledPacket>) {
        for packet in &mut packets {
            packet.cpu = self.intake.place_of(packet.flow).cpu;
        }
        let burst = SampledBurst { name: self.name.clone(), packets };
        for request in self.burst_requests.drain(..) {
            // The requester may have dropped the receiver.
            let _ = request.send(burst.clone());
        }
    }
}
