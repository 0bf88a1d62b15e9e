//! Trace of a run: plain files from which external tools can judge it.
//!
//! `deliver.csv`, `drop.csv`, `config.csv`, `parse.csv` and `flowkey.csv` (if requested),
//! `lro.jsonl` (if packets are coalesced) and `counters.json`, in one directory. Tracing may cost
//! speed: rows are written under locks.

mod parse_row; //    rows of `parse.csv`: parsed fields
mod flow_key_row; // rows of `flowkey.csv`: flow keys
mod lro_row; //      lines of `lro.jsonl`: packets that left coalescing
mod flow_names; //   names of flows and their packets
mod trace_file; //   one file, written a few rows at a time
mod written_frames; // frames that have a row

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flow_names::{FlowNames, TracedFlowName};
use forebay_rx::arrive::{Burst, RefusedFrame};
use forebay_rx::backlog::Note;
use forebay_rx::delivery::Batch;
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_rx::intake::Dropped;
use forebay_rx::packet::Arrival;
use forebay_rx::parse::Verify;
use forebay_rx::{Packet, RxQueue};
use forebay_sys::error::{Error, Result};
use forebay_sys::failure::FirstFailure;
use forebay_sys::remove_file;
use trace_file::TraceFile;
use written_frames::WrittenFrames;

use crate::Config;

const DELIVER_FILE: &str = "deliver.csv";
const DROP_FILE: &str = "drop.csv";
const CONFIG_FILE: &str = "config.csv";
/// Name of the file with a row of parsed fields for each frame.
const PARSE_FILE: &str = "parse.csv";
/// Name of the file with a row for each frame's flow key.
const FLOW_KEY_FILE: &str = "flowkey.csv";
/// Name of the file with a row for each packet that left coalescing.
const LRO_FILE: &str = "lro.jsonl";
/// Name of the file with the counters at the end of the run.
const COUNTERS_FILE: &str = "counters.json";

/// Every file that a trace may have.
pub const FILES: [&str; 7] =
    [DELIVER_FILE, DROP_FILE, CONFIG_FILE, PARSE_FILE, FLOW_KEY_FILE, LRO_FILE, COUNTERS_FILE];

const DELIVER_HEADER: &str =
    "order,flow,seq,rxq,frame,hash,epoch,cpu,qpos,head_old,because,t_enq,t_deq\n";
const DROP_HEADER: &str = "rxq,frame,reason,flow,seq\n";
const CONFIG_HEADER: &str = "t_ns,epoch,what,value\n";

/// Size at which gathered rows are written, in bytes.
const ROWS_BYTES: usize = 64 << 10;

/// Destination of a trace.
#[derive(Clone, Debug)]
pub struct TracePlan {
    /// The directory.
    pub directory: PathBuf,
    /// True if a row is written for the headers of every frame, too.
    pub parse: bool,
}

impl TracePlan {
    /// Opens the trace of an engine that is about to be built, and has the engine write it. Files of
    /// an earlier run stay as they are until the trace [begins](Trace::begin).
    ///
    /// # Errors
    /// If its files cannot be opened or created.
    pub fn open(&self, engine: &mut Config) -> Result<Arc<Trace>> {
        let lro = engine.coalesces(|coalesce| coalesce.is_on);
        let trace = Trace::open(&self.directory, self.parse, lro)?;
        engine.trace = Some(Arc::clone(&trace));
        Ok(trace)
    }
}

/// The files of one trace.
#[derive(Debug)]
pub struct Trace {
    directory: PathBuf,
    deliver: TraceFile,
    drop: TraceFile,
    config: TraceFile,
    parse: Option<ParseFiles>,
    lro: Lro,
    names: Mutex<FlowNames>,
    /// Number of packets delivered to the application so far, over all CPUs.
    order: AtomicU64,
    failure: FirstFailure,
}

