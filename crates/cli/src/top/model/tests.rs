//! Rates of made-up samples.

use std::ops::Range;
use std::sync::OnceLock;

use forebay_metrics::{CONNECTIONS_LISTED_MAX, SOCKETS_LISTED_MAX};

use super::super::sample::Masks;
use super::*;

/// Answer to `get rps_cpus` of all runs here, in the order of the queues of each.
const MASKS: [&str; 6] = [
    "rx-0/rps_cpus 3",
    "rx-9/rps_cpus 5",
    "rx-10/rps_cpus 2",
    "eth2/rx-0/rps_cpus 3",
    "eth2/rx-1/rps_cpus 1",
    "eth10/rx-0/rps_cpus 2",
];

/// Time in seconds after the first call.
fn at_second(seconds: u64) -> Instant {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    *FIRST.get_or_init(Instant::now) + Duration::from_secs(seconds)
}

fn sample(at: Instant, text: &str) -> Sample {
    Sample::read(at, &text.lines().collect::<Vec<_>>(), Masks::read(&MASKS))
}

fn model(before: &str, now: &str) -> Model {
    let at = Instant::now();
    let mut history = History::default();
    assert_eq!(history.model(sample(at, before)), None, "one sample has no rates");
    history.model(sample(at + Duration::from_secs(2), now)).unwrap()
}

#[test]
fn top_1_rates_are_growth_per_second() {
    let text = |packets: u32, busy: f64, held: u32, rps: u32| {
        format!(
            "forebay_packets_received_total{{device=\"eth1\",queue=\"0\"}} {packets}\n\
             forebay_received_bytes_total{{device=\"eth1\",queue=\"0\"}} {}\n\
             forebay_flow_moves_total{{device=\"eth1\",queue=\"0\"}} {held}\n\
             forebay_flow_hold_seconds_sum{{device=\"eth1\",queue=\"0\"}} {}\n\
             forebay_flow_hold_seconds_count{{device=\"eth1\",queue=\"0\"}} {held}\n\
             forebay_polling_cpu{{device=\"eth1\",queue=\"0\"}} 1\n\
             forebay_cpu_online{{cpu=\"10\"}} 0\nforebay_cpu_online{{cpu=\"9\"}} 1\n\
             forebay_cpu_busy_seconds_total{{cpu=\"9\"}} {busy}\n\
             forebay_packets_delivered_total{{cpu=\"9\"}} {packets}\n\
             forebay_packets_steered_total{{cpu=\"9\",reason=\"rps\"}} {rps}\n\
             forebay_packets_steered_total{{cpu=\"9\",reason=\"held\"}} {held}\n\
             forebay_packets_steered_total{{cpu=\"9\",reason=\"rfs\"}} 5\n\
             forebay_backlog_packets{{cpu=\"9\"}} 7\n",
            packets * 60,
            f64::from(held) * 0.002,
        )
    };
    let model = model(&text(100, 1.0, 10, 50), &text(1100, 2.5, 20, 80));
    let totals = &model.totals;
    assert_eq!([totals.received, totals.received_bytes, totals.delivered], [500.0, 30e3, 500.0]);
    assert_eq!([totals.moves, totals.backlog, totals.dropped], [5.0, 7.0, 0.0]);
    assert!((totals.hold_s.unwrap() - 0.002).abs() < 1e-9);
    assert_eq!((totals.sent, totals.merged), (None, None));
    let [nine, ten] = model.cpus.as_slice() else { panic!("{:?}", model.cpus) };
    assert_eq!((nine.cpu, nine.is_online, nine.busy, nine.share), (9, true, 0.75, 1.0));
    assert_eq!(nine.reasons, [("rps".to_owned(), 0.75), ("held".to_owned(), 0.25)]);
    assert_eq!((ten.cpu, ten.is_online, ten.busy, ten.wait_s), (10, false, 0.0, None));
    let [queue] = model.queues.as_slice() else { panic!("{:?}", model.queues) };
    assert_eq!((queue.name.as_str(), queue.mask.as_str(), queue.polling_cpu), ("rx-0", "3", 1.0));
    assert_eq!(model.sockets, []);
}

#[test]
fn top_1_queues_are_named_as_explain_does() {
    let of = |queues: &[(&str, u32)]| {
        let lines = queues.iter().map(|(device, queue)| {
            format!("forebay_packets_received_total{{device=\"{device}\",queue=\"{queue}\"}} 1\n")
        });
        let text: String = lines.collect();
        let model = model(&text, &text);
        model.queues.into_iter().map(|row| format!("{} {}", row.name, row.mask)).collect::<Vec<_>>()
    };
    assert_eq!(of(&[("eth1", 10), ("eth1", 9)]), ["rx-9 5", "rx-10 2"]);
    let several = [("eth2", 0), ("eth2", 1), ("eth10", 0)];
    assert_eq!(of(&several), ["eth10/rx-0 2", "eth2/rx-0 3", "eth2/rx-1 1"]);
}

