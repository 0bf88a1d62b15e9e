//! Laws of all packets that leave coalescing, for any input: nothing is lost, duplicated, changed
//! or reordered, and segmenting a merged packet restores its inputs.

use std::collections::{BTreeSet, HashMap};

use crate::frames::Frame;
use crate::gro::further::UDP_SEGMENTS_MAX;
use crate::gro::segment::Family;
use crate::gro::trace::Left;
use crate::gro::wire::{self, Wire};

/// Upper bound on an IP packet's length, which has 16 bits. For IPv6 the header is included, as in
/// Linux.
const IP_PACKET_BYTES_MAX: usize = 65_535;

/// All violations.
pub(crate) fn broken(frames: &[&Frame], left: &[Left]) -> Vec<String> {
    let mut wrong = Vec::new();
    wrong.extend(accounts(frames.len(), left).err());
    for packet in left {
        let inputs: Option<Vec<_>> =
            packet.inputs.iter().map(|index| frames.get(*index).copied()).collect();
        let verdict = match inputs.as_deref() {
            None | Some([]) => Err("names frames that never came".to_owned()),
            Some([frame]) => single(frame, packet),
            Some(frames) => merged(frames, packet),
        };
        wrong.extend(verdict.err().map(|problem| format!("{:?}: {problem}", packet.inputs)));
    }
    wrong.extend(order(frames, left).err());
    wrong
}

/// Every input leaves once, or is dropped once.
fn accounts(count: usize, left: &[Left]) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    for index in left.iter().flat_map(|packet| &packet.inputs) {
        if !seen.insert(*index) {
            return Err(format!("frame {index} leaves twice"));
        }
    }
    let missing: Vec<_> = (0..count).filter(|index| !seen.contains(index)).take(8).collect();
    if missing.is_empty() { Ok(()) } else { Err(format!("frames {missing:?} never leave")) }
}

/// A frame that is not merged leaves unchanged, except that padding may be trimmed.
fn single(frame: &Frame, packet: &Left) -> Result<(), String> {
    if packet.drop.is_some() {
        let is_sound = Wire::read(&frame.bytes).is_some_and(|wire| wire.is_mergeable());
        return if is_sound { Err("is sound, and dropped".to_owned()) } else { Ok(()) };
    }
    let trimmed = Wire::read(&frame.bytes).map(|wire| wire.trimmed());
    if packet.bytes != frame.bytes && Some(packet.bytes.as_slice()) != trimmed {
        return Err(format!("changed to {}", hex::encode(&packet.bytes)));
    }
    match Wire::read(&packet.bytes) {
        Some(wire) if wire.is_mergeable() => told(&wire, packet),
        _ => Ok(()),
    }
}

fn merged(frames: &[&Frame], packet: &Left) -> Result<(), String> {
    if packet.drop.is_some() {
        return Err("several frames, dropped at once".to_owned());
    }
    if !packet.inputs.is_sorted() {
        return Err("not in the order of arrival".to_owned());
    }
    let inputs: Option<Vec<_>> = frames.iter().map(|frame| Wire::read(&frame.bytes)).collect();
    let inputs = inputs.filter(|inputs| inputs.iter().all(Wire::is_mergeable));
    let inputs = inputs.ok_or("merged what is malformed or has a bad checksum")?;
    let whole = Wire::read(&packet.bytes).ok_or("its lengths are wrong")?;
    if whole.trimmed() != packet.bytes {
        return Err("merged with padding".to_owned());
    }
    if whole.ip_packet_bytes() > IP_PACKET_BYTES_MAX {
        return Err(format!("an IP packet of {} bytes", whole.ip_packet_bytes()));
    }
    if !whole.has_good_checksums() {
        return Err("its checksums are wrong".to_owned());
    }
    told(&whole, packet)?;
    joints(&inputs, &whole, packet.gso_size)?;
    // The IP identification must be constant or incrementing: both ways of segmenting are known.
    let is_remade = |step| {
        recut(&packet.bytes, &whole, packet.gso_size, step)
            .zip(&inputs)
            .all(|(segment, input)| segment == input.trimmed())
    };
    if is_remade(0) || is_remade(1) {
        Ok(())
    } else {
        Err("cut again, it is not what it was made of".to_owned())
    }
}

