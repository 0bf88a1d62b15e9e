//! Captures as a source: pcap and pcapng files, one after another, once or many times.

mod capture; //   captures in files, pipes, standard input and memory
mod gzip; //      gzip files, unpacked
mod window; //    a bounded window on a stream of bytes
mod reader; //    records of pcap, packet blocks of pcapng
mod recognise; // classic captures told from other files
mod block; //     blocks of pcapng
mod interface; // link types and clocks
mod link; //      the header before a packet
mod serial; //    headers of serial lines, label stacks and firewalls' logs
mod wireless; //  headers of 802.11
mod tally; //     counts of records
mod delivered; // packets of one CPU, written to a file
mod writer; //    writer of pcap files
mod rotation; //  a new file by size or time

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

pub use capture::Capture;
use capture::PipeControl;
pub use delivered::{CaptureOptions, DeliveredCapture};
use forebay_buf::Pool;
use forebay_rx::arrive::{Burst, PollRequest, Polled, RefusedFrame, SourceError};
use forebay_rx::packet::Arrival;
use forebay_rx::parse::Verify;
use forebay_rx::{DropReason, Packet, Source};
use forebay_sys::error::{Error, Result};
use link::LinkType;
pub use reader::{CaptureReader, MAX_BLOCK_BYTES, Record};
pub use rotation::Rotation;
pub use tally::Damage;

use super::pace::{Pace, Rate};
use super::{LOOKS_PER_FRAME, Progress, QueueShare};

/// Maximum size of all captures kept in memory; captures beyond it are read during the run.
pub const KEPT_BYTES_MAX: u64 = 256 << 20;

/// Options of a replay of captures.
#[derive(Clone, Debug)]
pub struct ReplayPlan {
    /// Captures, in order.
    pub captures: Vec<Capture>,
    /// Number of passes over all captures.
    pub loops: u64,
    /// Rate.
    pub rate: Rate,
}

/// Source that replays captures.
pub struct PcapSource {
    plan: ReplayPlan,
    share: Option<QueueShare>,
    verify: Verify,
    /// Index of the next capture, counted over all loops.
    next_capture: u64,
    reader: Option<CaptureReader>,
    /// Control of the capture being read, if its reads may block.
    pipe: Option<PipeControl>,
    /// True if a poll returns instead of blocking while a capture has no data.
    never_waits: bool,
    /// Number of the next frame.
    number: u64,
    pace: Pace,
    progress: Arc<Progress>,
    /// Bytes of the captures before the one being read.
    bytes_before: u64,
    /// Damaged records of the captures before the one being read.
    damaged_before: u64,
    /// Unreadable records of the captures before the one being read, by link type.
    unread_before: BTreeMap<String, u64>,
    /// Number of unreadable records published so far.
    unread_told: u64,
}

impl PcapSource {
    /// Opens the first capture. With a `share`, only frames of that queue are yielded. `verify`
    /// selects whether frames are summed while they are copied.
    ///
    /// # Errors
    /// If the first capture cannot be read or is not a capture.
    pub fn open(plan: ReplayPlan, share: Option<QueueShare>, verify: Verify) -> Result<Self> {
        let total = plan.captures.iter().map(Capture::len_bytes).sum::<Option<u64>>();
        let progress = Progress {
            total: total.map(|bytes| bytes.saturating_mul(plan.loops)),
            ..Progress::default()
        };
        let mut source = Self {
            pace: Pace::new(plan.rate),
            plan,
            share,
            verify,
            next_capture: 0,
            reader: None,
            pipe: None,
            never_waits: false,
            number: 0,
            progress: Arc::new(progress),
            bytes_before: 0,
            damaged_before: 0,
            unread_before: BTreeMap::new(),
            unread_told: 0,
        };
        source.open_next()?;
        if let Some(reader) = &mut source.reader {
            reader.begin_now()?;
        }
        Ok(source)
    }

    /// Makes polls return while a pipe, or standard input, has no data, so that earlier packets
    /// proceed, and the run can be ended.
    #[must_use]
    pub fn never_waiting(mut self) -> Self {
        self.never_waits = true;
        self.pipe.iter().for_each(PipeControl::never_wait);
        self
    }

    /// Returns the progress of the source, in bytes of the captures over all loops.
    #[must_use]
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Opens the next capture; none after the last loop.
    fn open_next(&mut self) -> Result<()> {
        self.report();
        self.pipe = None;
        if let Some(done) = self.reader.take() {
            self.bytes_before += done.offset();
            self.damaged_before += done.damage().records;
            add(&mut self.unread_before, &done);
            done.verdict()?;
        }
        let captures = self.plan.captures.len() as u64;
        if captures == 0 || self.next_capture / captures >= self.plan.loops {
            return Ok(());
        }
        let index = usize::try_from(self.next_capture % captures).unwrap_or(0);
        self.next_capture += 1;
        self.pace.begin_pass();
        let capture = &self.plan.captures[index];
        self.reader = Some(match capture.open_pipe()? {
            Some((reader, pipe)) => {
                if self.never_waits {
                    pipe.never_wait();
                }
                self.pipe = Some(pipe);
                reader
            }
            None => capture.open()?,
        });
        Ok(())
    }

