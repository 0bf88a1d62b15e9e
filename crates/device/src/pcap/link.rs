//! Link types (tcpdump.org/linktypes.html): the header before a packet of a capture, and the part
//! of it that the path receives.
//!
//! An IP packet behind a cooked header (`LINUX_SLL`, `LINUX_SLL2`: written by `tcpdump -i any`) or
//! an address family (`NULL`, `LOOP`) is passed on without that header. Any other packet with an
//! `EtherType` behind a cooked header is passed on as an Ethernet frame, with a header rebuilt from
//! the cooked one: so ARP and VLAN tags are parsed as on the wire, and no packet is lost. The
//! destination address is not recorded: it is zero, except for broadcasts. The same is done for serial
//! lines, label stacks and firewalls' logs (`serial.rs`). A frame of 802.11 with a packet is passed on as
//! an Ethernet frame with its own addresses (`wireless.rs`).

use std::fmt;

use forebay_rx::parse::Link;

use super::{serial, wireless};

/// Link types that can be read, for messages.
pub(super) const READ: &str = "Ethernet (1), raw IP (12, 14, 101, 228, 229), NULL (0), LOOP (108), \
                               LINUX_SLL (113), LINUX_SLL2 (276), PPP (9, 50, 51, 204), C_HDLC (104, \
                               205), IEEE802_11 (105, 127), ENC (109), PFLOG (117), MPLS (219) and \
                               NFLOG (239)";

/// Link type of an interface.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct LinkType(u32);

/// Start of a packet in a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Begin {
    /// Offset of the packet, and its link type.
    At(usize, Link),
    /// Offset of the payload, and the Ethernet header to put before it.
    Rebuilt(usize, EthernetHeader),
    /// Unreadable packet.
    Unread,
}

pub(super) type EthernetHeader = [u8; 14];

const FAMILY_BYTES: usize = 4;
/// Length of the header of OpenBSD's IPsec device: a family, an SPI and flags.
const ENC_BYTES: usize = 12;
const SLL_BYTES: usize = 16;
const SLL2_BYTES: usize = 20;

impl LinkType {
    const NULL: Self = Self(0);
    const ETHERNET: Self = Self(1);
    const PPP: Self = Self(9);
    /// PPP in HDLC-like framing, or Cisco's HDLC.
    const PPP_HDLC: Self = Self(50);
    const PPP_ETHER: Self = Self(51);
    /// PPP and Cisco's HDLC behind a byte with the direction.
    const PPP_WITH_DIR: Self = Self(204);
    const C_HDLC_WITH_DIR: Self = Self(205);
    const C_HDLC: Self = Self(104);
    const IEEE802_11: Self = Self(105);
    const IEEE802_11_RADIOTAP: Self = Self(127);
    const LOOP: Self = Self(108);
    const ENC: Self = Self(109);
    const PFLOG: Self = Self(117);
    const MPLS: Self = Self(219);
    const NFLOG: Self = Self(239);
    const SLL: Self = Self(113);
    const SLL2: Self = Self(276);
    /// RAW, under its numbers on various systems; IPV4; IPV6.
    const RAW: [Self; 5] = [Self(12), Self(14), Self(101), Self(228), Self(229)];

    /// Link type of an interface whose description is unreadable.
    pub(super) const DAMAGED: Self = Self(u32::MAX);

    /// All link types that are not counted apart.
    pub(super) const OTHERS: Self = Self(u32::MAX - 1);

    pub(super) fn of(number: i32) -> Self {
        Self(number.cast_unsigned())
    }

    /// True if this link type can be read; single packets may still hold a protocol that cannot.
    pub(super) fn is_read(self) -> bool {
        let with_a_header = [
            Self::NULL,
            Self::ETHERNET,
            Self::PPP,
            Self::PPP_HDLC,
            Self::PPP_ETHER,
            Self::C_HDLC,
            Self::IEEE802_11,
            Self::LOOP,
            Self::ENC,
            Self::SLL,
            Self::PFLOG,
            Self::IEEE802_11_RADIOTAP,
            Self::PPP_WITH_DIR,
            Self::C_HDLC_WITH_DIR,
            Self::MPLS,
            Self::NFLOG,
            Self::SLL2,
        ];
        with_a_header.contains(&self) || Self::RAW.contains(&self)
    }

