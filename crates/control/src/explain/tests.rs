use forebay_rx::steer::HeldPackets;
use forebay_rx::{CpuId, RxQueue};

use super::*;

const FLOW: FlowHash = FlowHash(0x0bad_cafe);
const OTHER: FlowHash = FlowHash(0x0bad_cafd);

/// Flow that is on CPU 3, its desired CPU.
fn settled() -> FlowState {
    FlowState {
        slot: Some(186),
        slots: 4096,
        cpu: Some(CpuId(3)),
        is_fenced: false,
        desired: (CpuId(3), SteerReason::Rps),
        ahead: 0,
        stayed: None,
        held: None,
        last_flow: FLOW,
        watched_since_ns: None,
        sharers: Vec::new(),
        rule: None,
        moves: Vec::new(),
    }
}

#[test]
fn flk_7_rule_of_a_flow_in_words() {
    for (flow, rules, words) in [
        ("udp 10.0.0.1:5000 > 10.0.0.2:443", "auto", "outer, or inner in a tunnel (flow_key=auto)"),
        (
            "tcp 10.0.0.1:5000 > 10.0.0.2:443",
            "quic:443:8",
            "outer, or inner in a tunnel (flow_key=auto,quic:443:8)",
        ),
        (
            "udp 10.0.0.1:5000 > 10.0.0.2:443",
            "quic:443:8",
            "outer, or inner in a tunnel (flow_key=auto,quic:443:8); QUIC's short headers go by connection ID instead",
        ),
        (
            "udp 10.0.0.1:5000 > 10.0.0.2:4789",
            "inner",
            "outer, or inner in a tunnel (flow_key=inner); packets in the tunnel go by their inner header instead",
        ),
        ("udp 10.0.0.1:5000 > 10.0.0.2:443", "outer", "outer (flow_key=outer)"),
        ("10.0.0.1 > 10.0.0.2", "outer", "addresses (flow_key=outer)"),
        ("esp 10.0.0.1 > 10.0.0.2", "outer", "addresses (flow_key=outer)"),
        ("sctp 10.0.0.1 > 10.0.0.2", "auto", "addresses (flow_key=auto)"),
        (
            "esp 10.0.0.1 > 10.0.0.2",
            "auto",
            "addresses (flow_key=auto); packets with an SPI go by addresses and SPI instead",
        ),
        (
            "gre ::1 > ::2",
            "inner",
            "addresses (flow_key=inner); packets in the tunnel go by their inner header instead",
        ),
        (
            "icmp6 ::1 > ::2",
            "auto",
            "addresses (flow_key=auto); errors go by the flow that they quote instead",
        ),
        ("0badcafe", "auto", "given by its hash (flow_key=auto)"),
    ] {
        let explanation = Explanation {
            name: flow.parse().unwrap(),
            hash: FLOW,
            flow_key: rules.parse().unwrap(),
            queues: Vec::new(),
            connections: Vec::new(),
        };
        assert_eq!(explanation.key(), words, "{flow}");
        let document = explanation.document();
        let rules = ["rule", "rule_in_tunnel"].map(|name| document[name].as_str());
        let expected = match words.split([',', ' ']).next() {
            Some("given") => [None; 2],
            rule => [rule, words.contains("or inner in a tunnel").then_some("inner")],
        };
        assert_eq!(rules, expected, "{flow}");
    }
}

/// Flow outside a tunnel on one queue, and with the same addresses and ports inside one on the other.
#[test]
fn flk_7_latest_rule_of_all_queues() {
    let told = |index: u16, rule| Explained {
        queue: RxQueue(index),
        name: format!("rx-{index}"),
        polling_cpu: CpuId(0),
        at_ns: 100,
        state: FlowState { rule, ..settled() },
        drops: Vec::new(),
    };
    let (outer, inner) = (KeyRule::Outer, KeyRule::Inner);
    for (rules, expected) in [
        ([Some((outer, 10)), Some((inner, 20))], inner),
        ([Some((outer, 20)), Some((inner, 10))], outer),
        ([None, Some((inner, 10))], inner),
        ([Some((inner, 0)), None], inner),
    ] {
        let explanation = Explanation {
            name: "udp 10.0.0.1:5000 > 10.0.0.2:443".parse().unwrap(),
            hash: FLOW,
            flow_key: FlowKeyRules::default(),
            queues: (0..).zip(rules).map(|(index, rule)| told(index, rule)).collect(),
            connections: Vec::new(),
        };
        assert_eq!(explanation.rule(), Some(expected), "{rules:?}");
    }
}

