//! Ancillary data (cmsg) as bytes: of a datagram received, and of one to send.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use forebay::net::Datagram;
use forebay::net::message::DeviceIndex;
use rustix::io::Errno;

use crate::udp_options::Settings;

/// Bytes of the header of a control message (`struct cmsghdr` on 64 bits), and its alignment.
const HEADER_BYTES: usize = 16;
const ALIGNMENT: usize = 8;

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

    fn put(&mut self, (level, kind): (i32, i32), data: &[u8]) {
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
    pub(crate) fn put_datagram(&mut self, of: &Datagram, asked: &Settings, interface: u32) {
        if asked.gro && of.gso_size() > 0 {
            self.put((libc::SOL_UDP, libc::UDP_GRO), &i32::from(of.gso_size()).to_ne_bytes());
        }
        let destination = of.destination().ip();
        let ttl = i32::from(of.ttl()).to_ne_bytes();
        let plain = destination.to_canonical();
        if asked.v6_pktinfo {
            let ip = match destination {
                IpAddr::V6(ip) => ip,
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            };
            let info = [&ip.octets()[..], &interface.to_ne_bytes()].concat();
            self.put((libc::IPPROTO_IPV6, libc::IPV6_PKTINFO), &info);
        }
        match plain {
            IpAddr::V4(ip) => {
                if asked.v4_pktinfo {
                    let info = [&interface.to_ne_bytes()[..], &ip.octets(), &ip.octets()].concat();
                    self.put((libc::IPPROTO_IP, libc::IP_PKTINFO), &info);
                }
                if asked.v4_ttl {
                    self.put((libc::IPPROTO_IP, libc::IP_TTL), &ttl);
                }
                if asked.v4_tos {
                    self.put((libc::IPPROTO_IP, libc::IP_TOS), &[of.traffic_class()]);
                }
            }
            IpAddr::V6(_) => {
                if asked.v6_hop_limit {
                    self.put((libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT), &ttl);
                }
                if asked.v6_traffic_class {
                    let class = i32::from(of.traffic_class()).to_ne_bytes();
                    self.put((libc::IPPROTO_IPV6, libc::IPV6_TCLASS), &class);
                }
            }
        }
    }
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
    /// Reads control messages. `interfaces` has the interface of each device.
    ///
    /// # Errors
    /// `EINVAL` if they are malformed, or have a type that is not supported; `ENODEV` for an interface that is
    /// not one of the devices.
    pub(crate) fn read(mut bytes: &[u8], interfaces: &[u32]) -> Result<Self, Errno> {
        let mut control = Self::default();
        // As `CMSG_NXTHDR`: what is too short for another header ends the list.
        while let Some((header, _)) = bytes.split_first_chunk::<HEADER_BYTES>() {
            let len = word(header, 0).map(usize::from_ne_bytes)?;
            let level = word(header, 8).map(i32::from_ne_bytes)?;
            let kind = word(header, 12).map(i32::from_ne_bytes)?;
            let data = bytes.get(HEADER_BYTES..len).ok_or(Errno::INVAL)?;
            control.add((level, kind), data, interfaces)?;
            bytes = bytes.get(len.next_multiple_of(ALIGNMENT)..).unwrap_or_default();
        }
        Ok(control)
    }

    fn add(&mut self, kind: (i32, i32), data: &[u8], interfaces: &[u32]) -> Result<(), Errno> {
        let device = |index: u32| match index {
            0 => Ok(None),
            _ => {
                let position = interfaces.iter().position(|&interface| interface == index);
                let position = position.and_then(|position| u8::try_from(position).ok());
                position.map(|position| Some(DeviceIndex(position))).ok_or(Errno::NODEV)
            }
        };
        match kind {
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                self.device = device(word(data, 0).map(u32::from_ne_bytes)?)?;
                self.source = specified(Ipv4Addr::from(word::<4>(data, 4)?).into());
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                self.source = specified(Ipv6Addr::from(word::<16>(data, 0)?).into());
                self.device = device(word(data, 16).map(u32::from_ne_bytes)?)?;
            }
            (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                self.ttl = octet_or_default(word(data, 0).map(i32::from_ne_bytes)?)?;
            }
            (libc::IPPROTO_IP, libc::IP_TOS) if data.len() == 1 => {
                self.traffic_class = data.first().copied();
            }
            (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                self.traffic_class = octet_or_default(word(data, 0).map(i32::from_ne_bytes)?)?;
            }
            (libc::SOL_UDP, libc::UDP_SEGMENT) => {
                self.gso_size = Some(word(data, 0).map(u16::from_ne_bytes)?);
            }
            _ => return Err(Errno::INVAL),
        }
        Ok(())
    }
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Errno> {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().ok_or(Errno::INVAL)
}

/// -1 stands for the socket's value.
fn octet_or_default(value: i32) -> Result<Option<u8>, Errno> {
    if value == -1 {
        return Ok(None);
    }
    u8::try_from(value).map(Some).map_err(|_| Errno::INVAL)
}

fn specified(ip: IpAddr) -> Option<IpAddr> {
    (!ip.is_unspecified()).then_some(ip)
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
            writer.put((0, libc::IP_TTL), &int);
            let (bytes, is_truncated) = writer.finish();
            assert_eq!((bytes.len(), is_truncated), (len, is_cut), "{room}");
        }
    }

    #[test]
    fn exe_3_control_messages_are_read() {
        let mut writer = ControlWriter::new(200);
        writer.put((libc::IPPROTO_IP, libc::IP_TOS), &[3]);
        writer.put((libc::IPPROTO_IP, libc::IP_TTL), &9i32.to_ne_bytes());
        let info = [&5u32.to_ne_bytes()[..], &[10, 0, 0, 1], &[0; 4]].concat();
        writer.put((libc::IPPROTO_IP, libc::IP_PKTINFO), &info);
        writer.put((libc::SOL_UDP, libc::UDP_SEGMENT), &100u16.to_ne_bytes());
        let (bytes, _) = writer.finish();
        let read = SendControl::read(&bytes, &[4, 5]).unwrap();
        let expected = SendControl {
            source: Some(Ipv4Addr::new(10, 0, 0, 1).into()),
            device: Some(DeviceIndex(1)),
            ttl: Some(9),
            traffic_class: Some(3),
            gso_size: Some(100),
        };
        assert_eq!(read, expected);
        assert_eq!(SendControl::read(&bytes, &[4]), Err(Errno::NODEV));
        for cut in 17..bytes.len() {
            let _ = SendControl::read(&bytes[..cut], &[4, 5]); // no panic
        }
        let mut long = bytes.clone();
        long[0] = 255;
        assert_eq!(SendControl::read(&long, &[4, 5]), Err(Errno::INVAL));
        long[..8].fill(255);
        assert_eq!(SendControl::read(&long, &[4, 5]), Err(Errno::INVAL));
    }
}
