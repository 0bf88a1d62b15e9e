//! Captures of flows of many kinds, frame by frame.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use etherparse::{PacketBuilder, TcpHeader, VlanId};
use forebay_sys::random::Random;
use pcap_file::pcap::{PcapPacket, PcapReader, PcapWriter};

const FIRST_PORT: u16 = 4000;
const DESTINATION_PORT: u16 = 80;
const STREAMS: u16 = 8;

/// Minimum length of an Ethernet frame, without the frame check sequence.
const LEAST_FRAME_BYTES: usize = 60;

/// One direction of a connection. Even numbers are IPv4; two of every four are TCP.
#[derive(Clone, Debug)]
pub(crate) struct Stream {
    number: u16,
    sequence: u32,
}

impl Stream {
    /// A flow whose sequence numbers wrap soon.
    pub(crate) fn new(number: u16) -> Self {
        Self { number, sequence: u32::MAX - 20_000 }
    }

    /// Next segment or datagram, padded as a device pads it.
    pub(crate) fn next(&mut self, payload_len: usize, is_pushed: bool) -> Vec<u8> {
        let key = self.sequence;
        let payload = (0..).map(|at| key.wrapping_add(at * 31).to_le_bytes()[0]);
        let payload: Vec<u8> = payload.take(payload_len).collect();
        let link = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2])
            .single_vlan(VlanId::try_new(5).unwrap());
        let network = if self.number.is_multiple_of(2) {
            link.ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
        } else {
            link.ipv6([0xfd; 16], [0xfc; 16], 64)
        };
        let (port, mut frame) = (FIRST_PORT + self.number, Vec::new());
        if self.number % 4 < 2 {
            let mut header = TcpHeader::new(port, DESTINATION_PORT, self.sequence, 4000);
            (header.ack, header.psh) = (true, is_pushed);
            network.tcp_header(header).write(&mut frame, &payload).unwrap();
            frame.resize(frame.len().max(LEAST_FRAME_BYTES), 0);
        } else {
            network.udp(port, DESTINATION_PORT).write(&mut frame, &payload).unwrap();
        }
        self.sequence = self.sequence.wrapping_add(u32::try_from(payload_len).unwrap());
        frame
    }
}

/// Frames of eight streams, in rows: mostly of one size, now and then with a short one, an empty
/// one or a push.
pub(crate) fn mixed(count: usize, seed: u64) -> Vec<Vec<u8>> {
    const SIZES: [usize; 4] = [1448, 1, 100, 501];
    let mut random = Random::new(seed);
    let mut streams: Vec<_> = (0..STREAMS).map(Stream::new).collect();
    let mut frames = Vec::new();
    while frames.len() < count {
        let draw = |random: &mut Random, below: u64| usize::try_from(random.below(below)).unwrap();
        let stream = draw(&mut random, STREAMS.into());
        let size = SIZES[draw(&mut random, 4)];
        for _ in 0..=draw(&mut random, 24) {
            let (len, is_pushed) = match random.below(20) {
                0 => (size.div_ceil(2), false),
                1 => (0, false),
                2 => (size, true),
                _ => (size, false),
            };
            frames.push(streams[stream].next(len, is_pushed));
        }
    }
    frames.truncate(count);
    frames
}

/// Writes a capture with one frame per microsecond.
pub(crate) fn write(file: &Path, frames: &[Vec<u8>]) {
    let mut writer = PcapWriter::new(File::create(file).unwrap()).unwrap();
    for (micros, frame) in (1..).zip(frames) {
        let len = u32::try_from(frame.len()).unwrap();
        let packet = PcapPacket::new(Duration::from_micros(micros), len, frame);
        writer.write_packet(&packet).unwrap();
    }
}

/// Frames of a capture, with their timestamps.
pub(crate) fn read(file: &Path) -> Vec<(Duration, Vec<u8>)> {
    let mut reader = PcapReader::new(File::open(file).unwrap()).unwrap();
    let mut frames = Vec::new();
    while let Some(packet) = reader.next_packet() {
        let packet = packet.unwrap();
        frames.push((packet.timestamp, packet.data.into_owned()));
    }
    frames
}
