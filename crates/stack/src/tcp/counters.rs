//! Counters, named as in `/proc/net/snmp` (`Tcp:`) and `/proc/net/netstat` (`TcpExt:`).

use crate::counter::StackCounter;

macro_rules! counters {
    ($($(#[$doc:meta])* $field:ident = $name:literal,)*) => {
        /// Counters of one [`Tcp`](super::Tcp), written by whoever has it locked, and read by any thread.
        #[derive(Debug, Default)]
        pub struct TcpCounters {
            $($(#[$doc])* pub $field: StackCounter,)*
        }

        impl TcpCounters {
            /// Each counter's name in the kernel, and its value.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
                [$(($name, self.$field.get()),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Connections opened by a call.
    active_opens = "ActiveOpens",
    /// Connections opened by a peer.
    passive_opens = "PassiveOpens",
    /// Connections that could not be opened.
    attempt_fails = "AttemptFails",
    /// Connections that ended at once from ESTABLISHED or CLOSE-WAIT, as by a reset.
    estab_resets = "EstabResets",
    /// Segments received.
    in_segs = "InSegs",
    /// Segments sent, those sent again not counted.
    out_segs = "OutSegs",
    /// Segments sent again.
    retrans_segs = "RetransSegs",
    /// Segments received in error.
    in_errs = "InErrs",
    /// Resets sent.
    out_rsts = "OutRsts",
    /// Segments of no connection here, on a device that the kernel answers on.
    not_ours = "ForebayNotOurs",
    /// Segments with a wrong checksum.
    in_csum_errors = "InCsumErrors",
    /// SYN cookies sent.
    syncookies_sent = "SyncookiesSent",
    /// Valid SYN cookies received.
    syncookies_recv = "SyncookiesRecv",
    /// Invalid SYN cookies received.
    syncookies_failed = "SyncookiesFailed",
    /// Connections whose data in the SYN the server took.
    fast_open_active = "TCPFastOpenActive",
    /// Connections whose data in the SYN were sent again.
    fast_open_active_fail = "TCPFastOpenActiveFail",
    /// Times that Fast Open paused, as a path swallowed SYNs with data.
    fast_open_blackhole = "TCPFastOpenBlackhole",
    /// SYNs with data accepted by their cookie.
    fast_open_passive = "TCPFastOpenPassive",
    /// SYNs with a Fast Open cookie that is not valid.
    fast_open_passive_fail = "TCPFastOpenPassiveFail",
    /// SYNs with data accepted by a cookie of the older key.
    fast_open_passive_alt_key = "TCPFastOpenPassiveAltKey",
    /// SYNs with data or a cookie, of which a listener had too many.
    fast_open_listen_overflow = "TCPFastOpenListenOverflow",
    /// SYNs that asked for a Fast Open cookie.
    fast_open_cookie_reqd = "TCPFastOpenCookieReqd",
    /// SYNs that a full queue dropped.
    req_q_full_drop = "TCPReqQFullDrop",
    /// Handshakes and SYNs that a full accept queue dropped.
    listen_overflows = "ListenOverflows",
    /// SYNs and handshakes dropped at a listener.
    listen_drops = "ListenDrops",
    /// Connections that went to TIME-WAIT.
    time_waits = "TW",
    /// Connections not kept in TIME-WAIT, as too many were.
    time_wait_overflow = "TCPTimeWaitOverflow",
    /// Segments of a timestamp older than the last one.
    paws_estab = "PAWSEstab",
    /// ACKs sent late.
    delayed_acks = "DelayedACKs",
    /// Segments received that hold only bytes received before.
    delayed_ack_lost = "DelayedACKLost",
    /// Segments received out of order.
    ofo_queue = "TCPOFOQueue",
    /// Segments received out of order and dropped for lack of memory.
    ofo_drop = "TCPOFODrop",
    /// Segments in order dropped for lack of memory.
    rcv_q_drop = "TCPRcvQDrop",
    /// Receive queues copied together for lack of memory.
    rcv_collapsed = "TCPRcvCollapsed",
    /// Out-of-order payloads dropped for lack of memory.
    ofo_pruned = "OfoPruned",
    /// Segments beyond the receive window.
    beyond_window = "BeyondWindow",
    /// Segments dropped since the receive window was zero.
    zero_window_drop = "TCPZeroWindowDrop",
    /// Windows of zero announced.
    to_zero_window = "TCPToZeroWindowAdv",
    /// Probes of a zero window or of an idle peer sent.
    win_probe = "TCPWinProbe",
    /// Keep-alive probes sent.
    keepalive = "TCPKeepAlive",
    /// Challenge ACKs sent (RFC 5961).
    challenge_ack = "TCPChallengeACK",
    /// SYNs answered by a challenge ACK.
    syn_challenge = "TCPSYNChallenge",
    /// Challenge ACKs not sent because of the rate limit.
    challenge_ack_skipped = "TCPACKSkippedChallenge",
    /// ACKs of invalid segments not sent because of the rate limit: of a handshake.
    ack_skipped_syn_recv = "TCPACKSkippedSynRecv",
    /// Of segments with an old timestamp.
    ack_skipped_paws = "TCPACKSkippedPAWS",
    /// Of segments outside of the window.
    ack_skipped_seq = "TCPACKSkippedSeq",
    /// Of segments in FIN-WAIT-2 without an owner.
    ack_skipped_fin_wait2 = "TCPACKSkippedFinWait2",
    /// Of segments in TIME-WAIT.
    ack_skipped_time_wait = "TCPACKSkippedTimeWait",
    /// Segments with a signature (RFC 2385), for which there is no key.
    md5_unexpected = "TCPMD5Unexpected",
    /// Segments from farther away than their socket permits.
    min_ttl_drop = "TCPMinTTLDrop",
    /// Segments of a handshake that echo no timestamp of its SYN-ACKs.
    tsecr_rejected = "TSEcrRejected",
    /// Time-outs of retransmission.
    timeouts = "TCPTimeouts",
    /// Losses repaired by selective acknowledgements.
    sack_recovery = "TCPSackRecovery",
    /// Losses repaired without them.
    reno_recovery = "TCPRenoRecovery",
    /// Fast retransmissions.
    fast_retrans = "TCPFastRetrans",
    /// Retransmissions in slow start after a time-out.
    slow_start_retrans = "TCPSlowStartRetrans",
    /// Segments deemed lost whose retransmission was lost, too.
    lost_retransmit = "TCPLostRetransmit",
    /// Peers that discarded bytes they had acknowledged selectively.
    sack_reneging = "TCPSACKReneging",
    /// Tail loss probes sent.
    loss_probes = "TCPLossProbes",
    /// Losses repaired by a tail loss probe.
    loss_probe_recovery = "TCPLossProbeRecovery",
    /// Time-outs found to be spurious.
    spurious_rtos = "TCPSpuriousRTOs",
    /// Windows restored by timestamps or duplicates after a fast retransmission.
    full_undo = "TCPFullUndo",
    /// Windows restored after a time-out.
    loss_undo = "TCPLossUndo",
    /// Windows restored by D-SACK.
    dsack_undo = "TCPDSACKUndo",
    /// D-SACKs sent for bytes received before.
    dsack_old_sent = "TCPDSACKOldSent",
    /// D-SACKs sent for out-of-order bytes.
    dsack_ofo_sent = "TCPDSACKOfoSent",
    /// Probes of the path's MTU that arrived.
    mtup_success = "TCPMTUPSuccess",
    /// Probes of the path's MTU that were too large.
    mtup_fail = "TCPMTUPFail",
    /// D-SACKs received.
    dsack_recv = "TCPDSACKRecv",
    /// Connections reset by a close with unread data.
    abort_on_close = "TCPAbortOnClose",
    /// Connections reset by data after a close.
    abort_on_data = "TCPAbortOnData",
    /// Connections given up after a time-out.
    abort_on_timeout = "TCPAbortOnTimeout",
    /// Connections reset with a linger time of zero, or in the peer's absence.
    abort_on_linger = "TCPAbortOnLinger",
    /// Connections aborted for lack of memory.
    abort_on_memory = "TCPAbortOnMemory",
    /// Segments not sent for lack of a frame.
    no_frame = "ForebayNoFrame",
    /// ICMP errors of a segment that is not outstanding.
    out_of_window_icmps = "OutOfWindowIcmps",
}
