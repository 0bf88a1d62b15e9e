//! State of a run between two samples: rates, shares, levels.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use forebay_control::top_flows::TopFlow;

use super::flows::{FlowRow, flow_rows};
use super::sample::{Key, Sample, sum_of};

/// State of a run between two samples.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Model {
    pub(super) totals: Totals,
    pub(super) cpus: Vec<CpuRow>,
    pub(super) queues: Vec<QueueRow>,
    /// Flows with the most packets, the largest first.
    pub(super) flows: Vec<FlowRow>,
    /// Reasons with drops, those that drop now first.
    pub(super) drops: Vec<DropRow>,
    pub(super) sockets: Vec<SocketRow>,
    /// TCP listeners, and the connections with the most bytes.
    pub(super) tcp: Vec<TcpRow>,
}

/// Figures of the whole run; rates are per second.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Totals {
    pub(super) received: f64,
    pub(super) received_bytes: f64,
    pub(super) delivered: f64,
    /// Packets that destinations took; `None` without destinations.
    pub(super) sent: Option<f64>,
    pub(super) dropped: f64,
    /// Drops since the run began.
    pub(super) dropped_total: f64,
    pub(super) backlog: f64,
    pub(super) moves: f64,
    pub(super) holds: f64,
    pub(super) stayed: f64,
    /// Mean duration of the holds that ended.
    pub(super) hold_s: Option<f64>,
    /// Segments per merged packet.
    pub(super) merged: Option<f64>,
}

/// A CPU.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct CpuRow {
    pub(super) cpu: u32,
    pub(super) is_online: bool,
    /// Part of the time spent on packets.
    pub(super) busy: f64,
    /// Frames delivered per second.
    pub(super) delivered: f64,
    /// Part of all frames delivered.
    pub(super) share: f64,
    pub(super) backlog: f64,
    /// Frames per second that its backlogs refused.
    pub(super) refused: f64,
    /// Mean wait in the backlog, if it is measured.
    pub(super) wait_s: Option<f64>,
    /// Reasons for which frames were steered there, and their parts; the largest first.
    pub(super) reasons: Vec<(String, f64)>,
}

/// An rx queue.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct QueueRow {
    /// Name as `explain` gives it.
    pub(super) name: String,
    pub(super) polling_cpu: f64,
    pub(super) mask: String,
    pub(super) active_cpus: f64,
    pub(super) received: f64,
    pub(super) received_bytes: f64,
    pub(super) dropped: f64,
    pub(super) moves: f64,
    pub(super) holds: f64,
    pub(super) stayed: f64,
    /// Mean duration of the holds that ended.
    pub(super) hold_s: Option<f64>,
}

/// Drops of one reason at one place.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct DropRow {
    pub(super) place: String,
    pub(super) reason: String,
    pub(super) per_s: f64,
    pub(super) total: f64,
    /// Time since it was last seen to grow; `None` if never.
    pub(super) since_s: Option<f64>,
}

/// A UDP socket.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct SocketRow {
    pub(super) number: String,
    pub(super) local: String,
    /// Datagrams queued per second.
    pub(super) queued: f64,
    pub(super) memory: f64,
    pub(super) buffer: f64,
    pub(super) errors: f64,
    pub(super) errors_total: f64,
}

/// A TCP listener or connection.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct TcpRow {
    /// Address of a listener, or peer and address of a connection.
    pub(super) name: String,
    pub(super) state: String,
    /// Bytes received per second.
    pub(super) received: f64,
    /// Bytes sent per second.
    pub(super) sent: f64,
    /// Segments sent again per second.
    pub(super) resent: f64,
    /// Bytes that are not read; of a listener, connections that are not accepted (`Recv-Q` of `ss`).
    pub(super) unread: f64,
    /// Bytes that are not acknowledged; of a listener, its backlog (`Send-Q` of `ss`).
    pub(super) unacknowledged: f64,
}

