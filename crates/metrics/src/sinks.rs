//! Families of destinations.

use std::fmt;
use std::sync::Arc;

use forebay_rx::sink::{SendDrop, SinkCounters};
use prometheus_client::registry::Unit;

use crate::families::Families;

/// Adds the counters of all destinations, each summed over its CPUs.
pub(crate) fn encode(
    destinations: &[(String, Vec<Arc<SinkCounters>>)],
    families: &mut Families<'_>,
) -> fmt::Result {
    let each = |count: fn(&SinkCounters) -> u64| {
        destinations.iter().map(move |(to, sinks)| {
            ([("to", to.as_str())], sinks.iter().map(|sink| count(sink)).sum())
        })
    };
    let packets = ("packets_sent", "Packets that the destination took; a merged one counts once");
    families.counters(packets, None, each(SinkCounters::packets))?;
    let frames = ("frames_sent", "Frames of these packets");
    families.counters(frames, None, each(SinkCounters::frames))?;
    let bytes = ("sent", "Bytes of these packets; headers of a merged packet count once");
    families.counters(bytes, Some(&Unit::Bytes), each(SinkCounters::bytes))?;
    let dropped = ("packets_unsent", "Packets that the destination did not take, by reason");
    let each = destinations.iter().flat_map(|(to, sinks)| {
        SendDrop::ALL.into_iter().map(move |reason| {
            let count = sinks.iter().map(|sink| sink.dropped(reason)).sum();
            ([("to", to.as_str()), ("reason", reason.name())], count)
        })
    });
    families.counters(dropped, None, each)
}
