//! Ways in which a run takes packets, and the link between sender and run.

use forebay_testkit::namespaces::named::{NamedNamespace, output_of};
use libtest_mimic::Failed;
use serde_json::Value;

/// Interface that a run takes packets from, and the sender's interface.
pub(super) const DEVICE: &str = "fb0";
pub(super) const PEER: &str = "fb1";

/// MAC addresses of the two ends.
pub(super) const DEVICE_MAC: &str = "02:00:00:00:00:02";
pub(super) const PEER_MAC: &str = "02:00:00:00:00:01";

/// Source of packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    AfXdpNative,
    AfXdpGeneric,
    AfPacket,
    Tap,
    Tun,
}

impl Way {
    pub(super) const ALL: [Self; 5] =
        [Self::AfXdpNative, Self::AfXdpGeneric, Self::AfPacket, Self::Tap, Self::Tun];

    /// The options of `forebay run`.
    pub(super) fn args(self) -> &'static [&'static str] {
        match self {
            Self::AfXdpNative => &["--via", "af_xdp", "--xdp-mode", "native", "--take", "all"],
            Self::AfXdpGeneric => &["--via", "af_xdp", "--xdp-mode", "generic", "--take", "all"],
            Self::AfPacket => &["--via", "af_packet"],
            Self::Tap => &["--via", "tap"],
            Self::Tun => &["--via", "tun"],
        }
    }

    /// True if its packets begin with an Ethernet header.
    pub(super) fn has_ethernet(self) -> bool {
        self != Self::Tun
    }

    pub(super) fn is_xdp(self) -> bool {
        matches!(self, Self::AfXdpNative | Self::AfXdpGeneric)
    }
}

/// Namespaces of sender and run, and the interfaces between them; deleted on drop.
pub(super) struct Link {
    pub(super) way: Way,
    /// Namespace of the run.
    pub(super) near: NamedNamespace,
    /// Namespace of the sender; `None` for a TAP or TUN, which is written from the run's namespace.
    far: Option<NamedNamespace>,
}

impl Link {
    /// Creates a link with both ends up and silent.
    pub(super) fn new(way: Way) -> Result<Self, Failed> {
        Self::with_queues(way, 1)
    }

    /// Creates a link with this many queues at each end.
    pub(super) fn with_queues(way: Way, queues: u16) -> Result<Self, Failed> {
        let near = NamedNamespace::new()?;
        let mut link = Self { way, near, far: None };
        match way {
            Way::Tap | Way::Tun => {
                let mode = if way == Way::Tap { "tap" } else { "tun" };
                let several = if queues > 1 { ["multi_queue"].as_slice() } else { &[] };
                silence(&link.near)?;
                let add = ["ip", "tuntap", "add", "dev", DEVICE, "mode", mode];
                link.near.run(&[&add, several].concat())?;
                link.near.run(&["ip", "link", "set", DEVICE, "up"])?;
            }
            Way::AfXdpNative | Way::AfXdpGeneric | Way::AfPacket => {
                let far = link.far.insert(NamedNamespace::new()?);
                join((&link.near, DEVICE, DEVICE_MAC), (far, PEER, PEER_MAC), queues)?;
            }
        }
        Ok(link)
    }

    /// True if the run creates the device: a TAP or TUN.
    pub(super) fn is_own(&self) -> bool {
        self.far.is_none()
    }

    /// Interface to send into, and its namespace.
    pub(super) fn sender(&self) -> (&NamedNamespace, &str) {
        self.far.as_ref().map_or((&self.near, DEVICE), |far| (far, PEER))
    }

