//! Tests of the path that any machine can run.

#[cfg(not(loom))]
mod parse; //        headers, and laws of any bytes
#[cfg(not(loom))]
mod flow_key; //     keys of flows: tunnels, numbers, connection IDs
#[cfg(not(loom))]
mod coalescing; //   what merges, and what does not
#[cfg(not(loom))]
mod segmentation; // merged packets, split again
#[cfg(not(loom))]
mod steering; //     the map, the flow table, held moves, against a slow twin
#[cfg(not(loom))]
mod vectors; //      published hashes
#[cfg(loom)]
mod drain_rule; //   the drain rule in every interleaving
