//! Configuration of the preloaded library, as `forebay exec` hands it to a program in its environment.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use forebay_device::Via;
use forebay_device::rx_filter::RxFilter;
use forebay_engine::SPIN_ALWAYS_NS;

/// Environment variable of the configuration.
pub const VARIABLE: &str = "FOREBAY_EXEC";

/// Devices of an unmodified program, and the packets of them that its sockets get.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PreloadConfig {
    /// Names of the interfaces.
    pub devices: Vec<String>,
    /// Backend of all of them.
    pub via: Via,
    /// Packets to take.
    pub take: RxFilter,
    /// Spinning of the engine's threads.
    pub spin: Spin,
    /// Absolute path of the control socket, if there is to be one: UTF-8 without blanks.
    pub control: Option<PathBuf>,
    /// Process that opens the devices as it starts, by its number: else each does so at its first socket.
    pub opened_by: Option<u32>,
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

    /// Longest time of spinning, in ns; `auto_ns` if it is not set.
    #[must_use]
    pub fn max_ns(self, auto_ns: u64) -> u64 {
        match self {
            Self::Auto => auto_ns,
            Self::Never => 0,
            Self::Always => SPIN_ALWAYS_NS,
        }
    }
}

/// Backends that a program's sockets can be on.
const BACKENDS: [Via; 3] = [Via::AfPacket, Via::AfXdp, Via::Tap];

impl fmt::Display for PreloadConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "via={} take={} spin={}", self.via, self.take, self.spin)?;
        self.control.iter().try_for_each(|path| write!(f, " control={}", path.display()))?;
        self.opened_by.iter().try_for_each(|process| write!(f, " opened_by={process}"))?;
        self.devices.iter().try_for_each(|device| write!(f, " dev={device}"))
    }
}

impl FromStr for PreloadConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mut devices, mut via, mut take, mut spin) = (Vec::new(), None, None, Spin::Auto);
        let (mut control, mut opened_by) = (None, None);
        for word in text.split_ascii_whitespace() {
            match word.split_once('=') {
                Some(("via", name)) => {
                    via = BACKENDS.into_iter().find(|via| via.name() == name);
                }
                Some(("take", list)) => {
                    let filter: Result<RxFilter, forebay_sys::Error> = list.parse();
                    take = Some(filter.map_err(|error| error.to_string())?);
                }
                Some(("spin", name)) => spin = name.parse()?,
                Some(("control", path)) => control = Some(path.into()),
                Some(("opened_by", process)) => opened_by = process.parse().ok(),
                Some(("dev", name)) => devices.push(name.to_owned()),
                _ => return Err(format!("{VARIABLE}: the word {word:?} is not known")),
            }
        }
        let via = via.ok_or(format!("{VARIABLE} names no backend (via=af_packet)"))?;
        let take = take.ok_or(format!("{VARIABLE} does not say what to take (take=udp:53)"))?;
        Ok(Self { devices, via, take, spin, control, opened_by })
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
            take: "udp:53,tcp:80".parse().unwrap(),
            spin,
            control: (spin == Spin::Auto).then(|| "/run/a=b".into()),
            opened_by: (spin == Spin::Never).then_some(4_194_304),
        };
        for via in BACKENDS {
            for (spin, _) in Spin::ALL {
                assert_eq!(of(via, spin).to_string().parse(), Ok(of(via, spin)));
            }
        }
        for wrong in ["via=af_packet", "take=udp:53", "via=dpdk take=udp", "what"] {
            assert!(wrong.parse::<PreloadConfig>().is_err(), "{wrong}");
        }
    }
}
