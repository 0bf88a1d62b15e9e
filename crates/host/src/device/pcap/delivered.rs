//! What one CPU delivers, written to a capture of its own.

use std::path::Path;
use std::sync::Arc;

use path::coalesce::resegment;
use path::{CpuId, Packet};

use super::CaptureWriter;
use crate::device::sink::{SendDrop, Sent, SinkCounters};
use crate::error::{Error, Result};

/// The capture of one CPU: `cpuN.pcap` in some directory.
#[derive(Debug)]
pub struct DeliveredCapture {
    writer: CaptureWriter,
    /// Whether merged packets are written as the frames that they were merged of.
    resegments: bool,
    /// Written packets are sent ones, and all others refused.
    counters: Arc<SinkCounters>,
    failed: Option<Error>,
}

impl DeliveredCapture {
    /// Will write to a file of `directory`, which must be there.
    #[must_use]
    pub fn new(directory: &Path, cpu: CpuId, resegments: bool) -> Self {
        let writer = CaptureWriter::new(directory.join(format!("cpu{cpu}")));
        Self { writer, resegments, counters: Arc::default(), failed: None }
    }

    /// Writes packets; they may have been taken apart afterwards. Once that has failed nothing more
    /// is written, and [`finish`](Self::finish) says so.
    pub fn write(&mut self, packets: &mut Vec<Packet>) {
        let handed = packets.len() as u64;
        let sent = Sent {
            packets: handed,
            frames: packets.iter().map(|packet| u64::from(packet.segment_count())).sum(),
            bytes: packets.iter().map(|packet| u64::from(packet.wire_len)).sum(),
        };
        if self.failed.is_none() {
            if self.resegments {
                take_apart(packets);
            }
            self.failed = packets.iter().find_map(|packet| self.writer.write(packet).err());
        }
        match self.failed {
            Some(_) => self.counters.add_dropped(SendDrop::Refused, handed),
            None => self.counters.add_sent(sent),
        }
    }

    /// What was written so far, and what was not.
    #[must_use]
    pub fn counters(&self) -> &Arc<SinkCounters> {
        &self.counters
    }

    /// Writes out what is still buffered.
    ///
    /// # Errors
    /// When this fails, or anything before has.
    pub fn finish(self) -> Result<()> {
        self.failed.map_or_else(|| self.writer.finish(), Err)
    }
}

/// Has the frames that packets were merged of take their places.
fn take_apart(packets: &mut Vec<Packet>) {
    let mut frames = Vec::with_capacity(packets.len());
    packets.drain(..).for_each(|packet| resegment(packet, &mut frames));
    *packets = frames;
}
