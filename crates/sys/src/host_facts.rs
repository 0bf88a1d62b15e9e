//! Links, addresses and routes of the host, asked for over a socket that stays open. They concern the network namespace of
//! the thread that opened it.

use std::io;
use std::net::IpAddr;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::{LinkAttribute, LinkLayerType, LinkMessage};
use rustix::io::Errno;

use super::interface::{InterfaceIndex, MacAddress};
use super::neighbour::{InterfaceAddresses, RouteFacts};
use super::netlink::NetlinkSocket;

/// Questions to the kernel about this host.
#[derive(Debug)]
pub struct HostFacts(NetlinkSocket);

/// Addresses of all interfaces, as they were at one time.
#[derive(Debug)]
pub struct HostAddresses(Vec<RouteNetlinkMessage>);

/// Properties of an interface that may change at any time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LinkFacts {
    /// MTU: the longest IP packet that it sends, in bytes.
    pub mtu: u32,
    /// Ethernet address, if its frames are Ethernet frames.
    pub mac: Option<MacAddress>,
}

impl HostFacts {
    /// Opens the socket.
    ///
    /// # Errors
    /// If the process has no descriptor or memory left.
    pub fn open() -> io::Result<Self> {
        NetlinkSocket::of_routes().map(Self)
    }

    /// Reads the addresses of all interfaces.
    ///
    /// # Errors
    /// If the netlink request fails.
    pub fn addresses(&mut self) -> io::Result<HostAddresses> {
        let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        self.0.dump(&request).map(HostAddresses)
    }

    /// Reads the properties of an interface; `None` if it is gone.
    ///
    /// # Errors
    /// If the netlink request fails.
    pub fn link(&mut self, of: InterfaceIndex) -> io::Result<Option<LinkFacts>> {
        let mut request = LinkMessage::default();
        request.header.index = of.0;
        let gone = [Errno::NODEV, Errno::NXIO].map(Errno::raw_os_error);
        let answers = match self.0.ask(RouteNetlinkMessage::GetLink(request)) {
            Ok(answers) => answers,
            Err(error) if error.raw_os_error().is_some_and(|errno| gone.contains(&errno)) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        Ok(answers.iter().find_map(|answer| match answer {
            RouteNetlinkMessage::NewLink(link) => Some(LinkFacts::of(link)),
            _ => None,
        }))
    }

    /// The kernel's route to a destination by an interface; `None` if there is none.
    ///
    /// # Errors
    /// If the netlink request fails, or the route forbids to send.
    pub fn route(
        &mut self,
        destination: IpAddr,
        by: InterfaceIndex,
    ) -> io::Result<Option<RouteFacts>> {
        RouteFacts::ask(&mut self.0, destination, by)
    }
}

impl HostAddresses {
    /// Addresses of an interface.
    #[must_use]
    pub fn on(&self, interface: InterfaceIndex) -> InterfaceAddresses {
        InterfaceAddresses::told(&self.0, interface)
    }
}

impl LinkFacts {
    fn of(link: &LinkMessage) -> Self {
        let kinds = [LinkLayerType::Ether, LinkLayerType::Loopback];
        let is_ethernet = kinds.contains(&link.header.link_layer_type);
        let mut facts = Self::default();
        for attribute in &link.attributes {
            match attribute {
                LinkAttribute::Mtu(mtu) => facts.mtu = *mtu,
                LinkAttribute::Address(address) if is_ethernet => {
                    facts.mac = address.as_slice().try_into().ok().map(MacAddress);
                }
                _ => {}
            }
        }
        facts
    }
}
