//! The judgement, over facts that are made up.

use forebay_rx::CpuId;
use forebay_sys::device_facts::{Interrupt, KernelRps};
use forebay_sys::ethtool_netlink::{DeviceFeatures, RingSettings, RssSettings};
use forebay_sys::interface::{InterfaceCounters, InterfaceIndex, TunInfo};
use forebay_sys::machine_facts::MissingPrivilege;
use forebay_sys::netdev::XdpFeatures;

use super::*;

fn list(text: &str) -> forebay_sys::cpu_list::CpuList {
    forebay_sys::cpu_list::CpuList::parse_list(text).unwrap()
}

/// A machine with nothing to change.
fn machine() -> MachineFacts {
    MachineFacts {
        kernel: Some("6.18.5".to_owned()),
        allowed: list("0-1"),
        online: Some(list("0-1")),
        isolated: Some(list("")),
        transparent_huge_pages: Some("madvise".to_owned()),
        memlock_bytes: u64::MAX,
        is_bpf_compiled: Some(true),
        has_irqbalance: Some(false),
        ..MachineFacts::default()
    }
}

/// A device with nothing to change.
fn device() -> DeviceFacts {
    let interface = Interface {
        name: "eth0".to_owned(),
        index: InterfaceIndex(2),
        mtu: 1500,
        is_up: true,
        is_running: true,
        is_loopback: false,
        is_ethernet: true,
        mac: None,
        rx_queues: 1,
        tx_queues: 1,
        driver: Some("mlx5_core".to_owned()),
        is_virtual: false,
        xdp_program: None,
        tun: None,
    };
    let xdp = XdpFeatures {
        is_native: true,
        is_zero_copy: true,
        is_multi_buffer: true,
        has_rx_hash: false,
    };
    DeviceFacts {
        interface,
        is_default_route: Some(false),
        xdp: Some(xdp),
        programs: Vec::new(),
        features: Some(DeviceFeatures::default()),
        rss: None,
        rings: Some(RingSettings { rx: 1024, rx_max: 8192 }),
        rx_queues_max: Some(1),
        interrupts: Vec::new(),
        rps: Vec::new(),
        node: None,
        node_cpus: None,
        napi_defer_hard_irqs: None,
        gro_flush_timeout_ns: None,
        counters: Some(InterfaceCounters::default()),
        tun: None,
        unseen: Vec::new(),
    }
}

fn missing(capabilities: &str) -> Option<MissingPrivilege> {
    let capabilities = capabilities.to_owned();
    Some(MissingPrivilege { capabilities, help: "run as root".to_owned() })
}

fn features(active: &[&str]) -> Option<DeviceFeatures> {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    Some(DeviceFeatures { active: names(active), changeable: names(active) })
}

fn interrupt(number: u32, name: &str, cpus: &str) -> Interrupt {
    Interrupt { number, name: name.to_owned(), cpus: list(cpus) }
}

fn examined(machine: &MachineFacts, device: Option<&DeviceFacts>) -> Examined {
    Examined::of(machine, device, &Topology::default())
}

/// Checks that exactly one finding besides the notes of a sound machine has this subject, severity,
/// and these parts of its text and commands.
fn expect(examined: &Examined, severity: Severity, about: &str, parts: [&str; 2]) {
    let of_it: Vec<_> = examined
        .findings
        .iter()
        .filter(|finding| finding.about == about && finding.found.contains(parts[0]))
        .collect();
    let [finding] = of_it[..] else { panic!("{about}, {parts:?}: {:#?}", examined.findings) };
    assert_eq!(finding.severity, severity, "{finding:?}");
    let told = finding.commands.join("; ") + &finding.gain;
    assert!(told.contains(parts[1]), "{parts:?}: {finding:?}");
    let code = match severity {
        Severity::Note => 0,
        Severity::Costs => 1,
        Severity::Stops => 2,
    };
    assert_eq!(examined.exit_code(), code, "{:#?}", examined.findings);
}

type MachineCase = (fn(&mut MachineFacts), Severity, &'static str, [&'static str; 2]);
type DeviceCase = (fn(&mut DeviceFacts), Severity, &'static str, [&'static str; 2]);

