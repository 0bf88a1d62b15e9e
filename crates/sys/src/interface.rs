//! Network interfaces in the network namespace of the calling thread, as the kernel reports them.

use std::{fmt, io};

use netlink_packet_core::Nla;
use netlink_packet_route::link::{
    InfoData, InfoTun, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage, LinkXdp,
    Stats64,
};
use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteType};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::io::Errno;

use super::{ethtool, netlink};
use crate::error::{Error, Result};
use crate::number;

/// Maximum length of a name in bytes: `IFNAMSIZ` without the NUL (include/uapi/linux/if.h).
pub const NAME_BYTES_MAX: usize = 15;

// Attributes of a TUN: include/uapi/linux/if_link.h.
const IFLA_TUN_OWNER: u16 = 1;
const IFLA_TUN_GROUP: u16 = 2;
const IFLA_TUN_TYPE: u16 = 3;
const IFLA_TUN_PERSIST: u16 = 6;
const IFLA_TUN_MULTI_QUEUE: u16 = 7;
const IFLA_TUN_NUM_QUEUES: u16 = 8;
const IFLA_TUN_NUM_DISABLED_QUEUES: u16 = 9;
/// `IFF_TAP` of include/uapi/linux/if_tun.h.
const IFF_TAP: u8 = 2;

/// Index of an interface in its namespace, constant as long as the interface exists.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct InterfaceIndex(pub u32);

/// An Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct MacAddress(pub [u8; 6]);

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// State of an interface at the time of the request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Interface {
    /// Name. The interface may have been found by an alternative name.
    pub name: String,
    /// Index.
    pub index: InterfaceIndex,
    /// MTU: the longest IP packet that it sends, in bytes.
    pub mtu: u32,
    /// True if the interface is administratively up.
    pub is_up: bool,
    /// True if it can carry packets: it is up, and so is its link.
    pub is_running: bool,
    /// True if it is the loopback interface.
    pub is_loopback: bool,
    /// True if its frames are Ethernet frames; a TUN has IP packets.
    pub is_ethernet: bool,
    /// Ethernet address, if it has one.
    pub mac: Option<MacAddress>,
    /// Number of rx queues in use; 1 if the driver does not report it.
    pub rx_queues: u16,
    /// Number of tx queues in use; 1 if the driver does not report it.
    pub tx_queues: u16,
    /// Name of the driver, if it reports one.
    pub driver: Option<String>,
    /// True if the kernel makes its packets, without a device of its own (`IFLA_INFO_KIND`): a veth, a tunnel, a bridge, a
    /// bond.
    pub is_virtual: bool,
    /// Id of the attached XDP program, if any.
    pub xdp_program: Option<u32>,
    /// Settings of a TAP or TUN; `None` for other interfaces.
    pub tun: Option<TunInfo>,
}

/// Settings of a TAP or TUN.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TunInfo {
    /// User who may open it without a capability; `None` if everyone may.
    pub owner: Option<u32>,
    /// Group that may open it without a capability; `None` if everyone may.
    pub group: Option<u32>,
    /// True if it is a TAP, whose frames are Ethernet frames.
    pub is_tap: bool,
    /// True if it can have several queues.
    pub is_multi_queue: bool,
    /// True if it stays when no program has it open.
    pub is_persistent: bool,
    /// Number of queues that programs have open; 0 for a single-queue device, for which the kernel
    /// reports none.
    pub open_queues: u32,
}

/// Counters of an interface since it was created: `struct rtnl_link_stats64`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct InterfaceCounters {
    /// Packets received.
    pub rx_packets: u64,
    /// Packets sent.
    pub tx_packets: u64,
    /// Packets received, and dropped by the kernel.
    pub rx_dropped: u64,
    /// Packets to be sent, and dropped. A TUN counts packets here that nobody read in time.
    pub tx_dropped: u64,
    /// Packets that the device dropped for want of buffers.
    pub rx_missed_errors: u64,
    /// Packets received while there was no receiver.
    pub rx_nohandler: u64,
}

