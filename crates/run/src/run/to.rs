//! Destinations of packets, as on the command line.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Destination of packets.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub enum To {
    /// No destination: packets are counted.
    #[default]
    Count,
    /// Captures in a directory, one for each CPU.
    Pcap(PathBuf),
    /// The kernel, through a TUN interface of this name; merged packets stay merged.
    Tun(String),
    /// The interface of this name, with packets cut to its MTU; or a device of the run, as in
    /// `dev:vhost-user:/run/switch.sock`.
    Dev(String),
}

impl fmt::Display for To {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count => write!(f, "count"),
            Self::Pcap(directory) => write!(f, "pcap:{}", directory.display()),
            Self::Tun(name) => write!(f, "tun:{name}"),
            Self::Dev(name) => write!(f, "dev:{name}"),
        }
    }
}

impl FromStr for To {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':').map_or((text, ""), |parts| parts) {
            ("count", "") => Ok(Self::Count),
            ("pcap", directory) if !directory.is_empty() => Ok(Self::Pcap(directory.into())),
            ("tun", name) if !name.is_empty() => Ok(Self::Tun(name.to_owned())),
            ("dev", name) if !name.is_empty() => Ok(Self::Dev(name.to_owned())),
            _ => Err(format!("{text:?} is none of count, pcap:DIR, tun:NAME and dev:NAME")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_round_trips() {
        for text in
            ["count", "pcap:out/of here", "tun:ft0", "dev:veth0", "dev:vhost-user:/run/a.sock"]
        {
            assert_eq!(text.parse::<To>().unwrap().to_string(), text);
        }
        for text in ["", "pcap", "tun:", "dev:", "count:3", "tap:t0", "veth0"] {
            assert!(text.parse::<To>().is_err(), "{text}");
        }
    }
}