    /// Options of a run on the receiving end, followed by `more`.
    pub(super) fn args<'a>(&self, more: &[&'a str]) -> Vec<&'a str> {
        [&[DEVICE], self.way.args(), more].concat()
    }

    /// Output of `ip` for the receiving end.
    pub(super) fn shown(&self) -> Result<Value, Failed> {
        shown(&self.near, DEVICE)
    }

    /// Output of `ip` for the sending end.
    pub(super) fn sender_shown(&self) -> Result<Value, Failed> {
        let (namespace, device) = self.sender();
        shown(namespace, device)
    }

    /// True if `ip` shows a flag, such as `NO-CARRIER`.
    pub(super) fn has_flag(&self, flag: &str) -> Result<bool, Failed> {
        let shown = self.shown()?;
        let flags = shown["flags"].as_array().ok_or("`ip` shows no flags")?;
        Ok(flags.iter().any(|it| it == flag))
    }

    /// Kernel counters of the receiving end.
    pub(super) fn counts(&self) -> Result<Counts, Failed> {
        Counts::of(&self.near, DEVICE)
    }

    /// Frames dropped by the kernel since the link was created, each counted once. `before_the_run`
    /// is the number that the run reports as dropped by the kernel: the interface must report the
    /// same, if it can.
    pub(super) fn lost(&self, before_the_run: u64) -> Result<u64, Failed> {
        let counts = self.counts()?;
        let (at_interface, elsewhere) = match self.way {
            // The XDP program drops frames without room in the socket's ring; the veth can drop
            // frames too.
            Way::AfXdpNative => (Some(counts.rx_dropped), self.sender_counts()?.tx_dropped),
            // Drops here happen after a CPU's backlog, whose drops count for the interface.
            Way::AfXdpGeneric | Way::AfPacket => (None, counts.rx_dropped),
            Way::Tap | Way::Tun => (Some(counts.tx_dropped), 0),
        };
        if at_interface.is_some_and(|dropped| dropped != before_the_run) {
            return Err(format!("{counts:?}, but the run says {before_the_run}").into());
        }
        Ok(before_the_run + elsewhere)
    }

    /// Kernel counters of the sending end.
    pub(super) fn sender_counts(&self) -> Result<Counts, Failed> {
        let (namespace, device) = self.sender();
        Counts::of(namespace, device)
    }
}

/// An end of a veth pair: namespace, name, and MAC address.
pub(super) type End<'a> = (&'a NamedNamespace, &'a str, &'a str);

/// Creates a veth pair between two namespaces. Both ends are up and send nothing on their own.
pub(super) fn join(one: End<'_>, other: End<'_>, queues: u16) -> Result<(), Failed> {
    let (namespace, name, address) = one;
    let (peer_namespace, peer_name, peer_address) = other;
    let (here, there) = (namespace.name(), peer_namespace.name());
    let queues = queues.to_string();
    let queues = ["numrxqueues", &queues, "numtxqueues", &queues];
    let one_end = ["link", "add", "name", name, "address", address, "netns", here];
    let other_end = ["peer", "name", peer_name, "address", peer_address, "netns", there];
    let both = [&one_end, &queues[..], &["type", "veth"], &other_end, &queues];
    output_of("ip", &both.concat())?;
    for (namespace, name) in [(namespace, name), (peer_namespace, peer_name)] {
        silence(namespace)?;
        namespace.run(&["ip", "link", "set", name, "up"])?;
    }
    Ok(())
}

/// Disables neighbour discovery, whose packets no sender would count.
fn silence(namespace: &NamedNamespace) -> Result<(), Failed> {
    for scope in ["all", "default"] {
        namespace.run(&["sysctl", "-qw", &format!("net.ipv6.conf.{scope}.disable_ipv6=1")])?;
    }
    Ok(())
}

/// Kernel counters of an interface.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts {
    pub(super) rx_dropped: u64,
    pub(super) tx_packets: u64,
    pub(super) tx_dropped: u64,
}

impl Counts {
    fn of(namespace: &NamedNamespace, device: &str) -> Result<Self, Failed> {
        let shown = shown(namespace, device)?;
        let number = |direction: &str, what: &str| {
            let number = shown["stats64"][direction][what].as_u64();
            number.ok_or_else(|| format!("`ip` does not say {direction} {what}: {shown}"))
        };
        Ok(Self {
            rx_dropped: number("rx", "dropped")?,
            tx_packets: number("tx", "packets")?,
            tx_dropped: number("tx", "dropped")?,
        })
    }
}

fn shown(namespace: &NamedNamespace, device: &str) -> Result<Value, Failed> {
    let told = namespace.output_of(&["ip", "-j", "-s", "link", "show", "dev", device])?;
    let mut links: Vec<Value> = serde_json::from_str(&told)?;
    links.pop().ok_or_else(|| format!("`ip` does not show {device}").into())
}
