//! Answers of the host itself, to echo requests and the like.

use std::net::IpAddr;

use forebay_rx::Packet;
use forebay_rx::packet::Arrival;
use forebay_stack::network::fragment_out::FragmentedAnswer;

use super::Transmitter;

impl Transmitter {
    /// Gathers complete packets, unchanged, unless one is an answer longer than the MTU: it leaves in fragments, or is dropped if
    /// there is no memory for them: its destination goes to `dropped`.
    pub(in crate::net) fn gather_answers(
        &mut self,
        device: usize,
        mtu: u32,
        packets: &mut Vec<Packet>,
        mut dropped: impl FnMut(IpAddr),
    ) {
        self.look_at_clock(device);
        for packet in packets.drain(..) {
            match self.compose_answer(&packet, mtu) {
                Composed::AsIs => self.add(device, packet),
                Composed::Fragments => {
                    self.add_composed(device);
                    self.put(packet);
                }
                Composed::NoMemory(to) => {
                    dropped(to);
                    self.put(packet);
                }
            }
        }
    }

    /// Composes the fragments of an answer that does not fit in the MTU.
    fn compose_answer(&mut self, packet: &Packet, mtu: u32) -> Composed {
        let Some(mut answer) = FragmentedAnswer::of(packet, mtu) else { return Composed::AsIs };
        let view = packet.view();
        let (Some(source), Some(destination)) = (view.source(), view.destination()) else {
            return Composed::AsIs;
        };
        answer.set_id(self.fragment_ids.next(source, destination));
        if self.reserve(answer.count(), answer.fragment_bytes_max()).is_err() {
            return Composed::NoMemory(destination);
        }
        for mut frame in self.frames.drain(..) {
            let headers = answer.write_next(&mut frame);
            let len_bytes = frame.len_bytes();
            let mut packet = Packet::received(frame, Arrival(0), len_bytes, headers.link);
            packet.headers = headers;
            self.composed.push(packet);
        }
        Composed::Fragments
    }
}

/// Form in which an answer leaves.
enum Composed {
    AsIs,
    Fragments,
    NoMemory(IpAddr),
}