/// State of a TCP listener.
pub(super) const LISTEN: &str = "LISTEN";

/// Number of samples whose flows are summed.
const FLOW_SAMPLES: usize = 5;

/// Reason of drops in the kernel, where it gives no other.
const KERNEL: &str = "kernel";

/// Metrics of drops: the name, the labels of the place and of the reason, and the place and the
/// reason where there is no label.
const DROPS: [(&str, &[&str], &str, &str); 8] = [
    ("forebay_packets_dropped_total", &["reason", "device", "queue"], "", ""),
    ("forebay_packets_lost_total", &["reason", "cpu"], "CPU", ""),
    ("forebay_packets_kernel_dropped_total", &["", "device", "queue"], "", KERNEL),
    ("forebay_kernel_drops_total", &["name", "device", "queue"], "", ""),
    ("forebay_packets_unsent_total", &["reason", "to"], "to", ""),
    (NETWORK_DROPS, &["reason"], "network", ""),
    ("forebay_neighbour_drops_total", &["reason"], "neighbours", ""),
    (SOCKET_DROPS, &["", "local"], "socket", "rcvbuf_errors"),
];

/// Drops of sockets. They are among those of the network layer, where the run has one.
const SOCKET_DROPS: &str = "forebay_socket_receive_buffer_errors_total";
const NETWORK_DROPS: &str = "forebay_network_drops_total";

/// Metrics of drops that [`Totals`] sums, besides [`SOCKET_DROPS`]: no frame is counted twice in them.
const DROPS_SUMMED: [&str; 6] = [
    "forebay_packets_dropped_total",
    "forebay_packets_lost_total",
    "forebay_packets_kernel_dropped_total",
    "forebay_packets_unsent_total",
    NETWORK_DROPS,
    "forebay_neighbour_drops_total",
];

/// Last sample and model, from which the next model is made.
#[derive(Debug, Default)]
pub(super) struct History {
    last: Option<Sample>,
    /// Flows of the last samples.
    flows: VecDeque<Vec<TopFlow>>,
    /// Time at which the drops of each place and reason were last seen to grow.
    grown: BTreeMap<(String, String), Instant>,
}

impl History {
    /// Model between the last sample and this one; `None` for the first.
    pub(super) fn model(&mut self, now: Sample) -> Option<Model> {
        if self.last.as_ref().is_some_and(|last| last.connection != now.connection) {
            *self = Self::default();
        }
        if self.flows.len() == FLOW_SAMPLES {
            self.flows.pop_front();
        }
        self.flows.push_back(now.flows.clone());
        let model = self.last.as_ref().map(|before| {
            let mut model = Change { before, now: &now }.model();
            model.flows = flow_rows(&self.flows, &model.queues);
            for row in &mut model.drops {
                let key = (row.place.clone(), row.reason.clone());
                if row.per_s > 0.0 {
                    self.grown.insert(key.clone(), now.at);
                }
                let since = self.grown.get(&key).map(|at| now.at.duration_since(*at));
                row.since_s = since.map(|since| since.as_secs_f64());
            }
            model
        });
        self.last = Some(now);
        model
    }

    /// Time since the last sample.
    pub(super) fn age(&self, now: Instant) -> Option<Duration> {
        self.last.as_ref().map(|last| now.duration_since(last.at))
    }

    /// Forgets what changes with time, as a pause ends.
    pub(super) fn pause(&mut self) {
        self.last = None;
        self.flows.clear();
    }
}

/// Two samples.
struct Change<'a> {
    before: &'a Sample,
    now: &'a Sample,
}

