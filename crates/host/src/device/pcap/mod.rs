//! Captures as a source: pcap and pcapng files, one after another, once or many times.

mod delivered;
mod interface;
mod link;
mod reader;
mod window;
mod writer;

use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use mem::Pool;
use path::arrive::{Ask, Burst, Polled, Refused, SourceError};
use path::hash::FlowHash;
use path::packet::Arrival;
use path::parse::Verify;
use path::{DropReason, Packet, Source};
use rustix::fs::{Access, access};

use super::pace::{Pace, Rate};
use super::{Progress, QueueShare};
use crate::error::{Error, Result};
pub use delivered::{DeliveredCapture, FirstFailure};
pub use reader::{Damage, MAX_BLOCK_BYTES, MAX_RECORD_BYTES, Reader, Record};

/// The most of all captures that is kept in memory; what is beyond is read as the run goes on.
pub const KEPT_BYTES_MAX: u64 = 256 << 20;

/// Where a capture's bytes are.
#[derive(Clone, Debug)]
pub enum Capture {
    /// In a file.
    File(PathBuf),
    /// In the program: a name and the bytes.
    Bundled(&'static str, &'static [u8]),
    /// In memory, read from this file.
    Kept(PathBuf, Arc<Vec<u8>>),
}

impl Capture {
    /// The name for messages.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::File(path) | Self::Kept(path, _) => path.display().to_string(),
            Self::Bundled(name, _) => (*name).to_owned(),
        }
    }

    /// Its size, if it can be known.
    #[must_use]
    pub fn len_bytes(&self) -> Option<u64> {
        match self {
            Self::File(path) => {
                let metadata = path.metadata().ok()?;
                metadata.is_file().then_some(metadata.len())
            }
            Self::Bundled(_, bytes) => Some(bytes.len() as u64),
            Self::Kept(_, bytes) => Some(bytes.len() as u64),
        }
    }

    /// Opens it from the start.
    ///
    /// # Errors
    /// When it cannot be read or is no capture.
    pub fn open(&self) -> Result<Reader> {
        let reader: Box<dyn Read + Send> = match self {
            Self::File(path) => Box::new(File::open(path).map_err(Error::file("open", path))?),
            Self::Bundled(_, bytes) => Box::new(io::Cursor::new(*bytes)),
            Self::Kept(_, bytes) => return Reader::of_bytes(self.name(), Arc::clone(bytes)),
        };
        Reader::new(self.name(), reader)
    }

    /// Sees whether it can be replayed: whether it is a capture, and the first record that can be
    /// delivered, or none, comes before any damage that ends the reading. What can be read only once
    /// is judged when it is.
    ///
    /// # Errors
    /// When it cannot be.
    pub fn judge(&self) -> Result<()> {
        match self {
            Self::File(path) if is_read_once(path) => access(path, Access::READ_OK)
                .map_err(|error| Error::file("open", path)(error.into())),
            _ => self.open()?.judge(),
        }
    }

    /// Whether it gives what it holds only once, as a pipe does.
    #[must_use]
    pub fn is_read_once(&self) -> bool {
        matches!(self, Self::File(path) if is_read_once(path))
    }

    /// The same, in memory if it is a file of no more than `left_bytes`, which then are fewer. One
    /// that cannot be read stays what it is, and says why when it is opened.
    #[must_use]
    pub fn kept(self, left_bytes: &mut u64) -> Self {
        let fits = |file: &Metadata| file.is_file() && file.len() <= *left_bytes;
        match self {
            Self::File(path) if path.metadata().is_ok_and(|file| fits(&file)) => {
                let Ok(bytes) = std::fs::read(&path) else { return Self::File(path) };
                *left_bytes = left_bytes.saturating_sub(bytes.len() as u64);
                Self::Kept(path, Arc::new(bytes))
            }
            other => other,
        }
    }
}

/// A directory, or what is not there, is told when it is opened.
fn is_read_once(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir())
}

/// How captures are replayed.
#[derive(Clone, Debug)]
pub struct ReplayPlan {
    /// The captures, in order.
    pub captures: Vec<Capture>,
    /// How often all of them are gone through.
    pub loops: u64,
    /// How fast.
    pub rate: Rate,
}

