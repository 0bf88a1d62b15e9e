//! Frees replaced tables on a thread of its own: returning a large one to the system takes longer
//! than a turn may.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use forebay_rx::backlog::FlowLimit;
use forebay_rx::steer::{FlowTables, SockFlowTable};

/// Time between two checks whether a shared table is still in use.
const LOOK_PERIOD: Duration = Duration::from_millis(500);

/// A replaced table.
#[derive(Debug)]
pub(super) enum Retired {
    /// Tables of one queue, their only owner.
    FlowTables(FlowTables),
    /// Table of all queues. Each queue, and each recording application, keeps it until it applies
    /// the change.
    SockFlows(Arc<SockFlowTable>),
    /// Flow limit of one queue, its only owner.
    FlowLimit(FlowLimit),
}

/// Hands replaced tables to the thread that frees them. That thread is started with the first
/// change that makes a table, and ends with the engine.
#[derive(Default, Debug)]
pub(super) struct Reclaimer(OnceLock<Option<Sender<Retired>>>);

impl Reclaimer {
    /// Starts the thread. If the system has no thread left, tables are freed where they are
    /// replaced.
    pub(super) fn start(&self) {
        self.0.get_or_init(|| {
            let (sender, receiver) = channel();
            let thread = thread::Builder::new().name("forebay-reclaim".to_owned());
            thread.spawn(move || free(&receiver)).ok().map(|_| sender)
        });
    }

    /// Takes a table without blocking. There are at most as many as there were changes.
    pub(super) fn take(&self, retired: Retired) {
        if let Some(Some(sender)) = self.0.get() {
            // The send fails only if the thread is gone; the table is then freed here.
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
            Ok(Retired::FlowLimit(limit)) => drop(limit),
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
