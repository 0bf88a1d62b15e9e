//! Names of flows, in the notations that people use, and the hashes of these flows.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use forebay_rx::hash::{FlowHash, Hasher};
use forebay_sys::error::Error;

/// Name of a flow.
///
/// A flow is read in many forms: `udp 10.0.0.1:5000 > 10.0.0.2:53`, `10.0.0.1:5000,10.0.0.2:53`,
/// `[2001:db8::1]:5000 [2001:db8::2]:53 tcp`, tcpdump's `IP 10.0.0.1.5000 > 10.0.0.2.53: UDP`,
/// ports apart as in `10.0.0.1 5000 10.0.0.2 53` or `10.0.0.1,10.0.0.2,5000,53`, addresses
/// without ports, and a hash in hexadecimal as in `deliver.csv`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FlowName {
    /// Hash of the flow.
    Hash(FlowHash),
    /// Source and destination of the flow's packets; both addresses are of one family.
    Endpoints {
        /// Protocol, if named; the hash does not depend on it.
        protocol: Option<FlowProtocol>,
        /// Source address.
        source: IpAddr,
        /// Destination address.
        destination: IpAddr,
        /// Ports of source and destination. Without ports, the flow is that of fragments, and of
        /// packets of protocols other than TCP and UDP.
        ports: Option<[u16; 2]>,
    },
}

/// Protocol of a flow. Those other than TCP and UDP are hashed without ports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FlowProtocol {
    /// RFC 9293.
    Tcp,
    /// RFC 768.
    Udp,
    /// RFC 792 or RFC 4443.
    Icmp,
    /// RFC 9260.
    Sctp,
    /// RFC 2784.
    Gre,
    /// RFC 4303.
    Esp,
}

impl FlowProtocol {
    /// Name in a flow's.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Icmp => "icmp",
            Self::Sctp => "sctp",
            Self::Gre => "gre",
            Self::Esp => "esp",
        }
    }

    /// Number in IP headers; of ICMP that of IPv4.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Icmp => 1,
            Self::Sctp => 132,
            Self::Gre => 47,
            Self::Esp => 50,
        }
    }

    fn has_ports(self) -> bool {
        matches!(self, Self::Tcp | Self::Udp)
    }
}

impl FlowName {
    /// Hash of the flow under `hasher`.
    #[must_use]
    pub fn hash(&self, hasher: &Hasher) -> FlowHash {
        let Self::Endpoints { source, destination, ports, .. } = self else {
            let Self::Hash(hash) = *self else { return FlowHash::NONE };
            return hash;
        };
        let ports = ports.map(|[from, to]| {
            let ([a, b], [c, d]) = (from.to_be_bytes(), to.to_be_bytes());
            [a, b, c, d]
        });
        match (source, destination) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                hasher.hash_tuple([from.octets(), to.octets()].as_flattened(), ports.as_ref())
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                hasher.hash_tuple([from.octets(), to.octets()].as_flattened(), ports.as_ref())
            }
            _ => FlowHash::NONE, // no text is read as this
        }
    }
}

impl fmt::Display for FlowName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Hash(FlowHash(hash)) => write!(f, "{hash:08x}"),
            Self::Endpoints { protocol, source, destination, ports } => {
                if let Some(protocol) = protocol {
                    write!(f, "{} ", protocol.name())?;
                }
                match ports {
                    Some([from, to]) => {
                        let from = SocketAddr::new(source, from);
                        write!(f, "{from} > {}", SocketAddr::new(destination, to))
                    }
                    None => write!(f, "{source} > {destination}"),
                }
            }
        }
    }
}

impl FromStr for FlowName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        parse(text).map_err(|why| Error::Setting {
            what: "a flow",
            value: text.to_owned(),
            why: format!(
                "{why}; give addresses and ports as in \"udp 10.0.0.1:5000 > 10.0.0.2:53\" or \
                 \"[2001:db8::1]:5000 > [2001:db8::2]:53\", or a hash such as 0badcafe"
            ),
        })
    }
}

/// Words read so far.
#[derive(Default)]
struct FlowWords {
    protocol: Option<FlowProtocol>,
    endpoints: Vec<(IpAddr, Option<u16>)>,
}