    /// Publishes the progress of the reader.
    fn report(&mut self) {
        let Some(reader) = &self.reader else { return };
        self.progress.done.store(self.bytes_before + reader.offset(), Ordering::Relaxed);
        let Damage { records, first } = reader.damage();
        if let Some(first) = first {
            self.progress.damaged.store(self.damaged_before + records, Ordering::Relaxed);
            // Only the first damage of all captures is kept.
            let _ = self.progress.first_damage.set(first.clone());
        }
        let unread = reader.unread_records() + self.unread_before.values().sum::<u64>();
        if unread > self.unread_told {
            self.unread_told = unread;
            let mut told = self.unread_before.clone();
            add(&mut told, reader);
            *self.progress.unread.lock().unwrap_or_else(PoisonError::into_inner) = told;
        }
    }

    fn poll_records(
        &mut self,
        PollRequest { now_ns, max, may_wait, is_last }: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled> {
        if is_last {
            return Ok(Polled::Exhausted);
        }
        for _ in 0..max * LOOKS_PER_FRAME {
            if burst.len() >= max {
                return Ok(Polled::Ready);
            }
            let Some(reader) = &mut self.reader else { return Ok(Polled::Exhausted) };
            let record = match reader.record() {
                Ok(Some(record)) => record,
                Ok(None) => {
                    self.open_next()?;
                    continue;
                }
                Err(Error::File { source, .. }) if source.kind() == ErrorKind::WouldBlock => {
                    return Ok(Polled::Idle);
                }
                Err(error) => return Err(error),
            };
            let due_ns = self.pace.due_ns(now_ns, self.number, record.timestamp_ns);
            if due_ns > now_ns {
                return Ok(Polled::IdleUntil { now_ns: due_ns });
            }
            let arrival = Arrival::of_frame(self.number);
            let (share, packets) = (self.share.as_ref(), &mut burst.packets);
            match take(&record, arrival, share, self.verify, pool, packets) {
                Ok(()) => {}
                // The record stays the current one, and is taken in the next poll.
                Err(DropReason::NoBuffer) if may_wait => return Ok(Polled::Ready),
                Err(reason) => {
                    burst.refused.push(RefusedFrame { arrival, wire_len: record.wire_len, reason });
                }
            }
            self.number += 1;
            reader.prefetch();
            reader.advance();
        }
        Ok(Polled::Ready)
    }
}

impl Source for PcapSource {
    fn poll(
        &mut self,
        ask: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError> {
        let polled = self.poll_records(ask, pool, burst);
        self.report();
        if polled.is_err() {
            self.reader = None;
        }
        Ok(polled?)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(PipeControl::descriptor)
    }
}

/// Adds a reader's unreadable records, by link type.
fn add(unread: &mut BTreeMap<String, u64>, reader: &CaptureReader) {
    for (link_type, records) in reader.unread() {
        tally::count(unread, link_type, LinkType::OTHERS.to_string(), records);
    }
}

/// Copies a record into packet memory, if it belongs to this queue.
fn take(
    record: &Record<'_>,
    arrival: Arrival,
    share: Option<&QueueShare>,
    verify: Verify,
    pool: &mut Pool,
    packets: &mut Vec<Packet>,
) -> Result<(), DropReason> {
    if share.is_some_and(|share| !share.has(record.bytes, record.wire_len, record.link)) {
        return Ok(());
    }
    let link = record.link.ok_or(DropReason::LinkType)?;
    let (wire_len, timestamp_ns) = (record.wire_len, record.timestamp_ns);
    let len_bytes = u32::try_from(record.bytes.len()).unwrap_or(u32::MAX);
    let Some(frame) = pool.allocate(len_bytes) else {
        let oversize = len_bytes > pool.largest_frame_bytes();
        return Err(if oversize { DropReason::Oversize } else { DropReason::NoBuffer });
    };
    let packet = Packet::received(frame, arrival, wire_len, link);
    packets.push(Packet { timestamp_ns, ..packet });
    // Bytes last: the frame's first cache line comes from the CPU that read it last, and nothing
    // here waits for that line.
    if let Some(packet) = packets.last_mut() {
        packet.fill(record.bytes, verify);
    }
    Ok(())
}
