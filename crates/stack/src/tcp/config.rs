//! Settings: the kernel's sysctls and socket options, with its defaults.

use std::num::{NonZeroU8, NonZeroU32};

use super::fast_open::FastOpen;
use crate::network::compose::DEFAULT_TTL;

/// Microseconds of a millisecond.
pub(super) const MS: u64 = 1_000;
/// Microseconds of a second.
pub(super) const SECOND: u64 = 1_000_000;

/// A time in 32 bits; the longest if it does not fit.
#[expect(clippy::cast_possible_truncation, reason = "compared before")]
pub(super) const fn us_u32(us: u64) -> u32 {
    if us > u32::MAX as u64 { u32::MAX } else { us as u32 }
}

/// Lowest retransmission time-out (`TCP_RTO_MIN`), in µs.
pub(super) const RTO_MIN_US: u64 = 200 * MS;
/// Highest retransmission time-out (`TCP_RTO_MAX`), in µs.
pub(super) const RTO_MAX_US: u64 = 120 * SECOND;
/// Shortest time of a timer (`TCP_TIMEOUT_MIN`: two ticks of a millisecond), in µs.
pub(super) const TIMEOUT_MIN_US: u64 = 2 * MS;
/// Retransmission time-out without a measured round trip (RFC 6298, section 2.1), in µs.
pub(super) const RTO_INITIAL_US: u64 = SECOND;
/// Lowest delay of an ACK (`TCP_ATO_MIN`, `TCP_DELACK_MIN`), in µs.
pub(super) const DELACK_MIN_US: u64 = 40 * MS;
/// Highest delay of an ACK (`TCP_DELACK_MAX`), in µs.
pub(super) const DELACK_MAX_US: u64 = 200 * MS;
/// Time that a connection stays in TIME-WAIT (`TCP_TIMEWAIT_LEN`), in µs.
pub(super) const TIME_WAIT_US: u64 = 60 * SECOND;
/// Initial congestion window, in segments (RFC 6928).
pub(super) const INITIAL_CWND: u32 = 10;
/// Duplicate ACKs that mean a loss (RFC 5681; `TCP_FASTRETRANS_THRESH`).
pub(super) const DUP_THRESHOLD: u32 = 3;
/// Segment size assumed of a peer that announces none over IPv4 (RFC 9293, MUST-15).
pub(super) const DEFAULT_MSS: u16 = 536;
/// Segment size assumed of such a peer over IPv6, as in the kernel: that of a packet of 1280 bytes.
pub(super) const DEFAULT_MSS_V6: u16 = 1220;
/// Smallest segment size that a peer or a path can impose (`TCP_MIN_SND_MSS`).
pub(super) const MIN_MSS: u32 = 48;
/// Largest shift of a window (RFC 7323, section 2.3).
pub(super) const MAX_WINDOW_SCALE: u8 = 14;
/// ACKs sent at once while a connection is young (`TCP_MAX_QUICKACKS`).
pub(super) const MAX_QUICKACKS: u8 = 16;
/// Age of a timestamp beyond which PAWS no longer trusts it (`TCP_PAWS_24DAYS`), in µs.
pub(super) const PAWS_IDLE_US: u64 = 24 * 24 * 3600 * SECOND;

