//! Captures of merged packets: written as whole packets, or as the frames they were merged from.

use std::collections::BTreeMap;
use std::time::Duration;

use forebay_rx::parse::{Checksum, Headers, Link, Network, Verify, View, parse};

use super::*;
use crate::coalescing::streams::Stream;

fn headers(frame: &[u8]) -> Headers {
    parse(frame, u32::try_from(frame.len()).unwrap(), Link::Ethernet, Verify::Checksums)
}

/// A frame of a capture, with its timestamp.
type Recorded = (Duration, Vec<u8>);

/// Key of a flow: true if IPv4; the protocol; the ports.
type Flow = (bool, Option<u8>, Option<(u16, u16)>);

/// Frames of each flow, in their order.
fn by_flow(frames: impl IntoIterator<Item = Recorded>) -> BTreeMap<Flow, Vec<Recorded>> {
    let mut flows: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (time, frame) in frames {
        let headers = headers(&frame);
        let view = View::new(&frame, &headers);
        let key = (headers.network == Network::Ipv4, view.protocol(), view.ports());
        flows.entry(key).or_default().push((time, frame));
    }
    flows
}

/// All frames that the CPUs of a run wrote.
fn written(name: &str, mut plan: ReplayConfig, resegment: bool) -> (ReplayReport, Vec<Recorded>) {
    let directory = crate::replays::directory(name);
    (plan.write_pcap, plan.resegment) = (Some(directory.clone()), resegment);
    let report = run(plan);
    let files = (0..4).map(|cpu| directory.join(format!("cpu{cpu}.pcap")));
    let frames = files.filter(|file| file.exists()).flat_map(|file| streams::read(&file));
    (report, frames.collect())
}

fn capture(name: &str, frames: &[Vec<u8>]) -> std::path::PathBuf {
    let file = crate::replays::directory(name).join("in.pcap");
    streams::write(&file, frames);
    file
}

#[test]
fn promise_6_resegmented_captures_keep_flows() {
    let file = capture("resegment-in", &streams::mixed(STREAM_FRAMES, 9));
    let sent = by_flow(streams::read(&file));
    for at in ENDS {
        for cpus in [1, 3] {
            let plan = coalescing(at, streams_on(cpus, &file, Rate::Max, 2));
            let (report, frames) = written("resegment", plan, true);
            assert!(
                report.path.lro.packets_out < report.path.packets_in / 2,
                "{:?}",
                report.path.lro
            );
            assert!(by_flow(frames) == sent, "{at:?} on {cpus} CPUs");
        }
    }
}

#[test]
fn promise_6_merged_packet_written_with_right_checksums() {
    let file = capture("whole-in", &streams::mixed(STREAM_FRAMES, 10));
    let payloads = |frames: Vec<Recorded>| -> BTreeMap<_, Vec<u8>> {
        let payload = |(_, frame): &Recorded| View::new(frame, &headers(frame)).payload().to_vec();
        let flows = by_flow(frames).into_iter();
        flows.map(|(flow, frames)| (flow, frames.iter().flat_map(payload).collect())).collect()
    };
    let sent = payloads(streams::read(&file));
    for at in ENDS {
        let plan = coalescing(at, streams_on(3, &file, Rate::Max, 2));
        let (report, frames) = written("whole", plan, false);
        assert_eq!(frames.len() as u64, report.path.lro.packets_out);
        for (_, frame) in &frames {
            let headers = headers(frame);
            assert_eq!((headers.flaw, headers.l4_checksum), (None, Checksum::Good));
            assert_ne!(headers.ip_checksum, Checksum::Bad);
        }
        assert!(payloads(frames) == sent, "{at:?}");
    }
}

/// Segments of one byte are padded to 60 bytes; two of them, merged and with a VLAN tag, have the
/// same length, and look like a frame that was received so.
#[test]
fn promise_6_written_packets_are_not_remerged() {
    let mut stream = Stream::new(0);
    let frames: Vec<_> = [2, 1, 1, 1, 2].map(|len| stream.next(len, false)).into();
    assert!(frames.iter().all(|frame| frame.len() == 60));
    let file = capture("again-in", &frames);
    let mut plan = coalescing(CoalesceAt::Arrive, streams_on(1, &file, Rate::Max, 1));
    plan.engine.script =
        script(&["0:pause=0", "1:coalesce=off", "1:coalesce=gro", "3:coalesce_at=deliver"]);
    let (report, resegmented) = written("again", plan, true);
    assert_eq!(report.path.delivered, 5);
    assert!(resegmented.into_iter().map(|(_, frame)| frame).eq(frames));
}
