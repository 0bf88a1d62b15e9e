//! Law: streams are whole though a device keeps the few frames for a while.

use std::net::Shutdown;

use forebay_buf::Region;
use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_stack::tcp::{TcpConfig, TcpError, TcpOptions, TcpSocket, WriteFlags};
use proptest::prelude::*;

use super::pair::{Faults, HoldingDevice, Pair};
use super::streams::{byte_of, config};

/// Steps after which a stream counts as hanging.
const STEPS: u32 = 200_000;
/// Sizes of frames, and the device's own.
const CHUNK_BYTES: [u32; 3] = [2048, 16 << 10, 68 << 10];

/// Stream from host 0 to host 1.
struct Stream {
    client: TcpSocket,
    server: TcpSocket,
    len: usize,
    written: usize,
    read: usize,
    is_shut: bool,
    is_over: bool,
}

impl Stream {
    fn write(&mut self, pair: &mut Pair) {
        if self.is_shut {
            return;
        }
        let (client, left) = (self.client, self.len - self.written);
        if left == 0 {
            pair.call(0, |tcp, out| tcp.shutdown(client, Shutdown::Write, out)).unwrap();
            self.is_shut = true;
            return;
        }
        let most = 1 + usize::try_from(pair.random(3)).unwrap().pow(4) * 10_000;
        let most = usize::try_from(pair.random(most as u64) + 1).unwrap();
        let bytes: Vec<u8> = (self.written..self.written + left.min(most)).map(byte_of).collect();
        let flags = WriteFlags {
            more_follows: pair.random(8) == 0,
            ends_record: pair.random(8) == 0,
            ..WriteFlags::default()
        };
        match pair.call(0, |tcp, out| tcp.write(client, &bytes, flags, out)) {
            Ok(len) => self.written += len,
            Err(TcpError::WouldBlock) => {}
            Err(error) => panic!("a write failed: {error:?}"),
        }
    }

    fn read(&mut self, pair: &mut Pair) {
        let (server, mut room) = (self.server, vec![0; 200_000]);
        match pair.call(1, |tcp, out| tcp.read(server, &mut room, out)) {
            Ok(0) => {
                assert_eq!(self.read, self.len, "the end came early");
                self.is_over = true;
            }
            Ok(len) => {
                let is_same = |(at, &byte): (usize, &u8)| byte == byte_of(self.read + at);
                assert!(room[..len].iter().enumerate().all(is_same), "behind {}", self.read);
                self.read += len;
            }
            Err(TcpError::WouldBlock) => {}
            Err(error) => panic!("a read failed: {error:?}"),
        }
    }
}

/// Gives host 0 so many frames of each size, which its device keeps for a while.
fn hold(pair: &mut Pair, chunks: [u32; 3], hold_us: u64) {
    let class = |(chunk_bytes, chunks)| ChunkClass { chunk_bytes, chunks };
    let own: Vec<_> = CHUNK_BYTES.into_iter().zip(chunks).map(class).collect();
    let own = own.into_iter().filter(|class| class.chunks > 0).collect();
    let shares = [own, [(2048, 4096), (68 << 10, 64)].map(class).to_vec()];
    let mut pools = carve(Region::allocate(region_bytes(&shares)), &shares).unwrap();
    let device = pools.pop().unwrap();
    pair.hosts[0].pool = pools.remove(0);
    pair.hosts[0].device = Some(HoldingDevice::new(device, hold_us));
}

fn run(pair: &mut Pair, streams: &mut [Stream]) {
    let mut steps = 0;
    while !streams.iter().all(|stream| stream.is_over) {
        for stream in &mut *streams {
            if pair.random(3) > 0 {
                stream.write(pair);
            }
            if !stream.is_over && pair.random(4) > 0 {
                stream.read(pair);
            }
        }
        pair.step();
        steps += 1;
        let told = || {
            let of = |stream: &Stream| {
                let info = pair.hosts[0].tcp.info(stream.client);
                format!(
                    "{} of {} read, {} written: {info:?}",
                    stream.read, stream.len, stream.written
                )
            };
            streams.iter().map(of).collect::<Vec<_>>().join("\n")
        };
        assert!(steps < STEPS, "hangs after {} s: {}", pair.now_us / 1_000_000, told());
    }
}

prop_compose! {
    fn faults()(loss in 0_u32..4, reorder in 0_u32..10, delay_us in 0_u64..20_000, merges: bool) -> Faults {
        Faults { loss: if loss > 2 { 5 } else { loss }, reorder, delay_us, merges, ..Faults::default() }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn tcp_6_held_frames_lose_nothing(
        seed: u64, faults in faults(), first in config(), second in config(), hold_us in 0_u64..30_000,
        chunks in (4_u32..200, 0_u32..40, 0_u32..10), count in 1_usize..4,
        len in 1_usize..600_000, nodelay: bool, cork: bool, pushes_large_packets: bool,
    ) {
        let gso = TcpConfig { gso_bytes: 64_511, pushes_large_packets, ..first };
        let mut pair = Pair::new(seed, faults, [gso, second]);
        hold(&mut pair, chunks.into(), hold_us);
        let options = TcpOptions { nodelay, cork, ..TcpOptions::default() };
        let mut streams: Vec<_> = (0..count).map(|number| {
            let (client, server) = pair.open(80 + u16::try_from(number).unwrap());
            pair.call(0, |tcp, out| tcp.set_options(client, options, out)).unwrap();
            Stream { client, server, len, written: 0, read: 0, is_shut: false, is_over: false }
        }).collect();
        run(&mut pair, &mut streams);
        for Stream { client, server, .. } in streams {
            pair.call(0, |tcp, out| tcp.close(client, out)).unwrap();
            pair.call(1, |tcp, out| tcp.close(server, out)).unwrap();
        }
    }
}
