//! Which packets of an interface are taken; the kernel keeps the rest.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::error::{Error, Result};

/// Most ranges of ports that a list comes to: the kernel's filters must be able to jump over them.
pub const MAX_RANGES: usize = 64;

/// Which packets are taken.
///
/// `all`: every frame, ARP too. A list, as in `udp:53,tcp:443,udp:1000-2000,tcp`: whole datagrams to
/// these ports, over IPv4 or IPv6, behind up to two VLAN tags. Fragments stay with the kernel, for
/// later ones have no ports.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Take {
    /// Every frame.
    #[default]
    All,
    /// What is sent to these ports.
    Only(Destinations),
}

/// Destination ports, by protocol: ranges that neither overlap nor touch, in rising order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Destinations {
    tcp: Vec<RangeInclusive<u16>>,
    udp: Vec<RangeInclusive<u16>>,
}

impl Destinations {
    /// The ports that are taken of a protocol.
    #[must_use]
    pub fn ports(&self, protocol: Protocol) -> &[RangeInclusive<u16>] {
        match protocol {
            Protocol::Tcp => &self.tcp,
            Protocol::Udp => &self.udp,
        }
    }
}

/// A protocol with ports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Protocol {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Tcp, Self::Udp];

    /// Its number in an IP header.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

impl FromStr for Take {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.trim() == "all" {
            return Ok(Self::All);
        }
        let refused = |why| Error::Setting { what: "what is taken", value: text.to_owned(), why };
        let mut found = Destinations::default();
        for entry in text.split(',') {
            let (protocol, ports) = destination(entry.trim()).map_err(refused)?;
            match protocol {
                Protocol::Tcp => found.tcp.push(ports),
                Protocol::Udp => found.udp.push(ports),
            }
        }
        found.tcp = joined(found.tcp);
        found.udp = joined(found.udp);
        let ranges = found.tcp.len() + found.udp.len();
        if ranges > MAX_RANGES {
            let why = format!("it has {ranges} ranges of ports and {MAX_RANGES} are the most");
            return Err(refused(why));
        }
        Ok(Self::Only(found))
    }
}

/// One entry of a list: a protocol, and its ports if not all.
fn destination(entry: &str) -> Result<(Protocol, RangeInclusive<u16>), String> {
    let (name, ports) = entry.split_once(':').map_or((entry, None), |(p, r)| (p, Some(r)));
    let protocol = match name {
        "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        "" => return Err("an entry is empty; each is udp or tcp, and perhaps :PORT".to_owned()),
        "all" => return Err("\"all\" stands alone: it takes every frame".to_owned()),
        _ => {
            return Err(format!(
                "{name:?} is not a protocol with ports that is known here; each entry is udp or \
                 tcp, and perhaps :PORT or :PORT-PORT, or the whole is `all`"
            ));
        }
    };
    let Some(ports) = ports else { return Ok((protocol, 0..=u16::MAX)) };
    let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
    let (first, last) = (port(entry, first)?, port(entry, last)?);
    if first > last {
        return Err(format!(
            "the ports of {entry:?} go from {first} down to {last}; turn them round"
        ));
    }
    Ok((protocol, first..=last))
}

fn port(entry: &str, text: &str) -> Result<u16, String> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(port) if is_number => Ok(port),
        _ => Err(format!("{text:?} in {entry:?} is not a port: a number from 0 to 65535")),
    }
}

/// The same ports, in rising order, in as few ranges as can be.
fn joined(mut ranges: Vec<RangeInclusive<u16>>) -> Vec<RangeInclusive<u16>> {
    ranges.sort_by_key(|range| *range.start());
    let mut joined: Vec<RangeInclusive<u16>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(last) if *range.start() <= last.end().saturating_add(1) => {
                *last = *last.start()..=*last.end().max(range.end());
            }
            _ => joined.push(range),
        }
    }
    joined
}

impl fmt::Display for Take {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Only(destinations) = self else { return f.write_str("all") };
        let mut separator = "";
        for protocol in Protocol::ALL {
            for ports in destinations.ports(protocol) {
                write!(f, "{separator}{}", protocol.name())?;
                match (*ports.start(), *ports.end()) {
                    (0, u16::MAX) => {}
                    (first, last) if first == last => write!(f, ":{first}")?,
                    (first, last) => write!(f, ":{first}-{last}")?,
                }
                separator = ",";
            }
        }
        Ok(())
    }
}