/// Settings of a host's TCP. Names in parentheses are the kernel's sysctls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TcpConfig {
    /// Retransmissions of a SYN (`tcp_syn_retries`).
    pub syn_retries: u8,
    /// Retransmissions of a SYN before the time-out starts to double (`tcp_syn_linear_timeouts`).
    pub syn_linear_timeouts: u8,
    /// Retransmissions of a SYN-ACK (`tcp_synack_retries`).
    pub synack_retries: u8,
    /// Retransmissions after which a path counts as a black hole for large packets (`tcp_retries1`).
    pub retries1: u8,
    /// Retransmissions after which a connection is given up (`tcp_retries2`).
    pub retries2: u8,
    /// Retransmissions after which a connection that the application has closed is given up; 0 for eight,
    /// and for none once its time-outs are of the highest length (`tcp_orphan_retries`).
    pub orphan_retries: u8,
    /// Highest retransmission time-out, from a second to two minutes, in µs (`tcp_rto_max_ms`).
    pub rto_max_us: u32,
    /// Time that a closed connection waits for the peer's FIN, in µs (`tcp_fin_timeout`).
    pub fin_timeout_us: u64,
    /// Interval between two answers to invalid segments of a connection, in µs
    /// (`tcp_invalid_ratelimit`).
    pub invalid_ratelimit_us: u64,
    /// Initial and largest receive buffer, in bytes of memory (`tcp_rmem`).
    pub rmem: (u32, u32),
    /// Initial and largest send buffer, in bytes of memory (`tcp_wmem`). It has room for two congestion windows.
    pub wmem: (u32, u32),
    /// Connections of which no ACK was received yet, at most (`tcp_max_syn_backlog`).
    pub max_syn_backlog: u32,
    /// SYNs that are answered by cookies (`tcp_syncookies`).
    pub syncookies: SynCookies,
    /// Cookies for SYNs that came for the first time, at most, a second and CPU; 0 for no limit, as in the
    /// kernel. Beyond it a SYN is answered once it comes again.
    pub cookies_per_s: u32,
    /// True to accept ECN if the peer asks for it (`tcp_ecn` 2).
    pub accepts_ecn: bool,
    /// True to ask for ECN (`tcp_ecn` 1).
    pub asks_ecn: bool,
    /// True to ask for ECN in the first SYN only (`tcp_ecn_fallback`): a path may drop those that ask.
    pub ecn_fallback: bool,
    /// Timestamps (`tcp_timestamps`).
    pub timestamps: bool,
    /// Window scaling (`tcp_window_scaling`).
    pub window_scaling: bool,
    /// Selective acknowledgements (`tcp_sack`).
    pub sack: bool,
    /// Tells what came twice by a selective acknowledgement (`tcp_dsack`, RFC 2883).
    pub dsack: bool,
    /// Tail loss probes (`tcp_early_retrans`, RFC 8985).
    pub loss_probes: bool,
    /// Finds out if a time-out was spurious (`tcp_frto`, RFC 5682).
    pub frto: bool,
    /// Segments by which others overtake one, at most, before that counts as lost: as a connection begins (`tcp_reordering`).
    pub reordering: u32,
    /// True if urgent pointers point at the urgent byte (`tcp_stdurg`), and not behind it.
    pub urgent_at_pointer: bool,
    /// True if a reset does not end TIME-WAIT (`tcp_rfc1337`).
    pub ignores_time_wait_resets: bool,
    /// Sides of Fast Open that are on (`tcp_fastopen`, RFC 7413): as in the kernel, that of clients.
    pub fast_open: FastOpen,
    /// Time for which no client of the host sends data in its SYN after a path has swallowed such SYNs, in µs: twice as
    /// long each time, and 0 for not at all, as in the kernel (`tcp_fastopen_blackhole_timeout_sec`).
    pub fast_open_blackhole_timeout_us: u64,
    /// Connections, listeners and sockets together, at most.
    pub max_sockets: u32,
    /// Connections in TIME-WAIT, at most (`tcp_max_tw_buckets`).
    pub max_time_wait: u32,
    /// Connections that the application has closed and whose peer does not have everything, at most
    /// (`tcp_max_orphans`): one more is reset.
    pub max_orphans: u32,
    /// Memory of all buffers together, in bytes (`tcp_mem`).
    pub memory_bytes: u64,
    /// Memory of what all connections together have received and nobody has read, in bytes: packets keep the frames
    /// that they came in, of which the device needs some. Beyond it, a connection keeps a packet or two.
    pub received_bytes: u64,
    /// Payload of one packet sent, at most, in bytes: more than a segment if something behind cuts
    /// such packets (`gso_max_size`); 0 for single segments.
    pub gso_bytes: u32,
    /// Segments of such a packet, at least, as long as the window allows (`tcp_min_tso_segs`).
    pub min_gso_segments: u32,
    /// Sets PSH in each packet of several segments (`tcp_transmit_skb`). If false, such packets have none, and a segment with
    /// PSH or FIN is sent by itself: where a packet socket's packet is cut in software, the receiver's GRO merges all segments but
    /// the last, and passes that on before the others if it has one of them (`skb_segment`, `gro_list_prepare`).
    pub pushes_large_packets: bool,
    /// True to spread segments over the round trip (`sk_pacing_status`), as the kernel does behind `fq`.
    pub pacing: bool,
    /// True to shrink a congestion window after a pause, and one that is not used
    /// (`tcp_slow_start_after_idle`).
    pub restarts_after_idle: bool,
    /// Congestion control of new connections (`tcp_congestion_control`).
    pub congestion: Algorithm,
    /// Search for the largest packet of a path by probes (`tcp_mtu_probing`, RFC 4821).
    pub mtu_probing: MtuProbing,
    /// Payload of the segments that a search begins with, in bytes (`tcp_base_mss`).
    pub base_mss: u32,
    /// Smallest segment that a peer or a path can impose, its options counted, in bytes (`tcp_min_snd_mss`).
    pub min_snd_mss: u32,
    /// Smallest payload of a segment after time-outs that a search takes for a black hole, in bytes
    /// (`tcp_mtu_probe_floor`).
    pub mtu_probe_floor: u32,
    /// Uncertainty of a path's MTU with which a search ends, in bytes (`tcp_probe_threshold`).
    pub probe_threshold: u32,
    /// Time after which a search begins anew, in µs (`tcp_probe_interval`).
    pub probe_interval_us: u64,
}

