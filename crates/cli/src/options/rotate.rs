//! Options of the files of captures.

use std::num::{NonZeroU16, NonZeroU64};

use clap::Args;
use forebay_device::pcap::Rotation;

use crate::failure::Failure;

/// Lower bound on the size of a file, so that a disk does not fill with names.
const ROTATE_BYTES_MIN: u64 = 1 << 16;

const SECOND_NS: u64 = 1_000_000_000;

/// Rotation of captures.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct RotateOptions {
    /// Begin a new capture before one exceeds BYTES (with k, M or G), 64k at least: cpuN.000000.pcap,
    /// cpuN.000001.pcap and so on
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub(crate) rotate_bytes: Option<NonZeroU64>,

    /// Begin a new capture with the first packet that came SECS seconds or more after the first one
    /// of the current capture
    #[arg(long, value_name = "SECS")]
    pub(crate) rotate_seconds: Option<NonZeroU64>,

    /// Keep the newest N captures of each CPU, and delete older ones [default: all]
    #[arg(long, value_name = "N")]
    pub(crate) rotate_keep: Option<NonZeroU16>,
}

impl RotateOptions {
    /// Limits of the files. `to_captures` is true if the run writes any.
    pub(crate) fn rotation(&self, to_captures: bool) -> Result<Rotation, Failure> {
        let period_ns = self.rotate_seconds.map(|seconds| {
            seconds.saturating_mul(NonZeroU64::new(SECOND_NS).unwrap_or(NonZeroU64::MIN))
        });
        let rotation = Rotation { len_bytes: self.rotate_bytes, period_ns, kept: self.rotate_keep };
        if rotation.kept.is_some() && !rotation.is_on() {
            let problem = "--rotate-keep: there is one capture for each CPU, without an end";
            return Err(Failure::usage(problem, "give --rotate-bytes or --rotate-seconds, too"));
        }
        if rotation.is_on() && !to_captures {
            let problem = "--rotate-bytes and --rotate-seconds: there are no captures to write to";
            return Err(Failure::usage(problem, "have captures written, or leave them out"));
        }
        Ok(rotation)
    }
}

fn size(text: &str) -> Result<NonZeroU64, String> {
    let (digits, shift) = match text.split_at_checked(text.len().saturating_sub(1)) {
        Some((digits, "k" | "K")) => (digits, 10),
        Some((digits, "M")) => (digits, 20),
        Some((digits, "G")) => (digits, 30),
        _ => (text, 0),
    };
    let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    let bytes = bytes.filter(|bytes| *bytes >= ROTATE_BYTES_MIN).and_then(NonZeroU64::new);
    bytes.ok_or_else(|| "it is a number of bytes, 64k at least, as in 100M".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ops_4_sizes_have_units_and_minimum() {
        let read = |text: &str| size(text).map(NonZeroU64::get);
        assert_eq!(read("65536"), Ok(65536));
        assert_eq!([read("64k"), read("3M"), read("1G")], [Ok(65536), Ok(3 << 20), Ok(1 << 30)]);
        for text in ["", "k", "0", "65535", "-1", "1T", "1.5M", "99999999999999999G", "é"] {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
