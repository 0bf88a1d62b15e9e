//! Nonlinear packets: only bytes in the frame itself are parsed, because nobody else can write
//! there.

use std::mem::replace;

use forebay_buf::{Frame, Pool};

use super::{DeviceSum, Headers, NoMemory, Seen, Stop, Verify, parse_into, walk_noting};
use crate::packet::Packet;

/// Presence of a packet's headers in the frame itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) enum Reach {
    /// All headers are there, or there are no more bytes than the frame holds.
    Held,
    /// Headers continue in the pieces, and there is no room to pull them in.
    Beyond,
}

/// See [`parse_packet`](super::parse_packet).
pub(super) fn parse_packet(
    packet: &mut Packet,
    verify: Verify,
    pool: &mut Pool,
) -> Result<(), NoMemory> {
    let told = packet.headers;
    let Packet { frame, wire_len, device_sum, .. } = packet;
    let (headers, reach) = parse_pulling(frame, told, (*wire_len, *device_sum), verify);
    packet.headers = headers;
    if reach == Reach::Held {
        return Ok(());
    }
    let whole = packet.copied(pool).ok_or(NoMemory)?;
    pool.put(replace(packet, whole).frame);
    packet.headers = told;
    let Packet { frame, headers, wire_len, device_sum, .. } = packet;
    parse_into(headers, frame.data(), *wire_len, *device_sum, verify);
    Ok(())
}

/// Parses the bytes in the frame itself. If headers continue in the pieces, as many bytes as there
/// is room for are pulled in first. `told` is the device's information on the headers.
pub(crate) fn parse_pulling(
    frame: &mut Frame,
    told: Headers,
    (wire_len, device_sum): (u32, Option<DeviceSum>),
    verify: Verify,
) -> (Headers, Reach) {
    let mut headers = told;
    let mut walked = walk(&mut headers, frame, (wire_len, device_sum), verify);
    let is_known = headers.payload_offset > 0 && holds(frame, headers.payload_offset.into());
    if is_known && walked.is_ok() {
        return (headers, Reach::Held);
    }
    // Packets that are neither TCP nor UDP often end here: no more bytes to pull in, or no room.
    if pull_all(frame) {
        headers = told;
        walked = walk(&mut headers, frame, (wire_len, device_sum), verify);
    }
    let reach = match walked {
        _ if frame.frag_count() == 0 => Reach::Held,
        // A transport that is unknown may have further headers, but no stage reads them.
        Ok(()) if holds(frame, headers.payload_offset.into()) => Reach::Held,
        Ok(()) | Err(Stop::Snapped) => Reach::Beyond,
        // Ports of an inconsistent transport header can still be read.
        Err(Stop::Flaw(_)) if holds(frame, ports_end(&headers)) => Reach::Held,
        Err(Stop::Flaw(_)) => Reach::Beyond,
    };
    (headers, reach)
}

/// Pulls the first `len_bytes` of a packet into the frame itself. Returns true if they are there.
pub(crate) fn pull_to(frame: &mut Frame, len_bytes: usize) -> bool {
    let missing = len_bytes.saturating_sub(frame.data().len());
    let Ok(missing) = u32::try_from(missing) else { return false };
    let behind = frame.total_len_bytes() - frame.len_bytes();
    missing == 0 || missing <= behind && frame.pull_from_frags(missing)
}

/// Pulls in as many bytes as there is room for. Returns true if there were any.
pub(crate) fn pull_all(frame: &mut Frame) -> bool {
    let room = frame.room_mut().len() - frame.data().len();
    let behind = frame.total_len_bytes() - frame.len_bytes();
    let len_bytes = behind.min(u32::try_from(room).unwrap_or(u32::MAX));
    len_bytes > 0 && frame.pull_from_frags(len_bytes)
}

/// End of the ports and of the fixed part of the transport header, if the walk reached one; else 0.
fn ports_end(headers: &Headers) -> usize {
    const FIXED_BYTES: usize = 20;
    match headers.transport_offset {
        0 => 0,
        start => usize::from(start) + FIXED_BYTES,
    }
}

fn holds(frame: &Frame, len_bytes: usize) -> bool {
    len_bytes <= frame.data().len()
}

fn walk(
    headers: &mut Headers,
    frame: &Frame,
    (wire_len, device_sum): (u32, Option<DeviceSum>),
    verify: Verify,
) -> Result<(), Stop> {
    let wire_len = wire_len.max(frame.total_len_bytes());
    let seen = Seen::new(frame.data(), wire_len, headers.link);
    walk_noting(&Seen { in_pieces: Some(frame), device_sum, ..seen }, verify, headers)
}
