//! Capture files, written by a library other than the one that reads them.

use std::borrow::Cow;
use std::fs;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Duration;

use pcap_file::pcap::{PcapHeader, PcapPacket, PcapWriter};
use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketBlock;
use pcap_file::pcapng::blocks::interface_description::InterfaceDescriptionBlock;
use pcap_file::pcapng::blocks::simple_packet::SimplePacketBlock;
use pcap_file::{DataLink, Endianness, TsResolution};

use crate::frames::Frame;

/// Format of a capture.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Format {
    Pcap(Endianness, TsResolution),
    PcapNg(Endianness),
}

pub(crate) const FORMATS: [Format; 4] = [
    Format::Pcap(Endianness::Little, TsResolution::MicroSecond),
    Format::Pcap(Endianness::Big, TsResolution::NanoSecond),
    Format::PcapNg(Endianness::Little),
    Format::PcapNg(Endianness::Big),
];

impl Format {
    pub(crate) fn write(self, frames: &[Frame]) -> Vec<u8> {
        match self {
            Self::Pcap(endianness, ts_resolution) => {
                let header = PcapHeader { endianness, ts_resolution, ..PcapHeader::default() };
                pcap(Vec::new(), header, frames)
            }
            Self::PcapNg(endianness) => pcapng(endianness, frames),
        }
    }
}

/// Writes a pcap file in the most common format.
pub(crate) fn write_pcap(path: &Path, frames: &[Frame]) {
    let file = BufWriter::new(fs::File::create(path).unwrap());
    pcap(file, PcapHeader::default(), frames).flush().unwrap();
}

/// Writes a pcap file of frames without a link header.
pub(crate) fn write_pcap_raw(path: &Path, frames: &[Frame]) {
    let file = BufWriter::new(fs::File::create(path).unwrap());
    let header = PcapHeader { datalink: DataLink::RAW, ..PcapHeader::default() };
    pcap(file, header, frames).flush().unwrap();
}

/// Writes a pcap file of frames with times.
pub(crate) fn write_pcap_at(path: &Path, frames: &[(Duration, Frame)]) {
    let file = BufWriter::new(fs::File::create(path).unwrap());
    let timed = frames.iter().map(|(time, frame)| (*time, frame));
    pcap_at(file, PcapHeader::default(), timed).flush().unwrap();
}

fn pcap<W: Write>(to: W, header: PcapHeader, frames: &[Frame]) -> W {
    pcap_at(to, header, frames.iter().zip(1..).map(|(frame, at)| (Duration::from_secs(at), frame)))
}

fn pcap_at<'a, W: Write>(
    to: W,
    header: PcapHeader,
    frames: impl Iterator<Item = (Duration, &'a Frame)>,
) -> W {
    let mut writer = PcapWriter::with_header(to, header).unwrap();
    for (time, frame) in frames {
        let packet = PcapPacket::new(time, frame.wire_len, &frame.bytes);
        writer.write_packet(&packet).unwrap();
    }
    writer.into_writer()
}

/// Writes enhanced and simple packet blocks alternately.
fn pcapng(endianness: Endianness, frames: &[Frame]) -> Vec<u8> {
    let mut writer = PcapNgWriter::with_endianness(Vec::new(), endianness).unwrap();
    writer.write_pcapng_block(InterfaceDescriptionBlock::new(DataLink::ETHERNET, 0)).unwrap();
    for (index, frame) in frames.iter().enumerate() {
        let data = Cow::Borrowed(frame.bytes.as_slice());
        if index % 2 == 0 {
            let timestamp = Duration::from_millis(index as u64);
            let block = EnhancedPacketBlock {
                interface_id: 0,
                timestamp,
                original_len: frame.wire_len,
                data,
                options: Vec::new(),
            };
            writer.write_pcapng_block(block).unwrap();
        } else {
            let block = SimplePacketBlock { original_len: frame.wire_len, data };
            writer.write_pcapng_block(block).unwrap();
        }
    }
    writer.into_inner()
}
