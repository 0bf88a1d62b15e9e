//! From the network header to the transport header, through reassembly.

use forebay_buf::Pool;
use forebay_rx::packet::Packet;
use forebay_rx::parse::checksum::Sum;

use super::extensions::{self, ExtensionProgress, Walked};
use super::link::PacketType;
use super::reassembly::{Failures, Reassembly};
use super::transport::TransportHeader;
use super::wire::Wire;
use super::{Identity, NetworkDrop, NetworkLayer, NetworkVerdict, ipv4, ipv6};

impl NetworkLayer {
    pub(super) fn ipv4(
        &mut self,
        mut packet: Packet,
        on: &Identity,
        now_ns: u64,
        pool: &mut Pool,
    ) -> NetworkVerdict {
        let ipv4 = match ipv4::receive(&Wire::of(&packet), on, &self.counters.ip) {
            Ok(ipv4) => ipv4,
            Err(reason) => return self.dropped(packet, reason),
        };
        trim(&mut packet, ipv4.total_len);
        if ipv4.is_fragment {
            self.counters.ip.reasm_reqds.add(1);
            packet = match self.reassemble(packet, now_ns, pool) {
                Ok(whole) => whole,
                Err(received) => return received,
            };
        }
        self.ipv4_protocol(packet, on, pool)
    }

    /// `ip_protocol_deliver_rcu`, for a packet that has a valid header and is not a fragment.
    fn ipv4_protocol(&mut self, packet: Packet, on: &Identity, pool: &mut Pool) -> NetworkVerdict {
        let header = Wire::of(&packet).bytes;
        let Some(&[first, _, _, _, _, _, _, _, _, protocol, _, _, ref addresses @ ..]) =
            header.first_chunk::<{ ipv4::FIXED_BYTES }>()
        else {
            return self.dropped(packet, NetworkDrop::IpInhdr);
        };
        let place = TransportHeader {
            protocol,
            offset: usize::from(packet.headers.network_offset) + usize::from(first & 0x0f) * 4,
            pseudo_sum: Sum::of(addresses).plus_word(protocol.into()),
            is_ipv6: false,
            was_ipv6_fragment: false,
        };
        self.protocol(packet, &place, on, pool)
    }

    pub(super) fn ipv6(
        &mut self,
        mut packet: Packet,
        packet_type: PacketType,
        on: &Identity,
        now_ns: u64,
        pool: &mut Pool,
    ) -> NetworkVerdict {
        let ipv6 = match ipv6::receive(&Wire::of(&packet), on, &self.counters.ip6) {
            Ok(ipv6) => ipv6,
            Err(reason) => return self.dropped(packet, reason),
        };
        trim(&mut packet, ipv6.total_len);
        let mut progress = ExtensionProgress { packet_type, was_fragment: false };
        let mut walked = self.walk(&packet, &ipv6, progress);
        if walked == Ok(Walked::Fragment) {
            packet = match self.reassemble(packet, now_ns, pool) {
                Ok(whole) => whole,
                Err(received) => return received,
            };
            progress.was_fragment = true;
            let again = ipv6::again(Wire::of(&packet).bytes);
            walked = again.and_then(|ipv6| self.walk(&packet, &ipv6, progress));
        }
        match walked {
            // `ip6_protocol_deliver_rcu`.
            Ok(Walked::Protocol { protocol, offset, was_fragment }) => {
                let addresses = Wire::of(&packet).bytes.get(8..ipv6::FIXED_BYTES);
                let place = TransportHeader {
                    protocol,
                    offset: usize::from(packet.headers.network_offset) + offset,
                    pseudo_sum: Sum::of(addresses.unwrap_or_default()).plus_word(protocol.into()),
                    is_ipv6: true,
                    was_ipv6_fragment: was_fragment,
                };
                self.protocol(packet, &place, on, pool)
            }
            Ok(Walked::Fragment) => self.dropped(packet, NetworkDrop::Ipv6BadExthdr),
            Err(reason) => self.dropped(packet, reason),
        }
    }

    fn walk(
        &self,
        packet: &Packet,
        ipv6: &ipv6::Ipv6,
        progress: ExtensionProgress,
    ) -> Result<Walked, NetworkDrop> {
        extensions::walk(Wire::of(packet).bytes, ipv6, progress, &self.counters.ip6)
    }

    /// Adds a fragment to its datagram. Fragments that are dropped as a result go back to the pool.
    fn reassemble(
        &mut self,
        packet: Packet,
        now_ns: u64,
        pool: &mut Pool,
    ) -> Result<Packet, NetworkVerdict> {
        let is_ipv6 = packet.headers.network == forebay_rx::parse::Network::Ipv6;
        let reassembly = self.fragments.add(packet, now_ns, pool, &mut self.given_up);
        let [_, Failures { fails, .. }] = self.given_up.failures;
        self.count_given_up();
        self.given_up.packets.drain(..).for_each(|(packet, _)| pool.put(packet.frame));
        match reassembly {
            Reassembly::Waits => Err(NetworkVerdict::Kept),
            Reassembly::Dropped(packet, reason) => {
                // The fragment itself is invalid, and no datagram failed because of it.
                let is_wrong = reason != NetworkDrop::DupFrag && reason != NetworkDrop::FragNomem;
                if is_ipv6 && is_wrong && fails == 0 {
                    self.counters.ip6.in_hdr_errors.add(1);
                }
                Err(self.dropped(packet, reason))
            }
            Reassembly::Complete(packet) => {
                self.ip_and_icmp(is_ipv6).0.reasm_oks.add(1);
                Ok(packet)
            }
        }
    }

    /// Counts the fragments and datagrams that this CPU gave up, whichever CPU received them.
    pub(super) fn count_given_up(&mut self) {
        for (packet, reason) in &self.given_up.packets {
            self.counters.drops.add(*reason, u64::from(packet.wire_count()));
        }
        let [ipv4, ipv6] = std::mem::take(&mut self.given_up.failures);
        for (ip, failures) in [(&self.counters.ip, ipv4), (&self.counters.ip6, ipv6)] {
            ip.reasm_fails.add(failures.fails);
            ip.reasm_timeout.add(failures.timeouts);
        }
    }
}

/// Removes the bytes after an IP packet of `total_len` bytes. A packet in several frames has none.
fn trim(packet: &mut Packet, total_len: usize) {
    let end = usize::from(packet.headers.network_offset) + total_len;
    match u32::try_from(end) {
        Ok(end) if end < packet.frame.len_bytes() && !packet.is_chain() => {
            packet.frame.set_len(end);
            packet.wire_len = end;
        }
        _ => {}
    }
}
