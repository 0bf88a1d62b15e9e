//! Interfaces as the host reports them, in a network namespace that each test's thread creates: it
//! is removed with the thread, and `ip` run from the thread works in it.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use forebay_sys::Error;
use std::net::IpAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use forebay_sys::host_facts::HostFacts;
use forebay_sys::interface::{Interface, InterfaceIndex, LinkState, MacAddress, TunInfo};
use forebay_sys::neighbour::{
    self, EntryState, InterfaceAddresses, NeighbourEntry, NextHops, RouteFacts,
};
use forebay_testkit::namespaces::{ip, missing, trial_inside};

/// Longest wait for the kernel to detect duplicate addresses.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn trials() -> Vec<libtest_mimic::Trial> {
    let missing = missing(&["ip"]);
    let trial = |name: &str, test: fn()| trial_inside(name, missing.as_ref(), test);
    let trials = vec![
        trial("interface_matches_ip_output", as_made),
        trial("interface_index_survives_renaming", gone),
        trial("unknown_name_error_lists_known", not_there),
        trial("default_routes_found_in_any_table", default_routes),
        trial("counters_count_what_was_dropped", counters),
        trial("ops_3_link_status_follows_the_link", link_status),
        trial("tcp_15_next_hops_follow_route_changes", next_hops),
        trial("promise_8_used_stale_neighbours_are_probed", neighbour_states),
        trial("tcp_15_ipv4_routes_lead_over_ipv6", next_hops_of_other_family),
        trial("udp_26_unproven_addresses_are_not_used", unproven_addresses),
        trial("udp_27_kernel_tells_source_of_routes", sources_of_routes),
        trial("udp_21_gateways_are_told_by_interface", gateways),
    ];
    trials
}

fn as_made() {
    ip("link add hoa mtu 1400 address 02:00:00:00:00:0a numrxqueues 3 numtxqueues 2 type veth \
        peer name hob numrxqueues 2 numtxqueues 3");
    let made = Interface::named("hoa").unwrap();
    assert_eq!(made.mtu, 1400);
    assert_eq!((made.rx_queues, made.tx_queues), (3, 2));
    assert_eq!(made.mac, Some(MacAddress([2, 0, 0, 0, 0, 10])));
    assert_eq!(made.mac.unwrap().to_string(), "02:00:00:00:00:0a");
    assert_eq!(made.driver.as_deref(), Some("veth"));
    assert_eq!((made.is_up, made.is_running), (false, false));
    assert_eq!((made.is_loopback, made.is_ethernet), (false, true));
    assert_eq!(made.xdp_program, None);

    made.set_up().unwrap();
    let up = Interface::named("hoa").unwrap();
    assert_eq!((up.is_up, up.is_running), (true, false));
    Interface::named("hob").unwrap().set_up().unwrap();
    assert!(Interface::named("hoa").unwrap().is_running);

    let lo = Interface::named("lo").unwrap();
    assert!(lo.is_loopback && !made.is_loopback);
    ip("tuntap add hot mode tun");
    let tun = Interface::named("hot").unwrap();
    assert_eq!((tun.is_ethernet, tun.mac, tun.rx_queues), (false, None, 1));
    assert_eq!(made.tun, None);
    ip("tuntap add hop mode tap user 65534 group 7 multi_queue");
    let (is_tap, is_multi_queue, is_persistent) = (true, true, true);
    let expected = TunInfo {
        owner: Some(65534),
        group: Some(7),
        is_tap,
        is_multi_queue,
        is_persistent,
        open_queues: 0,
    };
    assert_eq!(Interface::named("hop").unwrap().tun, Some(expected));
    assert_eq!(tun.tun, Some(TunInfo { is_persistent, ..TunInfo::default() }));
    // An alternative name finds the interface as well, which reports its primary name.
    ip("link property add dev hoa altname hoalt");
    assert_eq!(Interface::named("hoalt").unwrap(), Interface::named("hoa").unwrap());
}

fn link_status() {
    ip("link add hoa type veth peer name hob");
    let made = Interface::named("hoa").unwrap();
    let status = || made.link_status().unwrap().unwrap();
    let before = status();
    assert_eq!(before.state, LinkState::Down);
    ip("link set hoa up");
    assert_eq!(status().state, LinkState::NoCarrier);
    ip("link set hob up");
    assert_eq!(status().state, LinkState::Running);
    let running = status();
    ip("link set hob down");
    ip("link set hob up");
    assert_eq!(status().state, LinkState::Running);
    assert_eq!(status().carrier_losses, running.carrier_losses + 1, "though it is back");
    ip("link del hob");
    assert_eq!(made.link_status().unwrap(), None);
}

