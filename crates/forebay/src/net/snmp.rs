//! Counters of the network layer, in the format of `/proc/net/snmp` and `/proc/net/snmp6`.

use std::fmt::Write;
use std::sync::Arc;

use forebay_stack::counter::StackCounter;
use forebay_stack::network::NetworkCounters;
use forebay_stack::tcp::TcpCounters;

use super::unsent::Unsent;

/// A counter's name, and the field that holds it.
type Named = (&'static str, fn(&NetworkCounters) -> &StackCounter);

const IP: &[Named] = &[
    ("InReceives", |of| &of.ip.in_receives),
    ("InHdrErrors", |of| &of.ip.in_hdr_errors),
    ("InAddrErrors", |of| &of.ip.in_addr_errors),
    ("InUnknownProtos", |of| &of.ip.in_unknown_protos),
    ("InDiscards", |of| &of.ip.in_discards),
    ("InDelivers", |of| &of.ip.in_delivers),
    ("ReasmTimeout", |of| &of.ip.reasm_timeout),
    ("ReasmReqds", |of| &of.ip.reasm_reqds),
    ("ReasmOKs", |of| &of.ip.reasm_oks),
    ("ReasmFails", |of| &of.ip.reasm_fails),
];

const ICMP: &[Named] = &[
    ("InMsgs", |of| &of.icmp.in_msgs),
    ("InErrors", |of| &of.icmp.in_errors),
    ("InCsumErrors", |of| &of.icmp.in_csum_errors),
    ("InDestUnreachs", |of| &of.icmp.in_dest_unreachs),
    ("InTimeExcds", |of| &of.icmp.in_time_excds),
    ("InParmProbs", |of| &of.icmp.in_parm_probs),
    ("InEchos", |of| &of.icmp.in_echos),
    ("InEchoReps", |of| &of.icmp.in_echo_reps),
    ("OutMsgs", |of| &of.icmp.out_msgs),
    ("OutRateLimitGlobal", |of| &of.icmp.out_rate_limit_global),
    ("OutRateLimitHost", |of| &of.icmp.out_rate_limit_host),
    ("OutDestUnreachs", |of| &of.icmp.out_dest_unreachs),
    ("OutEchoReps", |of| &of.icmp.out_echo_reps),
];

const UDP: &[Named] = &[
    ("InDatagrams", |of| &of.udp.in_datagrams),
    ("NoPorts", |of| &of.udp.no_ports),
    ("InErrors", |of| &of.udp.in_errors),
    ("RcvbufErrors", |of| &of.udp.rcvbuf_errors),
    ("InCsumErrors", |of| &of.udp.in_csum_errors),
    ("IgnoredMulti", |of| &of.udp.ignored_multi),
];

/// Counters of TCP that the kernel has in `/proc/net/snmp`; it has the others in `/proc/net/netstat`.
const TCP: &[&str] = &[
    "ActiveOpens",
    "PassiveOpens",
    "AttemptFails",
    "EstabResets",
    "InSegs",
    "OutSegs",
    "RetransSegs",
    "InErrs",
    "OutRsts",
    "InCsumErrors",
];

const V6: &[Named] = &[
    ("Ip6InReceives", |of| &of.ip6.in_receives),
    ("Ip6InHdrErrors", |of| &of.ip6.in_hdr_errors),
    ("Ip6InAddrErrors", |of| &of.ip6.in_addr_errors),
    ("Ip6InUnknownProtos", |of| &of.ip6.in_unknown_protos),
    ("Ip6InTruncatedPkts", |of| &of.ip6.in_truncated_pkts),
    ("Ip6InDiscards", |of| &of.ip6.in_discards),
    ("Ip6InDelivers", |of| &of.ip6.in_delivers),
    ("Ip6ReasmTimeout", |of| &of.ip6.reasm_timeout),
    ("Ip6ReasmReqds", |of| &of.ip6.reasm_reqds),
    ("Ip6ReasmOKs", |of| &of.ip6.reasm_oks),
    ("Ip6ReasmFails", |of| &of.ip6.reasm_fails),
    ("Icmp6InMsgs", |of| &of.icmp6.in_msgs),
    ("Icmp6InErrors", |of| &of.icmp6.in_errors),
    ("Icmp6OutMsgs", |of| &of.icmp6.out_msgs),
    ("Icmp6InCsumErrors", |of| &of.icmp6.in_csum_errors),
    ("Udp6InDatagrams", |of| &of.udp6.in_datagrams),
    ("Udp6NoPorts", |of| &of.udp6.no_ports),
    ("Udp6InErrors", |of| &of.udp6.in_errors),
    ("Udp6RcvbufErrors", |of| &of.udp6.rcvbuf_errors),
    ("Udp6InCsumErrors", |of| &of.udp6.in_csum_errors),
    ("Udp6IgnoredMulti", |of| &of.udp6.ignored_multi),
];

/// Sums of all CPUs' counters, in the lines of `/proc/net/snmp`. Counters that this stack lacks are
/// left out.
pub(super) fn snmp(
    counters: &[Arc<NetworkCounters>],
    tcp: &[Arc<TcpCounters>],
    unsent: &Unsent,
) -> String {
    let unsent = [("OutDiscards", unsent.v4.discards()), ("OutNoRoutes", unsent.v4.no_routes())];
    let mut text = String::new();
    for (protocol, named, more) in [("Ip", IP, &unsent[..]), ("Icmp", ICMP, &[]), ("Udp", UDP, &[])]
    {
        let named = named.iter().map(|(name, of)| (*name, sum(counters, *of)));
        add_lines(&mut text, protocol, named.chain(more.iter().copied()));
        if protocol == "Icmp" {
            add_lines(&mut text, "Tcp", sums(tcp, |name| TCP.contains(&name)));
        }
    }
    text
}

/// Sums of the other counters of TCP, in the lines of `/proc/net/netstat`.
pub(super) fn netstat(tcp: &[Arc<TcpCounters>]) -> String {
    let mut text = String::new();
    add_lines(&mut text, "TcpExt", sums(tcp, |name| !TCP.contains(&name)));
    text
}

/// Sums of the counters with these names.
fn sums(
    tcp: &[Arc<TcpCounters>],
    wanted: impl Fn(&str) -> bool,
) -> impl Iterator<Item = (&'static str, u64)> {
    let mut all: Vec<(&'static str, u64)> = TcpCounters::default().iter().collect();
    for counters in tcp {
        for ((_, sum), (_, value)) in all.iter_mut().zip(counters.iter()) {
            *sum += value;
        }
    }
    all.into_iter().filter(move |(name, _)| wanted(name))
}

fn add_lines(
    text: &mut String,
    protocol: &str,
    counters: impl Iterator<Item = (&'static str, u64)>,
) {
    let (names, values): (Vec<_>, Vec<_>) =
        counters.map(|(name, value)| (name, value.to_string())).unzip();
    let (names, values) = (names.join(" "), values.join(" "));
    // Writing to a string does not fail.
    let _ = write!(text, "{protocol}: {names}\n{protocol}: {values}\n");
}

/// Sums of all CPUs' IPv6 counters, in the lines of `/proc/net/snmp6`.
pub(super) fn snmp6(counters: &[Arc<NetworkCounters>], unsent: &Unsent) -> String {
    let unsent =
        [("Ip6OutDiscards", unsent.v6.discards()), ("Ip6OutNoRoutes", unsent.v6.no_routes())];
    let mut text = String::new();
    for (name, of) in V6.iter().map(|(name, of)| (*name, sum(counters, *of))).chain(unsent) {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name:<32}\t{of}");
    }
    text
}

fn sum(counters: &[Arc<NetworkCounters>], of: fn(&NetworkCounters) -> &StackCounter) -> u64 {
    counters.iter().map(|counters| of(counters).get()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names in a text of the kernel's format, each with its protocol.
    fn names(text: &str) -> Vec<String> {
        let heads = text.lines().step_by(2).filter_map(|line| line.split_once(": "));
        let all = heads.flat_map(|(protocol, names)| {
            names.split(' ').map(move |name| format!("{protocol}{name}"))
        });
        all.collect()
    }

    #[test]
    fn promise_8_counters_have_the_kernels_names() {
        let (v4, v6) = ("/proc/net/snmp", "/proc/net/snmp6");
        let kernels = std::fs::read_to_string(v4).unwrap();
        let theirs = names(&kernels);
        for ours in names(&snmp(&[], &[], &Unsent::default())) {
            assert!(theirs.contains(&ours), "{ours} is not in {v4}");
        }
        let kernels = std::fs::read_to_string("/proc/net/netstat").unwrap();
        let theirs = names(&kernels);
        for ours in names(&netstat(&[])) {
            let is_new = ["TcpExtBeyondWindow", "TcpExtTSEcrRejected"].contains(&ours.as_str()); // Linux 6.16
            let is_known = theirs.contains(&ours) || ours.starts_with("TcpExtForebay") || is_new;
            assert!(is_known, "{ours} is not in /proc/net/netstat");
        }
        let Ok(kernels) = std::fs::read_to_string(v6) else { return };
        let theirs: Vec<_> =
            kernels.lines().filter_map(|line| line.split_whitespace().next()).collect();
        for line in snmp6(&[], &Unsent::default()).lines() {
            let ours = line.split_whitespace().next().unwrap();
            assert!(theirs.contains(&ours), "{ours} is not in {v6}");
        }
    }
}
