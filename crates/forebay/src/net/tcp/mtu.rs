//! Connections whose device has another MTU than before.

use forebay_stack::tcp::{Tcp, TcpOut};

use super::super::shared::NetState;

/// Sockets that are told while a shard is locked, so that a segment waits for a few microseconds at most.
const SOCKETS_A_CALL: u32 = 32;

/// MTUs of a device, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::net) struct MtuChange {
    pub(in crate::net) before: u32,
    pub(in crate::net) now: u32,
}

impl MtuChange {
    /// Path MTU of a connection that had another one (`fib_nhc_update_mtu`): a router may have told of a smaller link.
    /// `None` if it stays.
    fn of_path(self, path_mtu_bytes: u32) -> Option<u32> {
        let is_other = path_mtu_bytes > self.now || path_mtu_bytes == self.before;
        (is_other && self.before != self.now).then_some(self.now)
    }
}

impl NetState {
    /// Tells all connections of the changes of their devices, which are in the order of the devices.
    pub(in crate::net) fn change_mtus(&self, changes: &[MtuChange]) {
        for index in self.tcp.indices() {
            let mut first = 0;
            while self.call_tcp(index, |tcp, out| {
                let end = tcp.slots().min(first + SOCKETS_A_CALL);
                (first..end).for_each(|slot| self.change_mtu(slot, changes, tcp, out));
                first = end;
                end < tcp.slots()
            }) {}
        }
    }

    fn change_mtu(&self, slot: u32, changes: &[MtuChange], tcp: &mut Tcp, out: &mut TcpOut<'_>) {
        let Some(socket) = tcp.socket_at(slot as usize) else { return };
        let (Ok(flow), Ok(Some(info))) = (tcp.flow(socket), tcp.info(socket)) else { return };
        let device = self.routes().find_between(Some(flow.ours.ip()), flow.theirs.ip());
        let change = device.and_then(|device| changes.get(device));
        if let Some(mtu_bytes) = change.and_then(|change| change.of_path(info.path_mtu_bytes)) {
            // It is a connection.
            let _ = tcp.set_route_mtu(socket, mtu_bytes, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_54_smaller_path_stays_known() {
        let [grows, shrinks] =
            [(1500, 9000), (9000, 1500)].map(|(before, now)| MtuChange { before, now });
        for (change, path, expected) in [
            (grows, 1500, Some(9000)),
            (grows, 1400, None),
            (shrinks, 9000, Some(1500)),
            (shrinks, 4000, Some(1500)),
            (shrinks, 1400, None),
            (MtuChange { before: 1500, now: 1500 }, 1500, None),
        ] {
            assert_eq!(change.of_path(path), expected, "{change:?} of {path}");
        }
    }
}
