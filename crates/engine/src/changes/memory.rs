//! Memory of a change's tables, of which there is enough before any is made.

use forebay_rx::Packet;
use forebay_rx::backlog::{FLOW_LIMIT_HISTORY, Note, capacity_for};
use forebay_rx::steer::{FlowTables, RPS_FLOW_CNT, SockFlowTable};
use forebay_sys as sys;
use forebay_sys::errno::Errno;
use forebay_sys::refused::Refused;

use super::Changes;
use crate::knobs::{Change, Queues};

impl Changes {
    /// Checks that there is memory for the tables of a change: all are made, or none.
    pub(super) fn check_memory(&self, change: &Change) -> Result<(), Refused> {
        let need_bytes = self.need_bytes(change);
        if need_bytes == 0 {
            return Ok(());
        }
        let probe = usize::try_from(need_bytes).ok();
        let is_given = probe.is_some_and(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok());
        match sys::available_memory_bytes() {
            Some(have_bytes) if need_bytes > have_bytes => {
                let why = format!("that takes {need_bytes} bytes, and {have_bytes} can be had");
                Err(Refused::new(Errno::NoMem, why))
            }
            _ if is_given => Ok(()),
            _ => Err(Refused::new(Errno::NoMem, format!("that takes {need_bytes} bytes"))),
        }
    }

    /// Size of the tables that a change makes, in bytes; 0 if it makes none.
    fn need_bytes(&self, change: &Change) -> u64 {
        let queues = self.settings.queues.len() as u64;
        match change {
            Change::RpsFlowCnt(Queues::All, count) => flow_tables_bytes(*count) * queues,
            Change::RpsFlowCnt(Queues::One(_), count) => flow_tables_bytes(*count),
            Change::FlowKey(rules) if rules == self.hasher.rules() => 0,
            Change::HashKey(_) | Change::FlowKey(_) => {
                let counts = self.settings.queues.iter().map(|queue| queue.rps_flow_cnt);
                counts.map(flow_tables_bytes).sum()
            }
            Change::RpsSockFlowEntries(entries @ 1..) => {
                slots(*entries) * SockFlowTable::ENTRY_BYTES as u64
            }
            Change::NetdevMaxBacklog(packets) => self.rings_bytes(capacity_for(*packets)),
            // A flow_limit_table_len is that of tables made later.
            Change::FlowLimitCpuBitmap(cpus) if !cpus.is_empty() => {
                let history = FLOW_LIMIT_HISTORY * size_of::<u32>();
                (u64::from(self.settings.flow_limit_table_len) + history as u64) * queues
            }
            _ => 0,
        }
    }

    /// Size of all backlog rings with this many slots, if those that there are have fewer.
    fn rings_bytes(&self, slots: u32) -> u64 {
        if slots <= self.ring_slots {
            return 0;
        }
        let note = if self.trace.is_some() { size_of::<Note>() } else { 0 };
        let rings = self.settings.queues.len() * self.cpus.cpus().len();
        u64::from(slots) * (size_of::<Packet>() + note) as u64 * rings as u64
    }
}

/// Size of a queue's flow tables; one without RFS has tables, too.
fn flow_tables_bytes(rps_flow_cnt: u32) -> u64 {
    let count = if rps_flow_cnt > 0 { rps_flow_cnt } else { RPS_FLOW_CNT };
    slots(count) * FlowTables::SLOT_BYTES as u64
}

fn slots(entries: u32) -> u64 {
    u64::from(entries).next_power_of_two()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use forebay_rx::CpuId;
    use forebay_rx::flow_key::FlowKeyRules;
    use forebay_rx::hash::Hasher;
    use forebay_sys::cpu_list::CpuList;

    use super::*;
    use crate::Config;
    use crate::trace::Trace;

    /// Configuration on CPUs 0 and 1.
    fn config() -> Config {
        let cpus = CpuList::new([0, 1].map(CpuId));
        let hasher = Hasher::keyed(&[0; 16], false).with_rules(FlowKeyRules::default());
        Config::new(cpus, Arc::new(hasher))
    }

    /// Changes of an engine with three queues whose rings are made.
    fn changes(config: &Config) -> Changes {
        let mut changes = Changes::new(config, 3, Arc::default());
        changes.rings_made(config.backlog_capacity());
        changes
    }

    fn need(changes: &Changes, change: &str) -> u64 {
        changes.need_bytes(&change.parse().unwrap())
    }

    #[test]
    fn promise_3_only_new_tables_need_memory() {
        let mut changes = changes(&config());
        let (slot, packet) = (FlowTables::SLOT_BYTES as u64, size_of::<Packet>() as u64);
        let key = "hash_key=0f112233445566778899aabbccddeef1";
        for (change, bytes) in [
            ("rps_flow_cnt=1000", 3 * 1024 * slot),
            ("rx-1/rps_flow_cnt=1000", 1024 * slot),
            ("rps_flow_cnt=0", 3 * 4096 * slot),
            (key, 3 * 4096 * slot),
            ("flow_key=inner", 3 * 4096 * slot),
            ("flow_key=auto", 0),
            ("rps_sock_flow_entries=1000", 1024 * 8),
            ("rps_sock_flow_entries=0", 0),
            ("netdev_max_backlog=1023", 0),
            ("netdev_max_backlog=1024", 2 * 3 * 2048 * packet),
            ("flow_limit_table_len=8192", 0),
            ("flow_limit_cpu_bitmap=1", 3 * (4096 + 512)),
            ("flow_limit_cpu_bitmap=0", 0),
            ("dev_weight=100", 0),
        ] {
            assert_eq!(need(&changes, change), bytes, "{change}");
        }
        for change in ["rx-0/rps_flow_cnt=0", "rx-2/rps_flow_cnt=16384", "flow_key=inner"] {
            changes.change(&change.parse().unwrap()).unwrap();
        }
        assert_eq!(need(&changes, key), (4096 + 4096 + 16384) * slot);
        assert_eq!(need(&changes, "flow_key=inner"), 0);
        assert!(need(&changes, "flow_key=auto") > 0);
    }

    #[test]
    fn promise_3_rings_are_paid_once() {
        let mut changes = changes(&config());
        for change in ["netdev_max_backlog=5000", "netdev_max_backlog=10"] {
            changes.change(&change.parse().unwrap()).unwrap();
        }
        assert_eq!(need(&changes, "netdev_max_backlog=8191"), 0);
        let packet = size_of::<Packet>() as u64;
        assert_eq!(need(&changes, "netdev_max_backlog=8192"), 2 * 3 * 16384 * packet);
        let unmade = Changes::new(&config(), 3, Arc::default());
        assert_eq!(need(&unmade, "netdev_max_backlog=1000"), 2 * 3 * 1024 * packet);
    }

    #[test]
    fn notes_need_memory_if_traced() {
        let directory = tempfile::tempdir().unwrap();
        let trace = Some(Trace::open(directory.path(), false, false).unwrap());
        let changes = changes(&Config { trace, ..config() });
        let place = (size_of::<Packet>() + size_of::<Note>()) as u64;
        assert_eq!(need(&changes, "netdev_max_backlog=1024"), 2 * 3 * 2048 * place);
    }
}
