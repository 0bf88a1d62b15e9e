//! Memory of the buffers of all connections, and the effect of its limits on each (`tcp_mem`).

use std::sync::atomic::{AtomicU64, Ordering};

use super::config::TcpConfig;

/// Memory of the buffers of several [`Tcp`](super::Tcp), for their common limits.
#[derive(Debug, Default)]
pub struct TcpMemory {
    written_bytes: AtomicU64,
    received_bytes: AtomicU64,
}

impl TcpMemory {
    /// Memory in use, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.written_bytes.load(Ordering::Relaxed) + self.received_bytes()
    }

    /// Memory of what was received and not read, in bytes.
    #[must_use]
    pub fn received_bytes(&self) -> u64 {
        self.received_bytes.load(Ordering::Relaxed)
    }

    /// Replaces what a connection is charged for.
    pub(super) fn replace(&self, before: Charge, now: Charge) {
        for (total, before, now) in [
            (&self.written_bytes, before.written_bytes, now.written_bytes),
            (&self.received_bytes, before.received_bytes, now.received_bytes),
        ] {
            if now > before {
                total.fetch_add((now - before).into(), Ordering::Relaxed);
            } else if now < before {
                total.fetch_sub((before - now).into(), Ordering::Relaxed);
            }
        }
    }

    pub(super) fn pressure(&self, config: &TcpConfig) -> Pressure {
        let received_bytes = self.received_bytes();
        let written_bytes = self.written_bytes.load(Ordering::Relaxed);
        let is_above = |bytes: u64, limit_bytes: u64| bytes > limit_bytes / 4 * 3;
        Pressure {
            is_tight: is_above(written_bytes + received_bytes, config.memory_bytes)
                || is_above(received_bytes, config.received_bytes),
            is_full: received_bytes >= config.received_bytes,
        }
    }
}

/// State of the memory that all connections share.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Pressure {
    /// Three quarters of a limit are in use: no buffer grows (`tcp_memory_pressure`).
    pub(super) is_tight: bool,
    /// The memory of what was received is in use: a connection keeps a little (`sk_rmem_schedule`).
    pub(super) is_full: bool,
}

/// Memory that a connection is charged for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Charge {
    pub(super) written_bytes: u32,
    pub(super) received_bytes: u32,
}

impl Charge {
    pub(super) fn bytes(self) -> u64 {
        u64::from(self.written_bytes) + u64::from(self.received_bytes)
    }
}
