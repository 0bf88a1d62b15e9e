//! Synthetic traffic, as the command line describes it.

use std::str::FromStr;

use forebay_device::synthetic::SyntheticPlan;

/// Payload of the largest datagram over IPv4, whose total length has 16 bits, and over IPv6, whose payload length has.
const UDP_BYTES_MAX_V4: u16 = u16::MAX - 20 - 8;
const UDP_BYTES_MAX_V6: u16 = u16::MAX - 8;

/// Synthetic traffic on the command line: `flows=64,frames=1000000,size=18..1400,run=1..8,ipv6`.
#[derive(Clone, Debug)]
pub(crate) struct SyntheticSpec(pub(crate) SyntheticPlan);

impl FromStr for SyntheticSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut plan = SyntheticPlan::default();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let read = match name {
                "flows" => value.parse().map(|flows| plan.flows = flows).ok(),
                "frames" => value.parse().map(|frames| plan.frames = frames).ok(),
                "size" => range(value).map(|range| plan.payload_bytes = range),
                "run" => range(value).map(|range| plan.run = range),
                "ipv6" => value.is_empty().then(|| plan.ipv6 = true),
                _ => None,
            };
            read.ok_or_else(|| {
                format!(
                    "{part:?} is none of flows=N, frames=N, size=A..B (payload bytes), run=A..B \
                     (frames of a flow in a row), ipv6"
                )
            })?;
        }
        if !(1..=1 << 24).contains(&plan.flows) {
            return Err("flows is a number from 1 to 16777216".to_owned());
        }
        let (ip, most_bytes) =
            if plan.ipv6 { ("IPv6", UDP_BYTES_MAX_V6) } else { ("IPv4", UDP_BYTES_MAX_V4) };
        if plan.payload_bytes.1 > most_bytes {
            return Err(format!(
                "size={}: a datagram over {ip} has no room for it: give at most {most_bytes}",
                plan.payload_bytes.1
            ));
        }
        Ok(Self(plan))
    }
}

/// Parses `A..B`, or one number for both ends.
fn range<T: FromStr + Copy + PartialOrd>(text: &str) -> Option<(T, T)> {
    let (first, last) = text.split_once("..").unwrap_or((text, text));
    let (first, last) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last).then_some((first, last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn synthetic_traffic_parses_by_part() {
        let spec: SyntheticSpec = "flows=7,frames=50,size=18..1400,run=3,ipv6".parse().unwrap();
        let SyntheticPlan { flows, frames, payload_bytes, run, ipv6, .. } = spec.0;
        assert_eq!((flows, frames, payload_bytes, run), (7, 50, (18, 1400), (3, 3)));
        assert!(ipv6);
        for (text, is_read) in [
            ("size=65507", true),
            ("size=65508", false),
            ("ipv6,size=65527", true),
            ("size=18..65528,ipv6", false),
        ] {
            assert_eq!(text.parse::<SyntheticSpec>().is_ok(), is_read, "{text}");
        }
        for text in ["flows=0", "flow=3", "size=9..3", "ipv6=1", "frames=x", "run=1.."] {
            assert!(text.parse::<SyntheticSpec>().is_err(), "{text}");
        }
    }
}
