//! Tests of the path that any machine can run.

#[cfg(not(loom))]
mod parse; //        headers, and laws of any bytes
#[cfg(not(loom))]
mod flow_key; //     what tells a flow: tunnels, numbers, connection IDs
#[cfg(not(loom))]
mod coalescing; //   what merges, and what does not
#[cfg(not(loom))]
mod segmentation; // what is merged, taken apart again
#[cfg(not(loom))]
mod steering; //     the map, the flow table, held moves, by a slow twin
#[cfg(not(loom))]
mod vectors; //      published hashes
#[cfg(loom)]
mod drain_rule; //   every interleaving
