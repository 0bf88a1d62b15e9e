//! Packets sent to the device, which the kernel receives.

use std::io::IoSlice;
use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::Arc;

use forebay_rx::Packet;
use forebay_rx::coalesce::gso::{GSO_UDP_L4, VirtioNetHdrTunnel, describe, describe_tunnel};
use forebay_rx::coalesce::resegment;
use forebay_rx::parse::{Link, Network};
use forebay_rx::sink::{SendDrop, Sent, Sink, SinkCounters, SinkError};
use forebay_sys::error::{Error, Result};
use rustix::io::{self, Errno};

use super::TunKind;
use super::open::OpenTun;
use crate::cutting::CutMemory;

/// Maximum number of pieces gathered into one write. A packet in more pieces is copied first: the
/// kernel reads a long list as slowly as the bytes themselves.
const PIECES_MAX: usize = 64;

/// One CPU's sink of a device. Each packet is one write, merged ones too.
#[derive(Debug)]
pub struct TunSink {
    device: Arc<OpenTun>,
    counters: Arc<SinkCounters>,
    /// Scratch vector of [`Sink::send`], empty between calls.
    sending: Vec<Packet>,
    /// Buffer for a packet of too many pieces.
    copied: Vec<u8>,
    /// Memory for the segments of GSO packets that must be cut.
    cutting: CutMemory,
}

/// Result of a failed write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Failed {
    /// Packet to drop.
    Drop(SendDrop),
    /// Packet that the kernel cannot cut.
    Uncut,
    /// Removed device.
    Gone,
}

impl TunSink {
    pub(super) fn new(device: Arc<OpenTun>) -> Self {
        let (counters, sending, copied) = (Arc::default(), Vec::new(), Vec::new());
        Self { device, counters, sending, copied, cutting: CutMemory::default() }
    }

    /// Sends a packet, and leaves it, or its segments, in `done`.
    fn send_one(&mut self, mut packet: Packet, done: &mut Vec<Packet>) -> Result<(), Failed> {
        let mut sent = Sent { packets: 1, frames: packet.wire_count().into(), bytes: 0 };
        let written = match self.begin(&packet) {
            Ok(begin) => self.write(&mut packet, begin),
            Err(drop) => Err(Failed::Drop(drop)),
        };
        match written {
            Ok(bytes) => {
                sent.bytes = bytes;
                self.counters.add_sent(sent);
                done.push(packet);
                Ok(())
            }
            Err(Failed::Uncut) if packet.is_merged() => self.send_resegmented(packet, done),
            Err(Failed::Uncut) if packet.is_gso() => self.send_cut(packet, done),
            Err(failed) => {
                done.push(packet);
                Err(match failed {
                    Failed::Uncut => Failed::Drop(SendDrop::Refused),
                    failed => failed,
                })
            }
        }
    }

    /// Sends a merged packet as its original segments.
    fn send_resegmented(&mut self, packet: Packet, done: &mut Vec<Packet>) -> Result<(), Failed> {
        let first = done.len();
        resegment(packet, done);
        let mut sending = SegmentSending::default();
        let _ = sending.send(&mut done[first..], |segment| self.write_segment(segment));
        sending.finish(&self.counters)
    }

    /// Cuts a GSO packet, and sends its segments.
    fn send_cut(&mut self, packet: Packet, done: &mut Vec<Packet>) -> Result<(), Failed> {
        let mut cutting = std::mem::take(&mut self.cutting);
        let mut sending = SegmentSending::default();
        let is_cut = cutting
            .cut(&packet, |segments| sending.send(segments, |segment| self.write_segment(segment)));
        if !is_cut {
            sending.lost.get_or_insert(Failed::Drop(SendDrop::Refused));
        }
        self.cutting = cutting;
        done.push(packet);
        sending.finish(&self.counters)
    }

    fn write_segment(&mut self, segment: &mut Packet) -> Result<u64, Failed> {
        let begin = self.begin(segment).map_err(Failed::Drop)?;
        self.write(segment, begin)
    }