    /// Returns the number of bytes at the end of a record that are not the packet's: of the `wire_len` bytes that it
    /// had, not only of the captured ones.
    #[inline]
    pub(super) fn tail(self, bytes: &[u8], wire_len: u32) -> u32 {
        match self {
            Self::IEEE802_11_RADIOTAP => wireless::behind_frame(bytes),
            Self::NFLOG => serial::behind_nflog_packet(bytes, wire_len),
            _ => 0,
        }
    }

    /// Returns the start of a packet of `wire_len` bytes, without its [`tail`](Self::tail).
    #[inline]
    pub(super) fn begin(self, bytes: &[u8], wire_len: u32) -> Begin {
        if self == Self::ETHERNET {
            return Begin::At(0, Link::Ethernet);
        }
        let begin = match self {
            Self::NULL | Self::LOOP => behind_family(bytes, FAMILY_BYTES),
            Self::ENC => behind_family(bytes, ENC_BYTES),
            Self::PPP => serial::behind_ppp(bytes, 0),
            Self::PPP_HDLC => serial::behind_ppp_or_hdlc(bytes),
            Self::PPP_ETHER => serial::before_pppoe(bytes),
            Self::PPP_WITH_DIR => serial::behind_ppp(bytes, 1),
            Self::C_HDLC => serial::behind_hdlc(bytes, 0),
            Self::C_HDLC_WITH_DIR => serial::behind_hdlc(bytes, 1),
            Self::IEEE802_11 => wireless::behind_wireless(bytes, 0, false, wire_len),
            Self::IEEE802_11_RADIOTAP => wireless::behind_radiotap(bytes, wire_len),
            Self::PFLOG => serial::behind_pflog(bytes),
            Self::MPLS => Some(Begin::Rebuilt(0, serial::before_labels())),
            Self::NFLOG => serial::behind_nflog(bytes),
            Self::SLL => Cooked::of_sll(bytes).map(|cooked| cooked.begin(SLL_BYTES, wire_len)),
            Self::SLL2 => Cooked::of_sll2(bytes).map(|cooked| cooked.begin(SLL2_BYTES, wire_len)),
            _ => Self::RAW.contains(&self).then_some(Begin::At(0, Link::Ip)),
        };
        begin.unwrap_or(Begin::Unread)
    }

    fn name(self) -> Option<&'static str> {
        let name = match self.0 {
            0 => "NULL",
            6 => "IEEE802_5",
            8 => "SLIP",
            9 => "PPP",
            50 => "PPP_HDLC",
            51 => "PPP_ETHER",
            104 => "C_HDLC",
            105 => "IEEE802_11",
            107 => "FRELAY",
            108 => "LOOP",
            109 => "ENC",
            113 => "LINUX_SLL",
            117 => "PFLOG",
            127 => "IEEE802_11_RADIOTAP",
            187 | 201 => "BLUETOOTH_HCI_H4",
            189 | 220 => "USB_LINUX",
            195 | 230 => "IEEE802_15_4",
            204 => "PPP_WITH_DIR",
            205 => "C_HDLC_WITH_DIR",
            219 => "MPLS",
            227 => "CAN_SOCKETCAN",
            239 => "NFLOG",
            253 => "NETLINK",
            276 => "LINUX_SLL2",
            _ => return None,
        };
        Some(name)
    }
}

impl fmt::Display for LinkType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, self.name()) {
            (&Self::DAMAGED, _) => f.write_str("unknown (of a damaged interface description)"),
            (&Self::OTHERS, _) => f.write_str("others"),
            (Self(number), Some(name)) if self.is_read() => {
                write!(f, "{number} ({name}), of a protocol that is not read")
            }
            (Self(number), Some(name)) => write!(f, "{number} ({name})"),
            (Self(number), None) => write!(f, "{number}"),
        }
    }
}

