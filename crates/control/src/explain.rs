//! Explanation of a flow's CPU, in words.

use std::fmt::{self, Display};

use forebay_engine::Explained;
use forebay_rx::flow_key::{FlowKeyRules, KeyDepth, KeyRule};
use forebay_rx::hash::FlowHash;
use forebay_rx::steer::{Drops, FlowState, Move, SHARERS_MAX};
use forebay_rx::{DropReason, SteerReason};
use forebay_sys::errno::Errno;
use forebay_sys::refused::Refused;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::connection::FlowConnection;
use super::flow::{FlowName, FlowProtocol};
use super::handle::Control;

/// State of a flow on the queues of an engine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Explanation {
    /// Name of the flow, as requested.
    pub name: FlowName,
    /// Current hash of the flow.
    pub hash: FlowHash,
    /// Rules for flow keys.
    pub flow_key: FlowKeyRules,
    /// Answers of the queues that answered, in their order.
    pub queues: Vec<Explained>,
    /// Connections of the flow, if its packets go to sockets.
    pub connections: Vec<FlowConnection>,
}

/// Asks all queues about a flow, under its current hash.
///
/// # Errors
/// As [`Control::explain`]; `EINVAL` of a flow that is named by its addresses if a device hashes packets, by a key of its
/// own.
pub fn explain(control: &Control, name: &FlowName) -> Result<Explanation, Refused> {
    if let (FlowName::Endpoints { .. }, Some(device)) = (name, control.state().devices().hashing())
    {
        let why = format!(
            "{name}: {device} hashes packets by a key of its own; give the flow's hash, as \
             `forebay top` shows it"
        );
        return Err(Refused::new(Errno::Inval, why));
    }
    let hasher = control.hasher();
    let hash = name.hash(&hasher);
    let queues = control.explain(hash)?;
    let connections = control.connections_of(name, hash);
    Ok(Explanation { name: *name, hash, flow_key: *hasher.rules(), queues, connections })
}

impl Display for Explanation {
    /// Writes several lines, each with its newline. Times are seconds since the engine began.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name {
            FlowName::Hash(_) => writeln!(f, "flow {}", hex(self.hash))?,
            FlowName::Endpoints { .. } => {
                writeln!(f, "flow {}, hash {}", self.name, hex(self.hash))?;
            }
        }
        writeln!(f, "  key:   {}", self.key())?;
        if self.queues.is_empty() {
            writeln!(f, "  no queue has answered within five seconds")?;
        }
        self.queues.iter().try_for_each(|queue| write_queue(f, queue, self.hash))?;
        self.connections.iter().try_for_each(|connection| connection.fmt(f))
    }
}

fn write_queue(f: &mut fmt::Formatter<'_>, queue: &Explained, flow: FlowHash) -> fmt::Result {
    let Explained { name, polling_cpu, at_ns, state, drops, .. } = queue;
    writeln!(f, "{name}, polled by CPU {polling_cpu}, at {}", seconds(*at_ns))?;
    writeln!(f, "  now:   {}", now(state, flow))?;
    writeln!(f, "  next:  {}", next(state, *at_ns))?;
    writeln!(f, "  slot:  {}", slot(state, *at_ns, flow))?;
    match state.moves.len() {
        0 => writeln!(f, "  moves: none recorded")?,
        moves => writeln!(f, "  moves: {moves} recorded, the oldest first")?,
    }
    for moved in &state.moves {
        writeln!(f, "    {}", how_it_moved(moved, flow))?;
    }
    if drops.is_empty() {
        writeln!(f, "  drops: none recorded")?;
    }
    drops.iter().try_for_each(|drops| writeln!(f, "  drops: {}", how_it_dropped(drops)))
}

/// Current CPU of the flow.
fn now(state: &FlowState, flow: FlowHash) -> String {
    match state.cpu {
        _ if state.is_fenced => "unknown: the table was replaced since its last packet".to_owned(),
        None => "nowhere: no packet has come in its slot yet".to_owned(),
        Some(cpu) if state.last_flow == flow => format!("on CPU {cpu}: its last packet went there"),
        Some(cpu) => {
            let last = hex(state.last_flow);
            format!("on CPU {cpu}: the last packet of its slot, which was of {last}, went there")
        }
    }
}

