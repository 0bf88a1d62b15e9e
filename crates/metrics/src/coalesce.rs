//! Families of coalescing.

use std::fmt;

use forebay_engine::EngineState;
use forebay_rx::coalesce::{FlushReason, MergeRefusal};
use forebay_rx::counters::{CoalesceCounters, Counter};
use prometheus_client::registry::Unit;

use crate::families::Families;

/// Adds the counters of all coalescers, summed for each place where packets are merged.
pub(crate) fn encode(shared: &EngineState, families: &mut Families<'_>) -> fmt::Result {
    let Some(counters) = shared.counters() else { return Ok(()) };
    let arrive: Vec<_> = counters.queues.iter().map(|queue| &*queue.coalesce).collect();
    let deliver: Vec<_> = counters.cpus.iter().map(|cpu| &*cpu.coalesce).collect();
    let places = [("arrive", arrive), ("deliver", deliver)];
    let sum = |of: &[&CoalesceCounters], counter: &dyn Fn(&CoalesceCounters) -> &Counter| -> u64 {
        of.iter().map(|coalesce| counter(coalesce).get()).sum()
    };
    let each = |counter: fn(&CoalesceCounters) -> &Counter| {
        places.iter().map(move |(place, of)| ([("at", *place)], sum(of, &counter)))
    };
    let segments = ("coalesce_segments", "Frames that entered coalescing");
    families.counters(segments, None, each(|of| &of.segments_in))?;
    let packets = ("coalesce_packets", "Packets that left coalescing; a merged one counts once");
    families.counters(packets, None, each(|of| &of.packets_out))?;
    let bytes = ("coalesced", "Bytes of these packets; headers of a merged packet count once");
    families.counters(bytes, Some(&Unit::Bytes), each(|of| &of.bytes_out))?;
    let refused = ("coalesce_refusals", "Frames that were not added to a packet, by reason");
    let each = places.iter().flat_map(|(place, of)| {
        MergeRefusal::ALL.into_iter().map(move |refusal| {
            let count = sum(of, &|coalesce| &coalesce.refused[refusal.index()]);
            ([("at", *place), ("reason", refusal.name())], count)
        })
    });
    families.counters(refused, None, each)?;
    let flushes = ("coalesce_flushes", "Packets flushed from coalescing, by reason");
    let each = places.iter().flat_map(|(place, of)| {
        FlushReason::ALL.into_iter().map(move |reason| {
            let count = sum(of, &|coalesce| &coalesce.flushes[reason.index()]);
            ([("at", *place), ("reason", reason.name())], count)
        })
    });
    families.counters(flushes, None, each)
}
