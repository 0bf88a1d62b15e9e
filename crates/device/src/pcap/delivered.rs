//! Packets of one CPU, written to a capture file.

use std::mem;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use forebay_rx::coalesce::resegment;
use forebay_rx::sink::{SendDrop, Sent, SinkCounters};
use forebay_rx::{CpuId, Packet};
use forebay_sys::error::{Error, Result};

use super::writer::{CaptureWriter, WriteOutcome};

/// First failure of any of several captures, for the thread that watches them.
pub type FirstFailure = Arc<OnceLock<String>>;

/// Capture of one CPU: `cpuN.pcap` in a directory.
#[derive(Debug)]
pub struct DeliveredCapture {
    writer: CaptureWriter,
    /// True if a merged packet is written as its original frames.
    resegments: bool,
    /// Counts written packets as sent, all others as [`SendDrop::NotWritten`].
    counters: Arc<SinkCounters>,
    failed: Option<Error>,
    /// Scratch vector, empty between calls.
    frames: Vec<Packet>,
    told: FirstFailure,
}

impl DeliveredCapture {
    /// Returns a capture that will write to a file of `directory`, which must exist. The first
    /// failure is stored in `told` at once.
    #[must_use]
    pub fn new(directory: &Path, cpu: CpuId, resegments: bool, told: FirstFailure) -> Self {
        let writer = CaptureWriter::new(&directory.join(format!("cpu{cpu}")));
        let (counters, failed, frames) = (Arc::default(), None, Vec::new());
        Self { writer, resegments, counters, failed, frames, told }
    }

    /// Writes packets, and leaves their frames in `packets`, merged ones possibly resegmented.
    /// After a failure nothing more is written, and [`finish`](Self::finish) returns the error.
    pub fn write(&mut self, packets: &mut Vec<Packet>) {
        if self.failed.is_some() {
            // After a failure the file stays cut behind its last whole packet.
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

    /// Returns the counters of packets written and not written. Buffered packets are in neither.
    #[must_use]
    pub fn counters(&self) -> &Arc<SinkCounters> {
        &self.counters
    }

    /// Writes the buffered packets: afterwards every packet is counted.
    pub fn flush(&mut self) {
        let outcome = self.writer.flush();
        self.count(outcome);
    }

    /// Writes the buffered packets.
    ///
    /// # Errors
    /// If this write or any before it failed.
    pub fn finish(mut self) -> Result<()> {
        self.flush();
        self.failed.map_or(Ok(()), Err)
    }

    fn count(&mut self, WriteOutcome { written, lost, error }: WriteOutcome) {
        self.counters.add_sent(written);
        self.counters.add_dropped(SendDrop::NotWritten, lost);
        if let Some(error) = error {
            // Only the first failure is kept.
            let _ = self.told.set(error.to_string());
            self.failed.get_or_insert(error);
        }
    }
}
