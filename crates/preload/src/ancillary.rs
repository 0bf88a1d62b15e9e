//! Ancillary data (cmsg) as bytes: of a datagram received, and of one to send.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, SystemTime};

use forebay::net::Datagram;
use forebay::net::message::{DeviceIndex, Received};
use rustix::io::Errno;

use crate::abi::encode;
use crate::datagram::DatagramFamily;
use crate::udp_options::{ArrivalTime, Settings, TimeUnit};

/// Bytes of the header of a control message (`struct cmsghdr` on 64 bits), and its alignment.
const HEADER_BYTES: usize = 16;
const ALIGNMENT: usize = 8;

/// Description of a datagram that was received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct About {
    destination: SocketAddr,
    traffic_class: u8,
    ttl: u8,
    gso_size: u16,
    timestamp_ns: u64,
}

impl From<&Datagram> for About {
    fn from(of: &Datagram) -> Self {
        Self {
            destination: of.destination(),
            traffic_class: of.traffic_class(),
            ttl: of.ttl(),
            gso_size: of.gso_size(),
            timestamp_ns: of.timestamp_ns(),
        }
    }
}

impl From<&Received> for About {
    fn from(of: &Received) -> Self {
        let Received { destination, traffic_class, ttl, gso_size, timestamp_ns, .. } = *of;
        Self { destination, traffic_class, ttl, gso_size, timestamp_ns }
    }
}

/// Arrival of a datagram at a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Arrival {
    /// Interface that it came in on.
    pub(crate) interface: u32,
    /// Address of this host from which it is answered, if the program asked for it.
    pub(crate) answering: Option<IpAddr>,
    /// Number of datagrams that the socket had no room for, if the program asked for it.
    pub(crate) dropped: u32,
}

/// Control messages for a buffer of limited length, cut as `put_cmsg` of the kernel cuts them.
#[derive(Debug)]
pub(crate) struct ControlWriter {
    bytes: Vec<u8>,
    room: usize,
    is_truncated: bool,
}

impl ControlWriter {
    pub(crate) fn new(room: usize) -> Self {
        Self { bytes: Vec::new(), room, is_truncated: false }
    }

    /// Messages written, and true if some did not fit (`MSG_CTRUNC`).
    pub(crate) fn finish(mut self) -> (Vec<u8>, bool) {
        self.bytes.truncate(self.room);
        (self.bytes, self.is_truncated)
    }

