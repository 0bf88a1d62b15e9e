//! Input packets of benchmarks.

use std::path::Path;

use forebay_device::pcap::Capture;
use forebay_device::synthetic::stamped_udp;
use forebay_rx::parse::Link;

use crate::failure::Failure;

/// Upper bound on packets held at once: enough to exceed the first-level cache, few enough to fit
/// in memory.
const PACKETS_MAX: usize = 65_536;

/// Number of flows of synthetic packets.
const FLOWS: u32 = 100;

/// A packet, outside packet memory.
pub(super) struct Sample {
    pub(super) bytes: Vec<u8>,
    pub(super) wire_len: u32,
    pub(super) link: Link,
}

/// Packets of a capture, or synthetic 60-byte frames of a hundred flows.
pub(super) fn packets(file: Option<&Path>) -> Result<Vec<Sample>, Failure> {
    let samples = match file {
        Some(path) => read(path)?,
        None => made_up(),
    };
    if samples.is_empty() {
        return Err(Failure::usage("the capture holds no packet that can be read", "give another"));
    }
    Ok(samples)
}

/// Name of the input.
pub(super) fn name(file: Option<&Path>) -> String {
    let name = file.and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    name.unwrap_or_else(|| "made-up".to_owned())
}

fn read(path: &Path) -> Result<Vec<Sample>, Failure> {
    let mut reader = Capture::named(path.to_owned()).open()?;
    let mut samples = Vec::new();
    while samples.len() < PACKETS_MAX
        && let Some(record) = reader.record()?
    {
        if let Some(link) = record.link {
            let (bytes, wire_len) = (record.bytes.to_vec(), record.wire_len);
            samples.push(Sample { bytes, wire_len, link });
        }
        reader.advance();
    }
    Ok(samples)
}

fn made_up() -> Vec<Sample> {
    let sample = |number: u32| {
        let bytes = stamped_udp(number % FLOWS, u64::from(number / FLOWS), 18, false);
        let wire_len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        Sample { bytes, wire_len, link: Link::Ethernet }
    };
    (0..4096).map(sample).collect()
}