/// CPU of the flow's next packet, the reason, and the packets that it waits for.
fn next(state: &FlowState, at_ns: u64) -> String {
    let (desired_cpu, steer_reason) = state.desired;
    let follows = match (state.held, state.cpu) {
        _ if state.is_fenced => {
            "; it waits until every CPU has processed what it had when the table was replaced"
                .to_owned()
        }
        (Some(held), cpu) => {
            let until = match cpu {
                Some(cpu) if cpu != held.to => {
                    format!(", until CPU {cpu} has processed {}", packets(state.ahead.into()))
                }
                _ => String::new(),
            };
            let with = if held.to == desired_cpu {
                String::new()
            } else {
                format!(" for CPU {}", held.to)
            };
            let waited = span(at_ns.saturating_sub(held.since_ns));
            format!(
                "; it waits behind {} held{with} for {waited}{until}",
                packets(held.packets as u64)
            )
        }
        (None, Some(cpu)) if cpu != desired_cpu && state.ahead > 0 => {
            let stayed = state.stayed.map_or_else(String::new, |(stayed, since_ns)| {
                let waited = span(at_ns.saturating_sub(since_ns));
                format!("; {} did so in {waited}", packets(stayed.into()))
            });
            format!(
                ", once CPU {cpu} has processed {} up to the slot's last one; until then it goes \
                 behind them, or is held{stayed}",
                packets(state.ahead.into())
            )
        }
        (None, Some(cpu)) if cpu != desired_cpu => {
            format!("; at once, for CPU {cpu} has processed all before it")
        }
        _ => String::new(),
    };
    format!("to CPU {desired_cpu}, since {}{follows}", reason(steer_reason))
}

/// Slot of the flow table, and the other flows in it.
fn slot(state: &FlowState, at_ns: u64, flow: FlowHash) -> String {
    let Some(slot) = state.slot else {
        return "none: it has no hash, and is kept in order with all that have none".to_owned();
    };
    let [first, last] = hashes(slot, state.slots).map(hex);
    let others = state.sharers.iter().filter(|sharer| **sharer != flow);
    let others: Vec<_> = others.map(|sharer| hex(*sharer)).collect();
    let shared = match state.watched_since_ns.map(|since_ns| at_ns.saturating_sub(since_ns)) {
        None => "flows that share it are recorded from now on".to_owned(),
        Some(watched) if others.is_empty() => {
            format!("shared with nobody in {} of watching", span(watched))
        }
        Some(watched) => {
            let more = if state.sharers.len() < SHARERS_MAX { "" } else { " and maybe others" };
            format!("shared with {}{more} in {} of watching", others.join(", "), span(watched))
        }
    };
    format!("{slot} of {}, for the hashes {first} to {last}; {shared}", state.slots)
}

/// First and last hash value of a slot: all slots have equal shares of the hash values.
fn hashes(slot: u32, slots: usize) -> [FlowHash; 2] {
    let share = (1u64 << u32::BITS) / (slots as u64).max(1);
    let narrow = |hash: u64| FlowHash(u32::try_from(hash).unwrap_or(u32::MAX));
    let first = u64::from(slot) * share;
    [narrow(first), narrow(first + share - 1)]
}

fn how_it_moved(moved: &Move, flow: FlowHash) -> String {
    let Move { from, to, .. } = moved;
    let with = if moved.flow == flow {
        String::new()
    } else {
        format!(" with a packet of {}", hex(moved.flow))
    };
    let how = if moved.ahead == 0 && moved.stayed == 0 && moved.held_ns == 0 {
        format!("at once, for CPU {from} had processed all before it")
    } else {
        let held = match moved.held_ns {
            0 => "none was held".to_owned(),
            held_ns => format!("packets were held for {} of that", span(held_ns)),
        };
        format!(
            "after {}: CPU {from} had {} to process, {} stayed, {held}",
            span(moved.waited_ns.max(moved.held_ns)),
            packets(moved.ahead.into()),
            packets(moved.stayed.into()),
        )
    };
    format!(
        "{}: CPU {from} to CPU {to}{with}, since {}; {how} ({})",
        seconds(moved.at_ns),
        reason(moved.desired_by),
        moved.steer_reason.name()
    )
}