impl Change<'_> {
    fn model(&self) -> Model {
        let drops = self.drops();
        Model {
            totals: self.totals(),
            cpus: self.cpus(),
            queues: self.queues(),
            flows: Vec::new(),
            drops,
            sockets: self.sockets(),
            tcp: self.tcp(),
        }
    }

    fn passed_s(&self) -> f64 {
        self.now.at.duration_since(self.before.at).as_secs_f64().max(1e-9)
    }

    /// Growth of a counter by some of its labels.
    fn growth(&self, name: &str, labels: &[&str]) -> BTreeMap<Key, f64> {
        self.now.growth_since(self.before, name, labels)
    }

    /// Growth of a counter per second, by some of its labels.
    fn rates(&self, name: &str, labels: &[&str]) -> BTreeMap<Key, f64> {
        let passed_s = self.passed_s();
        let growth = self.growth(name, labels).into_iter();
        growth.map(|(key, growth)| (key, growth / passed_s)).collect()
    }

    fn rate(&self, name: &str) -> f64 {
        sum_of(self.growth(name, &[]).into_values()) / self.passed_s()
    }

    /// Mean of the values that a histogram gained, by some of its labels.
    fn means(&self, name: &str, labels: &[&str]) -> BTreeMap<Key, f64> {
        let sums = self.growth(&format!("{name}_sum"), labels);
        let counts = self.growth(&format!("{name}_count"), labels);
        let mean = |(key, sum): (Key, f64)| {
            let count = counts.get(&key).copied().unwrap_or(0.0);
            (count > 0.0).then_some((key, sum / count))
        };
        sums.into_iter().filter_map(mean).collect()
    }

    fn totals(&self) -> Totals {
        let sent = "forebay_packets_sent_total";
        let merged_packets = self.rate("forebay_coalesce_packets_total");
        let segments = self.rate("forebay_coalesce_segments_total");
        let of_sockets = (!self.now.has(NETWORK_DROPS)).then_some(SOCKET_DROPS);
        let dropped: Vec<_> = DROPS_SUMMED.into_iter().chain(of_sockets).collect();
        Totals {
            received: self.rate("forebay_packets_received_total"),
            received_bytes: self.rate("forebay_received_bytes_total"),
            delivered: self.rate("forebay_packets_delivered_total"),
            sent: self.now.has(sent).then(|| self.rate(sent)),
            dropped: dropped.iter().map(|name| self.rate(name)).sum(),
            dropped_total: dropped.iter().map(|name| self.now.sum(name)).sum(),
            backlog: self.now.sum("forebay_backlog_packets"),
            moves: self.rate("forebay_flow_moves_total"),
            holds: self.rate("forebay_flow_holds_total"),
            stayed: self.rate("forebay_packets_stayed_total"),
            hold_s: self.means("forebay_flow_hold_seconds", &[]).into_values().next(),
            merged: (merged_packets > 0.0).then(|| segments / merged_packets),
        }
    }

    fn cpus(&self) -> Vec<CpuRow> {
        const CPU: &[&str] = &["cpu"];
        let busy = self.rates("forebay_cpu_busy_seconds_total", CPU);
        let delivered = self.rates("forebay_packets_delivered_total", CPU);
        let all: f64 = delivered.values().sum();
        let backlog = self.now.by("forebay_backlog_packets", CPU);
        let refused = self.rates("forebay_packets_backlog_refused_total", CPU);
        let waits = self.means("forebay_backlog_wait_seconds", CPU);
        let online = self.now.by("forebay_cpu_online", CPU);
        let steered = self.growth("forebay_packets_steered_total", &["cpu", "reason"]);
        let row = |(key, online): (Key, f64)| {
            let of = |figures: &BTreeMap<Key, f64>| figures.get(&key).copied().unwrap_or(0.0);
            let delivered = of(&delivered);
            CpuRow {
                cpu: key.first().and_then(|cpu| cpu.parse().ok()).unwrap_or(u32::MAX),
                is_online: online > 0.0,
                busy: of(&busy).min(1.0),
                delivered,
                share: if all > 0.0 { delivered / all } else { 0.0 },
                backlog: of(&backlog),
                refused: of(&refused),
                wait_s: waits.get(&key).copied(),
                reasons: reasons(&steered, &key),
            }
        };
        let mut rows: Vec<_> = online.into_iter().map(row).collect();
        rows.sort_by_key(|row| row.cpu);
        rows
    }

    fn queues(&self) -> Vec<QueueRow> {
        const QUEUE: &[&str] = &["device", "queue"];
        let received = self.rates("forebay_packets_received_total", QUEUE);
        let bytes = self.rates("forebay_received_bytes_total", QUEUE);
        let dropped = self.rates("forebay_packets_dropped_total", QUEUE);
        let kernel = self.rates("forebay_packets_kernel_dropped_total", QUEUE);
        let [moves, holds, stayed] = [
            "forebay_flow_moves_total",
            "forebay_flow_holds_total",
            "forebay_packets_stayed_total",
        ]
        .map(|name| self.rates(name, QUEUE));
        let held = self.means("forebay_flow_hold_seconds", QUEUE);
        let polling = self.now.by("forebay_polling_cpu", QUEUE);
        let active = self.now.by("forebay_active_cpus", QUEUE);
        let mut keys: Vec<_> = received.keys().collect();
        keys.sort_by_key(|key| queue_order(key));
        let is_one_device = keys.iter().all(|key| key.first() == keys[0].first());
        let row = |key: &Key| {
            let of = |figures: &BTreeMap<Key, f64>| figures.get(key).copied().unwrap_or(0.0);
            let name = queue_name(key, is_one_device);
            QueueRow {
                polling_cpu: of(&polling),
                mask: self.now.masks.of(&name).unwrap_or_default().to_owned(),
                active_cpus: of(&active),
                received: of(&received),
                received_bytes: of(&bytes),
                dropped: of(&dropped) + of(&kernel),
                moves: of(&moves),
                holds: of(&holds),
                stayed: of(&stayed),
                hold_s: held.get(key).copied(),
                name,
            }
        };
        keys.into_iter().map(row).collect()
    }

    /// All reasons with drops, those with the most per second first.
    fn drops(&self) -> Vec<DropRow> {
        let mut devices = self.now.by("forebay_packets_received_total", &["device"]).into_keys();
        let is_one_device = devices.next().is_some() && devices.next().is_none();
        let mut rows = Vec::new();
        for (name, labels, prefix, reason) in DROPS {
            let rates = self.rates(name, labels);
            for (key, total) in self.now.by(name, labels).into_iter().filter(|(_, n)| *n > 0.0) {
                let [named, place @ ..] = key.as_slice() else { continue };
                let place = match place {
                    [_, _] => queue_name(place, is_one_device),
                    [one] => format!("{prefix} {one}"),
                    _ => prefix.to_owned(),
                };
                rows.push(DropRow {
                    place,
                    reason: if reason.is_empty() { named.clone() } else { reason.to_owned() },
                    per_s: rates.get(&key).copied().unwrap_or(0.0),
                    total,
                    since_s: None,
                });
            }
        }
        // The kernel's own names for the drops of a queue take the place of their sum.
        let named = self.now.by("forebay_kernel_drops_total", &["device", "queue"]);
        let named = named.iter().filter(|(_, count)| **count > 0.0);
        let named: Vec<_> = named.map(|(key, _)| queue_name(key, is_one_device)).collect();
        rows.retain(|row| row.reason != KERNEL || !named.contains(&row.place));
        rows.sort_by(|one, other| {
            other.per_s.total_cmp(&one.per_s).then(other.total.total_cmp(&one.total))
        });
        rows
    }

    fn sockets(&self) -> Vec<SocketRow> {
        const SOCKET: &[&str] = &["socket", "local"];
        let queued = self.rates("forebay_socket_datagrams_total", SOCKET);
        let buffer = self.now.by("forebay_socket_receive_buffer_bytes", SOCKET);
        let errors = self.rates(SOCKET_DROPS, SOCKET);
        let errors_total = self.now.by(SOCKET_DROPS, SOCKET);
        let memory = self.now.by("forebay_socket_memory_bytes", SOCKET).into_iter();
        let row = |(key, memory): (Key, f64)| {
            let of = |figures: &BTreeMap<Key, f64>| figures.get(&key).copied().unwrap_or(0.0);
            SocketRow {
                number: key.first().cloned().unwrap_or_default(),
                local: key.last().cloned().unwrap_or_default(),
                queued: of(&queued),
                memory,
                buffer: of(&buffer),
                errors: of(&errors),
                errors_total: of(&errors_total),
            }
        };
        memory.map(row).collect()
    }

    /// Listeners, and then connections; the largest first.
    fn tcp(&self) -> Vec<TcpRow> {
        const LISTENER: &[&str] = &["socket", "local"];
        const ENDS: &[&str] = &["peer", "local"];
        let backlog = self.now.by("forebay_tcp_listener_backlog", LISTENER);
        let waiting = self.now.by("forebay_tcp_listener_waiting_connections", LISTENER);
        let listeners = waiting.into_iter().map(|(key, waiting)| TcpRow {
            state: LISTEN.to_owned(),
            unread: waiting,
            unacknowledged: backlog.get(&key).copied().unwrap_or(0.0),
            name: key.into_iter().next_back().unwrap_or_default(),
            ..TcpRow::default()
        });
        let [received, sent, resent] = ["received_bytes", "sent_bytes", "segments_resent"]
            .map(|of| self.rates(&format!("forebay_tcp_connection_{of}_total"), ENDS));
        let [unread, unacknowledged] = ["unread", "unacknowledged"]
            .map(|of| self.now.by(&format!("forebay_tcp_connection_{of}_bytes"), ENDS));
        let states = self.now.by("forebay_tcp_connection_info", &["peer", "local", "state"]);
        let connection = |key: &Key| {
            let ends = &key[..key.len() - 1];
            let of = |figures: &BTreeMap<Key, f64>| figures.get(ends).copied().unwrap_or(0.0);
            TcpRow {
                name: ends.join(" > "),
                state: key.last().cloned().unwrap_or_default(),
                received: of(&received),
                sent: of(&sent),
                resent: of(&resent),
                unread: of(&unread),
                unacknowledged: of(&unacknowledged),
            }
        };
        let mut connections: Vec<_> = states.keys().map(connection).collect();
        connections.sort_by(|one, other| {
            let rate = |row: &TcpRow| row.received + row.sent;
            rate(other).total_cmp(&rate(one))
        });
        listeners.chain(connections).collect()
    }
}

/// Reasons for which frames were steered to a CPU, and their parts; the largest first.
fn reasons(steered: &BTreeMap<Key, f64>, cpu: &Key) -> Vec<(String, f64)> {
    let own = steered.iter().filter(|(key, _)| key.first() == cpu.first());
    let own: Vec<_> = own.filter(|(_, count)| **count > 0.0).collect();
    let all: f64 = own.iter().map(|(_, count)| **count).sum();
    let part = |(key, count): &(&Key, &f64)| {
        let reason = key.last().cloned().unwrap_or_default();
        (reason, *count / all)
    };
    let mut parts: Vec<_> = own.iter().map(part).collect();
    parts.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    parts
}

/// Order of queues: by device, then by number.
fn queue_order(key: &Key) -> (String, u32) {
    let number = key.last().and_then(|number| number.parse().ok()).unwrap_or(u32::MAX);
    (key.first().cloned().unwrap_or_default(), number)
}

/// Name of a queue as `explain` gives it: with its device if there are several.
fn queue_name(key: &[String], is_one_device: bool) -> String {
    match key {
        [_, queue] if is_one_device => format!("rx-{queue}"),
        [device, queue] => format!("{device}/rx-{queue}"),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests;