#[test]
fn doc_2_sound_machine_has_notes_only() {
    let examined = examined(&machine(), Some(&device()));
    assert_eq!(examined.exit_code(), 0, "{:#?}", examined.findings);
    let about: Vec<_> = examined.findings.iter().map(|finding| finding.about).collect();
    assert_eq!(about, ["xdp", "masks"]);
    assert!(examined.render().ends_with("\nnothing to change\n"));
}

#[test]
fn doc_2_machine_findings_have_commands() {
    use Severity::{Costs, Note, Stops};
    let cases: [MachineCase; 14] = [
        (
            |it| it.af_xdp = missing("CAP_NET_RAW"),
            Stops,
            "privileges",
            ["CAP_NET_RAW, which this process does not have: run as root", "--via af_packet"],
        ),
        (
            |it| (it.af_xdp, it.af_packet) = (missing("CAP_BPF"), missing("CAP_NET_RAW")),
            Stops,
            "privileges",
            ["AF_XDP needs CAP_BPF", "--user"],
        ),
        (
            |it| (it.ipc_lock, it.memlock_bytes) = (missing("CAP_IPC_LOCK"), 8 << 20),
            Stops,
            "memlock",
            ["8192 KiB of memory may be locked", "ulimit -l "],
        ),
        (|it| it.kernel = Some("5.4.0-200".into()), Stops, "kernel", ["Linux 5.4.0", "af_packet"]),
        (|it| it.kernel = Some("6.1.0".into()), Note, "kernel", ["does not say", "zero-copy"]),
        (|it| it.allowed = list("0"), Costs, "cpus", ["CPU 0 only, of 0-1", "taskset -c 0-1"]),
        (
            |it| (it.allowed, it.online) = (list("0"), Some(list("0"))),
            Note,
            "cpus",
            ["there is one CPU", ""],
        ),
        (
            |it| (it.online, it.isolated) = (Some(list("0-3")), Some(list("2-3"))),
            Costs,
            "isolation",
            ["CPUs 2-3 are isolated", "--cpus 2-3"],
        ),
        (
            |it| it.online = Some(list("0-3")),
            Note,
            "isolation",
            ["no CPU is isolated", "isolcpus="],
        ),
        (
            |it| it.governors = [("powersave".to_owned(), list("1"))].into(),
            Costs,
            "governor",
            ["powersave on CPUs 1", "cpupower frequency-set -g performance"],
        ),
        (
            |it| it.transparent_huge_pages = Some("never".into()),
            Costs,
            "hugepages",
            ["pages of 4 KiB", "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"],
        ),
        (|it| it.is_bpf_compiled = Some(false), Costs, "bpf", ["interpreted", "bpf_jit_enable=1"]),
        (
            |it| it.busy_read_us = Some(50),
            Costs,
            "busy polling",
            ["busy_read 50 µs", "net.core.busy_read=0"],
        ),
        (|_| {}, Note, "masks", ["CPUs 0-1 by default", "forebay advise"]),
    ];
    for (change, severity, about, parts) in cases {
        let mut machine = machine();
        change(&mut machine);
        expect(&examined(&machine, None), severity, about, parts);
    }
}