fn how_it_dropped(drops: &Drops) -> String {
    let at = drops.cpu.map_or_else(String::new, |cpu| format!(" for CPU {cpu}"));
    let (name, why) = (drops.reason.name(), loss(drops.reason));
    let last = seconds(drops.last_ns);
    format!("at least {}{at}, {name}: {why}; the last at {last}", counted(drops.frames, "frame"))
}

/// Reason for a desired CPU.
fn reason(steer_reason: SteerReason) -> &'static str {
    match steer_reason {
        SteerReason::Rfs => "its application runs there (rfs)",
        SteerReason::Rps => "the RPS map says so (rps)",
        SteerReason::Balance => {
            "its range of hash values was assigned to that CPU by load (balance)"
        }
        SteerReason::Spread => {
            "the load needs fewer CPUs than the RPS map has, and that is one of them (spread)"
        }
        SteerReason::Inline => "that CPU polls the queue, and nothing sends it elsewhere (inline)",
        SteerReason::Stay => "its predecessors are there (stay)",
        SteerReason::Drained => "the old CPU has processed all before it (drained)",
        SteerReason::Held => "it was held (held)",
    }
}

fn loss(reason: DropReason) -> &'static str {
    match reason {
        DropReason::LinkType => "its link type cannot be read",
        DropReason::LengthError => "the device reported inconsistent lengths",
        DropReason::VnetHeader => "its virtio-net header is invalid",
        DropReason::Oversize => "larger than the largest frame",
        DropReason::NoBuffer => "no memory for packets was free",
        DropReason::HoldFull => "the limit of held packets was reached",
        DropReason::BacklogFull => "the backlog was at netdev_max_backlog",
        DropReason::FlowLimit => "the flow had more than its share of a backlog half full",
        DropReason::CpuLost => "the CPU's thread died while it processed the packet",
    }
}

impl Explanation {
    /// Rule that gave the flow's last packet its key, as far as a queue has recorded it; else that of packets which begin
    /// with the named headers, and `None` for a flow named by its hash.
    #[must_use]
    pub fn rule(&self) -> Option<KeyRule> {
        self.recorded_rule().or(match self.name {
            FlowName::Hash(_) => None,
            FlowName::Endpoints { ports: Some(_), .. } => Some(KeyRule::Outer),
            FlowName::Endpoints { ports: None, .. } => Some(KeyRule::Addresses),
        })
    }

    fn recorded_rule(&self) -> Option<KeyRule> {
        let rules = self.queues.iter().filter_map(|queue| queue.state.rule);
        rules.max_by_key(|&(_, at_ns)| at_ns).map(|(rule, _)| rule)
    }

    /// Rule of packets that have the named headers inside a tunnel, as long as no queue has recorded which of them come.
    fn rule_in_tunnel(&self) -> Option<KeyRule> {
        let may_be_inside =
            self.flow_key.depth != KeyDepth::Outer && self.recorded_rule().is_none();
        (may_be_inside && self.rule() == Some(KeyRule::Outer)).then_some(KeyRule::Inner)
    }

    /// Rule of packets between the same endpoints that are identified neither by their ports nor by their addresses.
    fn other_rule(&self) -> Option<KeyRule> {
        match self.name {
            FlowName::Endpoints { protocol: Some(FlowProtocol::Tcp), .. } => None,
            FlowName::Endpoints { ports: Some([_, to]), .. } => self.flow_key.behind_udp_port(to),
            FlowName::Endpoints { protocol, .. } => {
                self.flow_key.behind_protocol(protocol?.number())
            }
            FlowName::Hash(_) => None,
        }
    }

