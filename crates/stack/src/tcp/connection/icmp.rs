//! Errors that routers and hosts report about a segment of ours (`tcp_v4_err`, `tcp_v6_err`).

use std::net::IpAddr;

use super::super::config::MIN_MSS;
use super::super::error::TcpError;
use super::super::seq::Seq;
use super::fast_open::Opening;
use super::{Connection, Context, State};

/// Meaning of an ICMP error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathError {
    /// The packet was too large for a link of this size (RFC 1191, RFC 8201).
    TooBig {
        /// Largest packet that the link takes.
        mtu_bytes: u32,
    },
    /// Host or network unreachable, or another error that may pass.
    Unreachable {
        /// Error that the application is told.
        error: TcpError,
        /// True if a handshake at a listener ends by it.
        ends_handshake: bool,
        /// True if a router has no route: segments were lost without congestion (RFC 6069).
        is_of_route: bool,
        /// Message that told it.
        message: IcmpMessage,
    },
}

/// ICMP message about a segment of ours.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct IcmpMessage {
    /// Host or router that sent it.
    pub from: Option<IpAddr>,
    /// Type.
    pub kind: u8,
    /// Code.
    pub code: u8,
}

/// Smallest path that a report can claim: less would be an attack (`ip_rt_min_pmtu`).
const MIN_PATH_MTU: u32 = 552;
/// Smallest link over IPv6 (`IPV6_MIN_MTU`).
const MIN_PATH_MTU_V6: u32 = 1280;

impl Connection {
    /// Processes an error about the segment that began at `seq`. Returns the MTU of the path, if the error narrowed it.
    pub(in crate::tcp) fn on_path_error(
        &mut self,
        error: PathError,
        seq: Seq,
        cx: &mut Context<'_>,
    ) -> Option<u32> {
        let is_outstanding =
            !seq.is_before(self.first_outstanding()) && !seq.is_after(self.send.next);
        if self.state == State::Closed || self.waits_for_data() || !is_outstanding {
            // RFC 5927, section 4.1: only errors about segments in flight are believed. As in the kernel,
            // the next one counts as such.
            cx.counters.out_of_window_icmps.add(1);
            return None;
        }
        match error {
            PathError::TooBig { mtu_bytes } => return self.shrink_path(mtu_bytes, cx),
            PathError::Unreachable { error, is_of_route, message, .. } => {
                let is_opening = matches!(self.state, State::SynSent | State::SynReceived);
                if is_opening && !(self.awaits_ack() && self.opening.has(Opening::ACCEPTED)) {
                    self.report_path_error(error, message);
                    self.fail(error, cx);
                } else {
                    if self.options.tells_path_errors {
                        self.error = Some(error);
                    } else {
                        // It may pass: told only if the connection is given up (RFC 5461).
                        self.soft_error = Some(error);
                    }
                    if is_of_route && seq == self.send.una && !self.awaits_ack() {
                        self.revert_timeout(cx);
                    }
                }
            }
        }
        None
    }

    /// Takes back a doubling of the time-out (RFC 6069; `tcp_ld_RTO_revert`).
    fn revert_timeout(&mut self, cx: &mut Context<'_>) {
        let Some(first) = self.sent.first() else { return };
        if self.recovery.retransmits == 0 || self.recovery.backoff == 0 {
            return;
        }
        self.recovery.backoff -= 1;
        self.rtt.set_backoff(self.recovery.backoff);
        let at_us = first.sent_us + self.rtt.rto_us();
        if at_us > cx.now_us {
            self.timers.set_retransmit(at_us);
        } else {
            self.on_retransmit_timer(cx);
        }
    }

    /// Path MTU discovery: sends what was too large again, in smaller segments. Returns the path's MTU, if it is smaller now.
    fn shrink_path(&mut self, mtu_bytes: u32, cx: &mut Context<'_>) -> Option<u32> {
        if self.flow().is_ipv6()
            && (mtu_bytes < MIN_PATH_MTU_V6
                || self.payload_in(mtu_bytes, cx.config) >= self.send.mss)
        {
            // No link is smaller; nor do segments become larger.
            return None;
        }
        let mtu_bytes = mtu_bytes.max(MIN_PATH_MTU).max(self.flow().header_bytes() + MIN_MSS);
        if mtu_bytes >= self.send.path_mtu {
            return None;
        }
        self.send.path_mtu = mtu_bytes;
        self.bound_mtu_search(mtu_bytes);
        self.set_mss(cx.config);
        self.resend_in_smaller(cx);
        Some(mtu_bytes)
    }

    /// Sends segments that are longer than they may be now again, in smaller ones (`tcp_simple_retransmit`).
    pub(super) fn resend_in_smaller(&mut self, cx: &mut Context<'_>) {
        if self.state == State::SynSent && self.has_syn_data() {
            // The SYN with its data was too large.
            return self.resend_syn_data(cx);
        }
        let mut facts = super::ack::AckFacts::default();
        let mut is_longer = false;
        for index in 0..self.sent.len() as usize {
            let Some(&sent) = self.sent.at(index) else { break };
            // The last segment of a packet may be a shorter one.
            is_longer = sent.payload_bytes() > self.send.mss || sent.marks.is_joined && is_longer;
            if is_longer {
                self.mark_lost(index, &mut facts);
            }
        }
        if self.sent.lost == 0 {
            return;
        }
        self.sent.split_all(self.send.mss);
        self.limit_dup_acks();
        // Not a sign of congestion: the window stays.
        self.enter_simple_recovery();
        self.resend_lost(cx);
    }
}
