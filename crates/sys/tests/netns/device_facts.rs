//! Facts about devices, compared with how `ip` and `ethtool` set them up.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::path::Path;

use forebay_sys::device_facts::DeviceFacts;
use forebay_sys::interface::Interface;
use forebay_testkit::namespaces::{command, ip, missing, trial_inside};

pub(crate) fn trials() -> Vec<libtest_mimic::Trial> {
    let missing = missing(&["ip", "ethtool"]);
    let trial = |name: &str, test: fn()| trial_inside(name, missing.as_ref(), test);
    let trials = vec![
        trial("doc_1_veth_facts_follow_ethtool", veth),
        trial("doc_1_loopback_and_tap_have_facts", others),
    ];
    trials
}

fn facts(name: &str) -> DeviceFacts {
    DeviceFacts::read(Interface::named(name).unwrap(), Path::new("/"))
}

fn veth() {
    ip("link add hoa numrxqueues 4 numtxqueues 4 type veth peer name hob numrxqueues 4 \
        numtxqueues 4");
    command("ethtool -L hoa rx 2");
    let made = facts("hoa");
    assert_eq!((made.interface.rx_queues, made.rx_queues_max), (2, Some(4)));
    // Its peer could send to queues that it does not have.
    assert!(!made.xdp.unwrap().is_native);
    command("ethtool -L hob tx 2");
    let xdp = facts("hoa").xdp.unwrap();
    assert_eq!((xdp.is_native, xdp.is_zero_copy), (true, false));
    for (state, is_on) in [("on", true), ("off", false)] {
        command(&format!("ethtool -K hoa gro {state}"));
        let features = facts("hoa").features.unwrap();
        assert_eq!(features.active.contains("rx-gro"), is_on, "{features:?}");
        assert!(features.changeable.contains("rx-gro"));
    }
    assert_eq!((made.rss, made.rings, made.is_default_route), (None, None, Some(false)));
    // The thread's namespace is new, and /sys is not that of it.
    let unseen: Vec<_> = made.unseen.iter().map(|unseen| unseen.what.as_str()).collect();
    assert_eq!(unseen, ["/sys/class/net/hoa"], "{:?}", made.unseen);
}

fn others() {
    let lo = facts("lo");
    assert!(lo.interface.is_loopback && !lo.xdp.unwrap().is_native);
    assert_eq!((lo.programs, lo.tun), (Vec::new(), None));
    ip("tuntap add hop mode tap user 65534");
    let tap = facts("hop");
    assert!(tap.interface.tun.unwrap().is_tap);
    // Root may open any.
    assert_eq!(tap.tun, None);
}
