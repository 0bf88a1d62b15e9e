//! Counters of a run, as the page reads them.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use forebay::net::Net;
use forebay::net::counters::NetworkDrop;
use forebay_engine::EngineState;
use forebay_rx::counters::{DeliveryCounters, Histogram, IntakeCounters};
use forebay_rx::sink::SendDrop;
use forebay_rx::{CpuId, DropReason, RxQueue, SteerReason};
use serde_json::{Value, json};

use crate::metrics::{CountedSocket, Metrics};
use crate::sockets::neighbour_drops;
use crate::tcp::CONNECTIONS_LISTED_MAX;

/// Upper bound of the sockets in a document.
const SOCKETS_SHOWN_MAX: usize = 50;

/// Document with the counters of all parts, and with the peers of connections if `shows_peers`. Related numbers may be a moment apart.
pub(crate) fn state(metrics: &Metrics, shows_peers: bool) -> Value {
    let mut document = json!({ "version": env!("CARGO_PKG_VERSION") });
    if let Some(control) = &metrics.control {
        let shared = control.state();
        // CPUs first, so that no more frames are delivered than were received.
        document["at_ns"] = shared.now_ns().into();
        document["cpus"] = cpus(shared).into();
        document["queues"] = queues(shared).into();
    }
    let devices = metrics.devices.iter();
    let devices = devices.map(|of| json!({ "name": of.name, "via": of.via.name() }));
    document["devices"] = devices.collect();
    let mut drops = drops(metrics);
    if let Some(counts) = &metrics.sockets {
        let mut busiest = BusiestSockets::default();
        counts(&mut |socket| busiest.add(socket));
        if metrics.net.is_none() {
            // Drops of the network layer have them, too, and those of closed sockets.
            drops.insert("socket_receive_buffer".to_owned(), busiest.errors);
        }
        document["sockets"] = busiest.shown();
    }
    if let Some(net) = &metrics.net {
        document["tcp"] = tcp(net, shows_peers);
    }
    drops.retain(|_, count| *count > 0);
    document["drops"] = json!(drops);
    document
}

/// Drops of all parts by name, those of sockets excepted.
fn drops(metrics: &Metrics) -> BTreeMap<String, u64> {
    let mut drops = BTreeMap::new();
    if let Some(control) = &metrics.control {
        add_engine_drops(control.state(), &mut drops);
    }
    add_other_drops(metrics, &mut drops);
    drops
}

/// Numbers of TCP connections by state, listeners, and, with their peers, the connections with the most
/// bytes.
fn tcp(net: &Net, shows_peers: bool) -> Value {
    let states = net.tcp_states().into_iter().filter(|(_, count)| *count > 0);
    let listeners = net.tcp_listeners(SOCKETS_SHOWN_MAX).into_iter().map(|of| {
        json!({
            "local": of.local.to_string(),
            "waiting": of.queues.waiting(),
            "backlog": of.backlog,
        })
    });
    let most = if shows_peers { CONNECTIONS_LISTED_MAX } else { 0 };
    let connections = net.tcp_connections(most).into_iter().map(|(flow, of)| {
        json!({
            "local": flow.ours.to_string(),
            "peer": flow.theirs.to_string(),
            "state": of.state.name(),
            "sent": of.tally.bytes_sent,
            "received": of.tally.bytes_received,
            "resent": of.resent.total(),
            "unread": of.unread_bytes,
            "unacknowledged": of.unsent_bytes.saturating_add(of.unacked_bytes),
        })
    });
    json!({
        "states": states.collect::<BTreeMap<_, _>>(),
        "listeners": listeners.collect::<Vec<_>>(),
        "connections": connections.collect::<Vec<_>>(),
    })
}

/// Number of sockets, and those with the most datagrams.
#[derive(Default)]
struct BusiestSockets {
    bound: u64,
    errors: u64,
    /// Sockets that may be shown.
    most: Vec<CountedSocket>,
}

impl BusiestSockets {
    fn add(&mut self, socket: CountedSocket) {
        self.bound += 1;
        self.errors += socket.2.rcvbuf_errors;
        self.most.push(socket);
        // As many again wait to be sorted, so that each socket costs little.
        if self.most.len() == 2 * SOCKETS_SHOWN_MAX {
            self.sort();
        }
    }

    fn sort(&mut self) {
        self.most.sort_by_key(|(number, _, counts)| (Reverse(counts.queued), *number));
        self.most.truncate(SOCKETS_SHOWN_MAX);
    }

    fn shown(mut self) -> Value {
        self.sort();
        let shown = self.most.iter().map(|(number, local, counts)| {
            json!({
                "socket": number,
                "local": local.to_string(),
                "datagrams": counts.queued,
                "memory": counts.rmem,
                "buffer": counts.rcvbuf,
                "errors": counts.rcvbuf_errors,
            })
        });
        json!({ "bound": self.bound, "shown": shown.collect::<Vec<_>>() })
    }
}

