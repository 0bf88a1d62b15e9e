//! Rules that identify a flow: `auto`, `outer` or `inner`, and optionally QUIC.

use std::fmt;
use std::str::FromStr;

use super::{KeyRule, inside, over_udp};
use crate::parse::Transport;

/// Maximum number of ports and port ranges in a QUIC rule.
pub const QUIC_PORT_RANGES_MAX: usize = 8;

/// Maximum length of a connection ID, in bytes (RFC 9000, section 17.2).
pub const QUIC_ID_BYTES_MAX: u8 = 20;

/// Rules that identify a flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FlowKeyRules {
    /// Headers that are looked behind.
    pub depth: KeyDepth,
    /// QUIC servers, whose flows are identified by connection ID.
    pub quic: Option<QuicRule>,
}

/// Depth of the walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum KeyDepth {
    /// The kernel's choice: its flow dissector's headers (IP in IP, GRE, PPPoE), and ICMP errors.
    /// Not behind UDP: a tunnel over UDP has a source port for each inner flow (RFC 7348, RFC
    /// 8926).
    #[default]
    Auto,
    /// None: the key is that of the outermost IP header and its ports.
    Outer,
    /// Every header that the walk knows.
    Inner,
}

/// Ports of QUIC servers, and the length of their connection IDs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QuicRule {
    ports: [(u16, u16); QUIC_PORT_RANGES_MAX],
    ranges: u8,
    id_bytes: u8,
}

impl FlowKeyRules {
    /// Rules for the outermost header alone.
    pub const OUTER: Self = Self { depth: KeyDepth::Outer, quic: None };

    /// Rule that takes precedence over ports for UDP packets to this port, if they have what the rule
    /// looks for.
    #[must_use]
    pub fn behind_udp_port(&self, port: u16) -> Option<KeyRule> {
        if self.quic.is_some_and(|quic| quic.has_port(port)) {
            Some(KeyRule::Quic)
        } else if self.depth == KeyDepth::Inner {
            over_udp::rule_of_udp_port(port)
        } else {
            None
        }
    }

    /// Rule that takes precedence over addresses for packets of this protocol of IP, if they have what the rule looks for.
    #[must_use]
    pub fn behind_protocol(&self, protocol: u8) -> Option<KeyRule> {
        inside::rule_of_protocol(protocol, self.depth)
    }

    /// True if the outermost header alone gives the key of a packet of this transport.
    #[must_use]
    pub(crate) fn uses_outermost_alone(&self, transport: Transport) -> bool {
        transport == Transport::Tcp
            || self.quic.is_none()
                && (self.depth == KeyDepth::Outer
                    || self.depth == KeyDepth::Auto && transport == Transport::Udp)
    }
}

impl QuicRule {
    /// True if a QUIC server listens at this port.
    #[must_use]
    pub fn has_port(&self, port: u16) -> bool {
        self.ranges().iter().any(|(first, last)| (*first..=*last).contains(&port))
    }

    /// Length of the connection IDs that the servers choose.
    #[must_use]
    pub fn id_len_bytes(&self) -> usize {
        self.id_bytes.into()
    }

    fn ranges(&self) -> &[(u16, u16)] {
        self.ports.get(..self.ranges.into()).unwrap_or_default()
    }
}

impl fmt::Display for FlowKeyRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.depth {
            KeyDepth::Auto => "auto",
            KeyDepth::Outer => "outer",
            KeyDepth::Inner => "inner",
        })?;
        self.quic.map_or(Ok(()), |quic| write!(f, ",{quic}"))
    }
}

impl fmt::Display for QuicRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("quic:")?;
        for (index, (first, last)) in self.ranges().iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(f, "{comma}{first}")?;
            if first != last {
                write!(f, "-{last}")?;
            }
        }
        write!(f, ":{}", self.id_bytes)
    }
}

/// Error of a text that does not name [`FlowKeyRules`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoFlowKey;

