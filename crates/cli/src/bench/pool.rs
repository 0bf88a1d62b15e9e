//! `bench pool`: a frame allocated on one CPU, freed on another.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::ring::{Consumer, ring};
use forebay_buf::{Frame, Pool, Position};
use forebay_sys as sys;

use super::BenchArgs;
use super::figures::Figures;
use super::pair::{self, CpuPair, Rounds};
use super::solo::{as_f64, nanoseconds};
use crate::failure::Failure;

const CAPACITY: u32 = 1024;
const CHUNKS: ChunkClass = ChunkClass { chunk_bytes: 2048, chunks: 8191 };

/// Frames per repeat.
const FRAMES: u64 = 2_000_000;

pub(super) fn run(args: &BenchArgs, cpus: CpuPair) -> Result<Figures, Failure> {
    let bulk = u64::from(args.bulk);
    let frames = FRAMES - FRAMES % bulk;
    let [mut pool, other_pool] = pools()?;
    let (mut producer, consumer) = ring(CAPACITY, Position(0));
    let rounds = Arc::new(Rounds::default());
    let other = Arc::clone(&rounds);
    let (batch, touch) = (args.bulk as usize, args.touch);
    let freer = thread::spawn(move || {
        // Ignored: figures of an unpinned thread are still valid.
        let _ = sys::pin_to(cpus.consumer);
        free(consumer, other_pool, &other, frames, batch, touch)
    });
    let mut round = 0;
    let figures = pair::measure(args, "pool", "ns/packet", &rounds.probe, || {
        round += 1;
        let started = Instant::now();
        rounds.open(round);
        for sent in (0..frames).step_by(batch) {
            pool.collect();
            while u64::from(CAPACITY - producer.queued()) < bulk
                && u64::from(CAPACITY - producer.refreshed_queued()) < bulk
            {}
            for _ in 0..bulk {
                let mut frame = wait_for_frame(&mut pool);
                if touch {
                    frame.copy_from(&[sent.to_le_bytes()[0]; 64]);
                }
                // Never fails: the loop above has waited for room.
                let _ = producer.push(frame);
            }
            producer.publish();
        }
        rounds.wait_until_closed(round);
        nanoseconds(started.elapsed()) / as_f64(usize::try_from(frames).unwrap_or(1))
    });
    rounds.end();
    // The thread does not panic.
    let _ = freer.join();
    let away = pool.in_use();
    Ok(figures.with("bulk", args.bulk).with("touch", touch).with("frames_away", away))
}

fn pools() -> Result<[Pool; 2], Failure> {
    let shares = [vec![CHUNKS], vec![]];
    let region = sys::map_packet_memory(region_bytes(&shares))?;
    let pools = carve(region, &shares).ok().and_then(|pools| pools.try_into().ok());
    pools.ok_or_else(|| Failure::usage("the region is too small", "this is a bug: report it"))
}

fn wait_for_frame(pool: &mut Pool) -> Frame {
    loop {
        if let Some(frame) = pool.allocate(64) {
            return frame;
        }
    }
}

fn free(
    mut consumer: Consumer<Frame>,
    mut pool: Pool,
    rounds: &Rounds,
    frames: u64,
    batch: usize,
    touch: bool,
) -> u64 {
    let mut taken = Vec::with_capacity(batch);
    let mut seen = 0u64;
    let mut round = 1;
    while rounds.wait_until_open(round) {
        let mut got = 0;
        while got < frames {
            got += consumer.take(batch, &mut taken) as u64;
            if touch {
                seen += taken.iter().map(first_word).fold(0, u64::wrapping_add) & 1;
            }
            for frame in taken.drain(..) {
                pool.put(frame);
            }
            consumer.release();
        }
        pool.flush();
        rounds.close(round);
        round += 1;
    }
    seen
}

fn first_word(frame: &Frame) -> u64 {
    frame.data().first_chunk().copied().map_or(0, u64::from_ne_bytes)
}