#[test]
fn doc_2_device_findings_have_commands() {
    use Severity::{Costs, Note, Stops};
    let cases: [DeviceCase; 12] = [
        (|it| it.interface.is_up = false, Stops, "link", ["is down", "ip link set up dev eth0"]),
        (|it| it.interface.is_running = false, Costs, "link", ["its link is not", ""]),
        (|it| it.xdp = Some(XdpFeatures::default()), Note, "xdp", ["generic mode", "af_packet"]),
        (
            |it| it.programs = vec!["XDP program 7 (lb), native".to_owned()],
            Stops,
            "xdp",
            ["XDP program 7 (lb), native is attached", "--replace"],
        ),
        (|it| it.is_default_route = Some(true), Note, "default route", ["default route", "--take"]),
        (
            |it| {
                it.interface.mtu = 9000;
                it.xdp = Some(XdpFeatures { is_native: true, ..XdpFeatures::default() });
            },
            Costs,
            "mtu",
            ["the MTU is 9000", "ip link set mtu 3400 dev eth0"],
        ),
        (
            |it| it.interface.rx_queues = 4,
            Costs,
            "queues",
            ["has 4 rx queues", "forebay run eth0 --queues 4; ethtool -L eth0 combined 1"],
        ),
        (|it| it.rx_queues_max = Some(8), Note, "queues", ["one rx queue of 8", "ethtool -L eth0"]),
        (
            |it| it.features = features(&["rx-lro", "rx-checksum"]),
            Costs,
            "offloads",
            ["merges segments itself: rx-lro", "ethtool -K eth0 lro off"],
        ),
        (
            |it| it.rings = Some(RingSettings { rx: 256, rx_max: 8192 }),
            Costs,
            "ring",
            ["256 entries, of 8192", "ethtool -G eth0 rx 2048"],
        ),
        (
            |it| it.xdp = Some(XdpFeatures { has_rx_hash: true, ..it.xdp.unwrap_or_default() }),
            Note,
            "hash",
            ["gives XDP the device's hash", "--hash device"],
        ),
        (
            |it| {
                it.counters = Some(InterfaceCounters { rx_missed_errors: 5, ..Default::default() });
            },
            Note,
            "ring",
            ["5 frames were lost", "no longer rises"],
        ),
    ];
    for (change, severity, about, parts) in cases {
        let mut device = device();
        change(&mut device);
        expect(&examined(&machine(), Some(&device)), severity, about, parts);
    }
}

/// A run polls one queue by default.
#[test]
fn doc_2_memory_is_for_one_queue() {
    let of_one = locked_memory_bytes(2, 1);
    let with = |memlock_bytes| {
        let mut device = device();
        (device.interface.rx_queues, device.rx_queues_max) = (4, Some(4));
        let ipc_lock = missing("CAP_IPC_LOCK");
        examined(&MachineFacts { ipc_lock, memlock_bytes, ..machine() }, Some(&device))
    };
    let memory = |examined: &Examined| {
        let found = examined.findings.iter().find(|finding| finding.about == "memlock")?;
        Some((found.severity, found.found.clone(), found.commands.concat()))
    };
    let all = format!("ulimit -l {}", (4 * of_one) >> 10);
    let (severity, _, command) = memory(&with(of_one - 1)).unwrap();
    assert_eq!((severity, &command), (Severity::Stops, &all));
    let few = with(2 * of_one);
    let (severity, found, command) = memory(&few).unwrap();
    assert_eq!((severity, command, few.exit_code()), (Severity::Note, all, 1), "the queues cost");
    assert!(found.contains("2 of 4 queues"), "{found}");
    assert_eq!(memory(&with(4 * of_one)), None);
}

#[test]
fn doc_2_queues_and_interrupts_are_judged() {
    use Severity::{Costs, Note};
    let key = |key: [u8; 4]| RssSettings { key: key.repeat(10), indirection: vec![0, 1, 0, 1] };
    let even = || RssSettings { key: vec![1, 2, 3], indirection: vec![0, 1, 0, 1] };
    let with_rss = |rss| {
        let mut device = device();
        (device.interface.rx_queues, device.rss) = (2, Some(rss));
        examined(&machine(), Some(&device))
    };
    assert!(with_rss(even()).findings.iter().all(|finding| finding.about != "indirection"));
    let uneven = RssSettings { indirection: vec![0, 0, 0, 1], ..even() };
    expect(&with_rss(uneven), Costs, "indirection", ["with 1 to 3 entries", "-X eth0 equal 2"]);
    let unused = RssSettings { indirection: vec![0; 4], ..even() };
    expect(&with_rss(unused), Costs, "indirection", ["has 1 of 2 queues", "-X eth0 equal 2"]);
    expect(&with_rss(key([0; 4])), Costs, "hash", ["all zeros", "ethtool -X eth0 hkey"]);

    let on_one = [interrupt(30, "eth0-rx-0", "1"), interrupt(31, "eth0-rx-1", "1")];
    let far = [interrupt(30, "virtio1-input.0", "2-3")];
    let control = [interrupt(29, "virtio1-config", "2-3")];
    let with = |interrupts: &[Interrupt], has_irqbalance| {
        let mut device = device();
        device.interrupts = interrupts.to_vec();
        (device.node, device.node_cpus) = (Some(0), Some(list("0-1")));
        let machine = MachineFacts { has_irqbalance: Some(has_irqbalance), ..machine() };
        examined(&machine, Some(&device))
    };
    let parts = ["CPU 1 alone handles the interrupts eth0-rx-0, eth0-rx-1", "/proc/irq/31/"];
    expect(&with(&on_one, false), Costs, "interrupts", parts);
    let parts = ["far from memory node 0", "echo 0-1 > /proc/irq/30/smp_affinity_list"];
    expect(&with(&far, false), Costs, "interrupts", parts);
    assert_eq!(with(&control, true).exit_code(), 0);
    let near = [interrupt(30, "virtio1-input.0", "0")];
    expect(&with(&near, true), Costs, "interrupts", ["irqbalance moves", "systemctl disable"]);
    let mut device = device();
    device.interrupts = near.to_vec();
    (device.napi_defer_hard_irqs, device.gro_flush_timeout_ns) = (Some(0), Some(0));
    let parts = ["not deferred", "echo 2 > /sys/class/net/eth0/napi_defer_hard_irqs"];
    expect(&examined(&machine(), Some(&device)), Note, "busy polling", parts);
}