    fn put(&mut self, level: i32, kind: i32, data: &[u8]) {
        let left = self.room.saturating_sub(self.bytes.len());
        if left < HEADER_BYTES {
            self.is_truncated = true;
            return;
        }
        let len = HEADER_BYTES + data.len();
        self.is_truncated |= len > left;
        let len = len.min(left);
        self.bytes.extend_from_slice(&len.to_ne_bytes());
        self.bytes.extend_from_slice(&level.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(&data[..len - HEADER_BYTES]);
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGNMENT), 0);
    }

    /// Writes the messages that the program asked for, in the kernel's order (`udp_recvmsg`).
    pub(crate) fn put_datagram(&mut self, of: &About, asked: &Settings, arrival: &Arrival) {
        let dropped = arrival.dropped;
        self.put_times(of, &asked.arrival_time);
        if dropped > 0 {
            self.put(libc::SOL_SOCKET, libc::SO_RXQ_OVFL, &dropped.to_ne_bytes());
        }
        if asked.gro && of.gso_size > 0 {
            self.put(libc::SOL_UDP, libc::UDP_GRO, &i32::from(of.gso_size).to_ne_bytes());
        }
        self.put_addresses(of, asked, arrival);
    }

    /// Writes times of arrival (`sock_recv_timestamp`).
    fn put_times(&mut self, of: &About, asked: &ArrivalTime) {
        if asked.unit.is_none() && asked.structured.is_none() {
            return;
        }
        let arrived = Duration::from_nanos(match of.timestamp_ns {
            0 => now_ns(),
            ns => ns,
        });
        let seconds = i64::try_from(arrived.as_secs()).unwrap_or(i64::MAX).to_ne_bytes();
        let nanos = i64::from(arrived.subsec_nanos()).to_ne_bytes();
        if let Some((kind, unit)) = asked.unit {
            let part = match unit {
                TimeUnit::Micros => i64::from(arrived.subsec_micros()).to_ne_bytes(),
                TimeUnit::Nanos => nanos,
            };
            self.put(libc::SOL_SOCKET, kind, &[seconds, part].concat());
        }
        if let Some(kind) = asked.structured {
            // The second and the third are of hardware.
            let none = [0; 8];
            let times = [seconds, nanos, none, none, none, none].concat();
            self.put(libc::SOL_SOCKET, kind, &times);
        }
    }

    fn put_addresses(&mut self, of: &About, asked: &Settings, arrival: &Arrival) {
        let interface = arrival.interface;
        let destination = of.destination.ip();
        let port = of.destination.port();
        let ttl = i32::from(of.ttl).to_ne_bytes();
        let plain = destination.to_canonical();
        if asked.v6_pktinfo {
            let ip = match destination {
                IpAddr::V6(ip) => ip,
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            };
            let info = [&ip.octets()[..], &interface.to_ne_bytes()].concat();
            self.put(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &info);
        }
        match plain {
            IpAddr::V4(ip) => {
                if asked.v4_pktinfo {
                    let own = match arrival.answering {
                        Some(IpAddr::V4(own)) => own,
                        _ => ip,
                    };
                    let info = [&interface.to_ne_bytes()[..], &own.octets(), &ip.octets()].concat();
                    self.put(libc::IPPROTO_IP, libc::IP_PKTINFO, &info);
                }
                if asked.v4_ttl {
                    self.put(libc::IPPROTO_IP, libc::IP_TTL, &ttl);
                }
                if asked.v4_tos {
                    self.put(libc::IPPROTO_IP, libc::IP_TOS, &[of.traffic_class]);
                }
                if asked.v4_destination {
                    let address = encode(SocketAddr::new(plain, port));
                    self.put(libc::IPPROTO_IP, libc::IP_ORIGDSTADDR, &address);
                }
            }
            IpAddr::V6(_) => {
                if asked.v6_hop_limit {
                    self.put(libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT, &ttl);
                }
                if asked.v6_traffic_class {
                    let class = i32::from(of.traffic_class).to_ne_bytes();
                    self.put(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, &class);
                }
                if asked.v6_destination {
                    let address = encode(scoped(SocketAddr::new(plain, port), || interface));
                    self.put(libc::IPPROTO_IPV6, libc::IPV6_ORIGDSTADDR, &address);
                }
            }
        }
    }
}

/// Address with the interface that it came in on, if it is one of a link (`ipv6_iface_scope_id`).
pub(crate) fn scoped(address: SocketAddr, interface: impl FnOnce() -> u32) -> SocketAddr {
    let SocketAddr::V6(mut v6) = address else { return address };
    if is_of_link(*v6.ip()) {
        v6.set_scope_id(interface());
    }
    v6.into()
}

/// Address as a socket keeps it that is bound to it: with the interface if it is one of a link, and without a flow label.
pub(crate) fn kept(address: SocketAddr) -> SocketAddr {
    let SocketAddr::V6(mut v6) = address else { return address };
    v6.set_scope_id(interface_in(address));
    v6.set_flowinfo(0);
    v6.into()
}

/// Interface that an address of a link names; 0 for none.
pub(crate) fn interface_in(address: SocketAddr) -> u32 {
    match address {
        SocketAddr::V6(v6) if is_of_link(*v6.ip()) => v6.scope_id(),
        _ => 0,
    }
}

/// True for an address that each link may have (`__ipv6_addr_needs_scope_id`).
fn is_of_link(ip: Ipv6Addr) -> bool {
    let [first, second, ..] = ip.octets();
    // Groups of an interface and of a link.
    ip.is_unicast_link_local() || first == 0xff && matches!(second & 0xf, 1 | 2)
}

fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Control data of a datagram to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct SendControl {
    pub(crate) source: Option<IpAddr>,
    pub(crate) device: Option<DeviceIndex>,
    pub(crate) ttl: Option<u8>,
    pub(crate) traffic_class: Option<u8>,
    pub(crate) gso_size: Option<u16>,
}