/// Address families of IP: `AF_INET` is 2 everywhere; `AF_INET6` differs: Linux, Windows, NetBSD and
/// OpenBSD, FreeBSD, macOS.
pub(super) const IP_FAMILIES: [u32; 6] = [2, 10, 23, 24, 28, 30];

/// Looks behind a header that begins with an address family, in any system's numbering.
fn behind_family(bytes: &[u8], header_bytes: usize) -> Option<Begin> {
    let family = u32::from_le_bytes(*bytes.first_chunk::<FAMILY_BYTES>()?);
    // NULL's is in the byte order of the capturing host, which may differ from the file's; LOOP's
    // is big-endian.
    let family = if family > u32::from(u16::MAX) { family.swap_bytes() } else { family };
    let is_ip = IP_FAMILIES.contains(&family) && header_bytes <= bytes.len();
    is_ip.then_some(Begin::At(header_bytes, Link::Ip))
}

/// Start of a packet at `at`, of a protocol by its `EtherType`.
pub(super) fn behind_ethertype(ethertype: u16, at: usize) -> Option<Begin> {
    match ethertype {
        IPV4 | IPV6 => Some(Begin::At(at, Link::Ip)),
        ETHERTYPE_MIN.. => Some(Begin::Rebuilt(at, ethernet(ethertype))),
        _ => None,
    }
}

/// Ethernet header without addresses.
pub(super) fn ethernet(ethertype: u16) -> EthernetHeader {
    let mut header = EthernetHeader::default();
    header[12..].copy_from_slice(&ethertype.to_be_bytes());
    header
}

/// Fields of a cooked header.
struct Cooked {
    /// Kind of the destination (`sll_pkttype`).
    packet_type: u16,
    /// Kind of the device: `ARPHRD_…`.
    device: u16,
    /// Source link-layer address.
    address: [u8; 6],
    protocol: u16,
}

/// `PACKET_BROADCAST`: sent to all stations.
const PACKET_BROADCAST: u16 = 1;

/// Frame relay, 802.11 with a radiotap header, and Netlink: devices whose protocol field is unused,
/// or is not an `EtherType`.
const DEVICES_WITHOUT_ETHERTYPE: [u16; 3] = [770, 803, 824];

const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
/// Least `EtherType`; smaller numbers are Linux's own protocols, or lengths.
pub(super) const ETHERTYPE_MIN: u16 = 0x0600;
/// 802.3 frames of Linux: raw 802.3 (`ETH_P_802_3`), and with an LLC header (`ETH_P_802_2`).
const IEEE_802_3: [u16; 2] = [1, 4];
/// Largest value of a length field.
pub(super) const LENGTH_MAX: u16 = 1500;

impl Cooked {
    fn of_sll(bytes: &[u8]) -> Option<Self> {
        let header = bytes.first_chunk::<SLL_BYTES>()?;
        Some(Self {
            packet_type: u16_at(header, 0),
            device: u16_at(header, 2),
            address: address(u16_at(header, 4), header, 6),
            protocol: u16_at(header, 14),
        })
    }

    fn of_sll2(bytes: &[u8]) -> Option<Self> {
        let header = bytes.first_chunk::<SLL2_BYTES>()?;
        Some(Self {
            packet_type: header[10].into(),
            device: u16_at(header, 8),
            address: address(header[11].into(), header, 12),
            protocol: u16_at(header, 0),
        })
    }

    fn begin(&self, header_bytes: usize, wire_len: u32) -> Begin {
        if DEVICES_WITHOUT_ETHERTYPE.contains(&self.device) {
            return Begin::Unread;
        }
        match self.protocol {
            IPV4 | IPV6 => Begin::At(header_bytes, Link::Ip),
            ETHERTYPE_MIN.. => Begin::Rebuilt(header_bytes, self.ethernet(self.protocol)),
            protocol if IEEE_802_3.contains(&protocol) => {
                let payload = (wire_len as usize).saturating_sub(header_bytes);
                match u16::try_from(payload) {
                    Ok(length) if length <= LENGTH_MAX => {
                        Begin::Rebuilt(header_bytes, self.ethernet(length))
                    }
                    _ => Begin::Unread,
                }
            }
            _ => Begin::Unread,
        }
    }

