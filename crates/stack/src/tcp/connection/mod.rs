//! Connection: state of one TCP connection (RFC 9293), and the stages that change it.
//!
//! ```text
//!  segment ─► receive ─► validate ─► ack ─► recovery ─┐
//!                └─────► data ─► delayed_ack          ├─► send ─► segments
//!  calls ─────────────────────────────────────────────┤
//!  timers ────────────────────────────────────────────┘
//! ```

mod open; //        handshakes, as client and as server
mod fast_open; //   data in a SYN
mod receive; //     the spine: a segment's way through the stages
mod validate; //    PAWS, sequence numbers, RST and SYN in a window
mod ack; //         acknowledgement, round trip, window of the peer
mod sent; //        a segment that was sent
mod scoreboard; //  segments that were sent: acknowledged, lost, sent again
mod sacked; //      selective acknowledgements received
mod plain; //       duplicate acknowledgements, without SACK (Reno)
mod rack; //        losses found by time (RFC 8985)
mod recovery; //    phases of loss recovery
mod repair; //      state of loss recovery while segments are in flight
mod rate; //        the rate of delivery
mod reduction; //   the congestion window: reduced, grown
mod undo; //        reductions that proved unnecessary
mod data; //        payload, FIN
mod urgent; //      urgent bytes
mod window; //      receive window and buffer
mod receive_rtt; // round-trip time at the receiver, for the window
mod delayed_ack; // acknowledgements at once or later
mod write; //       bytes into packets
mod send; //        segments that may be sent now
mod pacing; //      departure times, by the pacing rate
mod transmit; //    one segment, with its options
mod timers; //      time-outs: retransmission, probes, delayed ACK, keep-alive
mod reports; //     what the error queue tells
mod icmp; //        errors from the path
mod mtu_search; //  the largest packet of the path, by probes
mod calls; //       the application's calls
mod tally; //       numbers of bytes and segments
mod busy_time; //   times of waiting
mod options; //     the socket's options
mod spare; //       memory that an idle connection gives back
mod info; //        state for observers
mod passing; //     what another process goes on with

use std::num::NonZeroU32;

use forebay_buf::Pool;
use forebay_rx::packet::Packet;

pub use busy_time::BusyTime;
pub use calls::{ReadMode, Readiness};
pub(super) use fast_open::FastConnect;
pub use icmp::{IcmpMessage, PathError};
pub use info::{Limit, Resent, TcpInfo};
pub(super) use open::{Accepted, Answer, Begin};
pub use recovery::Phase;
pub(super) use spare::IDLE_US;
use tally::CapablePackets;
pub use tally::Tally;
pub(super) use window::{ReceiveWindow, scale_for};
pub use write::WriteFlags;

use self::delayed_ack::DelayedAck;
use self::fast_open::Opening;
use self::mtu_search::MtuSearch;
use self::options::ConnectionOptions;
use self::rate::DeliveryRate;
use self::recovery::Recovery;
use self::scoreboard::Scoreboard;
use self::timers::Timers;
use self::urgent::Urgent;
use super::config::{TcpConfig, us_u32};
use super::congestion::Congestion;
use super::counters::TcpCounters;
use super::error::TcpError;
use super::error_queue::ErrorQueue;
use super::fast_open::FastOpenCache;
use super::flow::{Flow, PackedFlow};
use super::invalid_limit::InvalidLimit;
use super::memory::{Charge, Pressure};
use super::on_demand::OnDemand;
use super::receive_queue::ReceiveQueue;
use super::rtt::RoundTrip;
use super::sack::SackReport;
use super::send_queue::SendQueue;
use super::seq::Seq;
use super::wire::{Flags, Options, Timestamps};

/// State of a connection (RFC 9293, section 3.3.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum State {
    /// No connection (any more).
    Closed,
    /// A SYN was sent.
    SynSent,
    /// SYNs were sent and received.
    SynReceived,
    /// Open.
    Established,
    /// Closed by us; the FIN is not acknowledged.
    FinWait1,
    /// Closed by us and acknowledged; the peer's FIN has not come.
    FinWait2,
    /// Closed by the peer.
    CloseWait,
    /// Closed by both at once; our FIN is not acknowledged.
    Closing,
    /// Closed by the peer and then by us; our FIN is not acknowledged.
    LastAck,
}