impl SendControl {
    /// Reads control messages of a datagram. `interfaces` has the interface of each device.
    ///
    /// # Errors
    /// `EINVAL` if they are malformed, or have a type that the kernel has not; `EOPNOTSUPP` for one that only the kernel
    /// has; `ENODEV` for an interface that is not one of the devices.
    pub(crate) fn read(
        bytes: &[u8],
        family: DatagramFamily,
        interfaces: &[u32],
    ) -> Result<Self, Errno> {
        let mut control = Self::default();
        // As in the kernel, first those of UDP, and then those of its family.
        for of_udp in [true, false] {
            let mut bytes = bytes;
            // As `CMSG_NXTHDR`: what is too short for another header ends the list.
            while let Some((header, _)) = bytes.split_first_chunk::<HEADER_BYTES>() {
                let len = word(header, 0).map(usize::from_ne_bytes)?;
                let level = word(header, 8).map(i32::from_ne_bytes)?;
                let kind = word(header, 12).map(i32::from_ne_bytes)?;
                let data = bytes.get(HEADER_BYTES..len).ok_or(Errno::INVAL)?;
                if (level == libc::SOL_UDP) == of_udp {
                    control.add((level, kind), data, family, interfaces)?;
                }
                bytes = bytes.get(len.next_multiple_of(ALIGNMENT)..).unwrap_or_default();
            }
        }
        Ok(control)
    }

    /// Checks that an interface is known if the source is link-local (`ip6_datagram_send_ctl`): of the messages, of the
    /// destination or of the socket's own address.
    ///
    /// # Errors
    /// `EINVAL` if it is not.
    pub(crate) fn check_link(&self, ends: [SocketAddr; 2]) -> Result<(), Errno> {
        let is_of_link = self.source.is_some_and(|ip| match ip {
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
            IpAddr::V4(_) => false,
        });
        let is_known = self.device.is_some() || ends.into_iter().any(|end| interface_in(end) != 0);
        if is_of_link && !is_known { Err(Errno::INVAL) } else { Ok(()) }
    }

    /// Checks control messages of a connection, for which they have no effect (`sock_cmsg_send`).
    ///
    /// # Errors
    /// `EINVAL` if they are malformed, or are of no socket.
    pub(crate) fn check_stream(mut bytes: &[u8]) -> Result<(), Errno> {
        while let Some((header, _)) = bytes.split_first_chunk::<HEADER_BYTES>() {
            let len = word(header, 0).map(usize::from_ne_bytes)?;
            let level = word(header, 8).map(i32::from_ne_bytes)?;
            let data = bytes.get(HEADER_BYTES..len).ok_or(Errno::INVAL)?;
            if level == libc::SOL_SOCKET {
                let kind = word(header, 12).map(i32::from_ne_bytes)?;
                Self::default().add((level, kind), data, DatagramFamily::V6, &[])?;
            }
            bytes = bytes.get(len.next_multiple_of(ALIGNMENT)..).unwrap_or_default();
        }
        Ok(())
    }

    fn add(
        &mut self,
        kind: (i32, i32),
        data: &[u8],
        family: DatagramFamily,
        interfaces: &[u32],
    ) -> Result<(), Errno> {
        let (of_ipv6, to_v4) = (family != DatagramFamily::V4, family != DatagramFamily::V6);
        let device = |index: u32| match index {
            0 => Ok(None),
            _ => {
                let position = interfaces.iter().position(|&interface| interface == index);
                let position = position.and_then(|position| u8::try_from(position).ok());
                position.map(|position| Some(DeviceIndex(position))).ok_or(Errno::NODEV)
            }
        };
        match kind {
            (libc::SOL_UDP, libc::UDP_SEGMENT) if data.len() == 2 => {
                self.gso_size = Some(word(data, 0).map(u16::from_ne_bytes)?);
            }
            (libc::SOL_SOCKET, libc::SCM_RIGHTS | libc::SCM_CREDENTIALS) => {} // of other sockets
            (libc::SOL_SOCKET, libc::SO_TIMESTAMPING | libc::SO_MARK | libc::SO_PRIORITY) => {
                return Err(Errno::OPNOTSUPP);
            }
            (libc::SOL_UDP | libc::SOL_SOCKET, _) => return Err(Errno::INVAL),
            (libc::IPPROTO_IP, libc::IP_PKTINFO) if to_v4 && data.len() == 12 => {
                self.device = device(word(data, 0).map(u32::from_ne_bytes)?)?;
                // Also none, for which the route has one.
                self.source = Some(Ipv4Addr::from(word::<4>(data, 4)?).into());
            }
            (libc::IPPROTO_IP, libc::IP_TTL) if to_v4 => {
                self.ttl = Some(octet(data)?).filter(|ttl| *ttl > 0);
                self.ttl.ok_or(Errno::INVAL)?;
            }
            (libc::IPPROTO_IP, libc::IP_TOS) if to_v4 => {
                self.traffic_class = Some(match data {
                    [class] => *class,
                    data => octet(data)?,
                });
            }
            (libc::IPPROTO_IP, _) if to_v4 => return Err(Errno::INVAL),
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) if of_ipv6 => {
                let (ip, index) = (word::<16>(data, 0)?, word(data, 16).map(u32::from_ne_bytes)?);
                let ip = Ipv6Addr::from(ip);
                if to_v4 && (data.len() != 20 || ip.to_ipv4_mapped().is_none()) {
                    return Err(Errno::INVAL);
                }
                self.source = (to_v4 || !ip.is_unspecified()).then(|| ip.to_canonical());
                self.device = device(index)?;
            }
            (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) if !to_v4 => {
                self.ttl = octet_or_default(data)?;
            }
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) if !to_v4 => {
                self.traffic_class = octet_or_default(data)?;
            }
            (libc::IPPROTO_IPV6, _) if !to_v4 => return Err(Errno::INVAL),
            _ => {} // of another family
        }
        Ok(())
    }
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Errno> {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().ok_or(Errno::INVAL)
}

