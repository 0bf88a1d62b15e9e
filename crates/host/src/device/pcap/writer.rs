//! Packets written to capture files.

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::time::Duration;

use path::Packet;
use path::parse::Link;
use pcap_file::pcap::{PcapHeader, PcapPacket, PcapWriter};
use pcap_file::{DataLink, TsResolution};

use super::reader::MAX_RECORD_BYTES;
use crate::error::{Error, Result};

/// The last time that a classic capture can tell, whose seconds have 32 bits.
const LAST_TIME_NS: u64 = (1 << 32) * 1_000_000_000 - 1;

/// A capture being written: classic pcap with nanoseconds. Packets without a link header go to a
/// file of their own beside it, since a file has one link type.
#[derive(Debug)]
pub struct CaptureWriter {
    stem: PathBuf,
    ethernet: Option<PcapWriter<BufWriter<File>>>,
    ip: Option<PcapWriter<BufWriter<File>>>,
    /// A packet of several pieces in one.
    whole: Vec<u8>,
}

impl CaptureWriter {
    /// Will write to `stem` with `.pcap` added, and to `stem` with `-ip.pcap` added if need be. A
    /// file is created with its first packet.
    #[must_use]
    pub fn new(stem: PathBuf) -> Self {
        Self { stem, ethernet: None, ip: None, whole: Vec::new() }
    }

    /// Adds a packet with its recorded time, or the last one that can be told.
    ///
    /// # Errors
    /// When the file cannot be created or written.
    pub fn write(&mut self, packet: &Packet) -> Result<()> {
        let link = packet.headers.link;
        let path = self.path(link);
        let writer = match link {
            Link::Ethernet => &mut self.ethernet,
            Link::Ip => &mut self.ip,
        };
        let writer = match writer {
            Some(writer) => writer,
            None => writer.insert(begin(&path, link)?),
        };
        let time = Duration::from_nanos(packet.timestamp_ns.min(LAST_TIME_NS));
        let data = if packet.is_merged() || packet.is_in_pieces() {
            self.whole.clear();
            packet.fragments().for_each(|fragment| self.whole.extend_from_slice(fragment));
            &self.whole
        } else {
            packet.frame.data()
        };
        let record = PcapPacket::new(time, packet.wire_len, data);
        writer.write_packet(&record).map(drop).map_err(|error| failed(error, &path))
    }

    /// Writes out what is still buffered.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn finish(self) -> Result<()> {
        let paths = [Link::Ethernet, Link::Ip].map(|link| self.path(link));
        for (writer, path) in [self.ethernet, self.ip].into_iter().zip(paths) {
            if let Some(writer) = writer {
                let flushed = writer.into_writer().into_inner();
                flushed.map_err(|error| error.into_error()).map_err(Error::file("write", path))?;
            }
        }
        Ok(())
    }

    fn path(&self, link: Link) -> PathBuf {
        let mut name = self.stem.clone().into_os_string();
        name.push(match link {
            Link::Ethernet => ".pcap",
            Link::Ip => "-ip.pcap",
        });
        name.into()
    }
}

fn begin(path: &Path, link: Link) -> Result<PcapWriter<BufWriter<File>>> {
    let file = File::create(path).map_err(Error::file("create", path))?;
    let header = PcapHeader {
        snaplen: MAX_RECORD_BYTES,
        datalink: match link {
            Link::Ethernet => DataLink::ETHERNET,
            Link::Ip => DataLink::RAW,
        },
        ts_resolution: TsResolution::NanoSecond,
        ..PcapHeader::default()
    };
    PcapWriter::with_header(BufWriter::new(file), header).map_err(|error| failed(error, path))
}

fn failed(error: pcap_file::PcapError, path: &Path) -> Error {
    let source = match error {
        pcap_file::PcapError::IoError(error) => error,
        other => std::io::Error::other(other.to_string()),
    };
    Error::File { action: "write", path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::made_up::datagrams;

    #[test]
    fn what_lies_in_pieces_is_written_as_what_lies_in_one_frame() {
        let directory = tempfile::tempdir().unwrap();
        let written = datagrams(&[3; 1001], 116).map(|packet| {
            let mut writer = CaptureWriter::new(directory.path().join("written"));
            writer.write(&packet).unwrap();
            writer.finish().unwrap();
            std::fs::read(directory.path().join("written.pcap")).unwrap()
        });
        assert_eq!(written[0].len(), 24 + 16 + 42 + 1001);
        assert_eq!(written[0], written[1]);
    }
}
