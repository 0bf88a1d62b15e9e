//! Tables that are of no more use, freed on a thread that nobody waits for: giving a large one back to
//! the system takes longer than a turn may.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use forebay_rx::steer::{FlowTables, SockFlowTable};

/// Time between two looks whether a shared table is still in use.
const LOOK_PERIOD: Duration = Duration::from_millis(500);

/// A table that was replaced.
#[derive(Debug)]
pub(super) enum Retired {
    /// Of a queue, which was its owner.
    FlowTables(FlowTables),
    /// Of all queues: each, and whoever records, has it until it comes to the change.
    SockFlows(Arc<SockFlowTable>),
}

/// Destination of tables that are of no more use. Its thread begins with the first change that makes a table,
/// and ends with the engine.
#[derive(Default, Debug)]
pub(super) struct Reclaimer(OnceLock<Option<Sender<Retired>>>);

impl Reclaimer {
    /// Has tables freed elsewhere from now on. Where the system has no thread left they are freed where
    /// they are given up.
    pub(super) fn start(&self) {
        self.0.get_or_init(|| {
            let (sender, receiver) = channel();
            let thread = thread::Builder::new().name("forebay-reclaim".to_owned());
            thread.spawn(move || free(&receiver)).ok().map(|_| sender)
        });
    }

    /// Takes a table. It takes no time, and there are as many as there were changes.
    pub(super) fn take(&self, retired: Retired) {
        if let Some(Some(sender)) = self.0.get() {
            // A thread that is gone has freed it by now.
            let _ = sender.send(retired);
        }
    }
}

fn free(receiver: &Receiver<Retired>) {
    let mut shared: Vec<Arc<SockFlowTable>> = Vec::new();
    loop {
        let received = if shared.is_empty() {
            receiver.recv().map_err(RecvTimeoutError::from)
        } else {
            receiver.recv_timeout(LOOK_PERIOD)
        };
        match received {
            Ok(Retired::FlowTables(tables)) => drop(tables),
            Ok(Retired::SockFlows(table)) => shared.push(table),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        shared.retain(|table| Arc::strong_count(table) > 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_table_outlives_its_readers() {
        let reclaimer = Reclaimer::default();
        reclaimer.start();
        let table = Arc::new(SockFlowTable::new(8, 2));
        let (alive, reader) = (Arc::downgrade(&table), Arc::clone(&table));
        reclaimer.take(Retired::SockFlows(table));
        assert!(alive.upgrade().is_some());
        drop(reader);
        while alive.upgrade().is_some() {
            reclaimer.take(Retired::FlowTables(FlowTables::new(2)));
            thread::yield_now();
        }
    }
}