fn gone() {
    ip("link add hoa type veth peer name hob");
    let made = Interface::named("hoa").unwrap();
    ip("link set hoa name hoc");
    assert_eq!(Interface::by_index(made.index).unwrap().unwrap().name, "hoc");
    ip("link del hoc");
    assert_eq!(Interface::by_index(made.index).unwrap(), None);
    for refused in [made.counters().map(|_| ()), made.set_up()] {
        let refused = refused.unwrap_err();
        assert!(matches!(&refused, Error::DeviceGone { name } if name == "hoa"), "{refused}");
        assert!(refused.is_refusal());
    }
}

/// One socket answers all questions, each as routes and neighbours are then; and in the namespace that it was
/// opened in.
fn next_hops() {
    ip("link add left type veth peer name right");
    ip("addr add 10.9.0.1/24 dev left");
    ip("addr add fd00::1/64 dev left nodad");
    ip("link set left up");
    ip("link set right up");
    let on = Interface::named("left").unwrap().index;
    let address = |text: &str| text.parse::<IpAddr>().unwrap();
    let mut hops = NextHops::open().unwrap();
    for (far, by, then_by) in
        [("192.0.2.7", "10.9.0.2", "10.9.0.3"), ("2001:db8::7", "fd00::2", "fd00::3")]
    {
        ip(&format!("route add {far} via {by} dev left"));
        assert_eq!(next_hop(&mut hops, address(far), on).unwrap(), Some(address(by)));
        assert_eq!(hops.entry_of(address(by), on).unwrap(), None);
        for mac in [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]] {
            let mac = MacAddress(mac);
            ip(&format!("neigh replace {by} lladdr {mac} dev left nud permanent"));
            assert_eq!(hops.entry_of(address(by), on).unwrap(), Some(fixed(mac)));
        }
        ip(&format!("route change {far} via {then_by} dev left"));
        assert_eq!(next_hop(&mut hops, address(far), on).unwrap(), Some(address(then_by)));
        let elsewhere = || {
            forebay_testkit::namespaces::enter_new();
            next_hop(&mut hops, address(far), on).unwrap()
        };
        let told = std::thread::scope(|scope| scope.spawn(elsewhere).join().unwrap());
        assert_eq!(told, Some(address(then_by)));
    }
    // A refusal is not taken for the answer to the next question.
    assert!(next_hop(&mut hops, address("192.0.2.7"), InterfaceIndex(u32::MAX)).is_err());
    assert_eq!(next_hop(&mut hops, address("192.0.2.7"), on).unwrap(), Some(address("10.9.0.3")));
}

fn fixed(lladdr: MacAddress) -> NeighbourEntry {
    NeighbourEntry { lladdr, state: EntryState::Fixed }
}

/// A stale entry is checked once it is used.
fn neighbour_states() {
    ip("link add left type veth peer name right");
    ip("addr add 10.9.0.1/24 dev left");
    ip("addr add fd00::1/64 dev left nodad");
    ip("link set left up");
    ip("link set right up");
    let on = Interface::named("left").unwrap().index;
    let lladdr = MacAddress([2, 0, 0, 0, 0, 1]);
    let mut hops = NextHops::open().unwrap();
    for of in ["10.9.0.2", "fd00::2"] {
        let mut state_of = |set: &str| {
            ip(&format!("neigh replace {of} lladdr {lladdr} dev left nud {set}"));
            let entry = hops.entry_of(of.parse().unwrap(), on).unwrap();
            entry.map(|entry| (entry.lladdr == lladdr).then_some(entry.state).unwrap())
        };
        assert_eq!(state_of("noarp"), Some(EntryState::Fixed));
        assert_eq!(state_of("reachable"), Some(EntryState::Current));
        assert_eq!(state_of("failed"), None);
        assert_eq!(state_of("stale"), Some(EntryState::Stale));
        hops.solicit(of.parse().unwrap(), on).unwrap();
        let entry = NeighbourEntry { lladdr, state: EntryState::Current };
        assert_eq!(hops.entry_of(of.parse().unwrap(), on).unwrap(), Some(entry));
    }
}

