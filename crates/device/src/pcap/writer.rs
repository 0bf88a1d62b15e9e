//! Writer of capture files.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::mem;
use std::path::{Path, PathBuf};

use forebay_rx::Packet;
use forebay_rx::parse::Link;
use forebay_rx::sink::Sent;
use forebay_sys::error::{Error, Result};

use super::rotation::{FileNames, FileSpan, Rotation};
use crate::MAX_RECORD_BYTES;

/// Link types of written captures (tcpdump.org/linktypes.html).
const ETHERNET: u32 = 1;
const RAW: u32 = 101;

/// Last time that a classic capture can hold, since its seconds have 32 bits.
const LAST_TIME_NS: u64 = (1 << 32) * SECOND_NS - 1;
const SECOND_NS: u64 = 1_000_000_000;

/// Magic number of a capture with nanoseconds.
const MAGIC_NS: u32 = 0xa1b2_3c4d;
/// Major version 2, minor version 4, as in every capture.
const VERSION: u32 = 4 << 16 | 2;

/// Length of the header of a record.
const RECORD_HEADER_BYTES: u64 = 16;

/// Number of bytes to buffer before a write. A reader of the growing file does not see them, and
/// they do not count as written.
const BUFFER_BYTES: usize = 16 << 10;

/// Capture being written: classic pcap with nanoseconds. Packets without a link header go to a
/// second file, since a file has one link type.
#[derive(Debug)]
pub(super) struct CaptureWriter {
    ethernet: LinkCapture,
    ip: LinkCapture,
}

/// Result of a write: packets in the file, packets that never will be.
#[derive(Debug, Default)]
pub(super) struct WriteOutcome {
    /// Packets that the system has taken.
    pub(super) written: Sent,
    /// Number of packets that the system has not taken.
    pub(super) lost: u64,
    /// First failure.
    pub(super) error: Option<Error>,
}

impl CaptureWriter {
    /// Returns a writer to `stem` with `.pcap` added, and to `stem` with `-ip.pcap` added if
    /// needed; with numbers before `.pcap` if files are rotated. A file is created with its first
    /// packet.
    pub(super) fn new(stem: &Path, rotation: Rotation) -> Self {
        let capture = |ending: &str, link_type| {
            let mut stem = stem.as_os_str().to_owned();
            stem.push(ending);
            LinkCapture { names: FileNames::new(stem.as_ref(), rotation), link_type, file: None }
        };
        Self { ethernet: capture("", ETHERNET), ip: capture("-ip", RAW) }
    }

    /// Adds a packet: a record for each of `frames`, with its recorded time, clamped to the last
    /// time that the format can hold. The packet counts as `sent` once all its records are in the
    /// file.
    pub(super) fn write(&mut self, frames: &[Packet], sent: Sent) -> WriteOutcome {
        let Some(link) = frames.first().map(|frame| frame.headers.link) else {
            return WriteOutcome::default();
        };
        let capture = match link {
            Link::Ethernet => &mut self.ethernet,
            Link::Ip => &mut self.ip,
        };
        capture.write(frames, sent)
    }

    /// Writes the buffered records.
    pub(super) fn flush(&mut self) -> WriteOutcome {
        let [one, other] = [&mut self.ethernet, &mut self.ip].map(LinkCapture::flush);
        one.and(other)
    }
}

impl WriteOutcome {
    /// Outcome of a packet that was lost because of an error.
    fn refused(sent: Sent, error: Error) -> Self {
        Self { lost: sent.packets, error: Some(error), ..Self::default() }
    }

    /// Outcome of two writes.
    fn and(self, later: Self) -> Self {
        Self {
            written: self.written.plus(later.written),
            lost: self.lost + later.lost,
            error: self.error.or(later.error),
        }
    }
}

/// Files of one link type, one after another.
#[derive(Debug)]
struct LinkCapture {
    names: FileNames,
    link_type: u32,
    /// `None` before the first packet.
    file: Option<OpenFile>,
}

/// File that is written now.
#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    records: Records<File>,
    span: FileSpan,
}