/// The trace's description of a packet agrees with its bytes.
fn told(wire: &Wire, packet: &Left) -> Result<(), String> {
    if packet.payload_len != wire.payload().len() {
        return Err(format!("payload_len {}, not {}", packet.payload_len, wire.payload().len()));
    }
    let sorted = |letters: &str| letters.chars().collect::<BTreeSet<_>>();
    if wire.is_tcp && sorted(&packet.flags) != sorted(&wire.flag_letters()) {
        return Err(format!("flags {:?}, not {:?}", packet.flags, wire.flag_letters()));
    }
    Ok(())
}

/// Merged segments are of one flow, of sizes that can be segmented again, and contiguous, with
/// nothing after a segment that must end a packet.
fn joints(inputs: &[Wire], whole: &Wire, gso_size: usize) -> Result<(), String> {
    let joined: Vec<u8> = inputs.iter().flat_map(Wire::payload).copied().collect();
    if whole.payload() != joined {
        return Err("its payload is not the inputs' payloads joined".to_owned());
    }
    if inputs.iter().any(|input| input.flow() != whole.flow()) {
        return Err("merged different flows".to_owned());
    }
    let (last, before) = inputs.split_last().ok_or("merged nothing")?;
    let last_len = last.payload().len();
    if before.iter().any(|input| input.payload().len() != gso_size) || last_len > gso_size {
        return Err(format!("gso_size {gso_size} does not cut it again"));
    }
    if last_len == 0 {
        return Err("merged an empty segment".to_owned());
    }
    if !whole.is_tcp {
        let count = inputs.len();
        return (count <= UDP_SEGMENTS_MAX).then_some(()).ok_or(format!("{count} datagrams"));
    }
    for (input, next) in inputs.iter().zip(&inputs[1..]) {
        let len = u32::try_from(input.payload().len()).unwrap();
        if input.sequence().wrapping_add(len) != next.sequence() {
            return Err("not contiguous".to_owned());
        }
    }
    let ends = wire::FIN | wire::SYN | wire::RST | wire::PSH | wire::URG;
    if before.iter().any(|input| input.flags() & ends != 0) {
        return Err("merged behind FIN, SYN, RST, PSH or URG".to_owned());
    }
    if whole.flags() & (wire::FIN | wire::PSH) != last.flags() & (wire::FIN | wire::PSH) {
        return Err("PSH and FIN are not the last segment's".to_owned());
    }
    Ok(())
}

/// Segments a packet as a device does: one header for every segment.
fn recut(
    bytes: &[u8],
    whole: &Wire,
    gso_size: usize,
    identification_step: u16,
) -> impl Iterator<Item = Vec<u8>> {
    let pieces = whole.payload().chunks(gso_size.max(1));
    let count = pieces.len();
    pieces.enumerate().map(move |(index, piece)| {
        let mut frame = [&bytes[..whole.payload_at], piece].concat();
        let ip_bytes = frame.len() - whole.ip_at;
        match whole.family {
            Family::Ipv4 => {
                let steps = u16::try_from(index).unwrap().wrapping_mul(identification_step);
                let first = wire::be16(bytes, whole.ip_at + 4).unwrap();
                wire::put16(&mut frame, whole.ip_at + 2, u16::try_from(ip_bytes).unwrap());
                wire::put16(&mut frame, whole.ip_at + 4, first.wrapping_add(steps));
            }
            Family::Ipv6 => {
                wire::put16(&mut frame, whole.ip_at + 4, u16::try_from(ip_bytes - 40).unwrap());
            }
        }
        if whole.is_tcp {
            let offset = u32::try_from(index * gso_size).unwrap();
            let sequence = whole.sequence().wrapping_add(offset);
            wire::put32(&mut frame, whole.transport_at + 4, sequence);
            if index + 1 < count {
                frame[whole.transport_at + 13] &= !(wire::FIN | wire::PSH);
            }
            if index > 0 {
                frame[whole.transport_at + 13] &= !wire::CWR;
            }
        } else {
            let udp_bytes = u16::try_from(frame.len() - whole.transport_at).unwrap();
            wire::put16(&mut frame, whole.transport_at + 4, udp_bytes);
        }
        Wire::mended(&frame).unwrap_or_default()
    })
}

/// The packets of each flow leave in the order in which they arrived.
fn order(frames: &[&Frame], left: &[Left]) -> Result<(), String> {
    let mut newest: HashMap<Vec<u8>, usize> = HashMap::new();
    for index in left.iter().flat_map(|packet| &packet.inputs) {
        let Some(wire) = frames.get(*index).and_then(|frame| Wire::read(&frame.bytes)) else {
            continue;
        };
        if let Some(before) = newest.insert(wire.flow(), *index)
            && before > *index
        {
            return Err(format!("frame {before} overtakes {index}"));
        }
    }
    Ok(())
}
