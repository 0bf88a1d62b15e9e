//! Datagrams built by etherparse, and fragmented by hand.

use etherparse::PacketBuilder;
use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{Pool, Region};
use forebay_rx::hash::FlowHash;
use forebay_rx::packet::{Arrival, Packet};
use forebay_rx::parse::{Link, Verify};

const MACS: [[u8; 6]; 2] = [[2; 6], [4; 6]];
pub(crate) const IP: usize = 14;
pub(crate) const IPV4_DATA: usize = IP + 20;
pub(crate) const IPV6_DATA: usize = IP + 40;

pub(crate) const CHUNK_BYTES: u32 = 2048;

/// A pool with small chunks for fragments, and `large` ones that hold any datagram.
pub(crate) fn pool(chunks: u32, large: u32) -> Pool {
    pools(1, chunks, large).pop().unwrap()
}

/// Creates `count` such pools in one region.
pub(crate) fn pools(count: usize, chunks: u32, large: u32) -> Vec<Pool> {
    let class = |chunk_bytes, chunks| ChunkClass { chunk_bytes, chunks };
    let shares = vec![vec![class(CHUNK_BYTES, chunks), class(1 << 17, large)]; count];
    carve(Region::allocate(region_bytes(&shares)), &shares).unwrap()
}

/// A packet as received, in a frame of its own.
pub(crate) fn packet(pool: &mut Pool, bytes: &[u8]) -> Packet {
    let len_bytes = u32::try_from(bytes.len()).unwrap();
    let frame = pool.allocate(len_bytes).unwrap();
    let mut packet = Packet::received(frame, Arrival(7), len_bytes, Link::Ethernet);
    packet.frame.copy_from(bytes);
    packet.hash = FlowHash(9);
    packet.headers = forebay_rx::parse::parse(bytes, len_bytes, Link::Ethernet, Verify::Checksums);
    packet
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Version {
    V4,
    V6,
}

/// A datagram before fragmentation.
#[derive(Clone, Debug)]
pub(crate) struct Datagram {
    pub(crate) version: Version,
    /// The complete frame.
    pub(crate) whole: Vec<u8>,
    pub(crate) id: u32,
}

impl Datagram {
    /// Creates a datagram from host `from` of our network, with a payload of its own.
    pub(crate) fn new(version: Version, from: u16, id: u32, payload_len: usize) -> Self {
        let payload: Vec<u8> = (0..payload_len)
            .map(|at| u8::try_from((at * 7 + at / 251 + id as usize) % 256).unwrap())
            .collect();
        let [high, low] = from.to_be_bytes();
        let builder = PacketBuilder::ethernet2(MACS[0], MACS[1]);
        let builder = match version {
            Version::V4 => builder.ipv4([10, 0, high, low], [10, 9, 0, 1], 64),
            Version::V6 => {
                let mut source = [0; 16];
                source[..8].copy_from_slice(&[0xfd, 0, 0, 0, 0, 0, high, low]);
                let mut destination = [0; 16];
                (destination[0], destination[15]) = (0xfd, 1);
                builder.ipv6(source, destination, 64)
            }
        };
        let mut whole = Vec::new();
        builder.udp(1000, 53).write(&mut whole, &payload).unwrap();
        if version == Version::V4 {
            // Fields that a fragmenting sender sets, and etherparse does not.
            whole[IP + 6] = 0;
            whole[IP + 4..IP + 6].copy_from_slice(&id.to_be_bytes()[2..]);
            resum(&mut whole);
        }
        Self { version, whole, id }
    }

    /// Bytes after the IP header, which are fragmented.
    pub(crate) fn data(&self) -> &[u8] {
        &self.whole[match self.version {
            Version::V4 => IPV4_DATA,
            Version::V6 => IPV6_DATA,
        }..]
    }

    /// A fragment with `data` at offset `start`.
    pub(crate) fn piece(&self, start: usize, data: &[u8], is_last: bool) -> Vec<u8> {
        let start = u16::try_from(start).unwrap();
        let more = u16::from(!is_last);
        match self.version {
            Version::V4 => {
                let mut bytes = [&self.whole[..IPV4_DATA], data].concat();
                let total_len = u16::try_from(20 + data.len()).unwrap();
                let field = (more << 13) | (start / 8);
                bytes[IP + 2..IP + 4].copy_from_slice(&total_len.to_be_bytes());
                bytes[IP + 6..IP + 8].copy_from_slice(&field.to_be_bytes());
                resum(&mut bytes);
                bytes
            }
            Version::V6 => {
                let next = self.whole[IP + 6];
                let field = (start | more).to_be_bytes();
                let header = [&[next, 0], field.as_slice(), &self.id.to_be_bytes()].concat();
                let mut bytes = [&self.whole[..IPV6_DATA], &header, data].concat();
                let payload_len = u16::try_from(8 + data.len()).unwrap();
                bytes[IP + 4..IP + 6].copy_from_slice(&payload_len.to_be_bytes());
                bytes[IP + 6] = 44;
                bytes
            }
        }
    }

    /// The fragment from `start` to `end`, exclusive, or to the end of the datagram.
    pub(crate) fn cut(&self, start: usize, end: usize) -> Vec<u8> {
        let data = self.data();
        let end = end.min(data.len());
        self.piece(start, &data[start..end], end == data.len())
    }

    /// The whole datagram, in fragments of `piece_bytes`.
    pub(crate) fn pieces(&self, piece_bytes: usize) -> Vec<Vec<u8>> {
        let starts = (0..self.data().len()).step_by(piece_bytes);
        starts.map(|start| self.cut(start, start + piece_bytes)).collect()
    }
}

/// Updates the IPv4 header checksum.
pub(crate) fn resum(bytes: &mut [u8]) {
    let header_len = usize::from(bytes[IP] & 15) * 4;
    bytes[IP + 10..IP + 12].fill(0);
    let sum = !forebay_rx::parse::checksum::Sum::of(&bytes[IP..IP + header_len]).fold();
    bytes[IP + 10..IP + 12].copy_from_slice(&sum.to_be_bytes());
}