#[test]
fn top_1_drops_have_place_reason_and_time() {
    let text = |full: u32, named: u32| {
        format!(
            "forebay_packets_received_total{{device=\"eth1\",queue=\"0\"}} 1\n\
             forebay_packets_dropped_total{{device=\"eth1\",queue=\"0\",reason=\"backlog_full\"}} {full}\n\
             forebay_packets_dropped_total{{device=\"eth1\",queue=\"0\",reason=\"no_buffer\"}} 0\n\
             forebay_packets_kernel_dropped_total{{device=\"eth1\",queue=\"0\"}} 3\n\
             forebay_kernel_drops_total{{device=\"eth1\",queue=\"0\",name=\"rx_ring_full\"}} {named}\n\
             forebay_packets_lost_total{{cpu=\"1\",reason=\"cpu_lost\"}} 2\n\
             forebay_packets_unsent_total{{to=\"tun:t0\",reason=\"not_sent\"}} 4\n\
             forebay_network_drops_total{{reason=\"no_socket\"}} 1\n\
             forebay_socket_receive_buffer_errors_total{{socket=\"0\",local=\"10.0.0.1:53\"}} 1\n"
        )
    };
    let at = Instant::now();
    let later = |seconds| at + Duration::from_secs(seconds);
    let mut history = History::default();
    history.model(sample(at, &text(10, 3)));
    let rows = |model: &Model| {
        let rows = model.drops.iter();
        rows.map(|row| (format!("{} {}", row.place, row.reason), row.per_s, row.total))
            .collect::<Vec<_>>()
    };
    let model = history.model(sample(later(2), &text(30, 3))).unwrap();
    let expected = [
        ("rx-0 backlog_full", 10.0, 30.0),
        ("to tun:t0 not_sent", 0.0, 4.0),
        ("rx-0 rx_ring_full", 0.0, 3.0),
        ("CPU 1 cpu_lost", 0.0, 2.0),
        ("network no_socket", 0.0, 1.0),
        ("socket 10.0.0.1:53 rcvbuf_errors", 0.0, 1.0),
    ];
    assert_eq!(rows(&model), expected.map(|(name, rate, total)| (name.to_owned(), rate, total)));
    assert_eq!((model.totals.dropped, model.totals.dropped_total), (10.0, 40.0));
    assert_eq!([model.drops[0].since_s, model.drops[1].since_s], [Some(0.0), None]);
    let model = history.model(sample(later(5), &text(30, 3))).unwrap();
    assert_eq!([model.drops[0].per_s, model.totals.dropped], [0.0, 0.0]);
    assert_eq!(model.drops[0].since_s, Some(3.0));
}

/// A datagram that a socket refuses is one drop, and the socket's counter goes with the socket.
#[test]
fn top_1_socket_drops_count_once() {
    let network =
        |count: u32| format!("forebay_network_drops_total{{reason=\"socket_rcvbuff\"}} {count}\n");
    let socket = |count: u32| {
        let labels = "{socket=\"0\",local=\"10.0.0.1:53\"}";
        format!("forebay_socket_receive_buffer_errors_total{labels} {count}\n")
    };
    let both = |count: u32| network(count) + &socket(count);
    let sums = |model: Model| (model.totals.dropped, model.totals.dropped_total);
    assert_eq!(sums(model(&both(10), &both(30))), (10.0, 30.0));
    assert_eq!(sums(model(&both(10), &network(30))), (10.0, 30.0), "closed");
    assert_eq!(sums(model(&socket(10), &socket(30))), (10.0, 30.0), "sockets of another network");
}

#[test]
fn top_1_tcp_rows_are_listeners_then_fastest() {
    let connection = |port: u16, state: &str, sent: u32| {
        let ends = format!("local=\"10.0.0.1:80\",peer=\"10.0.0.2:{port}\"");
        format!(
            "forebay_tcp_connection_info{{{ends},state=\"{state}\"}} 1\n\
             forebay_tcp_connection_sent_bytes_total{{{ends}}} {sent}\n\
             forebay_tcp_connection_received_bytes_total{{{ends}}} 10\n\
             forebay_tcp_connection_segments_resent_total{{{ends}}} 4\n\
             forebay_tcp_connection_unread_bytes{{{ends}}} 5\n\
             forebay_tcp_connection_unacknowledged_bytes{{{ends}}} 6\n"
        )
    };
    let text = |sent: u32| {
        let listener = "{socket=\"3\",local=\"10.0.0.1:80\"}";
        format!(
            "forebay_tcp_listener_waiting_connections{listener} 2\n\
             forebay_tcp_listener_backlog{listener} 128\n{}{}",
            connection(1, "CLOSE-WAIT", 100),
            connection(2, "ESTAB", sent),
        )
    };
    let model = model(&text(100), &text(500));
    let [listener, fast, slow] = model.tcp.as_slice() else { panic!("{:?}", model.tcp) };
    assert_eq!((&*listener.name, &*listener.state), ("10.0.0.1:80", "LISTEN"));
    assert_eq!((listener.unread, listener.unacknowledged), (2.0, 128.0));
    assert_eq!((&*fast.name, &*fast.state), ("10.0.0.2:2 > 10.0.0.1:80", "ESTAB"));
    assert_eq!([fast.sent, fast.received, fast.resent], [200.0, 0.0, 0.0]);
    assert_eq!((fast.unread, fast.unacknowledged), (5.0, 6.0));
    assert_eq!((&*slow.state, slow.sent), ("CLOSE-WAIT", 0.0));
}

