//! Goodput under loss, reordering and queues, in virtual time.

use forebay_stack::tcp::{Algorithm, TcpConfig, TcpOptions, WriteFlags};

use super::course::{CoursePlan, run};
use super::impaired_path::Impairments;
use super::pair::{Faults, Pair};

const CUBIC: &[Algorithm] = &[Algorithm::Cubic];
const SECOND_US: u64 = 1_000_000;

/// A path with a bottleneck of 100 Mbit/s, 10 ms each way, and a queue of one bandwidth-delay product.
const PATH: Impairments = Impairments {
    loss_ppm: 0,
    duplicate_ppm: 0,
    reorder_ppm: 0,
    reorder_us: 0,
    delay_us: 10_000,
    rate_kbps: 100_000,
    queue_bytes: 250_000,
};

fn plan(there: Impairments, flows: &'static [Algorithm]) -> CoursePlan {
    // The way back loses none: a test of its own does.
    let back = Impairments { delay_us: there.delay_us, ..Impairments::default() };
    let config = TcpConfig { gso_bytes: 60_000, ..TcpConfig::default() };
    CoursePlan { seed: 1, there, back, config, flows, lasts_us: 5 * SECOND_US, ack_turn_us: 0 }
}

/// Courses of the tests, with the part of the bottleneck that arrives at least, in percent.
const COURSES: [(&str, Impairments, u64); 10] = [
    ("clean", PATH, 94),
    ("a queue of a tenth", Impairments { queue_bytes: 30_000, ..PATH }, 60),
    ("a queue of ten times", Impairments { queue_bytes: 2_500_000, ..PATH }, 94),
    ("10 Mbit/s", Impairments { rate_kbps: 10_000, queue_bytes: 50_000, ..PATH }, 90),
    (
        "1 Gbit/s",
        Impairments { rate_kbps: 1_000_000, delay_us: 5_000, queue_bytes: 1_250_000, ..PATH },
        88,
    ),
    ("1 % is late by 2 ms", Impairments { reorder_ppm: 10_000, reorder_us: 2_000, ..PATH }, 94),
    ("1 % is late by 8 ms", Impairments { reorder_ppm: 10_000, reorder_us: 8_000, ..PATH }, 85),
    ("half is late by 2 ms", Impairments { reorder_ppm: 500_000, reorder_us: 2_000, ..PATH }, 85),
    ("5 % come twice", Impairments { duplicate_ppm: 50_000, ..PATH }, 94),
    ("1 % lost, near", Impairments { loss_ppm: 10_000, delay_us: 500, ..PATH }, 70),
];

#[test]
fn tcp_24_paths_are_filled() {
    for (name, there, percent) in COURSES {
        let result = run(&plan(there, CUBIC));
        let least_kbps = u64::from(there.rate_kbps) * percent / 100;
        let goodput_kbps = result.goodput_kbps();
        assert!(goodput_kbps >= least_kbps, "{name}: {goodput_kbps} kbit/s, {result:?}");
    }
}

/// Retransmissions are those of lost segments, and an eighth more at most.
#[test]
fn tcp_24_losses_are_sent_again_once() {
    let losses = [1_000, 10_000, 50_000].map(|loss_ppm| Impairments { loss_ppm, ..PATH });
    let losses = losses.map(|there| ("random losses", there, 0));
    for (name, there, _) in COURSES.into_iter().chain(losses) {
        let result = run(&plan(there, CUBIC));
        let lost = result.path.lost + result.path.overflowed;
        let most = lost + lost / 8 + 20;
        assert!(result.retransmitted <= most, "{name}: {result:?}");
        assert!(result.timeouts <= 1, "{name}: {result:?}");
    }
}

/// Window of Reno under random loss, 1.22 / sqrt(p) (RFC 9438, 5.1), of which CUBIC keeps the most.
#[test]
fn tcp_24_random_loss_leaves_its_share() {
    for (loss_ppm, window) in [(1_000, 38), (10_000, 12), (50_000, 5)] {
        let result = run(&plan(Impairments { loss_ppm, ..PATH }, CUBIC));
        let rtt_us = 2 * u64::from(PATH.delay_us);
        let share_kbps = window * 1448 * 8 * 1000 / rtt_us;
        let goodput_kbps = result.goodput_kbps();
        assert!(goodput_kbps * 5 > share_kbps * 4, "{goodput_kbps} of {share_kbps}: {result:?}");
    }
}

#[test]
fn tcp_24_flows_share_a_bottleneck() {
    for flows in [&[Algorithm::Cubic; 4], &[Algorithm::NewReno; 4]] {
        let result = run(&CoursePlan { lasts_us: 10 * SECOND_US, ..plan(PATH, flows) });
        // Jain's index, in percent.
        let (sum, squares) = result
            .bytes
            .iter()
            .map(|&bytes| u128::from(bytes))
            .fold((0, 0), |(sum, squares), bytes| (sum + bytes, squares + bytes * bytes));
        let index = sum * sum * 100 / (squares * result.bytes.len() as u128);
        assert!(index >= 90 && result.goodput_kbps() >= 94_000, "{index} %: {result:?}");
    }
}

/// A window that the peer's window keeps from being used does not grow (RFC 9438, 5.8).
#[test]
fn tcp_24_unused_window_does_not_grow() {
    let mut plan = plan(Impairments { queue_bytes: 2_500_000, ..PATH }, CUBIC);
    plan.config.rmem = (131_072, 131_072);
    let result = run(&plan);
    let info = result.infos[0];
    assert!(info.unsent_bytes > 0 && info.cwnd < 4 * info.unacked, "{result:?}");
}