impl State {
    /// All states, in their order.
    pub(super) const ALL: [Self; 9] = [
        Self::Closed,
        Self::SynSent,
        Self::SynReceived,
        Self::Established,
        Self::FinWait1,
        Self::FinWait2,
        Self::CloseWait,
        Self::Closing,
        Self::LastAck,
    ];
}

/// Context of a call to a connection: time, memory, the way out.
pub(super) struct Context<'a> {
    pub(super) now_us: u64,
    pub(super) pool: &'a mut Pool,
    /// Segments to be sent, in order.
    pub(super) out: &'a mut Vec<Packet>,
    pub(super) config: &'a TcpConfig,
    pub(super) counters: &'a TcpCounters,
    pub(super) fast_open: &'a FastOpenCache,
    pub(super) memory: Pressure,
}

/// Features that both sides agreed on.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Agreed {
    pub(super) timestamps: bool,
    pub(super) sack: bool,
    pub(super) ecn: bool,
    /// `None` without window scaling.
    pub(super) scales: Option<WindowScales>,
}

/// Shifts of the windows that both sides announce (RFC 7323, section 2).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct WindowScales {
    /// Shift of the peer's windows, which limit what is sent (`snd_wscale`).
    pub send: u8,
    /// Shift of our windows, which limit what is received (`rcv_wscale`).
    pub receive: u8,
}

impl Agreed {
    /// Flags and options of the SYN-ACK that tells this (`tcp_synack_options`).
    pub(super) fn syn_ack(self, mss: u16, stamps: Timestamps) -> (Flags, Options) {
        let syn_ack = Flags::SYN.with(Flags::ACK);
        let options = Options {
            mss: Some(mss),
            window_scale: self.scales.map(|scales| scales.receive),
            sack_permitted: self.sack,
            timestamps: self.timestamps.then_some(stamps),
            ..Options::default()
        };
        (if self.ecn { syn_ack.with(Flags::ECE) } else { syn_ack }, options)
    }

    /// Shift of the windows that the peer announces.
    fn send_scale(self) -> u8 {
        self.scales.map_or(0, |scales| scales.send)
    }

    /// Shift of the windows that this end announces.
    pub(super) fn receive_scale(self) -> u8 {
        self.scales.map_or(0, |scales| scales.receive)
    }
}

/// Sending side.
#[derive(Debug)]
pub(super) struct SendState {
    pub(super) initial: Seq,
    /// Oldest sequence number that is not acknowledged (`snd_una`).
    pub(super) una: Seq,
    /// Next sequence number to be sent (`snd_nxt`).
    pub(super) next: Seq,
    /// The peer's window, and the sequence number of its last update (`snd_wl1`).
    pub(super) window: u32,
    pub(super) window_seq: Seq,
    /// Largest window that the peer announced.
    pub(super) max_window: u32,
    /// Payload of a full segment, beside the options that each has.
    pub(super) mss: u32,
    /// Largest segment that the peer and the user allow, its options counted (`mss_clamp`).
    pub(super) peer_mss: u32,
    /// Largest packet that the path takes.
    pub(super) path_mtu: u32,
    /// Search for the path's MTU; `None` without MTU probing.
    search: Option<Box<MtuSearch>>,
    pub(super) queue: SendQueue,
    /// True once the application has closed its side: a FIN follows the queue.
    pub(super) fin: bool,
    /// End of the last segment shorter than `mss` (Minshall's variant of Nagle's rule).
    pub(super) small_end: Seq,
    /// Sequence number up to which PSH was set (`pushed_seq`).
    pub(super) pushed: Seq,
    /// Sequence number after an urgent byte.
    pub(super) urgent: Option<Seq>,
    /// First sequence number sent since nothing was in flight.
    pub(super) burst: Seq,
    /// Departure time of the next packet at the pacing rate, in ns (`tcp_wstamp_ns`).
    pub(super) paced_ns: u64,
    /// Time of the last segment with payload, in µs (`lsndtime`).
    pub(super) last_data_us: u64,
    /// Memory of packets that are not acknowledged, at most (`sk_sndbuf`).
    pub(super) buffer_bytes: u32,
    /// True if a write found too little memory (`SOCK_NOSPACE`).
    pub(super) is_full: bool,
    /// True if the last packet sent had neither data nor a FIN.
    pub(super) is_last_empty: bool,
}