    /// Returns the offset of the part of the packet that the device takes.
    fn begin(&self, packet: &Packet) -> Result<u16, SendDrop> {
        // A TAP takes Ethernet frames only, a TUN only IP packets.
        match (self.device.kind(), packet.headers.link) {
            (TunKind::Tap, Link::Ethernet) => Ok(0),
            (TunKind::Tap, Link::Ip) => Err(SendDrop::LinkHeader),
            (TunKind::Tun, _) if packet.headers.network == Network::Other => Err(SendDrop::NotIp),
            (TunKind::Tun, _) => Ok(packet.headers.network_offset.into()),
        }
    }

    /// Writes a packet from `begin` on, and returns the number of its bytes written.
    fn write(&mut self, packet: &mut Packet, begin: u16) -> Result<u64, Failed> {
        let mut header = self.header_of(packet).ok_or(Failed::Uncut)?;
        // `begin` is not 0 on a TUN only, which takes no tunnels whole.
        header.plain.hdr_len = header.plain.hdr_len.saturating_sub(begin);
        header.plain.csum_start = header.plain.csum_start.saturating_sub(begin);
        let header = header.to_bytes();
        let header = header.get(..self.device.header_bytes()).unwrap_or(&header);
        let written = if !packet.is_chain() && !packet.is_nonlinear() {
            let bytes = packet.view().bytes();
            let bytes = bytes.get(begin.into()..).unwrap_or_default();
            self.write_pieces(&[IoSlice::new(header), IoSlice::new(bytes)])
        } else {
            self.write_gathered(header, packet, begin)
        };
        let is_cut = packet.gso_size() > 0;
        // EBADFD: no device is attached to the file any more. EIO: the device is down.
        let bytes = written.map_err(|errno| match errno {
            Errno::BADFD => Failed::Gone,
            Errno::INVAL if is_cut => Failed::Uncut,
            Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM => Failed::Drop(SendDrop::Full),
            Errno::IO => Failed::Drop(SendDrop::Down),
            _ => Failed::Drop(SendDrop::Refused),
        })?;
        let bytes = bytes.saturating_sub(header.len());
        Ok(u64::try_from(bytes).unwrap_or(u64::MAX))
    }

    /// Header by which the kernel segments a packet. `None` if the kernel cannot, so the packet must
    /// be segmented here.
    fn header_of(&self, packet: &mut Packet) -> Option<VirtioNetHdrTunnel> {
        let header = if packet.is_merged_tunnel() {
            if self.device.takes_tunnels() { describe_tunnel(packet) } else { None }?
        } else {
            describe(packet).into()
        };
        // The kernel does not cut UDP packets without TUN_F_USO4 and TUN_F_USO6.
        let is_cuttable = header.plain.gso_type != GSO_UDP_L4 || self.device.cuts_udp();
        is_cuttable.then_some(header)
    }

    fn write_gathered(&mut self, header: &[u8], packet: &Packet, begin: u16) -> io::Result<usize> {
        let begin = usize::from(begin);
        // Only the first fragment has bytes before `begin`.
        let fragments = move || {
            let mut begin = begin;
            packet
                .fragments()
                .map(move |bytes| bytes.get(std::mem::take(&mut begin)..).unwrap_or_default())
        };
        let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
        pieces[0] = IoSlice::new(header);
        let mut count = 1;
        for fragment in fragments() {
            let Some(place) = pieces.get_mut(count) else {
                return self.write_copied(header, fragments());
            };
            *place = IoSlice::new(fragment);
            count += 1;
        }
        self.write_pieces(&pieces[..count])
    }

    fn write_copied<'a>(
        &mut self,
        header: &[u8],
        fragments: impl Iterator<Item = &'a [u8]>,
    ) -> io::Result<usize> {
        self.copied.clear();
        fragments.for_each(|bytes| self.copied.extend_from_slice(bytes));
        self.write_pieces(&[IoSlice::new(header), IoSlice::new(&self.copied)])
    }

    fn write_pieces(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        io::retry_on_intr(|| io::writev(self.device.descriptor(0), pieces))
    }
}

/// Sending of the segments of one packet, which counts as sent if all of them are.
#[derive(Default)]
struct SegmentSending {
    sent: Sent,
    /// Reason for which the first of those was lost that could not be sent.
    lost: Option<Failed>,
}

