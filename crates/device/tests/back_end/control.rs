//! The control queue from the device's side (virtio 1.2, section 5.1.6.5), correct or misbehaving.

use virtio_bindings::virtio_net::{VIRTIO_NET_ERR, VIRTIO_NET_OK};

use crate::back_end::ring::{Chain, Layout, Part, Place, Used};
use crate::back_end::session::Backend;

/// Behaviour of the device on commands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Control {
    /// Executes them.
    Serves,
    /// Answers `VIRTIO_NET_ERR`.
    Refuses,
    /// Reports an answer without writing one.
    Unwritten,
    /// Ignores them.
    Silent,
    /// Has no control ring: closes the session when one is set up.
    Missing,
    /// Reports an answer to a command with this id, which was not given.
    Id(u32),
    /// Reports this number of written bytes.
    Len(u32),
    /// Reports each answer twice.
    Twice,
    /// Advances the used index by that much; split rings only.
    Jump(u16),
    /// Closes the session instead of answering.
    Closes,
    /// Overwrites all of the ring with this byte.
    Scribbles(u8),
}

impl Backend {
    /// Takes and answers the commands that were posted.
    pub(crate) fn serve_commands(&mut self) {
        let index = self.control_ring();
        let has_scribbled =
            matches!(self.offer.control, Control::Scribbles(_)) && !self.commands.is_empty();
        if self.offer.control == Control::Silent || has_scribbled || !self.is_up(index) {
            return;
        }
        while let Some(chain) = self.ring(index).take() {
            self.judge_and_note(&chain);
            if let Control::Scribbles(byte) = self.offer.control {
                return self.scribble(index, byte);
            }
            self.answer_command(&chain);
        }
    }

    fn judge_and_note(&mut self, chain: &Chain) {
        let memory = self.memory.clone().unwrap();
        let (answer, request): (Vec<&Part>, Vec<&Part>) =
            chain.parts.iter().partition(|part| part.is_writable);
        assert_eq!(answer.iter().map(|part| part.len_bytes).sum::<u32>(), 1, "one byte of answer");
        let bytes = request.iter().flat_map(|part| memory.read_vec(part.address, part.len_bytes));
        let bytes: Vec<u8> = bytes.collect();
        if let [4, 0, pairs, 0] = bytes[..] {
            let has_all = (0..2 * usize::from(pairs)).all(|ring| self.is_up(ring));
            assert!(has_all, "queue pairs are set up before they are used (5.1.6.5.5.1)");
        }
        self.commands.push(bytes);
    }

    /// Overwrites a ring with this byte.
    pub(crate) fn scribble(&mut self, index: usize, byte: u8) {
        let Place { memory, size, areas: [descriptors, driver, device], .. } =
            self.ring(index).place().clone();
        for (area, len) in [(descriptors, 16 * size), (driver, 4), (device, 4 + 8 * size)] {
            memory.write(area, &vec![byte; len.into()]);
        }
    }

    fn answer_command(&mut self, chain: &Chain) {
        let control = self.offer.control;
        let ack = if control == Control::Refuses { VIRTIO_NET_ERR } else { VIRTIO_NET_OK };
        if control != Control::Unwritten {
            let answer = chain.parts.last().unwrap().address;
            self.memory.as_ref().unwrap().write(answer, &ack.to_le_bytes()[..1]);
        }
        let used = chain.used(1);
        let index = self.control_ring();
        let ring = self.ring(index);
        match control {
            Control::Id(id) => ring.give(&[Used { id, ..used }]),
            Control::Len(len_bytes) => ring.give(&[Used { len_bytes, ..used }]),
            Control::Twice => ring.give(&[used, used]),
            Control::Jump(by) => {
                let Layout::Split(ring) = &ring.layout else { panic!("a packed ring") };
                ring.store_index(ring.given.wrapping_add(by));
            }
            Control::Closes => self.close(),
            _ => ring.give(&[used]),
        }
    }
}