impl Trace {
    /// Opens the directory and its files, or creates them; `parse` adds `parse.csv` and
    /// `flowkey.csv`, and `lro` adds `lro.jsonl`, which else is created once packets are
    /// [coalesced](Self::coalesces). What they have stays until the trace [begins](Self::begin).
    ///
    /// # Errors
    /// If they cannot be opened or created.
    pub fn open(directory: &Path, parse: bool, lro: bool) -> Result<Arc<Self>> {
        fs::create_dir_all(directory).map_err(Error::file("create", directory))?;
        let failure = FirstFailure::default();
        let file = |name: &'static str, header: &str| {
            TraceFile::open(directory.join(name), header, &failure)
        };
        Ok(Arc::new(Self {
            directory: directory.to_owned(),
            deliver: file(DELIVER_FILE, DELIVER_HEADER)?,
            drop: file(DROP_FILE, DROP_HEADER)?,
            config: file(CONFIG_FILE, CONFIG_HEADER)?,
            parse: if parse { Some(ParseFiles::open(file)?) } else { None },
            lro: Lro {
                file: if lro {
                    file(LRO_FILE, "")?
                } else {
                    TraceFile::later(directory.join(LRO_FILE), &failure)
                },
                is_on: AtomicBool::new(lro),
                written: Mutex::default(),
            },
            names: Mutex::default(),
            order: AtomicU64::new(0),
            failure: FirstFailure::clone(&failure),
        }))
    }

    /// Removes the rows of an earlier run, and its files that this trace does not have. To be called
    /// when nothing can keep the run from starting any more.
    ///
    /// # Errors
    /// If a file cannot be truncated or removed.
    pub fn begin(&self) -> Result<()> {
        self.files().try_for_each(TraceFile::begin)?;
        let paths = FILES.map(|name| self.directory.join(name));
        let is_own = |path: &Path| self.files().any(|file| file.is_open() && file.path() == path);
        let mut stale = paths.iter().filter(|path| !is_own(path));
        stale.try_for_each(|path| remove_file(path))
    }

    /// Tells that packets are coalesced from now on: `lro.jsonl` has all that leave.
    pub fn coalesces(&self) {
        self.lro.is_on.store(true, Ordering::Relaxed);
    }

    /// Writes a row for a packet of these frames that left coalescing, or was dropped before;
    /// frames that have a row already are left out.
    fn left(&self, frames: &[u64], row: impl FnOnce(&[u64]) -> String) {
        if !self.lro.is_on.load(Ordering::Relaxed) {
            return;
        }
        let mut written = locked(&self.lro.written);
        let frames: Vec<_> = frames.iter().copied().filter(|frame| written.add(*frame)).collect();
        if !frames.is_empty() {
            self.lro.file.write(&row(&frames));
        }
    }

    /// Number of a flow in `deliver.csv`: that of the last packet with this hash, or the number of
    /// flows that are named by the hash.
    #[must_use]
    pub fn flow_number(&self, flow: FlowHash) -> u64 {
        locked(&self.names).number_of(flow)
    }

    /// Writes a live change; `value` is the value as it reads back.
    pub fn changed(&self, now_ns: u64, epoch: u32, what: &str, value: &str) {
        let value = if value.contains(',') { format!("\"{value}\"") } else { value.to_owned() };
        self.config.write(&format!("{now_ns},{epoch},{what},{value}\n"));
    }

    /// Writes the counters and closes all files, even if some of that fails. Returns an error for
    /// each file that could not be written, now or during the run.
    #[must_use]
    pub fn finish(&self, counters: &str) -> Vec<Error> {
        let path = self.directory.join(COUNTERS_FILE);
        let counters = fs::write(&path, counters).map_err(Error::file("write", &path));
        let finished = self.files().map(TraceFile::finish).chain([counters]);
        finished.filter_map(Result::err).collect()
    }

    /// First failure to write a file, set as soon as there is one.
    #[must_use]
    pub fn failure(&self) -> &FirstFailure {
        &self.failure
    }

    /// Number of rows that could not be written, in all files. It is final once the trace is
    /// [finished](Self::finish).
    #[must_use]
    pub fn rows_lost(&self) -> u64 {
        self.files().map(TraceFile::lost).sum()
    }

    fn files(&self) -> impl Iterator<Item = &TraceFile> {
        let parse = self.parse.iter().flat_map(|files| [&files.parse, &files.flow_key]);
        [&self.deliver, &self.drop, &self.config, &self.lro.file].into_iter().chain(parse)
    }
}