impl TcpConfig {
    /// The kernel's defaults on a machine with much memory.
    pub const KERNELS: Self = Self {
        syn_retries: 6,
        syn_linear_timeouts: 4,
        synack_retries: 5,
        retries1: 3,
        retries2: 15,
        orphan_retries: 0,
        rto_max_us: us_u32(RTO_MAX_US),
        fin_timeout_us: 60 * SECOND,
        invalid_ratelimit_us: SECOND / 2,
        rmem: (131_072, 32 << 20),
        wmem: (16_384, 4 << 20),
        max_syn_backlog: 4096,
        syncookies: SynCookies::WhenFull,
        cookies_per_s: 0,
        accepts_ecn: true,
        asks_ecn: false,
        ecn_fallback: true,
        timestamps: true,
        window_scaling: true,
        sack: true,
        dsack: true,
        loss_probes: true,
        frto: true,
        reordering: DUP_THRESHOLD,
        urgent_at_pointer: false,
        ignores_time_wait_resets: false,
        fast_open: FastOpen::CLIENT,
        fast_open_blackhole_timeout_us: 0,
        max_sockets: 1 << 20,
        max_time_wait: 1 << 16,
        max_orphans: 1 << 16,
        memory_bytes: 1 << 30,
        received_bytes: 1 << 30,
        gso_bytes: 0,
        min_gso_segments: 2,
        pushes_large_packets: true,
        pacing: false,
        restarts_after_idle: true,
        congestion: Algorithm::Cubic,
        mtu_probing: MtuProbing::Off,
        base_mss: 1024,
        min_snd_mss: MIN_MSS,
        mtu_probe_floor: 48,
        probe_threshold: 8,
        probe_interval_us: 600 * SECOND,
    };
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self::KERNELS
    }
}

/// Congestion control.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Algorithm {
    /// RFC 5681 with RFC 6582.
    NewReno,
    /// RFC 9438.
    #[default]
    Cubic,
}

/// SYNs that a listener answers by cookies, without a memory of them (RFC 4987, section 3.6).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SynCookies {
    /// None: SYNs beyond the backlog are dropped (`tcp_syncookies` 0).
    Off,
    /// SYNs beyond the backlog (`tcp_syncookies` 1).
    #[default]
    WhenFull,
    /// All SYNs, but those that reopen a connection in TIME-WAIT (`tcp_syncookies` 2).
    Always,
}

/// Search for the largest packet that a path takes (RFC 4821), of each connection by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum MtuProbing {
    /// Never (`tcp_mtu_probing` 0): errors of routers alone tell of smaller links (RFC 1191, RFC 8201).
    #[default]
    Off,
    /// Once segments time out as if something dropped large packets without an error (`tcp_mtu_probing` 1).
    AfterBlackHole,
    /// From the beginning (`tcp_mtu_probing` 2).
    Always,
}

/// Times that are told of what is sent, in the kernel's flags (`SO_TIMESTAMPING`). Names are the kernel's, `SOF_TIMESTAMPING_`
/// in front.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Timestamping(pub u32);

