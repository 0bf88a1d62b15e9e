//! The device's work on its rings: puts frames into receive buffers, takes packets to send.

use std::collections::VecDeque;

use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;

use crate::back_end::memory::Memory;
use crate::back_end::ring::{Chain, Used};
use crate::back_end::session::{Backend, Closed};

/// Header of a packet (virtio 1.2, section 5.1.6).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Header {
    pub(crate) flags: u8,
    pub(crate) gso_type: u8,
    pub(crate) hdr_len: u16,
    pub(crate) gso_size: u16,
    pub(crate) csum_start: u16,
    pub(crate) csum_offset: u16,
    /// Number of buffers to report; `None` for the true number.
    pub(crate) num_buffers: Option<u16>,
    /// Hash and its type, with `HASH_REPORT`.
    pub(crate) hash: (u32, u16),
}

impl Header {
    fn to_bytes(self, buffers: u16, header_bytes: usize) -> Vec<u8> {
        let shorts = [self.hdr_len, self.gso_size, self.csum_start, self.csum_offset, buffers];
        let mut bytes = vec![self.flags, self.gso_type];
        bytes.extend(shorts.into_iter().flat_map(u16::to_le_bytes));
        bytes.extend(self.hash.0.to_le_bytes());
        bytes.extend(self.hash.1.to_le_bytes());
        bytes.resize(20, 0);
        bytes.truncate(header_bytes);
        bytes
    }

    fn of_bytes(bytes: &[u8]) -> Self {
        let short = |at| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Self {
            flags: bytes[0],
            gso_type: bytes[1],
            hdr_len: short(2),
            gso_size: short(4),
            csum_start: short(6),
            csum_offset: short(8),
            num_buffers: Some(short(10)),
            hash: (0, 0),
        }
    }
}

/// Packet in receive buffers, with the used entries to report.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    pub(crate) chains: Vec<Chain>,
    pub(crate) used: Vec<Used>,
    header_bytes: usize,
    memory: Memory,
}

impl Placed {
    /// Writes another header in front of the packet.
    pub(crate) fn rewrite(&self, header: Header) {
        let buffers = header.num_buffers.unwrap_or(self.chains.len().try_into().unwrap());
        let bytes = header.to_bytes(buffers, self.header_bytes);
        scatter(&self.memory, std::slice::from_ref(&self.chains[0]), &bytes);
    }

    /// Overwrites everything in the packet's buffers, used or not.
    pub(crate) fn scribble(&self, byte: u8) {
        for part in self.chains.iter().flat_map(|chain| &chain.parts) {
            let bytes = vec![byte; part.len_bytes.try_into().unwrap()];
            self.memory.write(part.address, &bytes);
        }
    }
}

/// Packet sent by the driver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Sent {
    pub(crate) header: Header,
    pub(crate) bytes: Vec<u8>,
}

impl Backend {
    /// Waits for the next buffer of a queue pair's receive ring.
    pub(crate) fn buffer(&mut self, pair: usize) -> Result<Chain, Closed> {
        self.wait("a buffer", |backend| backend.look(pair))?;
        Ok(self.stock[pair].pop_front().unwrap())
    }

    /// Takes all available buffers into stock. Returns true if the stock has any.
    pub(crate) fn look(&mut self, pair: usize) -> bool {
        if self.is_up(2 * pair) {
            while let Some(chain) = self.ring(2 * pair).take() {
                let least = u32::try_from(self.header_bytes()).unwrap();
                let first = chain.parts.first().map_or(0, |part| part.len_bytes);
                assert!(first >= least, "NET1: a buffer of {first} bytes");
                self.stock[pair].push_back(chain);
            }
        }
        !self.stock[pair].is_empty()
    }

    /// Waits until the stock has that many buffers.
    pub(crate) fn stocked(&mut self, pair: usize, count: usize) -> Result<(), Closed> {
        self.wait("buffers", |backend| {
            backend.look(pair);
            backend.stock[pair].len() >= count
        })
    }

    /// Puts a packet into as many buffers as needed, all full but the last one (5.1.6.4.1).
    pub(crate) fn place(
        &mut self,
        pair: usize,
        header: Header,
        frame: &[u8],
    ) -> Result<Placed, Closed> {
        let header_bytes = self.header_bytes();
        let whole = header_bytes + frame.len();
        let (mut chains, mut room) = (Vec::new(), 0);
        while room < whole {
            let chain = self.buffer(pair)?;
            room += usize::try_from(chain.len_bytes()).unwrap();
            chains.push(chain);
        }
        let is_mergeable = self.has(VIRTIO_NET_F_MRG_RXBUF);
        assert!(is_mergeable || chains.len() == 1, "NET2: {whole} bytes do not fit in a buffer");
        let buffers = header.num_buffers.unwrap_or(chains.len().try_into().unwrap());
        let bytes = [&header.to_bytes(buffers, header_bytes), frame].concat();
        let memory = self.memory.clone().unwrap();
        let used = scatter(&memory, &chains, &bytes);
        Ok(Placed { chains, used, header_bytes, memory })
    }

    /// Reports a packet's buffers as used.
    pub(crate) fn give(&mut self, pair: usize, placed: &Placed) {
        self.ring(2 * pair).give(&placed.used);
    }

    /// Places a packet and reports it.
    pub(crate) fn deliver(
        &mut self,
        pair: usize,
        header: Header,
        frame: &[u8],
    ) -> Result<(), Closed> {
        let placed = self.place(pair, header, frame)?;
        self.give(pair, &placed);
        Ok(())
    }

    /// Takes packets sent so far, and returns their buffers.
    pub(crate) fn sent(&mut self, pair: usize) -> Vec<Sent> {
        let (mut sent, mut used) = (Vec::new(), Vec::new());
        let (header_bytes, memory) = (self.header_bytes(), self.memory.clone().unwrap());
        if !self.is_up(2 * pair + 1) {
            return sent;
        }
        let ring = self.ring(2 * pair + 1);
        while let Some(chain) = ring.take() {
            let parts = chain.parts.iter();
            let bytes = parts.flat_map(|part| memory.read_vec(part.address, part.len_bytes));
            let mut bytes: Vec<u8> = bytes.collect();
            assert!(bytes.len() > header_bytes, "{} bytes were sent", bytes.len());
            let frame = bytes.split_off(header_bytes);
            sent.push(Sent { header: Header::of_bytes(&bytes), bytes: frame });
            used.push(chain.used(0));
        }
        if !used.is_empty() {
            ring.give(&used);
        }
        sent
    }

    /// Waits until that many packets were sent.
    pub(crate) fn await_sent(&mut self, pair: usize, count: usize) -> Result<Vec<Sent>, Closed> {
        let mut all = Vec::new();
        self.wait("what is sent", |backend| {
            all.extend(backend.sent(pair));
            all.len() >= count
        })?;
        Ok(all)
    }

    /// Returns the lengths of the buffers in stock.
    pub(crate) fn posted_bytes(&mut self, pair: usize) -> Vec<u32> {
        self.look(pair);
        let stock: &VecDeque<Chain> = &self.stock[pair];
        stock.iter().map(Chain::len_bytes).collect()
    }
}

/// Fills buffers one after the other.
fn scatter(memory: &Memory, chains: &[Chain], bytes: &[u8]) -> Vec<Used> {
    let mut rest = bytes;
    let used = chains.iter().map(|chain| {
        let before = rest.len();
        for (address, len) in chain.first(rest.len()) {
            let (now, later) = rest.split_at(len);
            memory.write(address, now);
            rest = later;
        }
        chain.used((before - rest.len()).try_into().unwrap())
    });
    used.collect()
}
