//! Frames that carry a number.

use etherparse::{PacketBuilder, SlicedPacket};

/// Length of the headers in front of a datagram's payload.
pub(crate) const HEADERS: usize = 42;

const FROM: [u8; 6] = [2, 0, 0, 0, 0, 2];
const TO: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// Valid UDP datagram of `len` bytes in all, at least 46. Sixteen flows take turns.
pub(crate) fn datagram(number: u32, len: usize) -> Vec<u8> {
    let port = 1000 + u16::try_from(number % 16).unwrap();
    of_flow(number, port, len)
}

/// Valid UDP datagram of `len` bytes in all, at least 46, in the flow from `port`.
pub(crate) fn of_flow(number: u32, port: u16, len: usize) -> Vec<u8> {
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(FROM, TO)
        .ipv4([10, 9, 0, 2], [10, 9, 0, 1], 64)
        .udp(port, 9)
        .write(&mut frame, &payload(number, len - HEADERS))
        .unwrap();
    frame
}

/// TCP segment with that much payload.
pub(crate) fn segment(number: u32, payload_len: usize) -> Vec<u8> {
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(FROM, TO)
        .ipv4([10, 9, 0, 2], [10, 9, 0, 1], 64)
        .tcp(2000, 80, number, 512)
        .ack(1)
        .write(&mut frame, &payload(number, payload_len))
        .unwrap();
    frame
}

/// Payload that identifies a frame: its number first.
fn payload(number: u32, len: usize) -> Vec<u8> {
    let bytes = (0..=250u8).cycle().skip(usize::try_from(number % 251).unwrap());
    number.to_be_bytes().into_iter().chain(bytes).take(len).collect()
}

/// Returns the number of a datagram built here, if it is unchanged.
pub(crate) fn number_of(frame: &[u8]) -> Option<u32> {
    let packet = SlicedPacket::from_ethernet(frame).ok()?;
    let etherparse::TransportSlice::Udp(udp) = packet.transport? else { return None };
    let number = u32::from_be_bytes(*udp.payload().first_chunk()?);
    let port = udp.source_port();
    (udp.destination_port() == 9 && frame == of_flow(number, port, frame.len())).then_some(number)
}