impl Timestamping {
    /// When a device has a packet.
    pub const TX_SOFTWARE: Self = Self(1 << 1);
    /// Tells the times of the first two in reports.
    pub const SOFTWARE: Self = Self(1 << 4);
    /// Tells the number of the byte.
    pub const OPT_ID: Self = Self(1 << 7);
    /// When a packet goes on its way to the device.
    pub const TX_SCHED: Self = Self(1 << 8);
    /// When the peer has acknowledged all up to the byte.
    pub const TX_ACK: Self = Self(1 << 9);
    /// Tells times without the packets.
    pub const OPT_TSONLY: Self = Self(1 << 11);
    /// Tells numbers of the connection, which needs [`Self::OPT_TSONLY`].
    pub const OPT_STATS: Self = Self(1 << 12);
    /// Counts from what is written next, and not from what is not acknowledged; with [`Self::OPT_ID`] only.
    pub const OPT_ID_TCP: Self = Self(1 << 16);
    /// All flags that the kernel knows.
    const ALL: Self = Self((1 << 19) - 1);

    /// Flags of both.
    #[must_use]
    pub const fn with(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    /// True if all of these are set.
    #[must_use]
    pub const fn has(self, flags: Self) -> bool {
        self.0 & flags.0 == flags.0
    }

    /// Times that are asked for of what is sent.
    pub(super) fn of_transmission(self) -> Self {
        Self(self.0 & (Self::TX_SOFTWARE.0 | Self::TX_SCHED.0 | Self::TX_ACK.0))
    }

    /// True if the kernel takes the flags together.
    pub(super) fn is_valid(self) -> bool {
        Self::ALL.has(self)
            && (self.has(Self::OPT_ID) || !self.has(Self::OPT_ID_TCP))
            && (self.has(Self::OPT_TSONLY) || !self.has(Self::OPT_STATS))
    }
}

/// Options of a socket. Names in parentheses are the kernel's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TcpOptions {
    /// Sends small segments at once (`TCP_NODELAY`).
    pub nodelay: bool,
    /// Sends full segments only, for at most 200 ms (`TCP_CORK`).
    pub cork: bool,
    /// Probes an idle peer (`SO_KEEPALIVE`).
    pub keepalive: bool,
    /// Idle time before the first probe, in µs (`TCP_KEEPIDLE`).
    pub keepalive_idle_us: u64,
    /// Interval of probes, in µs (`TCP_KEEPINTVL`).
    pub keepalive_interval_us: u64,
    /// Probes without an answer after which the connection is given up (`TCP_KEEPCNT`).
    pub keepalive_probes: u8,
    /// Time that data may stay unacknowledged, in µs; 0 for the number of retransmissions
    /// (`TCP_USER_TIMEOUT`, RFC 5482).
    pub user_timeout_us: u64,
    /// Time that a close waits for data to be acknowledged, in s; 0 resets (`SO_LINGER`).
    pub linger_s: Option<u32>,
    /// Leaves urgent bytes in the stream (`SO_OOBINLINE`), as RFC 6093 recommends.
    pub oob_inline: bool,
    /// Receive buffer, in bytes of memory; `None` for one that grows (`SO_RCVBUF`).
    pub rcvbuf: Option<u32>,
    /// Bytes that a reader waits for (`SO_RCVLOWAT`), which a receive buffer that grows has room for. With fewer, a socket is
    /// not readable unless no more can come, and every second segment is acknowledged.
    pub low_water_bytes: u32,
    /// Send buffer, in bytes of memory; `None` for one that grows (`SO_SNDBUF`).
    pub sndbuf: Option<u32>,
    /// Largest segment (`TCP_MAXSEG`).
    pub max_segment: Option<u16>,
    /// Largest receive window; recomputed when the ratio of payload to truesize changes (`TCP_WINDOW_CLAMP`).
    pub window_clamp: Option<NonZeroU32>,
    /// Time that a closed connection waits for the peer's FIN, in µs; 0 for not at all
    /// (`TCP_LINGER2`, there -1).
    pub fin_timeout_us: Option<u32>,
    /// Retransmissions of a SYN (`TCP_SYNCNT`).
    pub syn_retries: Option<NonZeroU8>,
    /// Highest retransmission time-out, from a second to two minutes, in µs; `None` for that of the settings
    /// (`TCP_RTO_MAX_MS`).
    pub rto_max_us: Option<NonZeroU32>,
    /// The first time-outs of a connection with few segments in flight are of one length (`TCP_THIN_LINEAR_TIMEOUTS`).
    pub thin_linear_timeouts: bool,
    /// SYN-ACKs that are sent again before a connection without data is accepted; 0 to accept at once
    /// (`TCP_DEFER_ACCEPT`).
    pub defer_retries: u8,
    /// Congestion control; `None` for that of the settings (`TCP_CONGESTION`).
    pub congestion: Option<Algorithm>,
    /// Acknowledges at once as a client begins (`TCP_QUICKACK`); of an open connection see
    /// [`Tcp::set_quick_acks`](super::Tcp::set_quick_acks).
    pub quick_acks: bool,
    /// DSCP of packets sent, in the upper six bits (`IP_TOS`).
    pub tos: u8,
    /// Time to live, or hop limit, of packets sent (`IP_TTL`, `IPV6_UNICAST_HOPS`).
    pub ttl: u8,
    /// Least time to live, or hop limit, of segments received: those from farther away are dropped (RFC 5082; `IP_MINTTL`,
    /// `IPV6_MINHOPCOUNT`).
    pub min_ttl: u8,
    /// Of a listener of both families, these three for connections over IPv4; `None` for those of IPv6.
    pub v4: Option<FamilyOptions>,
    /// Tells errors of the path of an open connection at once, and not only if it is given up (`IP_RECVERR`,
    /// `IPV6_RECVERR`).
    pub tells_path_errors: bool,
    /// Unsent bytes at which writes block; the socket is writable again below half of that. `None`: only the send
    /// buffer limits (`TCP_NOTSENT_LOWAT`).
    pub unsent_limit: Option<NonZeroU32>,
    /// Tells in the error queue when the bytes of a write with `MSG_ZEROCOPY` are needed no more (`SO_ZEROCOPY`).
    pub zero_copy: bool,
    /// Times that the error queue tells; see [`Tcp::set_timestamping`](super::Tcp::set_timestamping) (`SO_TIMESTAMPING`).
    pub timestamping: Timestamping,
}