impl LinkCapture {
    fn write(&mut self, frames: &[Packet], sent: Sent) -> WriteOutcome {
        let len_bytes: u64 = frames.iter().map(record_bytes).sum();
        let now_ns = frames.first().map_or(0, |frame| frame.timestamp_ns);
        let rotation = self.names.rotation();
        let mut outcome = WriteOutcome::default();
        if self.file.as_ref().is_some_and(|file| rotation.is_due(&file.span, len_bytes, now_ns)) {
            outcome = self.flush();
            if outcome.error.is_some() {
                return WriteOutcome { lost: outcome.lost + sent.packets, ..outcome };
            }
            self.file = None;
        }
        let file = match &mut self.file {
            Some(file) => file,
            None => match OpenFile::create(&mut self.names, self.link_type, now_ns) {
                Ok(file) => self.file.insert(file),
                Err(error) => return outcome.and(WriteOutcome::refused(sent, error)),
            },
        };
        frames.iter().for_each(|frame| file.records.add(frame));
        file.records.end_packet(sent);
        file.span.len_bytes += len_bytes;
        if file.records.waits_bytes() < BUFFER_BYTES { outcome } else { outcome.and(self.flush()) }
    }

    fn flush(&mut self) -> WriteOutcome {
        self.file.as_mut().map(OpenFile::flush).unwrap_or_default()
    }
}

impl OpenFile {
    fn create(names: &mut FileNames, link_type: u32, began_ns: u64) -> Result<Self> {
        let path = names.next()?;
        let file = File::create(&path).map_err(Error::file("create", &path))?;
        let records = Records::begin(file, link_type);
        let span = FileSpan { len_bytes: records.waits_bytes() as u64, began_ns };
        Ok(Self { path, records, span })
    }

    fn flush(&mut self) -> WriteOutcome {
        let (written, lost, error) = self.records.flush();
        if error.is_some() {
            // Nothing more is written, so half a record is removed, and a file without its whole
            // header is deleted. A file that cannot be truncated stays as it is.
            let _ = match self.records.whole_bytes {
                0 => std::fs::remove_file(&self.path),
                whole => self.records.file.set_len(whole),
            };
        }
        WriteOutcome { written, lost, error: error.map(Error::file("write", &self.path)) }
    }
}

/// Length of the record of a packet.
fn record_bytes(packet: &Packet) -> u64 {
    let len: usize = packet.fragments().map(<[u8]>::len).sum();
    RECORD_HEADER_BYTES + len as u64
}

/// Buffered records, and the packets that they belong to.
#[derive(Debug)]
struct Records<W> {
    file: W,
    waiting: Vec<u8>,
    /// Buffered packets: the end of each one's last record, and its counts.
    packets: Vec<(usize, Sent)>,
    /// Length of the file up to the end of the last complete packet.
    whole_bytes: u64,
}

impl<W: Write> Records<W> {
    fn begin(file: W, link_type: u32) -> Self {
        let mut waiting = Vec::with_capacity(BUFFER_BYTES);
        for field in [MAGIC_NS, VERSION, 0, 0, MAX_RECORD_BYTES, link_type] {
            waiting.extend(field.to_le_bytes());
        }
        // The header is written whole or not at all, and counts as no packet.
        let packets = vec![(waiting.len(), Sent::default())];
        Self { file, waiting, packets, whole_bytes: 0 }
    }

    fn waits_bytes(&self) -> usize {
        self.waiting.len()
    }

    fn add(&mut self, packet: &Packet) {
        let time_ns = packet.timestamp_ns.min(LAST_TIME_NS);
        let [seconds, nanoseconds] = [time_ns / SECOND_NS, time_ns % SECOND_NS]
            .map(|part| u32::try_from(part).unwrap_or(u32::MAX));
        let len: usize = packet.fragments().map(<[u8]>::len).sum();
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        for field in [seconds, nanoseconds, len, packet.wire_len] {
            self.waiting.extend(field.to_le_bytes());
        }
        packet.fragments().for_each(|fragment| self.waiting.extend_from_slice(fragment));
    }