/// `parse.csv` and `flowkey.csv`: a row in each for every frame.
#[derive(Debug)]
struct ParseFiles {
    parse: TraceFile,
    flow_key: TraceFile,
}

impl ParseFiles {
    fn open(file: impl Fn(&'static str, &str) -> Result<TraceFile>) -> Result<Self> {
        Ok(Self {
            parse: file(PARSE_FILE, parse_row::HEADER)?,
            flow_key: file(FLOW_KEY_FILE, flow_key_row::HEADER)?,
        })
    }
}

/// `lro.jsonl`, and the numbers of the frames that have a row in it. A packet that left coalescing
/// on arrival may later be dropped, or be merged on delivery after a live change.
#[derive(Debug)]
struct Lro {
    file: TraceFile,
    /// True once packets are coalesced, or if it is known that they will be.
    is_on: AtomicBool,
    written: Mutex<WrittenFrames>,
}

/// One CPU's part of a trace: `deliver.csv`.
#[derive(Debug)]
pub struct DeliverTrace {
    trace: Arc<Trace>,
    rows: String,
    /// Number of the last frame seen, from which full frame numbers are derived.
    last_frame: u64,
}

impl DeliverTrace {
    /// One CPU's part of a trace.
    #[must_use]
    pub fn new(trace: Arc<Trace>) -> Self {
        Self { trace, rows: String::with_capacity(ROWS_BYTES), last_frame: 0 }
    }

    /// Writes the packet at `index` of a batch, delivered to the application at `now_ns`.
    pub fn delivered(&mut self, batch: &Batch<'_>, index: usize, now_ns: u64) {
        let packet = &batch.packets[index];
        let order = self.trace.order.fetch_add(1, Ordering::Relaxed);
        let mut frames = Vec::new();
        for segment in packet.segments() {
            let frame = segment.arrival.unwrap_near(self.last_frame);
            self.last_frame = frame;
            frames.push(frame);
            // A packet merged before steering has one note; merged after it, each segment has its
            // own.
            let note = batch.note_of(segment.arrival).or_else(|| batch.note_of(packet.arrival));
            if let Some(note) = note {
                let name = locked(&self.trace.names).of((packet, batch.rx_queue), &segment, frame);
                self.row(order, (packet, batch), note, (name, frame), now_ns);
            }
        }
        // Written at once, so that the file keeps the order of delivery in each flow.
        self.trace.left(&frames, |frames| lro_row::row(packet, frames));
    }

    fn row(
        &mut self,
        order: u64,
        (packet, batch): (&Packet, &Batch<'_>),
        note: &Note,
        (name, frame): (TracedFlowName, u64),
        now_ns: u64,
    ) {
        let Note { enqueued_ns, epoch, steer_reason, position, head_old, previous_flow, .. } = note;
        // Readers compare `head_old` with the flow's own last packet, so it is left out if the
        // slot's last packet was of another flow.
        let head_old = head_old.filter(|_| *previous_flow == packet.hash);
        let head_old = head_old.map(|head| head.0.to_string()).unwrap_or_default();
        let row = format_args!(
            "{order},{},{},{},{frame},{:08x},{epoch},{},{},{head_old},{},{enqueued_ns},{now_ns}\n",
            name.flow,
            name.sequence,
            batch.rx_queue.0,
            packet.hash.0,
            batch.cpu,
            position.0,
            steer_reason.name(),
        );
        // Writing to a string cannot fail.
        let _ = self.rows.write_fmt(row);
        if self.rows.len() >= ROWS_BYTES - 256 {
            self.flush();
        }
    }

    fn flush(&mut self) {
        self.trace.deliver.write(&self.rows);
        self.rows.clear();
    }
}

impl Drop for DeliverTrace {
    fn drop(&mut self) {
        self.flush();
    }
}

/// One intake's part of a trace: `drop.csv`, `parse.csv` and `flowkey.csv`.
#[derive(Debug)]
pub struct IntakeTrace {
    trace: Arc<Trace>,
    hasher: Arc<Hasher>,
    verify: Verify,
    /// As in [`DeliverTrace`].
    last_frame: u64,
}

impl IntakeTrace {
    /// One intake's part of a trace; `hasher` and `verify` are the intake's.
    #[must_use]
    pub fn new(trace: Arc<Trace>, hasher: Arc<Hasher>, verify: Verify) -> Self {
        Self { trace, hasher, verify, last_frame: 0 }
    }

