//! Existing devices, new devices, and devices that cannot be opened.

use std::net::UdpSocket;
use std::os::fd::AsFd;

use forebay_device::tun::{TunDevice, TunKind};
use forebay_sys::Error;
use forebay_sys::bpf::{FilterProgram, Instruction};
use forebay_sys::interface::Interface;
use forebay_sys::tun::{Attach, TunQueue};
use forebay_testkit::namespaces::ip;

use crate::tun::Test;
use crate::tun::rig::{Rig, address, neighbour};

pub(crate) const TESTS: &[Test] = &[
    ("created_device_disappears_with_us", made),
    ("existing_device_is_kept", attached),
    ("filter_of_killed_run_is_detached", killed),
    ("wrong_device_kind_is_named", refused),
];

fn made() {
    // The first opening makes the kernel load what it loads once.
    drop(TunDevice::open("tnmade", TunKind::Tun, 1).unwrap());
    let open = || std::fs::read_dir("/proc/thread-self/fd").unwrap().count();
    let before = open();
    for round in 0..20 {
        let (kind, queues) = ([TunKind::Tun, TunKind::Tap][round % 2], [1, 3][round / 2 % 2]);
        let device = TunDevice::open("tnmade", kind, queues).unwrap();
        let there = Interface::named("tnmade").unwrap();
        assert!(there.is_up && there.is_running);
        assert_eq!(there.is_ethernet, kind == TunKind::Tap);
        assert_eq!(device.facts()[0], ("device", "new".to_owned()));
        let (rig, sink) = (Rig::new(&device), device.sink());
        assert_eq!(rig.sources.len(), usize::from(queues));
        drop(device);
        rig.all_home(Vec::new());
        assert!(Interface::named("tnmade").is_ok(), "the sink has it still");
        drop(sink);
        let gone = Interface::named("tnmade").unwrap_err();
        assert!(matches!(gone, Error::NoInterface { .. }), "{gone}");
    }
    assert_eq!(open(), before);
}

fn attached() {
    for (mode, kind) in [("tun", TunKind::Tun), ("tap", TunKind::Tap)] {
        ip(&format!("tuntap add tnone mode {mode}"));
        ip(&format!("tuntap add tnmany mode {mode} multi_queue vnet_hdr"));
        for (name, queues) in [("tnone", 1), ("tnmany", 1), ("tnmany", 4), ("tnone", 1)] {
            let before = Interface::named(name).unwrap();
            let device = TunDevice::open(name, kind, queues).unwrap();
            assert_eq!(device.facts()[0], ("device", "was there".to_owned()));
            assert!(!Interface::named(name).unwrap().is_up, "it is not ours to set up");
            drop(device);
            assert_eq!(Interface::named(name).unwrap(), before);
        }
        ip(&format!("tuntap del tnone mode {mode}"));
        ip(&format!("tuntap del tnmany mode {mode} multi_queue"));
    }
}

/// A run that is killed while it ends leaves the program that drops all packets.
fn killed() {
    let exit = Instruction { code: 0x95, ..Instruction::default() };
    let nothing = FilterProgram::load(&[Instruction { code: 0xb7, ..exit }, exit]).unwrap();
    for (mode, kind) in [("tun", TunKind::Tun), ("tap", TunKind::Tap)] {
        ip(&format!("tuntap add tnleft mode {mode}"));
        let earlier = TunQueue::open().unwrap();
        let to = Attach { name: "tnleft", kind, is_multi_queue: false, is_new: false };
        earlier.attach(to).unwrap();
        earlier.set_filter(Some(nothing.as_fd())).unwrap();
        drop(earlier);
        let device = TunDevice::open("tnleft", kind, 1).unwrap();
        ip("link set tnleft up");
        address("tnleft");
        if kind == TunKind::Tap {
            neighbour("tnleft");
        }
        UdpSocket::bind("10.9.0.1:0").unwrap().send_to(b"after", "10.9.0.2:2000").unwrap();
        let mut rig = Rig::new(&device);
        let packets = rig.drain(0).0;
        assert_eq!(packets.len(), 1, "{mode}");
        rig.all_home(packets);
        drop(device);
        ip(&format!("tuntap del tnleft mode {mode}"));
    }
}

fn refused() {
    ip("tuntap add tntun mode tun");
    ip("tuntap add tntap mode tap");
    ip("link add tnveth type veth peer name tnpeer");
    let cases = [
        ("tntun", TunKind::Tap, 1, "it is a TUN"),
        ("tntap", TunKind::Tun, 1, "it is a TAP"),
        ("tntap", TunKind::Tap, 2, "it has one queue, not 2"),
        ("tnveth", TunKind::Tun, 1, "neither a TUN nor a TAP (veth)"),
        ("lo", TunKind::Tap, 2, "neither a TUN nor a TAP"),
        ("tnnew", TunKind::Tun, 257, "256 queues"),
    ];
    for (name, kind, queues, why) in cases {
        let refused = TunDevice::open(name, kind, queues).unwrap_err();
        let told = format!("{refused} ({})", refused.help());
        assert!(told.contains(why) && told.contains(name), "{told}");
        assert!(refused.is_refusal());
    }
    assert!(Interface::named("tnnew").is_err(), "half a device stayed");
    let _held = TunDevice::open("tntun", TunKind::Tun, 1).unwrap();
    let busy = TunDevice::open("tntun", TunKind::Tun, 1).unwrap_err().to_string();
    assert!(busy.contains("another program"), "{busy}");
    ip("tuntap add tnmany mode tap multi_queue");
    let _held = TunDevice::open("tnmany", TunKind::Tap, 2).unwrap();
    for queues in [1, 2] {
        let busy = TunDevice::open("tnmany", TunKind::Tap, queues).unwrap_err().to_string();
        assert!(busy.contains("another program"), "{busy}");
    }
    for name in ["", "a/b", "tun%d", "sixteen_bytes_long"] {
        let odd = TunDevice::open(name, TunKind::Tun, 1).unwrap_err();
        assert!(matches!(odd, Error::Setting { .. }), "{odd}");
    }
}