fn parse(text: &str) -> Result<FlowName, String> {
    let text = text.replace("->", " ").replace([',', '>', '<'], " ");
    let words: Vec<_> = text.split_whitespace().collect();
    if let [word] = words[..]
        && let Some(hash) = parse_hash(word)
    {
        return if hash == 0 { Err("0 is not a flow's hash".to_owned()) } else { Ok(named(hash)) };
    }
    let mut seen = FlowWords::default();
    for word in words {
        if let Some(endpoint) = parse_endpoint(word) {
            seen.endpoints.push(endpoint);
        } else if let Some(endpoint) = word.strip_suffix(':').and_then(parse_endpoint) {
            seen.endpoints.push(endpoint);
            break; // tcpdump describes the packet from here on
        } else {
            seen.read(word)?;
        }
    }
    seen.into_name()
}

fn named(hash: u32) -> FlowName {
    FlowName::Hash(FlowHash(hash))
}

impl FlowWords {
    /// Reads a word that is not an endpoint: a separate port, or a protocol.
    fn read(&mut self, word: &str) -> Result<(), String> {
        if let Ok(port) = word.parse() {
            let bare = self.endpoints.iter_mut().find(|(_, port)| port.is_none());
            let (_, place) = bare.ok_or_else(|| format!("{word} is a port of no address"))?;
            *place = Some(port);
            return Ok(());
        }
        match word.to_ascii_lowercase().as_str() {
            "tcp" => self.protocol = Some(FlowProtocol::Tcp),
            "udp" => self.protocol = Some(FlowProtocol::Udp),
            "ip" | "ip6" => {}
            "icmp" | "icmp6" => self.protocol = Some(FlowProtocol::Icmp),
            "sctp" => self.protocol = Some(FlowProtocol::Sctp),
            "gre" => self.protocol = Some(FlowProtocol::Gre),
            "esp" => self.protocol = Some(FlowProtocol::Esp),
            _ => return Err(format!("{word:?} is neither an address nor a port nor a protocol")),
        }
        Ok(())
    }

    fn into_name(self) -> Result<FlowName, String> {
        let [(source, from), (destination, to)] = self.endpoints[..] else {
            return Err(format!("it takes two addresses, not {}", self.endpoints.len()));
        };
        if source.is_ipv4() != destination.is_ipv4() {
            return Err("one address is of IPv4 and the other of IPv6".to_owned());
        }
        let ports = match (from, to) {
            (Some(from), Some(to)) => Some([from, to]),
            (None, None) => None,
            _ => return Err("one address has a port and the other has none".to_owned()),
        };
        let is_portless = self.protocol.is_some_and(|protocol| !protocol.has_ports());
        if is_portless && ports.is_some() {
            return Err("only TCP and UDP are hashed with ports".to_owned());
        }
        Ok(FlowName::Endpoints { protocol: self.protocol, source, destination, ports })
    }
}

fn parse_hash(word: &str) -> Option<u32> {
    let digits = word.strip_prefix("0x").unwrap_or(word);
    let is_hash = digits.len() <= 8 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    u32::from_str_radix(digits, 16).ok().filter(|_| is_hash)
}

/// Reads an address, with a port behind a colon or, in tcpdump's notation, behind a dot.
fn parse_endpoint(word: &str) -> Option<(IpAddr, Option<u16>)> {
    if let Ok(address) = word.parse::<SocketAddr>() {
        return Some((address.ip(), Some(address.port())));
    }
    let bare = word.strip_prefix('[').and_then(|word| word.strip_suffix(']')).unwrap_or(word);
    if let Ok(address) = bare.parse() {
        return Some((address, None));
    }
    let (address, port) = word.rsplit_once('.')?;
    Some((address.parse().ok()?, Some(port.parse().ok()?)))
}

