//! The XDP program on interfaces of a thread's own network namespace.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use forebay_device::af_xdp::{AttachOptions, Attached};
use forebay_device::rx_filter::RxFilter;
use forebay_sys::bpf::{Instruction, XdpLoad, XdpPlace, XdpProgram, XskMap};
use forebay_sys::interface::Interface;
use forebay_sys::xdp_attached::{self, AttachedProgram};
use forebay_sys::{Error, netdev};
use forebay_testkit::namespaces;
use forebay_testkit::namespaces::{ip, trial_inside, tried};
use rustix::net::{AddressFamily, SocketType, socket};

/// Environment variable by which this test program becomes the process to kill.
pub(crate) const KILLED: &str = "FOREBAY_TEST_KILLED";

pub(crate) fn trials() -> Vec<libtest_mimic::Trial> {
    let missing = missing();
    let trial = |name: &str, test: fn()| trial_inside(name, missing.as_ref(), test);
    let trials = vec![
        trial("a_program_goes_with_its_owner", goes_when_dropped),
        trial("xdp_program_dies_with_process", goes_when_killed),
        trial("xdp_falls_back_to_generic", generic),
        trial("another_program_stays_unless_told_otherwise", foreign),
        trial("linked_program_stays", held),
        trial("program_reads_driver_hash", hash),
        trial("deleted_interface_takes_program_along", interface_gone),
        trial("sockets_fit_existing_queues", sockets),
        trial("verifier_refusal_shows_its_log", refused),
    ];
    trials
}

/// Reason why these tests cannot be run here, if there is one.
fn missing() -> Option<String> {
    let map = || XskMap::create(1).err();
    namespaces::missing(&["ip", "bpftool"])
        .or_else(|| map().map(|refused| format!("no XSKMAP can be made: {}", refused.errno)))
}

/// Creates a veth pair, and returns one end.
fn veth() -> Interface {
    ip("link add pga type veth peer name pgb");
    Interface::named("pga").unwrap()
}

fn options() -> AttachOptions<'static> {
    AttachOptions {
        queues: 1,
        places: &[XdpPlace::Native, XdpPlace::Generic],
        is_multi_buffer: false,
        device_hash: false,
        replace: false,
        promiscuous: false,
    }
}

fn take() -> RxFilter {
    "udp:53".parse().unwrap()
}

fn attached(interface: &Interface) -> Vec<AttachedProgram> {
    xdp_attached::attached_to(interface.index).unwrap()
}

fn fact<'a>(attached: &'a Attached, name: &str) -> &'a str {
    let fact = attached.facts().iter().find(|(of, _)| *of == name);
    fact.map_or("", |(_, value)| value.as_str())
}

fn goes_when_dropped() {
    let interface = veth();
    for is_multi_buffer in [false, true] {
        let options = AttachOptions { is_multi_buffer, ..options() };
        let ours = Attached::open(&interface, &take(), &options).unwrap();
        assert_eq!((ours.place(), fact(&ours, "mode")), (XdpPlace::Native, "native"));
        let [there] = attached(&interface).try_into().unwrap();
        assert_eq!((there.place, there.name.as_deref()), (XdpPlace::Native, Some("forebay")));
        assert!(there.link.is_some());
        drop(ours);
        assert_eq!(attached(&interface), []);
    }
}

fn goes_when_killed() {
    let interface = veth();
    let mut run = Command::new(std::env::current_exe().unwrap());
    let mut run = run.env(KILLED, &interface.name).stdout(Stdio::piped()).spawn().unwrap();
    let mut told = String::new();
    BufReader::new(run.stdout.take().unwrap()).read_line(&mut told).unwrap();
    assert_eq!(told, "attached\n");
    assert_eq!(attached(&interface).len(), 1);
    run.kill().unwrap();
    run.wait().unwrap();
    while !attached(&interface).is_empty() {
        thread::sleep(Duration::from_millis(1)); // the kernel closes descriptors asynchronously
    }
}

pub(crate) fn be_killed(name: &str) {
    let interface = Interface::named(name).unwrap();
    let _ours = Attached::open(&interface, &take(), &options()).unwrap();
    println!("attached");
    loop {
        thread::park();
    }
}

fn generic() {
    let interface = Interface::named("lo").unwrap();
    let ours = Attached::open(&interface, &RxFilter::All, &options()).unwrap();
    assert_eq!(ours.place(), XdpPlace::Generic);
    assert!(fact(&ours, "mode").starts_with("generic: the driver refused"), "{ours:?}");
    drop(ours);
    let options = AttachOptions { places: &[XdpPlace::Native], ..options() };
    let error = Attached::open(&interface, &RxFilter::All, &options).unwrap_err();
    assert!(error.help().contains("--xdp-mode generic") && error.is_refusal(), "{error}");
}

