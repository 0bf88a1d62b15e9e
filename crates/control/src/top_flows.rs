//! Flows with the most packets, by a sample of bursts: bounded, and off the path of packets.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use forebay_engine::{Question, SampledBurst, SampledPacket};
use forebay_rx::CpuId;
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_sys::refused::Refused;

use super::flow::{FlowName, FlowProtocol};
use super::handle::Control;

/// Bursts of each queue in a sample.
const BURSTS: usize = 8;

/// Maximum time for the queues to answer with a burst.
const BURST_TIME: Duration = Duration::from_millis(10);

/// Time between two bursts of a sample.
const BURST_PAUSE: Duration = Duration::from_millis(5);

/// Maximum number of flows in an answer.
pub const FLOWS_TOLD_MAX: usize = 32;

/// Protocols with ports, as in an IP header.
const TCP: u8 = 6;
const UDP: u8 = 17;

/// Flow of a sample. Its text is `PACKETS OF_PACKETS QUEUE HASH CPU NAME`, with `-` for an unknown
/// CPU; the name is the hash again if the outermost headers do not lead to it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TopFlow {
    /// Number of its packets in the sample; a merged one counts once.
    pub packets: u64,
    /// Number of all packets of its queue in the sample.
    pub of_packets: u64,
    /// Name of the queue, as in an explanation.
    pub queue: String,
    /// Hash of the flow.
    pub hash: FlowHash,
    /// CPU of its slot, if one is known.
    pub cpu: Option<CpuId>,
    /// Name by which it can be explained.
    pub name: FlowName,
}

impl Control {
    /// Flows with the most packets in some bursts of each queue, as far as these come within a
    /// fraction of a second; at most [`FLOWS_TOLD_MAX`].
    ///
    /// # Errors
    /// `EBUSY` if too many changes and questions wait for the engine.
    pub fn top_flows(&self) -> Result<Vec<TopFlow>, Refused> {
        let mut bursts: Vec<SampledBurst> = Vec::new();
        for burst in 0..BURSTS {
            if burst > 0 {
                thread::sleep(BURST_PAUSE);
            }
            bursts.extend(self.ask(BURST_TIME, |answers| Question::Burst { answers })?);
        }
        Ok(counted(&bursts, &self.hasher()))
    }
}

fn counted(bursts: &[SampledBurst], hasher: &Hasher) -> Vec<TopFlow> {
    let mut flows: HashMap<(&str, FlowHash), TopFlow> = HashMap::new();
    let mut of_packets: HashMap<&str, u64> = HashMap::new();
    for burst in bursts {
        for packet in &burst.packets {
            *of_packets.entry(&burst.name).or_default() += 1;
            let flow = flows.entry((&burst.name, packet.flow)).or_insert_with(|| TopFlow {
                packets: 0,
                of_packets: 0,
                queue: burst.name.clone(),
                hash: packet.flow,
                cpu: None,
                name: name(packet, hasher),
            });
            flow.packets += 1;
            flow.cpu = packet.cpu;
        }
    }
    let mut flows: Vec<_> = flows.into_values().collect();
    for flow in &mut flows {
        flow.of_packets = of_packets.get(flow.queue.as_str()).copied().unwrap_or(0);
    }
    flows.sort_by_key(|flow| (Reverse(flow.packets), flow.hash.0));
    flows.truncate(FLOWS_TOLD_MAX);
    flows
}

/// Name of a packet's flow, by its outermost headers if these are what is hashed.
fn name(packet: &SampledPacket, hasher: &Hasher) -> FlowName {
    let Some([from, to]) = packet.endpoints else { return FlowName::Hash(packet.flow) };
    let protocol = match packet.protocol {
        Some(TCP) => Some(FlowProtocol::Tcp),
        Some(UDP) => Some(FlowProtocol::Udp),
        _ => None,
    };
    let ports = |of: &[SocketAddr; 2]| of.map(|at| at.port());
    let ports = protocol.map(|_| ports(&[from, to]));
    let endpoints = |protocol, ports| FlowName::Endpoints {
        protocol,
        source: from.ip(),
        destination: to.ip(),
        ports,
    };
    let names = [endpoints(protocol, ports), endpoints(None, None)];
    let is_hashed = |name: &FlowName| name.hash(hasher) == packet.flow;
    names.into_iter().find(is_hashed).unwrap_or(FlowName::Hash(packet.flow))
}