/// Link of an interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LinkState {
    /// Packets can pass.
    Running,
    /// The interface is up, but the other end is not, or there is no cable.
    NoCarrier,
    /// The interface was set down.
    Down,
}

/// Link of an interface, and the changes of its carrier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkStatus {
    /// State now.
    pub state: LinkState,
    /// Number of times that the carrier was lost since the interface was created.
    pub carrier_losses: u32,
}

impl Interface {
    /// Looks up an interface by name.
    ///
    /// # Errors
    /// [`Error::NoInterface`], or [`Error::Device`] if the netlink request fails.
    pub fn named(name: &str) -> Result<Self> {
        if !is_interface_name(name) {
            return Err(no_interface(name));
        }
        let by_name = LinkAttribute::IfName(name.to_owned());
        match link(0, Some(by_name)).and_then(|link| Self::of(&link)) {
            Ok(interface) => Ok(interface),
            Err(error) if is_gone(&error) => Err(no_interface(name)),
            Err(source) => Err(refused(name, "ask the kernel about it", source)),
        }
    }

    /// Looks up an interface by index, with its current name; `None` if it is gone.
    ///
    /// # Errors
    /// If the netlink request fails.
    pub fn by_index(index: InterfaceIndex) -> Result<Option<Self>> {
        match link(index.0, None).and_then(|link| Self::of(&link)) {
            Ok(interface) => Ok(Some(interface)),
            Err(error) if is_gone(&error) => Ok(None),
            Err(source) => Err(refused(&index.to_string(), "ask the kernel about it", source)),
        }
    }

    /// Names of all interfaces.
    ///
    /// # Errors
    /// If the netlink request fails.
    pub fn names() -> Result<Vec<String>> {
        let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
        let links = netlink::dump(&request).map_err(|source| {
            refused("the interfaces", "ask the kernel for their names", source)
        })?;
        let names = links.iter().filter_map(|answer| match answer {
            RouteNetlinkMessage::NewLink(link) => name_of(link),
            _ => None,
        });
        Ok(names.collect())
    }

    /// Sets the interface up, as `ip link set up` does.
    ///
    /// # Errors
    /// [`Error::DeviceGone`], or the kernel's error: `CAP_NET_ADMIN` is required.
    pub fn set_up(&self) -> Result<()> {
        let mut link = LinkMessage::default();
        link.header.index = self.index.0;
        link.header.flags = LinkFlags::Up;
        link.header.change_mask = LinkFlags::Up;
        let set = netlink::ask(RouteNetlinkMessage::SetLink(link));
        set.map(|_| ()).map_err(|source| self.failed("set it up", source))
    }

