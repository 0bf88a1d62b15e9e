//! Configuration of the preloaded library, as `forebay exec` hands it to a program in its environment.

use std::fmt;
use std::str::FromStr;

use forebay_device::Via;
pub use forebay_device::rx_filter::FilterProtocol;
use forebay_device::rx_filter::RxFilter;

/// Environment variable of the configuration.
pub const VARIABLE: &str = "FOREBAY_EXEC";

/// Devices of an unmodified program, and the packets of them that its sockets get.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PreloadConfig {
    /// Names of the interfaces.
    pub devices: Vec<String>,
    /// Backend of all of them.
    pub via: Via,
    /// Packets to take, in the notation of [`RxFilter`].
    pub take: String,
    /// Spinning of the engine's threads.
    pub spin: Spin,
}

/// Spinning of the engine's threads while there is no work.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Spin {
    /// For a short time, then sleep.
    #[default]
    Auto,
    /// Sleep at once.
    Never,
    /// Until the program ends.
    Always,
}

impl Spin {
    const ALL: [(Self, &str); 3] =
        [(Self::Auto, "auto"), (Self::Never, "never"), (Self::Always, "always")];
}

/// Notation of the backends that an interface of the kernel can be opened with.
const BACKENDS: [(Via, &str); 3] =
    [(Via::AfPacket, "af_packet"), (Via::AfXdp, "af_xdp"), (Via::Tap, "tap")];

impl PreloadConfig {
    /// Filter of the packets to take.
    ///
    /// # Errors
    /// If the notation is wrong.
    pub fn filter(&self) -> Result<RxFilter, String> {
        self.take.parse().map_err(|error: forebay_sys::Error| error.to_string())
    }
}

/// True if a filter takes packets to this port.
#[must_use]
pub fn takes(filter: &RxFilter, protocol: FilterProtocol, port: u16) -> bool {
    match filter {
        RxFilter::All => true,
        RxFilter::Only(only) => only.ports(protocol).iter().any(|range| range.contains(&port)),
    }
}

impl fmt::Display for PreloadConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let via = BACKENDS.iter().find(|(via, _)| *via == self.via).map_or("", |(_, name)| name);
        write!(f, "via={via} take={} spin={}", self.take, self.spin)?;
        self.devices.iter().try_for_each(|device| write!(f, " dev={device}"))
    }
}

impl FromStr for PreloadConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mut devices, mut via, mut take, mut spin) = (Vec::new(), None, None, Spin::Auto);
        for word in text.split_ascii_whitespace() {
            match word.split_once('=') {
                Some(("via", name)) => {
                    via = BACKENDS.iter().find(|(_, of)| *of == name).map(|(via, _)| *via);
                }
                Some(("take", list)) => take = Some(list.to_owned()),
                Some(("spin", name)) => spin = name.parse()?,
                Some(("dev", name)) => devices.push(name.to_owned()),
                _ => return Err(format!("{VARIABLE}: the word {word:?} is not known")),
            }
        }
        let via = via.ok_or(format!("{VARIABLE} names no backend (via=af_packet)"))?;
        let take = take.ok_or(format!("{VARIABLE} does not say what to take (take=udp:53)"))?;
        Ok(Self { devices, via, take, spin })
    }
}

impl fmt::Display for Spin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::ALL.iter().find(|(spin, _)| spin == self).map_or("", |(_, name)| name))
    }
}

impl FromStr for Spin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|(_, name)| *name == text).map(|(spin, _)| *spin);
        found.ok_or_else(|| format!("spin is auto, never or always, not {text:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations_are_read_as_written() {
        let of = |via, spin| PreloadConfig {
            devices: vec!["veth0".to_owned(), "eth1".to_owned()],
            via,
            take: "udp:53,tcp:80".to_owned(),
            spin,
        };
        for (via, _) in BACKENDS {
            for (spin, _) in Spin::ALL {
                assert_eq!(of(via, spin).to_string().parse(), Ok(of(via, spin)));
            }
        }
        for wrong in ["via=af_packet", "take=udp:53", "via=dpdk take=udp", "what"] {
            assert!(wrong.parse::<PreloadConfig>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn filters_take_their_ports() {
        let filter = "udp:53,tcp:80".parse().unwrap();
        assert!(takes(&filter, FilterProtocol::Udp, 53));
        assert!(!takes(&filter, FilterProtocol::Tcp, 53));
        assert!(takes(&RxFilter::All, FilterProtocol::Tcp, 53));
    }
}