#[cfg(test)]
mod tests {
    use forebay_rx::hash::toeplitz::STANDARD_KEY;
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> Result<String, String> {
        text.parse::<FlowName>().map(|name| name.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn flow_names_in_common_notations() {
        const V4: &str = "10.0.0.1:5000 > 10.0.0.2:53";
        const V6: &str = "[2001:db8::1]:5000 > [2001:db8::2]:53";
        for (text, name) in [
            (V4, V4),
            (V6, V6),
            ("udp 10.0.0.1:5000 > 10.0.0.2:53", "udp 10.0.0.1:5000 > 10.0.0.2:53"),
            ("10.0.0.1:5000,10.0.0.2:53", V4),
            ("10.0.0.1:5000->10.0.0.2:53", V4),
            ("10.0.0.1:5000<>10.0.0.2:53", V4),
            ("10.0.0.1.5000 > 10.0.0.2.53", V4),
            ("IP 10.0.0.1.5000 > 10.0.0.2.53: UDP, length 12", V4),
            ("IP6 2001:db8::1.5000 > 2001:db8::2.53: Flags [S], seq 1", V6),
            ("10.0.0.1 5000 10.0.0.2 53", V4),
            ("10.0.0.1,10.0.0.2,5000,53", V4),
            ("TCP,10.0.0.1,5000,10.0.0.2,53", "tcp 10.0.0.1:5000 > 10.0.0.2:53"),
            (
                "[2001:db8::1]:5000 [2001:db8::2]:53 tcp",
                "tcp [2001:db8::1]:5000 > [2001:db8::2]:53",
            ),
            ("10.0.0.1 10.0.0.2", "10.0.0.1 > 10.0.0.2"),
            ("icmp6 [fe80::1] > [ff02::]:", "icmp fe80::1 > ff02::"),
            ("ESP 10.0.0.1 > 10.0.0.2", "esp 10.0.0.1 > 10.0.0.2"),
            ("10.0.0.1 10.0.0.2 gre", "gre 10.0.0.1 > 10.0.0.2"),
            ("::ffff:1.2.3.4 > ::1", "::ffff:1.2.3.4 > ::1"),
            ("0badcafe", "0badcafe"),
            (" 0xBADCAFE ", "0badcafe"),
            ("7", "00000007"),
        ] {
            assert_eq!(read(text).as_deref(), Ok(name), "{text}");
        }
    }

    #[test]
    fn nameless_flow_is_refused() {
        for (text, why) in [
            ("", "it takes two addresses, not 0"),
            ("0", "0 is not a flow's hash"),
            ("123456789", "\"123456789\" is neither"),
            ("10.0.0.1", "it takes two addresses, not 1"),
            ("10.0.0.1 10.0.0.2 10.0.0.3", "it takes two addresses, not 3"),
            ("10.0.0.1 > ::1", "one address is of IPv4"),
            ("10.0.0.1:5 > 10.0.0.2", "one address has a port"),
            ("icmp 10.0.0.1:5 > 10.0.0.2:6", "only TCP and UDP"),
            ("10.0.0.1:5 10.0.0.2:6 7", "7 is a port of no address"),
            ("10.0.0.1.domain > 10.0.0.2.53", "\"10.0.0.1.domain\" is neither"),
            ("10.0.0.1 -5 10.0.0.2 6", "\"-5\" is neither"),
            ("10.0.0.1:65536 10.0.0.2:6", "is neither"),
        ] {
            let refused = read(text).unwrap_err();
            assert!(refused.contains(why) && refused.contains("cannot be"), "{text}: {refused}");
        }
    }

    #[test]
    fn rps_4_name_hash_equals_packet_hash() {
        let hasher = Hasher::toeplitz(&STANDARD_KEY).unwrap();
        let hash = |text: &str| text.parse::<FlowName>().unwrap().hash(&hasher).0;
        // Microsoft's verification suite.
        assert_eq!(hash("66.9.149.187:2794 > 161.142.100.80:1766"), 0x51cc_c178);
        assert_eq!(hash("66.9.149.187 > 161.142.100.80"), 0x323e_8fc2);
        let v6 = "[3ffe:2501:200:1fff::7]:2794 > [3ffe:2501:200:3::1]:1766";
        assert_eq!(hash(v6), 0x4020_7d3d);
        assert_eq!(hash("40207d3d"), 0x4020_7d3d);
    }

    fn name() -> impl Strategy<Value = FlowName> {
        let protocol =
            prop_oneof![Just(None), Just(Some(FlowProtocol::Tcp)), Just(Some(FlowProtocol::Udp))];
        let addresses = prop_oneof![
            any::<[[u8; 4]; 2]>().prop_map(|pair| pair.map(IpAddr::from)),
            any::<[[u8; 16]; 2]>().prop_map(|pair| pair.map(IpAddr::from)),
        ];
        let endpoints = (protocol, addresses, any::<Option<[u16; 2]>>()).prop_map(
            |(protocol, [source, destination], ports)| FlowName::Endpoints {
                protocol,
                source,
                destination,
                ports,
            },
        );
        prop_oneof![(1..u32::MAX).prop_map(named), endpoints]
    }

    proptest! {
        #[test]
        fn name_round_trips(name in name()) {
            prop_assert_eq!(name.to_string().parse::<FlowName>().unwrap(), name);
        }

        #[test]
        fn promise_5_no_text_panics(text in "[ 0-9a-f.:,>\\[\\]xudp%-]{0,40}|\\PC{0,40}") {
            let _ = text.parse::<FlowName>();
        }
    }
}
