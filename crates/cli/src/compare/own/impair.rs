//! Bridge between two TAPs that impairs the frames from the first one to the second.

use std::time::{Duration, Instant};

use clap::Args;
use forebay_sys::tun::{Attach, TunKind, TunQueue};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{self, Errno};

use super::impaired_path::{ImpairedPath, Impairments};
use super::{OwnArgs, ready};
use crate::failure::Failure;

/// Header that the kernel puts in front of each frame, and a frame.
const FRAME_BYTES: usize = 10 + 1514;
/// Frames read from one TAP at a time.
const BATCH_MAX: usize = 64;

#[derive(Debug, Args)]
pub(super) struct ImpairArgs {
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Frames lost, of a million
    #[arg(long, default_value_t = 0)]
    loss_ppm: u32,

    /// Frames that arrive twice, of a million
    #[arg(long, default_value_t = 0)]
    duplicate_ppm: u32,

    /// Frames that take longer, of a million
    #[arg(long, default_value_t = 0)]
    reorder_ppm: u32,

    /// Microseconds that those take longer
    #[arg(long, default_value_t = 0)]
    reorder_us: u32,

    /// Microseconds of delay, each way
    #[arg(long, default_value_t = 0)]
    delay_us: u32,

    /// Rate of the bottleneck in kbit/s; 0: none
    #[arg(long, default_value_t = 0)]
    rate_kbps: u32,

    /// Bytes of the queue in front of it
    #[arg(long, default_value_t = 0)]
    queue_bytes: u32,
}

/// Bridges until the program is ended.
pub(super) fn run(args: &OwnArgs) -> Result<(), Failure> {
    let refused = |error: Errno| {
        Failure::usage(format!("TAP: {error}"), "check that this machine has /dev/net/tun")
    };
    let open = |name: &String| {
        let tap = TunQueue::open()?;
        let kind = TunKind::Tap;
        tap.attach(Attach { name, kind, is_multi_queue: false, is_new: true })?;
        Ok(tap)
    };
    let taps = args.device.iter().map(open).collect::<Result<Vec<_>, _>>().map_err(refused)?;
    let [first, second] = taps.as_slice() else {
        return Err(Failure::usage("two TAPs are bridged", "give --device twice"));
    };
    ready()?;
    Bridge::new(&args.impair, [first, second]).run().map_err(refused)
}

struct Bridge<'a> {
    taps: [&'a TunQueue; 2],
    /// Path from each TAP to the other one.
    paths: [ImpairedPath<Vec<u8>>; 2],
    began: Instant,
}

impl<'a> Bridge<'a> {
    fn new(args: &ImpairArgs, taps: [&'a TunQueue; 2]) -> Self {
        let back = Impairments { delay_us: args.delay_us, ..Impairments::default() };
        let there = Impairments {
            loss_ppm: args.loss_ppm,
            duplicate_ppm: args.duplicate_ppm,
            reorder_ppm: args.reorder_ppm,
            reorder_us: args.reorder_us,
            rate_kbps: args.rate_kbps,
            queue_bytes: args.queue_bytes,
            ..back
        };
        let paths = [there, back].map(|impairments| ImpairedPath::new(args.seed, impairments));
        Self { taps, paths, began: Instant::now() }
    }

    fn run(mut self) -> Result<(), Errno> {
        loop {
            let mut is_busy = false;
            for from in 0..2 {
                is_busy |= self.take_in(from)?;
                self.put_out(from)?;
            }
            if !is_busy {
                self.wait()?;
            }
        }
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Reads frames of a TAP. Returns true if there may be more.
    fn take_in(&mut self, from: usize) -> Result<bool, Errno> {
        for _ in 0..BATCH_MAX {
            let mut frame = vec![0; FRAME_BYTES];
            match io::read(self.taps[from], &mut frame[..]) {
                Ok(len) => {
                    frame.truncate(len);
                    let now_ns = self.now_ns();
                    // What is lost is so on purpose.
                    let _ = self.paths[from].offer(now_ns, len, frame);
                }
                Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Writes the frames that have arrived.
    fn put_out(&mut self, from: usize) -> Result<(), Errno> {
        let now_ns = self.now_ns();
        while let Some(frame) = self.paths[from].take(now_ns) {
            match io::write(self.taps[1 - from], &frame) {
                // An interface that is down takes none.
                Ok(_) | Err(Errno::IO | Errno::AGAIN | Errno::NOBUFS) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Waits for a frame, or until the next one has arrived.
    fn wait(&self) -> Result<(), Errno> {
        let next_ns = self.paths.iter().filter_map(ImpairedPath::next_ns).min();
        let left = next_ns.map(|at_ns| Duration::from_nanos(at_ns.saturating_sub(self.now_ns())));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut polled = self.taps.map(|tap| PollFd::new(tap, PollFlags::IN));
        match poll(&mut polled, left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
