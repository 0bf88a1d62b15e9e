//! Search for the largest packet that the path takes, by probes: segments of data that are longer than others
//! (RFC 4821; `tcp_mtu_probe`). It needs no errors of routers, which a path may drop together with the packets.

use super::super::config::{MIN_MSS, MtuProbing, RTO_MIN_US, TcpConfig};
use super::super::seq::Seq;
use super::super::wire::options::TIMESTAMPS_BYTES;
use super::recovery::Phase;
use super::timers::retransmission_time_us;
use super::{Connection, Context};

/// Smallest congestion window for a probe, in segments: a lost one is then found without a time-out.
const PROBE_CWND_MIN: u32 = 11;
/// Segments that leave a probe and another one room in the congestion window.
const PROBE_AND_NEXT: u32 = 2;
/// Payload that options always leave room for.
const SMALLEST_PAYLOAD_BYTES: u32 = 8;

/// Search of a connection (`icsk_mtup`). Sizes are those of packets, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct MtuSearch {
    /// Packet that arrives, as a probe has shown or as is assumed.
    pub(super) low: u32,
    /// Largest packet that may arrive.
    pub(super) high: u32,
    /// Largest packet of the route's device.
    most: u32,
    probe: Option<Probe>,
    /// Time when the search began, in µs.
    since_us: u64,
}

const _: () = assert!(size_of::<MtuSearch>() <= 40, "TCP-12: a search takes 40 bytes");

/// A probe that is under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Probe {
    start: Seq,
    end: Seq,
    packet_bytes: u32,
}

/// Outcome of a try to send a probe.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Probing {
    Sent,
    /// Others wait, too: the next ACKs will let a probe out.
    Waits,
    NotNow,
}

impl Connection {
    /// Begins the search if it is always meant, when the connection opens (`tcp_mtup_init`).
    pub(super) fn begin_mtu_search(&mut self, cx: &Context<'_>) {
        if cx.config.mtu_probing == MtuProbing::Always {
            self.send.search = Some(Box::new(self.new_search(cx)));
        }
    }

    fn new_search(&self, cx: &Context<'_>) -> MtuSearch {
        let most = self.send.path_mtu;
        MtuSearch {
            low: self.packet_of(cx.config.base_mss),
            high: self.largest_of_peer().min(most),
            most,
            probe: None,
            since_us: cx.now_us,
        }
    }

    /// Packet with a payload of this length (`tcp_mss_to_mtu`).
    fn packet_of(&self, payload_bytes: u32) -> u32 {
        payload_bytes.saturating_add(self.flow().header_bytes() + self.option_bytes())
    }

    /// Packet of the largest segment that the peer and the user allow.
    fn largest_of_peer(&self) -> u32 {
        self.send.peer_mss + self.flow().header_bytes()
    }

    /// Options that each segment has.
    pub(super) fn option_bytes(&self) -> u32 {
        if self.agreed.timestamps { TIMESTAMPS_BYTES } else { 0 }
    }

    /// Payload of a full segment in a packet of this size (`tcp_mtu_to_mss`).
    pub(super) fn payload_in(&self, packet_bytes: u32, config: &TcpConfig) -> u32 {
        let segment = packet_bytes.saturating_sub(self.flow().header_bytes());
        let segment = segment.min(self.send.peer_mss).max(config.min_snd_mss);
        segment.saturating_sub(self.option_bytes()).max(SMALLEST_PAYLOAD_BYTES)
    }

    /// Payload of a full segment in the largest packet that is known to arrive.
    pub(super) fn payload_in_path(&self, config: &TcpConfig) -> u32 {
        let of_path = self.payload_in(self.send.path_mtu, config);
        let proven = self.send.search.as_ref().map(|search| self.payload_in(search.low, config));
        proven.map_or(of_path, |proven| of_path.min(proven))
    }

    /// Sends a probe if one is due: a segment in the middle between the largest that arrives and the smallest that
    /// does not, with as much behind it as shows its loss.
    pub(super) fn send_mtu_probe(&mut self, cx: &mut Context<'_>) -> Probing {
        let Some(&MtuSearch { low, high, probe, .. }) = self.send.search.as_deref() else {
            return Probing::NotNow;
        };
        let may_probe = probe.is_none()
            && self.recovery.is_open()
            && self.congestion.cwnd >= PROBE_CWND_MIN
            && self.segment_room() == self.send.mss;
        if !may_probe {
            return Probing::NotNow;
        }
        let len_bytes = self.payload_in(u32::midpoint(low, high), cx.config);
        let is_narrow = high < low || high - low < cx.config.probe_threshold.max(1);
        if is_narrow || len_bytes > self.payload_in(high, cx.config) {
            self.search_anew(cx);
            return Probing::NotNow;
        }
        let behind = self.recovery.reordering.saturating_add(1).saturating_mul(self.send.mss);
        let needed = len_bytes.saturating_add(behind);
        if self.unsent_bytes() < needed || self.send.window < needed {
            return Probing::NotNow;
        }
        if (self.send.next + needed).is_after(self.window_end()) {
            return Probing::Waits;
        }
        let in_flight = self.sent.in_flight();
        if in_flight + PROBE_AND_NEXT > self.congestion.cwnd {
            return if in_flight == 0 { Probing::NotNow } else { Probing::Waits };
        }
        if self.waits_for_pace(cx)
            || cx.free_payload_bytes() < len_bytes
            || !self.send.queue.gather_packet(self.send.next, len_bytes)
        {
            return Probing::NotNow;
        }
        self.send_as_probe(len_bytes, cx)
    }