fn cpus(shared: &EngineState) -> Vec<Value> {
    let Some(counters) = shared.counters() else { return Vec::new() };
    let running = shared.settings().cpus;
    let cpus = (0..).zip(shared.cpus().cpus()).zip(&counters.cpus);
    let cpus = cpus.map(|((index, &cpu), delivery)| {
        let delivery: &DeliveryCounters = delivery;
        // Dequeued frames are read first, so that they are never more than the enqueued ones.
        let (packets, lost) = (delivery.frames.get(), delivery.lost.get());
        let targets = || counters.queues.iter().filter_map(|queue| queue.per_cpu.get(cpu.index()));
        let enqueued: u64 = targets().map(|target| target.enqueued()).sum();
        let reasons = SteerReason::ALL.into_iter().map(|reason| {
            (reason.name(), targets().map(|target| target.enqueued_for(reason)).sum::<u64>())
        });
        json!({
            "cpu": cpu.0,
            "online": running.contains(cpu),
            "busy_ns": shared.busy_ns(index),
            "packets": packets,
            "bytes": delivery.bytes.get(),
            "lost": lost,
            "queued": enqueued.saturating_sub(packets + lost),
            "backlog_max": delivery.backlog_max.get(),
            "wakeups": shared.cpu_waker(index).wakeups(),
            "waits": count_of(&delivery.wait_ns),
            "waits_ns": delivery.wait_ns.sum(),
            "reasons": reasons.filter(|(_, count)| *count > 0).collect::<BTreeMap<_, _>>(),
        })
    });
    cpus.collect()
}

fn queues(shared: &EngineState) -> Vec<Value> {
    let Some(counters) = shared.counters() else { return Vec::new() };
    let queues = (0..).map(RxQueue).zip(&counters.queues).map(|(queue, counted)| {
        let counted: &IntakeCounters = counted;
        json!({
            "queue": shared.devices().name_of(queue),
            "polling_cpu": shared.polls(queue.0).map(|CpuId(cpu)| cpu),
            "packets": counted.frames.get(),
            "bytes": counted.bytes.get(),
            "dropped": counted.dropped(),
            "kernel_dropped": counted.kernel_dropped.get(),
            "moves": counted.moves.get(),
            "stays": counted.stays.get(),
            "holds": counted.holds.get(),
            "held_max_ns": counted.held_max_ns.get(),
            "active_cpus": counted.active_cpus.get(),
        })
    });
    queues.collect()
}

fn add_engine_drops(shared: &EngineState, drops: &mut BTreeMap<String, u64>) {
    let Some(counters) = shared.counters() else { return };
    for reason in DropReason::ALL {
        let counted = counters.queues.iter().map(|queue| queue.drops[reason.index()].get());
        *drops.entry(reason.name().to_owned()).or_default() += counted.sum::<u64>();
    }
    let lost: u64 = counters.cpus.iter().map(|cpu| cpu.lost.get()).sum();
    *drops.entry(DropReason::CpuLost.name().to_owned()).or_default() += lost;
    let kernel: u64 = counters.queues.iter().map(|queue| queue.kernel_dropped.get()).sum();
    drops.insert("before this program, by the kernel".to_owned(), kernel);
}

/// Adds drops after delivery: of the network layer and of destinations.
fn add_other_drops(metrics: &Metrics, drops: &mut BTreeMap<String, u64>) {
    if let Some(net) = &metrics.net {
        for reason in NetworkDrop::ALL {
            let counted = net.counters().iter().map(|counters| counters.drops.get(reason));
            *drops.entry(reason.name().to_owned()).or_default() += counted.sum::<u64>();
        }
        for (reason, count) in neighbour_drops(net) {
            *drops.entry(reason.to_owned()).or_default() += count;
        }
    }
    for (to, sinks) in &metrics.sinks {
        for reason in SendDrop::ALL {
            let count = sinks.iter().map(|sink| sink.dropped(reason)).sum();
            drops.insert(format!("{} to {to}", reason.name()), count);
        }
    }
}

fn count_of(histogram: &Histogram) -> u64 {
    histogram.buckets().map(|(_, count)| count).sum()
}

#[cfg(test)]
mod tests {
    use forebay::net::NetConfig;
    use forebay::{Config, CpuList};

    use super::*;
    use crate::format::TextFormat;

    /// Metrics of all parts that drop packets.
    fn dropping() -> Metrics {
        let config = Config { cpus: CpuList::new([CpuId(0)]), ..Config::live() };
        let (net, engine) = Net::over(&config, &NetConfig::default(), &mut []).unwrap();
        let metrics = Metrics::new().with_engine(engine.control()).with_sockets(net);
        metrics.with_sinks("dev:tap7", vec![std::sync::Arc::default()])
    }

    #[test]
    fn pag_2_drops_have_reasons_of_metrics() {
        let metrics = dropping();
        let text = metrics.text(TextFormat::OpenMetrics);
        let counts_drops =
            |line: &&str| ["drop", "lost", "unsent"].iter().any(|word| line.contains(word));
        let samples = text.lines().filter(|line| !line.starts_with('#')).filter(counts_drops);
        let reasons =
            samples.filter_map(|line| Some(line.split_once("reason=\"")?.1.split_once('"')?.0));
        let reasons: Vec<_> = reasons.collect();
        assert!(reasons.len() > DropReason::ALL.len() + NetworkDrop::ALL.len(), "{reasons:?}");
        let drops = drops(&metrics);
        for reason in reasons {
            let of_sink = format!("{reason} to dev:tap7");
            assert!(drops.contains_key(reason) || drops.contains_key(&of_sink), "{reason}");
        }
    }
}