    /// Ends a packet, whose records were added since the last one.
    fn end_packet(&mut self, sent: Sent) {
        self.packets.push((self.waiting.len(), sent));
    }

    /// Writes the buffered records. Returns the counts in the file, the number of lost packets, and
    /// the error if any.
    fn flush(&mut self) -> (Sent, u64, Option<io::Error>) {
        let (taken, error) = write_as_much_as_may_be(&mut self.file, &self.waiting);
        let (mut written, mut lost, mut whole) = (Sent::default(), 0, 0);
        for (end, sent) in mem::take(&mut self.packets) {
            if end <= taken {
                (written, whole) = (written.plus(sent), end);
            } else {
                lost += sent.packets;
            }
        }
        self.whole_bytes += whole as u64;
        self.waiting.clear();
        (written, lost, error)
    }
}

/// Writes until an error. Returns the number of bytes taken.
fn write_as_much_as_may_be(file: &mut impl Write, bytes: &[u8]) -> (usize, Option<io::Error>) {
    let mut taken = 0;
    while taken < bytes.len() {
        match file.write(&bytes[taken..]) {
            Ok(0) => return (taken, Some(ErrorKind::WriteZero.into())),
            Ok(count) => taken += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return (taken, Some(error)),
        }
    }
    (taken, None)
}

#[cfg(test)]
mod tests {
    use forebay_testkit::disk::Disk;
    use forebay_testkit::packets::datagrams;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nonlinear_capture_equals_linear() {
        let directory = tempfile::tempdir().unwrap();
        let written = datagrams(&[3; 1001], 116).map(|packet| {
            let mut writer =
                CaptureWriter::new(&directory.path().join("written"), Rotation::default());
            assert!(writer.write(&[packet], Sent::default()).error.is_none());
            assert!(writer.flush().error.is_none());
            std::fs::read(directory.path().join("written.pcap")).unwrap()
        });
        assert_eq!(written[0].len(), 24 + 16 + 42 + 1001);
        assert_eq!(written[0], written[1]);
    }

    /// Lengths of the complete records of a capture.
    fn whole_records(capture: &[u8]) -> Vec<usize> {
        let mut left = capture.get(24..).unwrap_or_default();
        let mut records = Vec::new();
        while let Some(len) = left.get(8..12).and_then(|len| len.first_chunk().copied()) {
            let len = u32::from_le_bytes(len) as usize;
            let Some(rest) = left.get(16 + len..) else { break };
            records.push(len);
            left = rest;
        }
        records
    }

    proptest! {
        /// With any room, the frames counted as written are those that can be read again.
        #[test]
        fn promise_2_only_recorded_frames_are_counted(
            room_bytes in 0usize..12_000,
            at_once in 1usize..500,
            flushes in prop::collection::vec(prop::collection::vec((300usize..400, 1usize..4), 0..6), 1..6),
        ) {
            let disk = Disk { room_bytes, at_once, has: Vec::new() };
            let mut records = Records::begin(disk, ETHERNET);
            let (mut written, mut lost, mut records_written) = (Sent::default(), 0, 0);
            let mut handed = 0;
            'full: for packets in &flushes {
                let mut ends = Vec::new();
                for (len, frames) in packets {
                    for _ in 0..*frames {
                        let [packet, _] = datagrams(&vec![7; *len], 116);
                        records.add(&packet);
                    }
                    ends.push(*frames);
                    records.end_packet(Sent { packets: 1, frames: *frames as u64, bytes: 0 });
                    handed += 1;
                }
                let (now, none, error) = records.flush();
                written = written.plus(now);
                lost += none;
                records_written += ends[..usize::try_from(now.packets).unwrap()].iter().sum::<usize>();
                prop_assert!(none == 0 || error.is_some());
                if error.is_some() {
                    break 'full;
                }
            }
            let whole = usize::try_from(records.whole_bytes).unwrap();
            prop_assert_eq!(written.packets + lost, handed);
            prop_assert_eq!(written.frames, u64::try_from(records_written).unwrap());
            prop_assert_eq!(whole_records(&records.file.has[..whole]).len(), records_written);
        }
    }
}