/// Options that a socket of both families has for each of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FamilyOptions {
    /// DSCP of packets sent, in the upper six bits.
    pub tos: u8,
    /// Time to live of packets sent.
    pub ttl: u8,
    /// Least time to live of segments received.
    pub min_ttl: u8,
}

impl Default for FamilyOptions {
    fn default() -> Self {
        Self { tos: 0, ttl: DEFAULT_TTL, min_ttl: 0 }
    }
}

impl TcpOptions {
    /// Options of a listener's connection, by its family.
    pub(super) fn inherited(mut self, is_ipv6: bool) -> Self {
        if let Some(FamilyOptions { tos, ttl, min_ttl }) = self.v4.take().filter(|_| !is_ipv6) {
            (self.tos, self.ttl, self.min_ttl) = (tos, ttl, min_ttl);
        }
        self
    }

    /// Options of a new socket.
    pub(super) const DEFAULT: Self = Self {
        nodelay: false,
        cork: false,
        keepalive: false,
        keepalive_idle_us: 7200 * SECOND,
        keepalive_interval_us: 75 * SECOND,
        keepalive_probes: 9,
        user_timeout_us: 0,
        linger_s: None,
        oob_inline: false,
        rcvbuf: None,
        low_water_bytes: 1,
        sndbuf: None,
        max_segment: None,
        window_clamp: None,
        fin_timeout_us: None,
        syn_retries: None,
        rto_max_us: None,
        thin_linear_timeouts: false,
        defer_retries: 0,
        congestion: None,
        quick_acks: true,
        tos: 0,
        ttl: DEFAULT_TTL,
        min_ttl: 0,
        v4: None,
        tells_path_errors: false,
        unsent_limit: None,
        zero_copy: false,
        timestamping: Timestamping(0),
    };
}

impl TcpOptions {
    /// Highest retransmission time-out, in µs.
    pub(super) fn rto_max_us(&self, config: &TcpConfig) -> u32 {
        self.rto_max_us.map_or(config.rto_max_us, NonZeroU32::get)
    }
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self::DEFAULT
    }
}