    /// Current counters of the interface.
    ///
    /// # Errors
    /// [`Error::DeviceGone`], or [`Error::Device`] if the netlink request fails.
    pub fn counters(&self) -> Result<InterfaceCounters> {
        let link = link(self.index.0, None);
        let link = link.map_err(|source| self.failed("read its counters", source))?;
        let counted = link.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::Stats64(counted) => Some(InterfaceCounters::of(counted)),
            _ => None,
        });
        counted.ok_or_else(|| self.failed("read its counters", io::ErrorKind::InvalidData.into()))
    }

    /// Current state of its link; `None` if the interface is gone.
    ///
    /// # Errors
    /// If the netlink request fails.
    pub fn link_status(&self) -> Result<Option<LinkStatus>> {
        let link = match link(self.index.0, None) {
            Ok(link) => link,
            Err(error) if is_gone(&error) => return Ok(None),
            Err(source) => return Err(refused(&self.name, "read the state of its link", source)),
        };
        let flags = link.header.flags;
        // `IFF_RUNNING` follows the carrier up to a second later (net/core/link_watch.c).
        let state = match (flags.contains(LinkFlags::Up), flags.contains(LinkFlags::LowerUp)) {
            (true, true) => LinkState::Running,
            (true, false) => LinkState::NoCarrier,
            (false, _) => LinkState::Down,
        };
        let losses = link.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::CarrierDownCount(count) => Some(*count),
            _ => None,
        });
        Ok(Some(LinkStatus { state, carrier_losses: losses.unwrap_or(0) }))
    }

    /// True if a default route of this namespace uses the interface, in any table, for IPv4 or
    /// IPv6: taking its packets may cut off the machine.
    ///
    /// # Errors
    /// If the netlink request fails.
    pub fn is_default_route(&self) -> Result<bool> {
        let mut request = RouteMessage::default();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            request.header.address_family = family;
            let routes = match netlink::dump(&RouteNetlinkMessage::GetRoute(request.clone())) {
                Ok(routes) => routes,
                // A kernel without IPv6 has no IPv6 routes.
                Err(error) if error.raw_os_error() == Some(Errno::OPNOTSUPP.raw_os_error()) => {
                    continue;
                }
                Err(source) => return Err(self.failed("read the routes", source)),
            };
            let is_default = routes.iter().any(|answer| match answer {
                RouteNetlinkMessage::NewRoute(route) => {
                    is_default(route) && goes_out_of(route, self.index)
                }
                _ => false,
            });
            if is_default {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Error of the kernel about this interface.
    fn failed(&self, what: &str, source: io::Error) -> Error {
        if is_gone(&source) {
            Error::DeviceGone { name: self.name.clone() }
        } else {
            refused(&self.name, what, source)
        }
    }

    fn of(link: &LinkMessage) -> io::Result<Self> {
        let flags = link.header.flags;
        let name = name_of(link).ok_or(io::ErrorKind::InvalidData)?;
        let queues = ethtool::queues(&name).unwrap_or(ethtool::ChannelCounts { rx: 1, tx: 1 });
        let count = |queues: u32| u16::try_from(queues.max(1)).unwrap_or(u16::MAX);
        let mut interface = Self {
            index: InterfaceIndex(link.header.index),
            mtu: 0,
            is_up: flags.contains(LinkFlags::Up),
            is_running: flags.contains(LinkFlags::Running),
            is_loopback: flags.contains(LinkFlags::Loopback),
            is_ethernet: matches!(
                link.header.link_layer_type,
                LinkLayerType::Ether | LinkLayerType::Loopback
            ),
            mac: None,
            rx_queues: count(queues.rx),
            tx_queues: count(queues.tx),
            driver: ethtool::driver(&name).ok().filter(|driver| !driver.is_empty()),
            is_virtual: false,
            xdp_program: None,
            tun: None,
            name,
        };
        for attribute in &link.attributes {
            match attribute {
                LinkAttribute::Mtu(mtu) => interface.mtu = *mtu,
                LinkAttribute::Address(address) => {
                    interface.mac = address.as_slice().try_into().ok().map(MacAddress);
                }
                LinkAttribute::Xdp(xdp) => {
                    interface.xdp_program = xdp.iter().find_map(|xdp| match xdp {
                        LinkXdp::ProgId(id) => Some(*id),
                        _ => None,
                    });
                }
                LinkAttribute::LinkInfo(info) => {
                    interface.is_virtual =
                        info.iter().any(|info| matches!(info, LinkInfo::Kind(_)));
                    interface.tun = info.iter().find_map(|info| match info {
                        LinkInfo::Data(InfoData::Tun(said)) => Some(TunInfo::of(said)),
                        _ => None,
                    });
                }
                _ => {}
            }
        }
        Ok(interface)
    }
}

impl TunInfo {
    fn of(said: &[InfoTun]) -> Self {
        let mut tun = Self::default();
        for attribute in said {
            let mut value = vec![0; attribute.value_len()];
            attribute.emit_value(&mut value);
            let is_set = value.first() == Some(&1);
            let id = value.as_slice().try_into().ok().map(u32::from_ne_bytes);
            match attribute.kind() {
                IFLA_TUN_OWNER => tun.owner = id,
                IFLA_TUN_GROUP => tun.group = id,
                IFLA_TUN_TYPE => tun.is_tap = value.first() == Some(&IFF_TAP),
                IFLA_TUN_PERSIST => tun.is_persistent = is_set,
                IFLA_TUN_MULTI_QUEUE => tun.is_multi_queue = is_set,
                IFLA_TUN_NUM_QUEUES | IFLA_TUN_NUM_DISABLED_QUEUES => {
                    tun.open_queues += id.unwrap_or(0);
                }
                _ => {}
            }
        }
        tun
    }
}

impl InterfaceCounters {
    fn of(counted: &Stats64) -> Self {
        Self {
            rx_packets: counted.rx_packets,
            tx_packets: counted.tx_packets,
            rx_dropped: counted.rx_dropped,
            tx_dropped: counted.tx_dropped,
            rx_missed_errors: counted.rx_missed_errors,
            rx_nohandler: counted.rx_nohandler,
        }
    }
}

impl fmt::Display for InterfaceIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "interface {}", self.0)
    }
}

