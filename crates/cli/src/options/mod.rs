//! Options that several commands take, and what they mean.

pub(crate) mod cpus; //     which CPUs
pub(crate) mod hash; //     how flows are hashed
pub(crate) mod coalesce; // how segments are merged
pub(crate) mod engine; //   what the path is made of
pub(crate) mod trace; //    where a run is traced
pub(crate) mod control; //  how a run is controlled
pub(crate) mod virtio; //   how a vhost-user back end is reached, and what buffers it gets

pub(crate) use coalesce::CoalesceOptions;
pub(crate) use control::ControlOptions;
pub(crate) use cpus::CpuOptions;
pub(crate) use engine::EngineOptions;
pub(crate) use hash::HashOptions;
pub(crate) use trace::TraceOptions;
pub(crate) use virtio::VhostUserOptions;