/// A replay of captures.
pub struct PcapSource {
    plan: ReplayPlan,
    share: Option<QueueShare>,
    verify: Verify,
    /// Which capture comes next, over all loops.
    next_capture: u64,
    reader: Option<Reader>,
    /// Of the next frame.
    number: u64,
    pace: Pace,
    progress: Arc<Progress>,
    /// Bytes of the captures before the one being read.
    bytes_before: u64,
    /// Damaged records of the captures before the one being read.
    damaged_before: u64,
    /// Records of link types that are not read, of the same.
    unread_before: BTreeMap<String, u64>,
    /// How many of all were told of.
    unread_told: u64,
}

/// Records looked at for each frame that may be taken, so that a poll ends although all records
/// belong to other queues.
const LOOKS_PER_FRAME: usize = 8;

impl PcapSource {
    /// Opens the first capture. With a `share`, only frames of that queue are given. `verify` says
    /// whether frames are summed up while they are copied.
    ///
    /// # Errors
    /// When the first capture cannot be read or is none.
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
            number: 0,
            progress: Arc::new(progress),
            bytes_before: 0,
            damaged_before: 0,
            unread_before: BTreeMap::new(),
            unread_told: 0,
        };
        source.open_next()?;
        Ok(source)
    }

    /// What the source tells while it runs: bytes of the captures, of all loops.
    #[must_use]
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Opens the capture after this one; there is none after the last loop.
    fn open_next(&mut self) -> Result<()> {
        self.report();
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
        self.reader = Some(self.plan.captures[index].open()?);
        Ok(())
    }

    /// Publishes how far the reader has come.
    fn report(&mut self) {
        let Some(reader) = &self.reader else { return };
        self.progress.done.store(self.bytes_before + reader.offset(), Ordering::Relaxed);
        let Damage { records, first } = reader.damage();
        if let Some(first) = first {
            self.progress.damaged.store(self.damaged_before + records, Ordering::Relaxed);
            // Only the first of all is kept.
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
        Ask { now_ns, max, may_wait, is_last }: Ask,
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
            let Some(record) = reader.record()? else {
                self.open_next()?;
                continue;
            };
            let due_ns = self.pace.due_ns(now_ns, self.number, record.timestamp_ns);
            if due_ns > now_ns {
                return Ok(Polled::IdleUntil { now_ns: due_ns });
            }
            let arrival = Arrival::of_frame(self.number);
            let (share, packets) = (self.share.as_ref(), &mut burst.packets);
            match take(&record, arrival, share, self.verify, pool, packets) {
                Ok(()) => {}
                Err(DropReason::NoBuffer) if may_wait => return Ok(Polled::Ready),
                Err(reason) => {
                    burst.refused.push(Refused { arrival, wire_len: record.wire_len, reason });
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
        ask: Ask,
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
}

/// Adds the records of link types that are not read.
fn add(unread: &mut BTreeMap<String, u64>, reader: &Reader) {
    for (link_type, count) in reader.unread() {
        *unread.entry(link_type).or_default() += count;
    }
}

/// Brings a record into packet memory, if it is this queue's.
fn take(
    record: &Record<'_>,
    arrival: Arrival,
    share: Option<&QueueShare>,
    verify: Verify,
    pool: &mut Pool,
    packets: &mut Vec<Packet>,
) -> Result<(), DropReason> {
    let hash = match share {
        Some(share) => match share.claim(record.bytes, record.wire_len, record.link) {
            Some(hash) => hash,
            None => return Ok(()),
        },
        None => FlowHash::NONE,
    };
    let link = record.link.ok_or(DropReason::LinkType)?;
    let (wire_len, timestamp_ns) = (record.wire_len, record.timestamp_ns);
    let len_bytes = u32::try_from(record.bytes.len()).unwrap_or(u32::MAX);
    let Some(frame) = pool.allocate(len_bytes) else {
        let oversize = len_bytes > pool.largest_frame_bytes();
        return Err(if oversize { DropReason::Oversize } else { DropReason::NoBuffer });
    };
    let packet = Packet::received(frame, arrival, wire_len, link);
    packets.push(Packet { timestamp_ns, hash, ..packet });
    // The bytes last: the frame's first line comes from the CPU that read it last, and nothing
    // here waits for it.
    if let Some(packet) = packets.last_mut() {
        packet.fill(record.bytes, verify);
    }
    Ok(())
}