    fn ethernet(&self, ethertype: u16) -> EthernetHeader {
        let destination = if self.packet_type == PACKET_BROADCAST { [0xff; 6] } else { [0; 6] };
        let mut header = EthernetHeader::default();
        header[..6].copy_from_slice(&destination);
        header[6..12].copy_from_slice(&self.address);
        header[12..].copy_from_slice(&ethertype.to_be_bytes());
        header
    }
}

/// Source address, if it is an Ethernet address; else zeros.
fn address<const N: usize>(len_bytes: u16, header: &[u8; N], at: usize) -> [u8; 6] {
    let address = header.get(at..).and_then(<[u8]>::first_chunk).copied();
    address.filter(|_| len_bytes == 6).unwrap_or_default()
}

fn u16_at<const N: usize>(header: &[u8; N], at: usize) -> u16 {
    let field = header.get(at..).and_then(<[u8]>::first_chunk).copied();
    u16::from_be_bytes(field.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_families_in_both_byte_orders() {
        for family in [2u32, 10, 23, 24, 28, 30] {
            for bytes in [family.to_le_bytes(), family.to_be_bytes()] {
                for link_type in [LinkType::NULL, LinkType::LOOP] {
                    assert_eq!(link_type.begin(&bytes, 4), Begin::At(4, Link::Ip), "{family}");
                }
            }
        }
        for other in [[0; 4], [7, 0, 0, 0], [2, 0, 0, 2], [0xff; 4]] {
            assert_eq!(LinkType::NULL.begin(&other, 4), Begin::Unread, "{other:?}");
        }
        assert_eq!(LinkType::NULL.begin(&[2, 0, 0], 60), Begin::Unread, "cut off");
    }

    /// Empty packet under each of the two cooked headers.
    fn cooked(device: u16, packet_type: u8, protocol: u16) -> [Vec<u8>; 2] {
        let ([d0, d1], [p0, p1]) = (device.to_be_bytes(), protocol.to_be_bytes());
        let address = [2, 3, 4, 5, 6, 7, 0, 0];
        let sll = [&[0, packet_type, d0, d1, 0, 6][..], &address, &[p0, p1]].concat();
        let sll2 = [&[p0, p1, 0, 0, 0, 0, 0, 9, d0, d1, packet_type, 6][..], &address].concat();
        [sll, sll2]
    }

    fn begins(device: u16, packet_type: u8, protocol: u16, payload: u32) -> [Begin; 2] {
        let [sll, sll2] = cooked(device, packet_type, protocol);
        [LinkType::SLL.begin(&sll, 16 + payload), LinkType::SLL2.begin(&sll2, 20 + payload)]
    }

    #[test]
    fn cooked_headers_stripped_or_rebuilt() {
        for protocol in [IPV4, IPV6] {
            let at = [16, 20].map(|bytes| Begin::At(bytes, Link::Ip));
            assert_eq!(begins(1, 0, protocol, 40), at);
        }
        let header = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 3, 4, 5, 6, 7, 8, 6];
        assert_eq!(begins(1, 1, 0x0806, 28), [16, 20].map(|at| Begin::Rebuilt(at, header)));
        let header = [0, 0, 0, 0, 0, 0, 2, 3, 4, 5, 6, 7, 0, 38];
        assert_eq!(begins(1, 2, 4, 38), [16, 20].map(|at| Begin::Rebuilt(at, header)));
        for (device, protocol, payload) in
            [(824, IPV4, 40), (803, IPV4, 40), (770, IPV6, 40), (1, 4, 1501), (280, 0xc, 16)]
        {
            assert_eq!(begins(device, 0, protocol, payload), [Begin::Unread; 2]);
        }
    }

    #[test]
    fn truncated_cooked_headers_are_skipped() {
        let whole = cooked(1, 0, IPV4);
        for (link_type, whole) in [LinkType::SLL, LinkType::SLL2].into_iter().zip(&whole) {
            let cut = &whole[..whole.len() - 1];
            assert_eq!(link_type.begin(cut, 60), Begin::Unread);
        }
    }
}