    fn send_as_probe(&mut self, len_bytes: u32, cx: &mut Context<'_>) -> Probing {
        let (start, end) = (self.send.next, self.send.next + len_bytes);
        let packet_bytes = self.packet_of(len_bytes);
        let probe = Some(Probe { start, end, packet_bytes });
        self.set_probe(probe);
        if !self.send_longer(len_bytes, cx) {
            self.set_probe(None);
            return Probing::NotNow;
        }
        // It takes the place of two.
        self.congestion.cwnd -= 1;
        Probing::Sent
    }

    fn set_probe(&mut self, probe: Option<Probe>) {
        if let Some(search) = &mut self.send.search {
            search.probe = probe;
        }
    }

    /// True if the segment that begins at `seq` is a probe, which is longer than others.
    pub(super) fn is_mtu_probe(&self, seq: Seq) -> bool {
        self.send.search.as_ref().and_then(|search| search.probe).is_some_and(|of| of.start == seq)
    }

    /// A segment is sent again: what becomes of the probe tells nothing (`__tcp_retransmit_skb`).
    pub(super) fn forget_mtu_probe(&mut self) {
        self.set_probe(None);
    }

    /// An ACK up to `una`: longer segments follow if it covers the probe (`tcp_mtup_probe_success`).
    pub(super) fn acknowledge_mtu_probe(&mut self, una: Seq, cx: &Context<'_>) {
        let Some(search) = self.send.search.as_deref_mut() else { return };
        let Some(probe) = search.probe.take_if(|probe| !probe.end.is_after(una)) else { return };
        search.low = probe.packet_bytes;
        // As many bytes as before, in fewer segments.
        let bytes = u64::from(self.congestion.cwnd) * u64::from(self.packet_of(self.send.mss));
        let cwnd = u32::try_from(bytes / u64::from(probe.packet_bytes)).unwrap_or(u32::MAX);
        self.recovery.repair.prior_ssthresh = self.current_ssthresh();
        self.congestion.set(cwnd);
        self.recovery.stamp_window(cx.now_us);
        self.congestion.ssthresh = self.current_ssthresh();
        self.send.path_mtu = self.send.path_mtu.max(probe.packet_bytes);
        self.set_mss(cx.config);
        cx.counters.mtup_success.add(1);
    }

    /// Segments were lost: if the probe is the first of them, it was too large, and its loss is no sign of
    /// congestion. Returns true if so (`tcp_mtup_probe_failed`).
    pub(super) fn has_mtu_probe_failed(&mut self, cx: &mut Context<'_>) -> bool {
        let (una, is_reducing) = (self.send.una, self.recovery.phase >= Phase::Cwr);
        let Some(search) = self.send.search.as_deref_mut().filter(|_| !is_reducing) else {
            return false;
        };
        let Some(probe) = search.probe.take_if(|probe| probe.start == una) else { return false };
        search.high = probe.packet_bytes - 1;
        self.congestion.cwnd += 1;
        cx.counters.mtup_fail.add(1);
        self.resend_in_smaller(cx);
        true
    }

    /// Segments time out again and again: perhaps the path drops large packets, and no error tells so. Returns true
    /// if segments become smaller (`tcp_mtu_probing`).
    pub(super) fn suspect_black_hole(&mut self, cx: &Context<'_>) -> bool {
        let config = cx.config;
        if config.mtu_probing == MtuProbing::Off {
            return false;
        }
        let since_us = self.recovery.repair.retransmit_stamp_us;
        let after_us = retransmission_time_us(config.retries1, RTO_MIN_US, self.rtt.max_us());
        let is_due = self.recovery.retransmits > 0
            && since_us > 0
            && cx.now_us.saturating_sub(since_us) >= after_us;
        if !is_due {
            return false;
        }
        match self.send.search.as_deref().map(|search| search.low) {
            None => self.send.search = Some(Box::new(self.new_search(cx))),
            Some(low) => {
                let half = self.payload_in(low, config) / 2;
                let payload = half.min(config.base_mss).max(config.mtu_probe_floor);
                let low = self.packet_of(payload.max(config.min_snd_mss));
                if let Some(search) = &mut self.send.search {
                    search.low = low;
                }
            }
        }
        let before = self.send.mss;
        self.set_mss(config);
        self.send.mss < before
    }

    /// After a while the path may be another one: the search goes up to the largest packet again
    /// (`tcp_mtu_check_reprobe`).
    fn search_anew(&mut self, cx: &Context<'_>) {
        let (low, largest) = (self.packet_of(self.send.mss), self.largest_of_peer());
        let Some(search) = &mut self.send.search else { return };
        if cx.now_us.saturating_sub(search.since_us) >= cx.config.probe_interval_us {
            search.probe = None;
            (search.low, search.high) = (low, largest.min(search.most));
            search.since_us = cx.now_us;
        }
    }

    /// A router told of a smaller link: larger packets are tried again after a while only.
    pub(super) fn bound_mtu_search(&mut self, mtu_bytes: u32) {
        if let Some(search) = &mut self.send.search {
            search.high = search.high.min(mtu_bytes);
        }
    }

    /// The route has another MTU. A search finds by probes if larger packets arrive.
    pub(in crate::tcp) fn change_route(&mut self, mtu_bytes: u32, cx: &Context<'_>) {
        let mtu_bytes = mtu_bytes.max(self.flow().header_bytes() + MIN_MSS);
        let is_larger = mtu_bytes > self.send.path_mtu;
        self.send.path_mtu = mtu_bytes;
        let high = self.largest_of_peer().min(mtu_bytes);
        if let Some(search) = &mut self.send.search {
            (search.most, search.high) = (mtu_bytes, high);
            if is_larger {
                return;
            }
        }
        self.set_mss(cx.config);
    }
}