/// The link-layer address is the IPv6 neighbour's.
fn next_hops_of_other_family() {
    ip("link add left type veth peer name right");
    ip("addr add 10.9.0.1/24 dev left");
    ip("link set left up");
    ip("link set right up");
    ip("route add 192.0.2.0/24 via inet6 fe80::1 dev left");
    let on = Interface::named("left").unwrap().index;
    let [far, by] = ["192.0.2.5", "fe80::1"].map(|text| text.parse::<IpAddr>().unwrap());
    let mut hops = NextHops::open().unwrap();
    assert_eq!(next_hop(&mut hops, far, on).unwrap(), Some(by));
    assert!(has_gateway(far, on));
    assert_eq!(hops.entry_of(by, on).unwrap(), None);
    let mac = MacAddress([2, 0, 0, 0, 0, 1]);
    ip(&format!("neigh replace {by} lladdr {mac} dev left nud permanent"));
    assert_eq!(hops.entry_of(by, on).unwrap(), Some(fixed(mac)));
}

/// Gateway of the route, or else the destination.
fn next_hop(
    hops: &mut NextHops,
    far: IpAddr,
    by: InterfaceIndex,
) -> std::io::Result<Option<IpAddr>> {
    let route = hops.route(far, by)?;
    Ok(route.map(|route| route.gateway.unwrap_or(far)))
}

fn has_gateway(far: IpAddr, by: InterfaceIndex) -> bool {
    let route = HostFacts::open().unwrap().route(far, by).unwrap();
    route.is_some_and(|route| route.gateway.is_some())
}

fn gateways() {
    ip("link add left type veth peer name right");
    for (name, v4, v6) in
        [("left", "10.9.0.1/24", "fd00::1/64"), ("right", "10.9.1.1/24", "fd01::1/64")]
    {
        ip(&format!("addr add {v4} dev {name}"));
        ip(&format!("addr add {v6} dev {name} nodad"));
        ip(&format!("link set {name} up"));
    }
    let told = || {
        let has = |name, far: &str| {
            let by = Interface::named(name).unwrap().index;
            has_gateway(far.parse().unwrap(), by)
        };
        ["192.0.2.1", "2001:db8::1"].map(|far| (has("left", far), has("right", far)))
    };
    assert_eq!(told(), [(false, false); 2]);
    ip("route add default via 10.9.1.2");
    assert_eq!(told(), [(false, true), (false, false)]);
    ip("route add default via 10.9.0.2 metric 100");
    ip("-6 route add default via fd00::2");
    assert_eq!(told(), [(true, true), (true, false)]);
}

/// Duplicate address detection has not ended, or another host has the address.
fn unproven_addresses() {
    ip("link add left type veth peer name right");
    ip("addr add fd00::2/64 dev right nodad");
    ip("link set right addrgenmode none");
    ip("link set left addrgenmode none");
    ip("link set left up");
    ip("link set right up");
    let on = Interface::named("left").unwrap().index;
    let address = |text: &str| (text.parse::<IpAddr>().unwrap(), 64);
    ip("addr add fd00::1/64 dev left nodad");
    ip("addr add fd00::9/64 dev left nodad preferred_lft 0");
    let (first, last) = (address("fd00::1"), address("fd00::9"));
    let expected =
        InterfaceAddresses { usable: vec![first, last], elsewhere: [address("fd00::2").0].into() };
    assert_eq!(InterfaceAddresses::of(on).unwrap(), expected, "the deprecated one is last");
    std::fs::write("/proc/sys/net/ipv6/conf/left/dad_transmits", "4").unwrap();
    ip("addr add fd00::2/64 dev left");
    ip("addr add fd00::3/64 dev left");
    assert_eq!(InterfaceAddresses::of(on).unwrap(), expected);
    let began = Instant::now();
    let after = loop {
        let now = InterfaceAddresses::of(on).unwrap();
        if now.usable.contains(&address("fd00::3")) {
            break now.usable;
        }
        assert!(began.elapsed() < PATIENCE, "detection does not end");
        sleep(Duration::from_millis(10));
    };
    assert!(!after.contains(&address("fd00::2")), "{after:?}");
    assert_eq!(after.last(), Some(&last));
}

