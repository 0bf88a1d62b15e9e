//! Flows with the most packets, by the last samples of bursts.

use std::collections::{HashMap, VecDeque};

use forebay_control::FlowName;
use forebay_control::top_flows::TopFlow;
use forebay_rx::CpuId;

use super::model::QueueRow;

/// A flow with many packets.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct FlowRow {
    pub(super) name: FlowName,
    /// The hash, as text.
    pub(super) hash: String,
    pub(super) queue: String,
    pub(super) cpu: Option<CpuId>,
    /// Packets per second, estimated.
    pub(super) packets: f64,
    /// Part of all packets, estimated.
    pub(super) share: f64,
}

/// Rows of the flows in these samples, the last of which is the newest; the largest flow first. A
/// flow's part in the sampled bursts of its queue is taken for its part of the queue's packets.
pub(super) fn flow_rows(samples: &VecDeque<Vec<TopFlow>>, queues: &[QueueRow]) -> Vec<FlowRow> {
    let mut sampled: HashMap<&str, u64> = HashMap::new();
    let mut flows: HashMap<(&str, u32), (u64, &TopFlow)> = HashMap::new();
    for sample in samples {
        let of_queues: HashMap<_, _> =
            sample.iter().map(|flow| (flow.queue.as_str(), flow.of_packets)).collect();
        for (queue, packets) in of_queues {
            *sampled.entry(queue).or_default() += packets;
        }
        for flow in sample {
            let known = flows.entry((flow.queue.as_str(), flow.hash.0)).or_insert((0, flow));
            *known = (known.0 + flow.packets, flow);
        }
    }
    let rate = |name: &str| queues.iter().find(|queue| queue.name == name).map(|of| of.received);
    let all: f64 = queues.iter().map(|queue| queue.received).sum();
    let row = |(packets, flow): (u64, &TopFlow)| {
        let of_packets = sampled.get(flow.queue.as_str()).copied().unwrap_or(0);
        let packets = ratio(packets, of_packets) * rate(&flow.queue).unwrap_or(0.0);
        FlowRow {
            name: flow.name,
            hash: FlowName::Hash(flow.hash).to_string(),
            queue: flow.queue.clone(),
            cpu: flow.cpu,
            packets,
            share: if all > 0.0 { packets / all } else { 0.0 },
        }
    };
    let mut rows: Vec<_> = flows.into_values().map(row).collect();
    rows.sort_by(|one, other| {
        other.packets.total_cmp(&one.packets).then_with(|| one.hash.cmp(&other.hash))
    });
    rows
}

#[expect(clippy::cast_precision_loss, reason = "the number of packets in samples is small")]
fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(line: &str) -> TopFlow {
        line.parse().unwrap()
    }

    fn queue(name: &str, received: f64) -> QueueRow {
        QueueRow { name: name.to_owned(), received, ..QueueRow::default() }
    }

    #[test]
    fn top_4_flow_shares_follow_queue_rates() {
        let samples = [
            vec![flow("6 8 rx-0 0a 0 0a"), flow("2 8 rx-0 0b 0 0b"), flow("1 1 rx-1 0c 1 0c")],
            vec![flow("3 4 rx-0 0a 1 0a"), flow("1 4 rx-0 0c - 0c")],
        ];
        let rows = flow_rows(&samples.into(), &[queue("rx-0", 1200.0), queue("rx-1", 400.0)]);
        let told: Vec<_> = rows
            .iter()
            .map(|row| (row.hash.as_str(), row.queue.as_str(), row.cpu, row.packets, row.share))
            .collect();
        let cpu = |number| Some(CpuId(number));
        let expected = [
            ("0000000a", "rx-0", cpu(1), 900.0, 0.5625),
            ("0000000c", "rx-1", cpu(1), 400.0, 0.25),
            ("0000000b", "rx-0", cpu(0), 200.0, 0.125),
            ("0000000c", "rx-0", None, 100.0, 0.0625),
        ];
        assert_eq!(told, expected);
        assert!(flow_rows(&VecDeque::new(), &[]).is_empty());
    }
}