/// A queue of several round trips is found before it overflows, or soon after.
#[test]
fn tcp_25_slow_start_spares_queues() {
    let there = Impairments { rate_kbps: 10_000, queue_bytes: 100_000, ..PATH };
    let result = run(&CoursePlan { lasts_us: 2 * SECOND_US, ..plan(there, CUBIC) });
    assert!(result.path.overflowed < 40, "{result:?}");
    assert!(result.goodput_kbps() > 9_000, "{result:?}");
}

/// ACKs that come in bunches, over a path with a queue of 2 ms: a bunch lets 33 segments out, of which
/// the queue takes 16. Pacing spreads them.
#[test]
fn tcp_32_bunches_of_acks_make_no_bursts() {
    let there = Impairments { delay_us: 5_000, queue_bytes: 25_000, ..PATH };
    let [burst, paced] = [false, true].map(|pacing| {
        let mut plan = plan(there, CUBIC);
        (plan.config.pacing, plan.ack_turn_us) = (pacing, 4_000);
        run(&plan)
    });
    assert!(paced.goodput_kbps() > 2 * burst.goodput_kbps(), "{paced:?} {burst:?}");
}

/// Slow start, which sends at twice the rate of the path, does not overflow a short queue by bursts.
#[test]
fn tcp_32_short_queues_suffice_when_paced() {
    let there = Impairments { queue_bytes: 30_000, ..PATH };
    let mut plan = plan(there, CUBIC);
    plan.config.pacing = true;
    let result = run(&plan);
    assert!(result.goodput_kbps() >= 80_000, "{result:?}");
}

/// Pacing costs no goodput where queues are deep enough, or round trips short.
#[test]
fn tcp_32_paced_paths_are_filled() {
    for (name, there, percent) in COURSES.into_iter().filter(|course| course.1.reorder_ppm == 0) {
        let mut plan = plan(there, CUBIC);
        plan.config.pacing = true;
        let result = run(&plan);
        let least_kbps = u64::from(there.rate_kbps) * percent / 100;
        let goodput_kbps = result.goodput_kbps();
        assert!(goodput_kbps >= least_kbps, "{name}: {goodput_kbps} kbit/s, {result:?}");
    }
}

/// Small segments that are sent again together are spread by their length, not by that of the first of them.
#[test]
fn tcp_32_merged_segments_are_spread() {
    let faults = Faults { delay_us: 100_000, ..Faults::default() };
    let wmem = (4 << 20, 4 << 20);
    let config = TcpConfig { pacing: true, wmem, ..TcpConfig::default() };
    let mut pair = Pair::new(1, faults, [config; 2]);
    let (client, server) = pair.open(80);
    let options = TcpOptions { nodelay: true, ..TcpOptions::default() };
    pair.call(0, |tcp, out| tcp.set_options(client, options, out)).unwrap();
    let mut room = vec![0; 1 << 20];
    let write = |pair: &mut Pair, len: usize| {
        let flags = WriteFlags::default();
        let written = pair.call(0, |tcp, out| tcp.write(client, &vec![7; len], flags, out));
        assert_eq!(written, Ok(len));
    };
    let mut read_all = |pair: &mut Pair| {
        let (mut largest, mut before) = (0, pair.segments[0]);
        while pair.hosts[0].tcp.info(client).unwrap().unwrap().unacked_bytes > 0 {
            assert!(pair.step());
            // Ignored: mostly there is nothing to read.
            let _ = pair.call(1, |tcp, out| tcp.read(server, &mut room, out));
            largest = largest.max(pair.segments[0] - before);
            before = pair.segments[0];
        }
        largest
    };
    for _ in 0..6 {
        write(&mut pair, 300_000);
        read_all(&mut pair);
    }
    pair.faults.loss = 100;
    (0..400).for_each(|_| write(&mut pair, 100));
    while pair.hosts[0].tcp.counters().timeouts.get() == 0 {
        assert!(pair.step());
    }
    pair.faults.loss = 0;
    let largest = read_all(&mut pair);
    assert!(largest <= 4, "{largest} segments at once");
}

/// Segments that come late by nearly a round trip are sent again for nothing: the peer's D-SACK, which
/// comes when the recovery is over, undoes it, and the next ones are waited for.
#[test]
fn tcp_26_late_segments_cost_no_goodput() {
    let late = Impairments { reorder_ppm: 10_000, reorder_us: 8_000, ..PATH };
    let there = Impairments { delay_us: 5_000, queue_bytes: 125_000, ..late };
    for timestamps in [false, true] {
        for seed in 1..4 {
            let mut plan = plan(there, CUBIC);
            (plan.seed, plan.config.timestamps) = (seed, timestamps);
            let result = run(&plan);
            assert!(result.goodput_kbps() >= 90_000, "seed {seed}: {result:?}");
        }
    }
}

/// A receiver learns the round trip from data, whatever came twice in the handshake: its window grows.
#[test]
fn tcp_33_window_grows_after_duplicate_handshake() {
    let there = Impairments { duplicate_ppm: 1_000_000, ..PATH };
    let result = run(&plan(there, CUBIC));
    assert!(result.goodput_kbps() >= 94_000, "{result:?}");
}