fn sources_of_routes() {
    ip("link add left type veth peer name right");
    for own in ["10.8.0.1/24", "10.9.0.1/24", "10.9.0.7/24"] {
        ip(&format!("addr add {own} dev left"));
    }
    ip("addr add fd00::1/64 dev left nodad");
    ip("addr add 2001:db8:1::1/64 dev left nodad");
    ip("link set left up");
    ip("link set right up");
    let on = Interface::named("left").unwrap().index;
    let source = |far: &str| {
        let told = neighbour::source_to(far.parse().unwrap(), on).unwrap();
        told.map(|told| told.to_string())
    };
    assert_eq!(source("2001:db8::1"), None, "no route");
    ip("route add default via 10.9.0.2");
    ip("route add 198.51.100.0/24 via 10.9.0.2 src 10.9.0.7");
    ip("-6 route add default via fd00::2");
    for (far, expected) in [
        ("192.0.2.1", "10.9.0.1"),
        ("198.51.100.1", "10.9.0.7"),
        ("2001:db8::1", "2001:db8:1::1"),
        ("fd01::1", "fd00::1"),
    ] {
        assert_eq!(source(far).as_deref(), Some(expected), "{far}");
    }
    ip("route add 203.0.113.0/24 via 10.9.0.2 mtu 1400");
    let route = NextHops::open().unwrap().route("203.0.113.1".parse().unwrap(), on).unwrap();
    let RouteFacts { mtu, expires_ns, .. } = route.unwrap();
    assert_eq!((mtu, expires_ns), (Some(1400), None), "no router has told of it");
}

fn not_there() {
    ip("link add hoa0 type veth peer name zeta0");
    for name in ["hoa1", "", "a/b", "..", "a b", "sixteen_bytes_long"] {
        let refused = Interface::named(name).unwrap_err();
        assert!(matches!(&refused, Error::NoInterface { name: said, .. } if said == name));
        assert!(refused.is_refusal());
        assert!(refused.to_string().contains(&format!("{name:?}")), "{refused}");
    }
    assert_eq!(Interface::named("hoa1").unwrap_err().help(), "there are: hoa0, lo, zeta0");
    assert_eq!(Interface::named("zeta").unwrap_err().help(), "there are: zeta0, hoa0, lo");
}

fn default_routes() {
    ip("link add hoa type veth peer name hob");
    let both = || {
        let of = |name| Interface::named(name).unwrap().is_default_route().unwrap();
        (of("hoa"), of("hob"))
    };
    for name in ["hoa", "hob"] {
        Interface::named(name).unwrap().set_up().unwrap();
    }
    ip("addr add 10.0.0.1/24 dev hoa");
    ip("addr add fd00::1/64 dev hob nodad");
    ip("addr add fd01::1/64 dev hoa nodad");
    assert_eq!(both(), (false, false));
    for (route, expected) in [
        ("route add default via 10.0.0.2", (true, false)),
        ("-6 route add default via fd00::2", (false, true)),
        ("route add default dev hob table 7", (false, true)),
        ("route add 128.0.0.0/1 dev hoa", (true, false)),
        ("route add 64.0.0.0/2 dev hoa", (false, false)),
        ("-6 route add 2000::/3 dev hoa", (true, false)),
        ("route add default nexthop dev hoa nexthop dev hob", (true, true)),
        ("-6 route add default nexthop via fd01::2 nexthop via fd00::2", (true, true)),
        ("route add unreachable default", (false, false)),
    ] {
        ip(route);
        assert_eq!(both(), expected, "{route}");
        ip(&route.replacen(" add ", " del ", 1));
        assert_eq!(both(), (false, false), "after {route}");
    }
}

fn counters() {
    ip("tuntap add hot mode tun");
    let tun = Interface::named("hot").unwrap();
    tun.set_up().unwrap();
    ip("addr add 10.0.0.1/24 dev hot");
    let before = tun.counters().unwrap();
    // No program has opened the TUN, so packets sent into it are dropped.
    let socket = std::net::UdpSocket::bind("10.0.0.1:0").unwrap();
    for _ in 0..5 {
        let _ = socket.send_to(b"x", "10.0.0.2:9");
    }
    let after = tun.counters().unwrap();
    assert_eq!(after.tx_dropped - before.tx_dropped, 5, "{before:?} {after:?}");
    assert_eq!(after.rx_packets, 0);
}