#[test]
fn flow_location_in_words() {
    let wanted = FlowState { desired: (CpuId(1), SteerReason::Rfs), ..settled() };
    let held_for = |cpu| HeldPackets { packets: 1, since_ns: 1_000, to: CpuId(cpu) };
    let behind = FlowState { ahead: 37, ..wanted.clone() };
    for (state, words) in [
        (settled(), ["on CPU 3: its last packet", "to CPU 3, since the RPS map says so (rps)"]),
        (FlowState { last_flow: OTHER, ..settled() }, ["which was of 0badcafd", "to CPU 3, since"]),
        (FlowState { cpu: None, ..settled() }, ["nowhere: no packet", "to CPU 3, since"]),
        (
            wanted,
            ["on CPU 3", "to CPU 1, since its application runs there (rfs); at once, for CPU 3"],
        ),
        (
            behind.clone(),
            ["on CPU 3", "once CPU 3 has processed 37 packets up to the slot's last one"],
        ),
        (
            FlowState { stayed: Some((5, 1_000)), ..behind.clone() },
            ["on CPU 3", "or is held; 5 packets did so in 1.0 ms"],
        ),
        (
            FlowState { held: Some(held_for(1)), ..behind.clone() },
            ["on CPU 3", "behind 1 packet held for 1.0 ms, until CPU 3 has processed 37"],
        ),
        (
            FlowState { held: Some(held_for(2)), ..behind },
            ["on CPU 3", "behind 1 packet held for CPU 2 for 1.0 ms, until CPU 3 has"],
        ),
        (
            FlowState { cpu: None, is_fenced: true, ..settled() },
            ["unknown: the table was replaced", "it waits until every CPU has processed"],
        ),
    ] {
        let told = [now(&state, FLOW), next(&state, 1_001_000)];
        for (told, words) in told.iter().zip(words) {
            assert!(told.contains(words), "{words:?} is not in {told:?}");
        }
    }
}

#[test]
fn slot_explanation_has_hashes_and_sharers() {
    let range = "186 of 4096, for the hashes 0ba00000 to 0bafffff; ";
    let watched = FlowState { watched_since_ns: Some(0), sharers: vec![FLOW], ..settled() };
    let crowd = (1..16).map(FlowHash).chain([FLOW]).collect();
    for (state, words) in [
        (settled(), format!("{range}flows that share it are recorded from now on")),
        (watched.clone(), format!("{range}shared with nobody in 2.0 s of watching")),
        (
            FlowState { sharers: vec![FLOW, OTHER], ..watched.clone() },
            format!("{range}shared with 0badcafd in 2.0 s of watching"),
        ),
        (FlowState { sharers: crowd, ..watched }, "and maybe others in 2.0 s".to_owned()),
        (FlowState { slot: None, ..settled() }, "none: it has no hash".to_owned()),
    ] {
        let told = slot(&state, 2_000_000_000, FLOW);
        assert!(told.contains(&words), "{words:?} is not in {told:?}");
    }
    assert_eq!(hashes(0, 2).map(hex), ["00000000", "7fffffff"]);
    assert_eq!(hashes(4095, 4096).map(hex), ["fff00000", "ffffffff"]);
}

#[test]
fn drops_have_name_and_reason() {
    let drops = Drops {
        flow: FLOW,
        reason: DropReason::BacklogFull,
        cpu: Some(CpuId(2)),
        frames: 1,
        last_ns: 1_234_567_890,
    };
    assert_eq!(
        how_it_dropped(&drops),
        "at least 1 frame for CPU 2, backlog_full: the backlog was at netdev_max_backlog; the \
         last at 1.234567 s"
    );
}
