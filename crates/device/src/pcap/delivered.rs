//! Packets of one CPU, written to a capture file.

use std::mem;
use std::path::Path;
use std::sync::Arc;

use forebay_rx::coalesce::resegment;
use forebay_rx::sink::{SendDrop, Sent, SinkCounters};
use forebay_rx::{CpuId, Packet};
use forebay_sys::error::{Error, Result};
use forebay_sys::failure::{FailureNote, FirstFailure};

use super::rotation::Rotation;
use super::writer::{CaptureWriter, WriteOutcome};

/// Consequence of a failure, as it is reported.
const CONSEQUENCE: &str = "what follows is counted as not_written";

/// Options of captures.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CaptureOptions {
    /// True if a merged packet is written as its original frames.
    pub resegments: bool,
    /// Limits of the files.
    pub rotation: Rotation,
}

/// Capture of one CPU: `cpuN.pcap` in a directory, or `cpuN.000000.pcap` and so on.
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
    /// Returns a capture that will write to files of `directory`, which must exist. The first
    /// failure is stored in `told` at once.
    #[must_use]
    pub fn new(directory: &Path, cpu: CpuId, options: CaptureOptions, told: FirstFailure) -> Self {
        let CaptureOptions { resegments, rotation } = options;
        let writer = CaptureWriter::new(&directory.join(format!("cpu{cpu}")), rotation);
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
            let _ = self.told.set(FailureNote::of(&error, CONSEQUENCE));
            self.failed.get_or_insert(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::num::{NonZeroU16, NonZeroU64};

    use forebay_testkit::packets::datagrams;
    use proptest::prelude::*;

    use super::*;

    /// Number and time of each record of a file, by the first payload byte of each datagram.
    fn records(file: &[u8]) -> Vec<(u8, u64)> {
        const HEADERS_BYTES: usize = 42;
        let word = |at: usize| u32::from_le_bytes(*file[at..].first_chunk().unwrap());
        let (mut at, mut records) = (24, Vec::new());
        while at < file.len() {
            let time_ns = u64::from(word(at)) * 1_000_000_000 + u64::from(word(at + 4));
            records.push((file[at + 16 + HEADERS_BYTES], time_ns));
            at += 16 + word(at + 8) as usize;
        }
        assert_eq!(at, file.len(), "whole records");
        records
    }

    /// Files of a directory, in the order of their names.
    fn files(directory: &Path) -> Vec<(String, Vec<u8>)> {
        let entries = fs::read_dir(directory).unwrap().map(Result::unwrap);
        let file = |entry: fs::DirEntry| {
            (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())
        };
        let mut files: Vec<_> = entries.map(file).collect();
        files.sort();
        files
    }

    /// Writes datagrams numbered from 0, of these lengths and at these times. Returns the largest
    /// number of files that there were at once.
    fn write(directory: &Path, rotation: Rotation, packets: &[(usize, u64)]) -> usize {
        let options = CaptureOptions { rotation, ..CaptureOptions::default() };
        let mut capture = DeliveredCapture::new(directory, CpuId(0), options, Arc::default());
        let mut files_max = 0;
        for (number, (len, time_ns)) in (0..).zip(packets) {
            let mut payload = vec![0; *len];
            payload[0] = number;
            let [mut packet, _] = datagrams(&payload, 116);
            packet.timestamp_ns = *time_ns;
            capture.write(&mut vec![packet]);
            files_max = files_max.max(fs::read_dir(directory).unwrap().count());
        }
        let counters = Arc::clone(capture.counters());
        capture.finish().unwrap();
        assert_eq!(counters.packets(), packets.len() as u64);
        files_max
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Each packet is in exactly one file, and files keep their limits.
        #[test]
        fn ops_4_each_packet_has_one_file(
            len_bytes in 200u64..5_000,
            period_ns in prop::option::of(1u64..4_000_000_000),
            steps in prop::collection::vec((80usize..1200, 0u64..1_500_000_000), 1..40),
        ) {
            let directory = tempfile::tempdir().unwrap();
            let mut now_ns = 7;
            let packets: Vec<_> = steps.iter().map(|(len, step_ns)| {
                now_ns += step_ns;
                (*len, now_ns)
            }).collect();
            let rotation = Rotation {
                len_bytes: NonZeroU64::new(len_bytes),
                period_ns: period_ns.and_then(NonZeroU64::new),
                kept: None,
            };
            write(directory.path(), rotation, &packets);
            let files = files(directory.path());
            let contents: Vec<_> = files.iter().map(|(_, file)| records(file)).collect();
            let written = contents.iter().flatten().map(|(number, _)| *number).collect::<Vec<_>>();
            prop_assert_eq!(written, (0..).take(packets.len()).collect::<Vec<u8>>());
            for ((index, (name, file)), records) in files.iter().enumerate().zip(&contents) {
                prop_assert_eq!(name, &format!("cpu0.{index:06}.pcap"));
                prop_assert!(!records.is_empty());
                prop_assert!(file.len() as u64 <= len_bytes || records.len() == 1);
                let span_ns = records[records.len() - 1].1 - records[0].1;
                prop_assert!(period_ns.is_none_or(|period_ns| span_ns < period_ns));
            }
        }

        /// The newest files are kept, whole, and there are never more.
        #[test]
        fn ops_4_only_newest_files_are_kept(kept in 1u16..5, packets in 1usize..60) {
            let directory = tempfile::tempdir().unwrap();
            let len_bytes = NonZeroU64::new(2_500);
            let rotation = Rotation { len_bytes, period_ns: None, kept: NonZeroU16::new(kept) };
            // Three of them fit in a file.
            let files_max = write(directory.path(), rotation, &vec![(700, 1); packets]);
            prop_assert!(files_max <= usize::from(kept));
            let files = files(directory.path());
            let begun = packets.div_ceil(3);
            prop_assert_eq!(files.len(), begun.min(kept.into()));
            let numbers = files.iter().flat_map(|(_, file)| records(file)).map(|(number, _)| number);
            let first = (begun - files.len()) * 3;
            let expected = (first..packets).map(|number| u8::try_from(number).unwrap());
            prop_assert_eq!(numbers.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
        }
    }

    /// A service that restarts often loses no file but the oldest.
    #[test]
    fn ops_4_later_run_counts_on() {
        let directory = tempfile::tempdir().unwrap();
        let others = ["cpu0-ip.000009.pcap", "cpu01.000009.pcap", "cpu0.x.pcap", "cpu0.pcap"];
        for name in others {
            fs::write(directory.path().join(name), "").unwrap();
        }
        let kept = NonZeroU16::new(3);
        let rotation = Rotation { len_bytes: NonZeroU64::new(2_500), period_ns: None, kept };
        let names = || {
            let files = files(directory.path()).into_iter().map(|(name, _)| name);
            files.filter(|name| !others.contains(&name.as_str())).collect::<Vec<_>>()
        };
        write(directory.path(), rotation, &[(700, 1); 6]);
        assert_eq!(names(), ["cpu0.000000.pcap", "cpu0.000001.pcap"]);
        write(directory.path(), rotation, &[(700, 1); 6]);
        assert_eq!(names(), ["cpu0.000001.pcap", "cpu0.000002.pcap", "cpu0.000003.pcap"]);
        // Fewer are kept from now on.
        let fewer = Rotation { kept: NonZeroU16::new(1), ..rotation };
        write(directory.path(), fewer, &[(700, 1); 1]);
        assert_eq!(names(), ["cpu0.000004.pcap"]);
        // Numbers are numbers, whatever their length is.
        fs::write(directory.path().join("cpu0.1000000.pcap"), "").unwrap();
        write(directory.path(), rotation, &[(700, 1); 1]);
        assert_eq!(names(), ["cpu0.000004.pcap", "cpu0.1000000.pcap", "cpu0.1000001.pcap"]);
        assert_eq!(files(directory.path()).len(), 3 + others.len());
    }

    #[test]
    fn ops_4_capture_without_limits_is_one_file() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), Rotation::default(), &[(1000, 1); 30]);
        let files = files(directory.path());
        assert_eq!((files.len(), files[0].0.as_str()), (1, "cpu0.pcap"));
    }
}