impl SegmentSending {
    /// Writes segments. Goes on behind one that is lost, unless the device is down or removed: a receiver needs those
    /// segments no less.
    fn send(
        &mut self,
        segments: &mut [Packet],
        mut write: impl FnMut(&mut Packet) -> Result<u64, Failed>,
    ) -> ControlFlow<()> {
        for segment in segments {
            match write(segment) {
                Ok(bytes) => {
                    self.sent.frames += 1;
                    self.sent.bytes += bytes;
                }
                Err(gone @ Failed::Gone) => {
                    self.lost = Some(gone);
                    return Break(());
                }
                Err(down @ Failed::Drop(SendDrop::Down)) => {
                    self.lost.get_or_insert(down);
                    return Break(());
                }
                Err(Failed::Uncut) => {
                    self.lost.get_or_insert(Failed::Drop(SendDrop::Refused));
                }
                Err(failed) => {
                    self.lost.get_or_insert(failed);
                }
            }
        }
        Continue(())
    }

    /// Counts what was sent, and returns why the first segment was lost that was.
    fn finish(mut self, counters: &SinkCounters) -> Result<(), Failed> {
        self.sent.packets = u64::from(self.lost.is_none());
        counters.add_sent(self.sent);
        self.lost.map_or(Ok(()), Err)
    }
}

impl Sink for TunSink {
    fn send(&mut self, packets: &mut Vec<Packet>) -> Result<(), SinkError> {
        let mut sending = std::mem::take(&mut self.sending);
        std::mem::swap(&mut sending, packets);
        let mut is_gone = false;
        for packet in sending.drain(..) {
            if is_gone {
                self.counters.add_dropped(SendDrop::Down, 1);
                packets.push(packet);
                continue;
            }
            match self.send_one(packet, packets) {
                Ok(()) => {}
                Err(Failed::Drop(reason)) => self.counters.add_dropped(reason, 1),
                Err(Failed::Uncut) => self.counters.add_dropped(SendDrop::Refused, 1),
                Err(Failed::Gone) => {
                    is_gone = true;
                    self.counters.add_dropped(SendDrop::Down, 1);
                }
            }
        }
        self.sending = sending;
        if is_gone {
            Err(Error::DeviceGone { name: self.device.name().to_owned() }.into())
        } else {
            Ok(())
        }
    }

    fn counters(&self) -> &Arc<SinkCounters> {
        &self.counters
    }
}

#[cfg(test)]
mod tests {
    use forebay_testkit::packets::{merged_vxlan, vxlan_payloads};

    use super::*;

    #[test]
    fn promise_2_lost_segment_takes_no_others() {
        let full = Err(Failed::Drop(SendDrop::Full));
        let down = Err(Failed::Drop(SendDrop::Down));
        // What the writes of four segments return, the outcome, and the frames that count.
        let cases = [
            ([Ok(100); 4], Ok(100), 4),
            ([Ok(100), full, Ok(100), Ok(100)], full, 3),
            ([full, Err(Failed::Uncut), Ok(100), full], full, 1),
            ([Ok(100), Err(Failed::Uncut), full, Ok(100)], Err(Failed::Drop(SendDrop::Refused)), 2),
            ([Ok(100), down, Ok(100), Ok(100)], down, 1),
            ([full, Ok(100), Err(Failed::Gone), Ok(100)], Err(Failed::Gone), 1),
        ];
        for (written, outcome, frames) in cases {
            let (_, merged) = merged_vxlan(&vxlan_payloads(4), Link::Ethernet);
            let (mut segments, counters) = (Vec::new(), SinkCounters::default());
            resegment(merged, &mut segments);
            assert_eq!(segments.len(), 4);
            let mut written = written.into_iter();
            let mut sending = SegmentSending::default();
            let _ = sending.send(&mut segments, |_| written.next().unwrap());
            assert_eq!(sending.finish(&counters), outcome.map(|_: u64| ()), "{frames}");
            let is_sent = outcome.is_ok();
            assert_eq!((counters.packets(), counters.frames()), (is_sent.into(), frames));
            assert_eq!(counters.bytes(), 100 * frames);
        }
    }
}