/// The bytes that a connection had before it came among the largest are no rate, nor are the drops of
/// a socket that moved up in the list.
#[test]
fn top_1_newly_listed_things_have_no_rate() {
    let connections = |ports: Range<usize>, sent: u32| {
        let line = |port| {
            let ends = format!("{{local=\"10.0.0.1:80\",peer=\"10.0.0.2:{port}\"}}");
            format!(
                "forebay_tcp_connection_info{ends} 1\n\
                 forebay_tcp_connection_sent_bytes_total{ends} {sent}\n\
                 forebay_tcp_connection_segments_resent_total{ends} {sent}\n"
            )
        };
        ports.map(line).collect::<String>()
    };
    let full = connections(0..CONNECTIONS_LISTED_MAX, 1_000);
    let fastest = |before: &str, now: &str| {
        let row = model(before, now).tcp.swap_remove(0);
        (row.sent, row.resent)
    };
    let entered = connections(1..CONNECTIONS_LISTED_MAX + 1, 1_000);
    assert_eq!(fastest(&full, &entered), (0.0, 0.0));
    let few = connections(0..1, 1_000);
    assert_eq!(fastest(&few, &connections(0..2, 1_000)), (500.0, 500.0), "new in a whole list");
    let sockets = |numbers: Range<usize>| {
        let line = |number| {
            let labels = format!("{{socket=\"{number}\",local=\"10.0.0.1:53\"}}");
            format!("forebay_socket_receive_buffer_errors_total{labels} 70\n")
        };
        numbers.map(line).collect::<String>()
    };
    let model = model(&sockets(0..SOCKETS_LISTED_MAX), &sockets(1..SOCKETS_LISTED_MAX + 1));
    assert_eq!((model.totals.dropped, model.drops[0].per_s), (0.0, 0.0));
}

/// Flows and drops of a run are not summed with those of the next one at its socket.
#[test]
fn top_1_other_connection_begins_anew() {
    let of_run = |connection, seconds, drops: u32, flow: &str| {
        let text = format!(
            "forebay_packets_received_total{{device=\"eth1\",queue=\"0\"}} {drops}\n\
             forebay_packets_dropped_total{{device=\"eth1\",queue=\"0\",reason=\"backlog_full\"}} {drops}\n"
        );
        let mut sample = sample(at_second(seconds), &text);
        sample.flows = vec![flow.parse().unwrap()];
        sample.connection = connection;
        sample
    };
    let (old, new) = ("1 1 rx-0 0a 0 0a", "1 1 rx-0 0b 0 0b");
    let mut history = History::default();
    history.model(of_run(1, 0, 10, old));
    let model = history.model(of_run(1, 1, 20, old)).unwrap();
    assert_eq!((model.flows.len(), model.drops[0].since_s), (1, Some(0.0)));
    assert_eq!(history.model(of_run(2, 2, 1_000, new)), None, "another run");
    let model = history.model(of_run(2, 3, 1_000, new)).unwrap();
    let flows: Vec<_> = model.flows.iter().map(|flow| flow.hash.as_str()).collect();
    assert_eq!((flows, model.drops[0].since_s), (vec!["0000000b"], None));
    history.pause();
    history.model(of_run(2, 60, 1_001, old));
    let model = history.model(of_run(2, 61, 1_001, old)).unwrap();
    let flows: Vec<_> = model.flows.iter().map(|flow| flow.hash.as_str()).collect();
    assert_eq!(flows, ["0000000a"], "those before a pause are old");
}

#[test]
fn top_1_absent_counters_are_zero() {
    let Totals { received, dropped_total, backlog, moves, .. } = model("", "").totals;
    for absent in [received, dropped_total, backlog, moves] {
        assert_eq!(absent.to_string(), "0");
    }
}

#[test]
fn top_1_smaller_counters_begin_new_run() {
    let text = |count: u32| {
        format!("forebay_packets_received_total{{device=\"a\",queue=\"0\"}} {count}\n")
    };
    assert_eq!(model(&text(100), &text(20)).totals.received, 0.0);
    let mut history = History::default();
    history.model(sample(Instant::now(), &text(1)));
    history.pause();
    assert_eq!(history.model(sample(Instant::now(), &text(2))), None);
}
