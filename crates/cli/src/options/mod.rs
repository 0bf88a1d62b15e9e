//! Options that several commands share, and their meaning.

pub(crate) mod cpus; //     which CPUs
pub(crate) mod hash; //     how flows are hashed
pub(crate) mod coalesce; // how segments are merged
pub(crate) mod engine; //   settings of the engine
pub(crate) mod trace; //    trace output
pub(crate) mod rotate; //   files of captures
pub(crate) mod control; //  control interfaces of a run
pub(crate) mod socket; //   place of the control socket
pub(crate) mod remover; //  removal of that socket by another process
pub(crate) mod log; //      messages
pub(crate) mod metrics; //  metrics of a run
pub(crate) mod virtio; //   vhost-user: how to reach the back end, and its buffers

pub(crate) use coalesce::CoalesceOptions;
pub(crate) use control::ControlOptions;
pub(crate) use cpus::CpuOptions;
pub(crate) use engine::EngineOptions;
pub(crate) use hash::{HashOptions, check_queues};
pub(crate) use log::LogOptions;
pub(crate) use metrics::MetricsOptions;
pub(crate) use remover::RemoveSocketArgs;
pub(crate) use rotate::RotateOptions;
pub(crate) use trace::TraceOptions;
pub(crate) use virtio::VhostUserOptions;