/// Receiving side.
#[derive(Debug)]
pub(super) struct ReceiveState {
    pub(super) initial: Seq,
    /// Next sequence number expected (`rcv_nxt`).
    pub(super) next: Seq,
    /// `next` when the last ACK was sent (`rcv_wup`).
    pub(super) acked: Seq,
    /// Window of the last ACK.
    pub(super) window: u32,
    pub(super) queue: ReceiveQueue,
    pub(super) sacks: SackReport,
    pub(super) buffer: ReceiveWindow,
    /// The peer's timestamp to echo, and the time when it came (`ts_recent`).
    pub(super) timestamp: u32,
    pub(super) timestamp_us: u64,
    /// True once the peer's FIN has come in order: its sequence number is the one before `next`.
    pub(super) has_fin: bool,
    /// Urgent byte that the reader has not passed.
    pub(super) urgent: Option<Urgent>,
    /// ECN: a mark was seen and its echo is not confirmed.
    pub(super) is_marked: bool,
    /// ECN: data came in capable packets.
    pub(super) was_capable: bool,
    /// Time of the last segment, in µs (`rcv_tstamp`).
    pub(super) last_us: u64,
}

/// Directions that were shut down.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Shut {
    pub(super) receive: bool,
    pub(super) send: bool,
}

/// A TCP connection.
#[derive(Debug)]
pub(super) struct Connection {
    ends: PackedFlow,
    pub(super) state: State,
    pub(super) options: ConnectionOptions,
    agreed: Agreed,
    timestamp_offset: u32,
    send: SendState,
    receive: ReceiveState,
    sent: OnDemand<Scoreboard>,
    recovery: Recovery,
    congestion: Congestion,
    rtt: RoundTrip,
    delayed: DelayedAck,
    timers: Timers,
    shut: Shut,
    /// Error to be told by the next call (`sk_err`).
    error: Option<TcpError>,
    /// Error of the path that is not fatal (`sk_err_soft`).
    soft_error: Option<TcpError>,
    errors: OnDemand<ErrorQueue>,
    opening: Opening,
    /// True once no application holds the connection (`SOCK_DEAD`).
    is_orphan: bool,
    invalid_limit: InvalidLimit,
    /// True if the window was reduced: CWR goes out with the next new data (ECN).
    cwr_is_due: bool,
    resent: Resent,
    tally: Tally,
    capable: OnDemand<CapablePackets>,
    busy: BusyTime,
    rate: DeliveryRate,
    /// Set when the rest is left to the table of TIME-WAIT.
    leaving: Option<Leaving>,
}

/// A connection's last numbers, when it goes to TIME-WAIT or waits for a FIN without an owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TimeWaitEntry {
    pub(super) send_next: Seq,
    pub(super) receive_next: Seq,
    pub(super) window: u32,
    pub(super) window_scale: u8,
    pub(super) timestamp: Option<TimeWaitStamps>,
    pub(super) tos: u8,
    pub(super) substate: Substate,
    /// Time that it stays, in µs.
    pub(super) stay_us: u64,
}

/// Request to go on as an entry of the TIME-WAIT table: its lifetime in µs, shifted left by one; the lowest bit is set if it
/// waits for a FIN. In one word, since an idle connection has no other to spare.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Leaving(NonZeroU32);

impl Leaving {
    fn new(substate: Substate, stay_us: u64) -> Self {
        let stay_us = us_u32(stay_us).clamp(1, u32::MAX >> 1);
        let word = stay_us << 1 | u32::from(substate == Substate::FinWait2);
        Self(NonZeroU32::new(word).unwrap_or(NonZeroU32::MAX))
    }