/// True if the kernel accepts the name for an interface: `dev_valid_name` in net/core/dev.c.
#[must_use]
pub fn is_interface_name(name: &str) -> bool {
    let is_odd = |byte: u8| byte == b'/' || byte == b':' || byte == 0 || number::is_space(byte);
    !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && ![".", ".."].contains(&name)
        && !name.bytes().any(is_odd)
}

/// `isspace` in lib/ctype.c, which includes the vertical tab and the no-break space.
/// Link with an index or, if that is 0, a name, as the kernel reports it.
fn link(index: u32, by_name: Option<LinkAttribute>) -> io::Result<LinkMessage> {
    let mut request = LinkMessage::default();
    request.header.index = index;
    request.attributes.extend(by_name);
    let answers = netlink::ask(RouteNetlinkMessage::GetLink(request))?;
    let link = answers.into_iter().find_map(|answer| match answer {
        RouteNetlinkMessage::NewLink(link) => Some(link),
        _ => None,
    });
    link.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn name_of(link: &LinkMessage) -> Option<String> {
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.clone()),
        _ => None,
    })
}

/// True if a route takes packets to all destinations. Halves of the address space count too, since
/// 0.0.0.0/1 and 128.0.0.0/1, or 2000::/3, are used to override a default route.
fn is_default(route: &RouteMessage) -> bool {
    let prefix_len_max = match route.header.address_family {
        AddressFamily::Inet => 1,
        _ => 3,
    };
    route.header.destination_prefix_length <= prefix_len_max
        && route.header.kind == RouteType::Unicast
}

fn goes_out_of(route: &RouteMessage, index: InterfaceIndex) -> bool {
    route.attributes.iter().any(|attribute| match attribute {
        RouteAttribute::Oif(oif) => *oif == index.0,
        RouteAttribute::MultiPath(hops) => hops.iter().any(|hop| hop.interface_index == index.0),
        _ => false,
    })
}

fn is_gone(error: &io::Error) -> bool {
    let gone = [Errno::NODEV, Errno::NXIO].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|errno| gone.contains(&errno))
}

fn refused(name: &str, what: &str, source: io::Error) -> Error {
    let help = match source.kind() {
        io::ErrorKind::PermissionDenied => {
            "this needs CAP_NET_ADMIN in the network namespace of the interface; run as root, or \
             have root do it"
        }
        _ => "check that the network namespace is the right one and `ip link` works in it",
    };
    let (name, what, help) = (name.to_owned(), what.to_owned(), help.to_owned());
    Error::Device { name, what, source, help }
}

/// Error for an unknown name, with the names that exist.
fn no_interface(name: &str) -> Error {
    let mut names = Interface::names().unwrap_or_default();
    names.sort_by_cached_key(|other| (strsim::damerau_levenshtein(name, other), other.clone()));
    Error::NoInterface { name: name.to_owned(), there_are: names }
}