    fn key(&self) -> String {
        let rule = self.rule().map_or("given by its hash", KeyRule::name);
        let inside = match self.rule_in_tunnel() {
            None => String::new(),
            Some(rule) => format!(", or {} in a tunnel", rule.name()),
        };
        let except = match self.other_rule() {
            None => "",
            Some(KeyRule::Esp) => "; packets with an SPI go by addresses and SPI instead",
            Some(KeyRule::Icmp) => "; errors go by the flow that they quote instead",
            Some(KeyRule::Quic) => "; QUIC's short headers go by connection ID instead",
            Some(KeyRule::Inner) => "; packets in the tunnel go by their inner header instead",
            Some(KeyRule::L2tpv3) => {
                "; packets in L2TPv2 go by their inner header, in L2TPv3 by session"
            }
            Some(_) => "; packets in the tunnel go by its number instead",
        };
        format!("{rule}{inside} (flow_key={}){except}", self.flow_key)
    }

    /// The explanation as a JSON document.
    #[must_use]
    pub fn document(&self) -> Value {
        let queues: Vec<_> = self.queues.iter().map(queue_document).collect();
        json!({
            "flow": self.name.to_string(),
            "hash": hex(self.hash),
            "flow_key": self.flow_key.to_string(),
            "rule": self.rule().map(KeyRule::name),
            "rule_in_tunnel": self.rule_in_tunnel().map(KeyRule::name),
            "other_rule": self.other_rule().map(KeyRule::name),
            "queues": queues,
            "connections": self.connections.iter().map(FlowConnection::document).collect::<Vec<_>>(),
        })
    }
}

impl Serialize for Explanation {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.document().serialize(serializer)
    }
}

fn queue_document(told: &Explained) -> Value {
    let Explained { name, polling_cpu, at_ns, state, drops, .. } = told;
    let range = state.slot.map(|slot| hashes(slot, state.slots).map(hex));
    let held = state.held.map(
        |held| json!({ "packets": held.packets, "since_ns": held.since_ns, "cpu": held.to.0 }),
    );
    let stayed =
        state.stayed.map(|(packets, since_ns)| json!({ "packets": packets, "since_ns": since_ns }));
    let sharers: Vec<_> = state.sharers.iter().copied().map(hex).collect();
    json!({
        "queue": name,
        "polling_cpu": polling_cpu.0,
        "at_ns": at_ns,
        "cpu": state.cpu.map(|cpu| cpu.0),
        "fenced": state.is_fenced,
        "desired": { "cpu": state.desired.0.0, "because": state.desired.1.name() },
        "ahead": state.ahead,
        "stayed": stayed,
        "held": held,
        "slot": state.slot,
        "slots": state.slots,
        "hashes": range,
        "last_flow": hex(state.last_flow),
        "watched_since_ns": state.watched_since_ns,
        "sharers": sharers,
        "moves": state.moves.iter().map(move_document).collect::<Vec<_>>(),
        "drops": drops.iter().map(drop_document).collect::<Vec<_>>(),
    })
}

fn move_document(moved: &Move) -> Value {
    json!({
        "at_ns": moved.at_ns,
        "flow": hex(moved.flow),
        "from": moved.from.0,
        "to": moved.to.0,
        "desired_by": moved.desired_by.name(),
        "because": moved.steer_reason.name(),
        "ahead": moved.ahead,
        "stayed": moved.stayed,
        "waited_ns": moved.waited_ns,
        "held_ns": moved.held_ns,
    })
}

fn drop_document(drops: &Drops) -> Value {
    json!({
        "reason": drops.reason.name(),
        "cpu": drops.cpu.map(|cpu| cpu.0),
        "frames": drops.frames,
        "last_ns": drops.last_ns,
    })
}

fn hex(flow: FlowHash) -> String {
    FlowName::Hash(flow).to_string()
}

fn packets(count: u64) -> String {
    counted(count, "packet")
}

fn counted(count: u64, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}

/// Time since the engine began, in seconds.
fn seconds(ns: u64) -> String {
    format!("{}.{:06} s", ns / 1_000_000_000, ns % 1_000_000_000 / 1_000)
}

/// Duration in words.
fn span(ns: u64) -> String {
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{}.{} µs", ns / 1_000, ns % 1_000 / 100),
        1_000_000..1_000_000_000 => format!("{}.{} ms", ns / 1_000_000, ns % 1_000_000 / 100_000),
        _ => format!("{}.{} s", ns / 1_000_000_000, ns % 1_000_000_000 / 100_000_000),
    }
}

#[cfg(test)]
mod tests;