    /// Sets the hash function of flows from now on.
    pub fn set_hasher(&mut self, hasher: Arc<Hasher>) {
        self.hasher = hasher;
    }

    /// Sets the number of the last frame seen, for a recorder of frames that others have received.
    pub(crate) fn set_last_frame(&mut self, frame: u64) {
        self.last_frame = frame;
    }

    /// Writes the parsed fields and the flow keys of the frames that were just received, in the order of
    /// arrival.
    pub fn received(&mut self, burst: &Burst) {
        let mut refused = burst.refused.iter().peekable();
        for packet in &burst.packets {
            while let Some(earlier) = refused.next_if(|it| packet.arrival.is_after(it.arrival)) {
                self.refused(earlier);
            }
            self.taken(packet);
        }
        refused.for_each(|refused| self.refused(refused));
    }

    /// Writes a packet that the source took.
    fn taken(&mut self, packet: &Packet) {
        self.last_frame = packet.arrival.unwrap_near(self.last_frame);
        if let Some(files) = &self.trace.parse {
            let seen = parse_row::Seen::new(packet, self.verify);
            let frame = self.last_frame;
            files.parse.write(&parse_row::row(packet, frame, &seen, &self.hasher));
            files.flow_key.write(&flow_key_row::row(packet, frame, &seen, &self.hasher));
        }
    }

    /// Writes a frame that the source refused; only its number, length and reason are known.
    fn refused(&mut self, refused: &RefusedFrame) {
        self.last_frame = refused.arrival.unwrap_near(self.last_frame);
        if let Some(files) = &self.trace.parse {
            files.parse.write(&parse_row::refused(refused, self.last_frame));
            files.flow_key.write(&flow_key_row::refused(self.last_frame));
        }
    }

    /// Writes a dropped frame, or all frames of a dropped merged packet.
    pub fn dropped(&self, dropped: &Dropped, queue: RxQueue) {
        let reason = dropped.reason.name();
        let row = |frame, stamp: Option<TracedFlowName>| {
            let (flow, sequence) = match stamp {
                Some(name) => (name.flow.to_string(), name.sequence.to_string()),
                None => (String::new(), String::new()),
            };
            self.trace.drop.write(&format!("{},{frame},{reason},{flow},{sequence}\n", queue.0));
        };
        let mut frames = Vec::new();
        for segment in dropped.packet.iter().flat_map(Packet::segments) {
            let frame = self.full_number(segment.arrival);
            let stamp = dropped.packet.as_ref();
            row(frame, stamp.and_then(|packet| flow_names::stamp(packet, &segment)));
            frames.push(frame);
        }
        if dropped.packet.is_none() {
            frames.push(self.full_number(dropped.arrival));
            row(frames[0], None);
        }
        self.trace.left(&frames, |frames| lro_row::lost(frames, reason));
    }

    /// Writes a packet that leaves coalescing on arrival.
    pub fn left(&mut self, packet: &Packet) {
        let frames = packet.segments().map(|segment| self.full_number(segment.arrival));
        let frames: Vec<_> = frames.collect();
        self.trace.left(&frames, |frames| lro_row::row(packet, frames));
    }

    /// Trace that this is a part of.
    #[must_use]
    pub fn trace(&self) -> &Arc<Trace> {
        &self.trace
    }

    fn full_number(&self, arrival: Arrival) -> u64 {
        arrival.unwrap_near(self.last_frame)
    }
}

/// Locks a mutex. Poison is ignored: no panic leaves the data half changed.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
