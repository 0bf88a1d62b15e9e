//! Division of new connections and datagrams among processes that have sockets at the same ports and receive the same
//! packets.

use std::fmt;
use std::net::SocketAddr;

use crate::tcp::Flow;

/// Place of this process among those that have sockets at the same ports.
///
/// A flow of TCP belongs to the process that has claimed it, from its SYN until it is released, at the end of TIME-WAIT.
/// The others are silent about its segments. All methods may be called by several threads.
pub trait Division: fmt::Debug + Send + Sync {
    /// Secret of the sequence numbers, cookies and timestamps of all processes.
    fn secret(&self) -> [u8; 16];

    /// Time 0 of all processes, of the machine's clock, in nanoseconds: one that goes on with another's connection has the same
    /// timestamps, and reads its cookies.
    fn origin_ns(&self) -> u64;

    /// True if this process takes the datagrams of a flow, if it has a socket for them.
    fn takes_datagrams(&self, flow: &Flow) -> bool;

    /// True if this process, and no other, tells the peer of a flow that no process has a socket for its datagrams.
    fn refuses_datagrams(&self, flow: &Flow) -> bool;

    /// True if this process takes new connections of a flow to a listener, whose address may stand for all. For
    /// a short time two processes may: the one that claims the flow answers.
    fn takes(&self, listener: SocketAddr, flow: &Flow) -> bool;

    /// True if this process, and no other, answers the segments of a flow that nobody has claimed.
    fn answers(&self, listener: SocketAddr, flow: &Flow) -> bool;

    /// True if other processes may take new connections to a listener.
    fn has_others(&self, listener: SocketAddr) -> bool;

    /// Claims a flow, which begins with the sequence number `syn` of the peer. False if another process has it, unless
    /// that is in TIME-WAIT of a connection that began with another number.
    fn claim(&self, flow: &Flow, syn: u32) -> bool;

    /// Records that this process answers a SYN by a cookie, whose ACK another one may receive. Times are of a clock that all
    /// processes share.
    fn note_cookie(&self, now_us: u64);

    /// Time of the last cookie of any process, in µs; 0 for never.
    fn cookie_us(&self) -> u64;

    /// Marks a claimed flow as one in TIME-WAIT.
    fn mark_ended(&self, flow: &Flow);

    /// Gives up a claim for the process that goes on with the flow, and adopts it. The others stay silent until then.
    fn pass_on(&self, flow: &Flow);

    /// Claims a flow that was passed on. False if another process has it.
    fn adopt(&self, flow: &Flow, syn: u32) -> bool;

    /// Ends a claim. Without effect if another process has the flow by now.
    fn release(&self, flow: &Flow);
}
