//! Options in the form in which programs read and write them by the kernel's calls.

use super::connection::{Phase, State, TcpInfo};

/// `TCP_CLOSE`, the state of what is not connected.
const CLOSED: u8 = 7;

/// `struct tcp_info` up to `tcpi_total_retrans`; of `None`, that of a socket without a connection.
#[must_use]
pub fn tcp_info(info: Option<&TcpInfo>) -> [u8; 104] {
    let mut bytes = [0; 104];
    let Some(info) = info else {
        bytes[0] = CLOSED;
        return bytes;
    };
    let features = u8::from(info.timestamps)
        | u8::from(info.sack) << 1
        | u8::from(info.window_scales.is_some()) << 2
        | u8::from(info.ecn) << 3;
    let (theirs, ours) = info.window_scales.unwrap_or_default();
    let (state, phase, scales) =
        (number_of(info.state), phase_of(info.phase), theirs & 15 | ours << 4);
    bytes[..8].copy_from_slice(&[
        state,
        phase,
        info.retransmits,
        0,
        info.backoff,
        features,
        scales,
        0,
    ]);
    let us = |time_us: u64| u32::try_from(time_us).unwrap_or(u32::MAX);
    let words = [
        us(info.rto_us),
        40_000, // tcpi_ato
        info.mss_bytes,
        info.mss_bytes, // tcpi_rcv_mss
        info.unacked,
        info.sacked,
        info.lost,
        info.retransmitted,
        0, // tcpi_fackets, and the ages of data and ACKs
        0,
        0,
        0,
        0,
        0,                         // tcpi_pmtu
        info.receive_window_bytes, // tcpi_rcv_ssthresh
        us(info.rtt_us),
        us(info.rttvar_us),
        info.ssthresh.min(i32::MAX.unsigned_abs()),
        info.cwnd,
        info.mss_bytes, // tcpi_advmss
        info.reordering,
        0,                         // tcpi_rcv_rtt
        info.receive_buffer_bytes, // tcpi_rcv_space
        info.resent.total(),
    ];
    let (places, _) = bytes[8..].as_chunks_mut::<4>();
    places.iter_mut().zip(words).for_each(|(place, word)| *place = word.to_ne_bytes());
    bytes
}

fn number_of(state: State) -> u8 {
    match state {
        State::Established => 1,
        State::SynSent => 2,
        State::SynReceived => 3,
        State::FinWait1 => 4,
        State::FinWait2 => 5,
        State::Closed => CLOSED,
        State::CloseWait => 8,
        State::LastAck => 9,
        State::Closing => 11,
    }
}

fn phase_of(phase: Phase) -> u8 {
    match phase {
        Phase::Open => 0,
        Phase::Disorder => 1,
        Phase::Cwr => 2,
        Phase::Recovery => 3,
        Phase::Loss => 4,
    }
}

/// Retransmissions of a SYN-ACK within a number of seconds, as `TCP_DEFER_ACCEPT` is stored
/// (`secs_to_retrans`).
#[must_use]
pub fn retransmissions_in(seconds: u32) -> u8 {
    let lasts = |&count: &u8| seconds_of(count) >= seconds.into();
    (0..=u8::MAX).find(lasts).unwrap_or(u8::MAX)
}

/// Seconds that a number of retransmissions takes, as `TCP_DEFER_ACCEPT` is told (`retrans_to_secs`).
#[must_use]
pub fn seconds_of(retransmissions: u8) -> u64 {
    (0..u32::from(retransmissions)).map(|count| (1 << count.min(7)).min(120)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_14_defer_accept_counts_retransmissions() {
        for (seconds, count) in [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4)] {
            assert_eq!(retransmissions_in(seconds), count, "{seconds} s");
        }
        assert_eq!([0, 1, 2, 3, 9].map(seconds_of), [0, 1, 3, 7, 367]);
    }

    #[test]
    fn tcp_14_unconnected_socket_is_closed() {
        let mut expected = [0; 104];
        expected[0] = CLOSED;
        assert_eq!(tcp_info(None), expected);
    }
}