    fn substate(self) -> Substate {
        if self.0.get() & 1 == 0 { Substate::TimeWait } else { Substate::FinWait2 }
    }

    fn stay_us(self) -> u64 {
        u64::from(self.0.get() >> 1)
    }
}

/// State of a connection in the table of TIME-WAIT (`tw_substate`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Substate {
    /// Without an owner: the peer's FIN has not come.
    FinWait2,
    TimeWait,
}

/// Timestamps that a connection in TIME-WAIT goes on with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TimeWaitStamps {
    pub(super) offset: u32,
    pub(super) recent: u32,
    pub(super) recent_us: u64,
}

impl Connection {
    /// Ends of the connection.
    pub(super) fn flow(&self) -> Flow {
        self.ends.unpacked()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state == State::Closed
    }

    /// True if nothing is left to do: closed, and without an owner.
    pub(super) fn is_done(&self) -> bool {
        self.state == State::Closed && self.is_orphan
    }

    /// True if nobody holds it any more.
    pub(super) fn is_orphan(&self) -> bool {
        self.is_orphan
    }

    /// Memory that queues occupy.
    pub(super) fn charge(&self) -> Charge {
        let sent_bytes = self.send.queue.memory_bytes() + u64::from(self.errors.memory_bytes());
        Charge {
            written_bytes: u32::try_from(sent_bytes).unwrap_or(u32::MAX),
            received_bytes: self.receive.queue.truesize(),
        }
    }

    /// Ends the connection. Data that were received stay readable.
    fn finish(&mut self, cx: &mut Context<'_>) {
        if matches!(self.state, State::Established | State::CloseWait) {
            cx.counters.estab_resets.add(1);
        }
        self.state = State::Closed;
        self.opening.forget(Opening::AWAITS_ACK.with(Opening::WAITS_FOR_DATA));
        self.shut = Shut { receive: true, send: true };
        self.timers.clear();
        self.sent.release();
        self.send.queue.acknowledge(self.send.queue.end());
        self.report_end();
        self.receive.queue.drop_out_of_order(cx.pool);
        if self.is_orphan {
            self.receive.queue.clear(cx.pool);
        }
    }

    /// Ends the connection by an error (`tcp_reset`, `tcp_write_err`). A failed attempt is counted here, and not at a close (`tcp_done`).
    fn fail(&mut self, error: TcpError, cx: &mut Context<'_>) {
        if matches!(self.state, State::SynSent | State::SynReceived) {
            cx.counters.attempt_fails.add(1);
        }
        self.error = Some(error);
        self.recovery.backoff = 0;
        self.finish(cx);
    }

    /// Frees all memory.
    pub(super) fn free(&mut self, pool: &mut Pool) {
        self.receive.queue.clear(pool);
    }

    fn can_receive(&self) -> bool {
        matches!(self.state, State::Established | State::FinWait1 | State::FinWait2)
    }

    /// True if the application's data may be sent in this state.
    fn can_send(&self) -> bool {
        matches!(
            self.state,
            State::Established
                | State::CloseWait
                | State::FinWait1
                | State::Closing
                | State::LastAck
        ) || self.state == State::SynReceived && self.awaits_ack()
    }

    /// Current value of our timestamps, in ms.
    fn timestamp(&self, now_us: u64) -> u32 {
        stamp_ms(now_us).wrapping_add(self.timestamp_offset)
    }
}

/// Time since a stamp of the same clock, in ms. 0 of one that is the next: the clock of a write is a little ahead.
pub(super) fn ms_since(stamp_ms: u32, now_us: u64) -> u32 {
    match self::stamp_ms(now_us).wrapping_sub(stamp_ms) {
        u32::MAX => 0,
        since_ms => since_ms,
    }
}

/// Timestamp clock: 1 ms (RFC 7323, section 5.4), modulo 2^32.
pub(super) fn stamp_ms(now_us: u64) -> u32 {
    u32::try_from((now_us / 1000) & u64::from(u32::MAX)).unwrap_or(0)
}