/// Value of an octet, as an int alone.
fn octet(data: &[u8]) -> Result<u8, Errno> {
    let value = <[u8; 4]>::try_from(data).map(i32::from_ne_bytes).map_err(|_| Errno::INVAL)?;
    u8::try_from(value).map_err(|_| Errno::INVAL)
}

/// Value of an octet. -1 stands for the socket's value.
fn octet_or_default(data: &[u8]) -> Result<Option<u8>, Errno> {
    if data == (-1i32).to_ne_bytes() { Ok(None) } else { octet(data).map(Some) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exe_3_control_messages_cut_as_kernels() {
        let int = 7i32.to_ne_bytes();
        for (room, len, is_cut) in [(15, 0, true), (16, 16, true), (19, 19, true), (20, 20, false)]
        {
            let mut writer = ControlWriter::new(room);
            writer.put(0, libc::IP_TTL, &int);
            let (bytes, is_truncated) = writer.finish();
            assert_eq!((bytes.len(), is_truncated), (len, is_cut), "{room}");
        }
    }

    #[test]
    fn exe_3_control_messages_are_read() {
        const V4: DatagramFamily = DatagramFamily::V4;
        let mut writer = ControlWriter::new(200);
        writer.put(libc::IPPROTO_IP, libc::IP_TOS, &[3]);
        writer.put(libc::IPPROTO_IP, libc::IP_TTL, &9i32.to_ne_bytes());
        let info = [&5u32.to_ne_bytes()[..], &[10, 0, 0, 1], &[0; 4]].concat();
        writer.put(libc::IPPROTO_IP, libc::IP_PKTINFO, &info);
        writer.put(libc::SOL_UDP, libc::UDP_SEGMENT, &100u16.to_ne_bytes());
        let (bytes, _) = writer.finish();
        let read = SendControl::read(&bytes, V4, &[4, 5]).unwrap();
        let expected = SendControl {
            source: Some(Ipv4Addr::new(10, 0, 0, 1).into()),
            device: Some(DeviceIndex(1)),
            ttl: Some(9),
            traffic_class: Some(3),
            gso_size: Some(100),
        };
        assert_eq!(read, expected);
        assert_eq!(SendControl::read(&bytes, V4, &[4]), Err(Errno::NODEV));
        for cut in 17..bytes.len() {
            let _ = SendControl::read(&bytes[..cut], V4, &[4, 5]); // no panic
        }
        assert_eq!(SendControl::read(&bytes, DatagramFamily::V6, &[4, 5]).unwrap(), {
            SendControl { gso_size: Some(100), ..SendControl::default() }
        });
        let mut long = bytes.clone();
        long[0] = 255;
        assert_eq!(SendControl::read(&long, V4, &[4, 5]), Err(Errno::INVAL));
        long[..8].fill(255);
        assert_eq!(SendControl::read(&long, V4, &[4, 5]), Err(Errno::INVAL));
    }
}
