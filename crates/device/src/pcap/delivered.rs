//! Packets of one CPU, written to a capture of its own.

use std::mem;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use forebay_rx::coalesce::resegment;
use forebay_rx::sink::{SendDrop, Sent, SinkCounters};
use forebay_rx::{CpuId, Packet};
use forebay_sys::error::{Error, Result};

use super::writer::{CaptureWriter, WriteOutcome};

/// The first thing that went wrong with any of several captures, for whoever watches over them.
pub type FirstFailure = Arc<OnceLock<String>>;

/// The capture of one CPU: `cpuN.pcap` in some directory.
#[derive(Debug)]
pub struct DeliveredCapture {
    writer: CaptureWriter,
    /// True if merged packets are written as the frames that they were merged of.
    resegments: bool,
    /// Written packets are sent ones, and all others are not written.
    counters: Arc<SinkCounters>,
    failed: Option<Error>,
    /// Empty, but for its room.
    frames: Vec<Packet>,
    told: FirstFailure,
}

impl DeliveredCapture {
    /// Will write to a file of `directory`, which must be there. What goes wrong first is `told` at
    /// once.
    #[must_use]
    pub fn new(directory: &Path, cpu: CpuId, resegments: bool, told: FirstFailure) -> Self {
        let writer = CaptureWriter::new(&directory.join(format!("cpu{cpu}")));
        let (counters, failed, frames) = (Arc::default(), None, Vec::new());
        Self { writer, resegments, counters, failed, frames, told }
    }

    /// Writes packets; they may have been taken apart afterwards. Once that has failed nothing more
    /// is written, and [`finish`](Self::finish) says so.
    pub fn write(&mut self, packets: &mut Vec<Packet>) {
        if self.failed.is_some() {
            return self.counters.add_dropped(SendDrop::NotWritten, packets.len() as u64);
        }
        let mut frames = mem::take(&mut self.frames);
        for packet in packets.drain(..) {
            let sent = Sent {
                packets: 1,
                frames: packet.segment_count().into(),
                bytes: packet.wire_len.into(),
            };
            let first = frames.len();
            if self.resegments {
                resegment(packet, &mut frames);
            } else {
                frames.push(packet);
            }
            if self.failed.is_some() {
                self.counters.add_dropped(SendDrop::NotWritten, 1);
            } else {
                let outcome = self.writer.write(&frames[first..], sent);
                self.count(outcome);
            }
        }
        self.frames = mem::replace(packets, frames);
    }

    /// Counters of packets written so far, and of those that were not. What still waits to be written is neither.
    #[must_use]
    pub fn counters(&self) -> &Arc<SinkCounters> {
        &self.counters
    }

    /// Writes out what still waits: afterwards everything is counted.
    pub fn flush(&mut self) {
        let outcome = self.writer.flush();
        self.count(outcome);
    }

    /// Writes out what still waits.
    ///
    /// # Errors
    /// When this fails, or anything before has.
    pub fn finish(mut self) -> Result<()> {
        self.flush();
        self.failed.map_or(Ok(()), Err)
    }

    fn count(&mut self, WriteOutcome { written, lost, error }: WriteOutcome) {
        self.counters.add_sent(written);
        self.counters.add_dropped(SendDrop::NotWritten, lost);
        if let Some(error) = error {
            // Only the first is told.
            let _ = self.told.set(error.to_string());
            self.failed.get_or_insert(error);
        }
    }
}