impl fmt::Display for TopFlow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { packets, of_packets, queue, hash, cpu, name } = self;
        let hash = FlowName::Hash(*hash);
        let cpu = cpu.map_or_else(|| "-".to_owned(), |cpu| cpu.to_string());
        write!(f, "{packets} {of_packets} {queue} {hash} {cpu} {name}")
    }
}

impl FromStr for TopFlow {
    type Err = ();

    fn from_str(line: &str) -> Result<Self, ()> {
        let words: Vec<_> = line.splitn(6, ' ').collect();
        let [packets, of_packets, queue, hash, cpu, name] = words[..] else { return Err(()) };
        let FlowName::Hash(hash) = hash.parse().map_err(drop)? else { return Err(()) };
        let name = name.parse().map_err(drop)?;
        let [packets, of_packets] = [packets, of_packets].map(|count| count.parse().map_err(drop));
        let (packets, of_packets) = (packets?, of_packets?);
        let cpu = cpu.parse().ok().map(CpuId);
        Ok(Self { packets, of_packets, queue: queue.to_owned(), hash, cpu, name })
    }
}

#[cfg(test)]
mod tests {
    use forebay_rx::hash::toeplitz::STANDARD_KEY;

    use super::*;

    /// A packet of Microsoft's verification suite.
    fn packet(flow: u32) -> SampledPacket {
        let endpoints = ["66.9.149.187:2794", "161.142.100.80:1766"];
        SampledPacket {
            flow: FlowHash(flow),
            endpoints: Some(endpoints.map(|at| at.parse().unwrap())),
            protocol: Some(TCP),
            cpu: Some(CpuId(1)),
        }
    }

    #[test]
    fn top_4_flows_are_named_if_hashed() {
        let hasher = Hasher::toeplitz(&STANDARD_KEY).unwrap();
        let name = |flow| name(&packet(flow), &hasher).to_string();
        assert_eq!(name(0x51cc_c178), "tcp 66.9.149.187:2794 > 161.142.100.80:1766");
        assert_eq!(name(0x323e_8fc2), "66.9.149.187 > 161.142.100.80", "a fragment");
        assert_eq!(name(0x0bad_cafe), "0badcafe", "the flow is inside");
    }

    #[test]
    fn top_4_largest_flows_survive_the_line() {
        let hasher = Hasher::toeplitz(&STANDARD_KEY).unwrap();
        let burst = |flows: std::ops::Range<u32>| SampledBurst {
            name: "rx-0".to_owned(),
            packets: flows.map(|flow| packet(flow + 1)).collect(),
        };
        let mut last = burst(5..6);
        last.packets[0].cpu = None;
        let told = counted(&[burst(0..40), burst(5..7), last], &hasher);
        assert_eq!((told[0].of_packets, told.len()), (43, FLOWS_TOLD_MAX));
        let [first, second, ..] = told.as_slice() else { panic!("{told:?}") };
        assert_eq!((first.packets, first.cpu, first.hash), (3, None, FlowHash(6)));
        assert_eq!((second.packets, second.cpu, second.hash), (2, Some(CpuId(1)), FlowHash(7)));
        assert_eq!(first.to_string(), "3 43 rx-0 00000006 - 00000006");
        let lines = told.iter().map(ToString::to_string);
        let read: Vec<TopFlow> = lines.map(|line| line.parse().unwrap()).collect();
        assert_eq!(read, told);
        for line in ["", "x", "1 2 rx-0 0 1 7", "1 2 rx-0 7 1", "x 2 rx-0 7 1 7"] {
            assert!(line.parse::<TopFlow>().is_err(), "{line}");
        }
    }
}