/// Attaches a program to `interface` by netlink, without a link, as `ip link` does.
fn attach_by_netlink(interface: &Interface, place: &str) {
    ip("link add pge type veth peer name pgf");
    let elsewhere = Interface::named("pge").unwrap();
    let loaded = Attached::open(&elsewhere, &RxFilter::All, &options()).unwrap();
    let id = attached(&elsewhere)[0].id;
    tried(&format!("bpftool net attach {place} id {id} dev {}", interface.name)).unwrap();
    drop(loaded);
    ip("link del pge");
    assert_eq!(attached(interface)[0].link, None);
}

fn foreign() {
    let interface = veth();
    for place in ["xdpdrv", "xdpgeneric"] {
        attach_by_netlink(&interface, place);
        let before = attached(&interface);
        let error = Attached::open(&interface, &take(), &options()).unwrap_err();
        assert!(error.help().contains(&format!("{place} off")), "{error}: {}", error.help());
        assert!(error.to_string().contains(&before[0].id.to_string()), "{error}");
        assert_eq!(attached(&interface), before);

        let ours = AttachOptions { replace: true, ..options() };
        let ours = Attached::open(&interface, &take(), &ours).unwrap();
        let [there] = attached(&interface).try_into().unwrap();
        assert_ne!(there.id, before[0].id);
        drop(ours);
        assert_eq!(attached(&interface), []);
    }
}

fn held() {
    let interface = veth();
    let _other = Attached::open(&interface, &RxFilter::All, &options()).unwrap();
    let before = attached(&interface);
    for replace in [false, true] {
        let ours = AttachOptions { replace, ..options() };
        let error = Attached::open(&interface, &take(), &ours).unwrap_err();
        let link = before[0].link.unwrap();
        assert!(error.help().contains(&format!("bpftool link show id {link}")), "{error}");
        assert_eq!(error.to_string().contains("cannot be replaced"), replace, "{error}");
        assert_eq!(attached(&interface), before);
    }
    tried(&format!("bpftool link show id {}", before[0].link.unwrap())).unwrap();
}

fn hash() {
    let interface = veth();
    let wanted = AttachOptions { device_hash: true, ..options() };
    let ours = Attached::open(&interface, &take(), &wanted).unwrap();
    let has_hash = netdev::has_rx_hash(interface.index).unwrap() == Some(true)
        && Path::new("/sys/kernel/btf/vmlinux").exists();
    assert_eq!(ours.metadata().is_some(), has_hash, "{ours:?}");
    assert_eq!(fact(&ours, "device_hash") == "yes", has_hash, "{ours:?}");
    assert_eq!(attached(&interface).len(), 1);
    drop(ours);

    let generic = AttachOptions { places: &[XdpPlace::Generic], ..wanted };
    let ours = Attached::open(&interface, &take(), &generic).unwrap();
    assert_eq!((ours.place(), ours.metadata()), (XdpPlace::Generic, None));
    assert_eq!(fact(&ours, "device_hash"), "no: generic mode has none");
    drop(ours);

    let interface = Interface::named("lo").unwrap();
    let ours = Attached::open(&interface, &take(), &wanted).unwrap();
    assert!(fact(&ours, "device_hash").starts_with("no: "), "{ours:?}");
    assert_eq!(ours.metadata(), None);
}

fn interface_gone() {
    let interface = veth();
    let ours = Attached::open(&interface, &take(), &options()).unwrap();
    ip("link del pga");
    ours.remove(0).unwrap();
    drop(ours);
    let error = Attached::open(&interface, &take(), &options()).unwrap_err();
    assert!(matches!(&error, Error::DeviceGone { name } if name == "pga"), "{error}");
}

fn sockets() {
    let interface = veth();
    let ours = Attached::open(&interface, &take(), &options()).unwrap();
    let xdp = socket(AddressFamily::XDP, SocketType::RAW, None).unwrap();
    ours.insert(0, xdp.as_fd()).unwrap();
    ours.remove(0).unwrap();
    ours.remove(0).unwrap();
    assert!(ours.insert(1, xdp.as_fd()).unwrap_err().help().contains("ethtool -l"));
    let udp = socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
    ours.insert(0, udp.as_fd()).unwrap_err();
}

fn refused() {
    let no_result = [Instruction { code: 0x95, ..Instruction::default() }];
    let refused = XdpProgram::load(&no_result, XdpLoad::default()).unwrap_err();
    assert!(refused.log.contains("R0 !read_ok"), "{refused:?}");
}
