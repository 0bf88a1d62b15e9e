//! Bytes that the application wrote and the peer has not acknowledged.

use std::collections::VecDeque;

use super::seq::{Seq, len_u32};

/// Send queue of a connection. It keeps a copy of the bytes: they may have to be sent again.
#[derive(Debug)]
pub(super) struct SendQueue {
    bytes: VecDeque<u8>,
    /// Sequence number of the first byte.
    start: Seq,
}

impl SendQueue {
    pub(super) fn new(start: Seq) -> Self {
        Self { bytes: VecDeque::new(), start }
    }

    pub(super) fn len_bytes(&self) -> u32 {
        len_u32(self.bytes.len())
    }

    /// Sequence number behind the last byte (`write_seq`).
    pub(super) fn end(&self) -> Seq {
        self.start + self.len_bytes()
    }

    /// Memory that the queue occupies.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.bytes.capacity() as u64
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }

    /// Bytes of a range, in up to two parts. A range that the queue does not hold gives fewer.
    pub(super) fn range(&self, start: Seq, len_bytes: u32) -> [&[u8]; 2] {
        let (first, second) = self.bytes.as_slices();
        let skip = start.bytes_since(self.start) as usize;
        let end = skip + len_bytes as usize;
        let part = |bytes: &'_ [u8], offset: usize| -> Option<(usize, usize)> {
            let from = skip.max(offset) - offset;
            let to = end.clamp(offset, offset + bytes.len()) - offset;
            (from < to).then_some((from, to))
        };
        let cut =
            |bytes, offset| part(bytes, offset).map_or(&[][..], |(from, to)| &bytes[from..to]);
        [cut(first, 0), cut(second, first.len())]
    }

    /// Forgets bytes before `end`: they were acknowledged.
    pub(super) fn acknowledge(&mut self, end: Seq) {
        let len = (end.bytes_since(self.start) as usize).min(self.bytes.len());
        self.bytes.drain(..len);
        self.start += len_u32(len);
        // An idle connection keeps no memory.
        if self.bytes.is_empty() && self.bytes.capacity() > 0 {
            self.bytes = VecDeque::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn tcp_6_send_queue_keeps_the_stream(
            start: u32, steps in prop::collection::vec((0_u32..300, 0_u32..300, 0_u32..400, 0_u32..400), 1..40),
        ) {
            let mut queue = SendQueue::new(Seq(start));
            let (mut stream, mut acked) = (Vec::new(), 0);
            for (write, ack, from, len) in steps {
                let bytes: Vec<u8> = (0..write).map(|at| u8::try_from((len_u32(stream.len()) + at) % 251).unwrap()).collect();
                queue.write(&bytes);
                stream.extend(bytes);
                acked = (acked + ack).min(len_u32(stream.len()));
                queue.acknowledge(Seq(start) + acked);
                prop_assert_eq!(queue.end(), Seq(start) + len_u32(stream.len()));
                let from = (acked + from).min(len_u32(stream.len()));
                let [first, second] = queue.range(Seq(start) + from, len);
                let to = (from + len).min(len_u32(stream.len()));
                prop_assert_eq!([first, second].concat(), &stream[from as usize..to as usize]);
            }
        }
    }
}