impl fmt::Display for NoFlowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "it is auto, outer or inner, then perhaps quic:PORTS:LEN with at most \
             {QUIC_PORT_RANGES_MAX} ports or ranges and an ID of 1 to {QUIC_ID_BYTES_MAX} bytes, as in \
             inner,quic:443,8443-8449:8"
        )
    }
}

impl std::error::Error for NoFlowKey {}

impl FromStr for FlowKeyRules {
    type Err = NoFlowKey;

    /// Reads `auto`, `outer`, `inner`, `quic:443:8` (with `auto`), or one of the first three, a
    /// comma and a QUIC rule.
    fn from_str(text: &str) -> Result<Self, NoFlowKey> {
        let text = text.trim();
        let (depth, quic) = match text.find("quic:") {
            Some(0) => ("auto", Some(text)),
            Some(at) => {
                let (depth, quic) = text.split_at(at);
                (depth.strip_suffix(',').ok_or(NoFlowKey)?, Some(quic))
            }
            None => (text, None),
        };
        let depth = match depth {
            "auto" => KeyDepth::Auto,
            "outer" => KeyDepth::Outer,
            "inner" => KeyDepth::Inner,
            _ => return Err(NoFlowKey),
        };
        Ok(Self { depth, quic: quic.map(str::parse).transpose()? })
    }
}

impl FromStr for QuicRule {
    type Err = NoFlowKey;

    fn from_str(text: &str) -> Result<Self, NoFlowKey> {
        let rest = text.strip_prefix("quic:").ok_or(NoFlowKey)?;
        let (list, id_bytes) = rest.rsplit_once(':').ok_or(NoFlowKey)?;
        // No signs, which `parse` would take.
        let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(id_bytes) {
            return Err(NoFlowKey);
        }
        let id_bytes = id_bytes.parse().map_err(|_| NoFlowKey)?;
        if !(1..=QUIC_ID_BYTES_MAX).contains(&id_bytes) {
            return Err(NoFlowKey);
        }
        let mut rule = Self { ports: Default::default(), ranges: 0, id_bytes };
        for range in list.split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let port = |text: &str| text.parse::<u16>().ok().filter(|_| digits(text));
            let (first, last) = port(first).zip(port(last)).ok_or(NoFlowKey)?;
            let overlaps = |range: &(u16, u16)| range.0 <= last && first <= range.1;
            if rule.ranges().iter().any(overlaps) {
                return Err(NoFlowKey);
            }
            let free = rule.ports.get_mut(usize::from(rule.ranges)).ok_or(NoFlowKey)?;
            if first == 0 || first > last {
                return Err(NoFlowKey);
            }
            *free = (first, last);
            rule.ranges += 1;
        }
        Ok(rule)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flk_1_rules_read_and_write_back() {
        for text in ["auto", "outer", "inner", "auto,quic:443:8", "inner,quic:443,8443-8449:20"] {
            let rules: FlowKeyRules = text.parse().unwrap();
            assert_eq!(rules.to_string(), text);
        }
        let rules: FlowKeyRules = "quic:443:8".parse().unwrap();
        assert_eq!(rules.to_string(), "auto,quic:443:8");
        let quic = "quic:443,8443-8449:8".parse::<QuicRule>().unwrap();
        let ports = [443, 8443, 8445, 8449, 442, 8442, 8450];
        assert_eq!(
            ports.map(|port| quic.has_port(port)),
            [true, true, true, true, false, false, false]
        );
    }

    #[test]
    fn flk_1_impossible_rules_are_refused() {
        for text in [
            "",
            "all",
            "inner,",
            "inner,outer",
            "quic:443",
            "quic::8",
            "quic:0:8",
            "quic:443:0",
            "quic:443:21",
            "quic:9-8:8",
            "innerquic:443:8",
            "quic:1,2,3,4,5,6,7,8,9:8",
            "quic:443:8,inner",
            "quic:+443:8",
            "quic:443:+8",
            "quic:443,443:8",
            "quic:440-450,443:8",
        ] {
            assert_eq!(text.parse::<FlowKeyRules>(), Err(NoFlowKey), "{text}");
        }
    }
}