#[test]
fn doc_2_kernel_rps_matters_before_generic() {
    let mut device = device();
    device.rps =
        vec![KernelRps { queue: 0, cpus: list("0-1") }, KernelRps { queue: 1, cpus: list("") }];
    let machine = MachineFacts { rps_sock_flow_entries: Some(32_768), ..machine() };
    let parts = ["packets of rx-0 to CPUs 0-1, by RFS", "/sys/class/net/eth0/queues/rx-*/rps_cpus"];
    expect(&examined(&machine, Some(&device)), Severity::Note, "kernel rps", parts);
    device.xdp = Some(XdpFeatures::default());
    expect(&examined(&machine, Some(&device)), Severity::Costs, "kernel rps", parts);
}

#[test]
fn doc_2_veth_needs_few_peer_queues() {
    let mut device = device();
    device.interface.driver = Some("veth".to_owned());
    device.xdp = Some(XdpFeatures::default());
    let parts = ["behind veth", "ethtool -L PEER tx 1"];
    expect(&examined(&machine(), Some(&device)), Severity::Note, "xdp", parts);
}

#[test]
fn doc_2_tap_needs_no_xdp_privileges() {
    let mut device = device();
    device.interface.tun = Some(TunInfo { is_tap: true, ..TunInfo::default() });
    device.interface.is_running = false;
    let mut machine = machine();
    machine.af_xdp = missing("CAP_BPF");
    assert_eq!(examined(&machine, Some(&device)).exit_code(), 0);
    device.tun = missing("CAP_NET_ADMIN");
    let parts = ["eth0 needs CAP_NET_ADMIN", "ip tuntap add eth0"];
    expect(&examined(&machine, Some(&device)), Severity::Stops, "privileges", parts);
}

#[test]
fn doc_3_worst_finding_first_and_unseen_told() {
    let mut machine = machine();
    machine.transparent_huge_pages = Some("never".to_owned());
    machine.af_xdp = missing("CAP_BPF");
    let why = "Permission denied".to_owned();
    machine.unseen.push(Unseen { what: "/proc/irq/30".to_owned(), why });
    let examined = examined(&machine, Some(&device()));
    let severities: Vec<_> = examined.findings.iter().map(|finding| finding.severity).collect();
    assert!(severities.is_sorted_by(|one, next| one >= next), "{severities:?}");
    let text = examined.render();
    for part in [
        "CPUs        0-1\n",
        "stops  privileges: AF_XDP needs CAP_BPF",
        "       $ echo madvise > /sys/kernel/mm/transparent_hugepage/enabled\n       gain: ",
        "\nnot seen\n  /proc/irq/30: Permission denied\n",
        "\n2 things to change\n",
    ] {
        assert!(text.contains(part), "{part:?}: {text}");
    }
    assert_eq!(machine.allowed.cpus().first(), Some(&CpuId(0)));
}
