//! Abilities of a machine and a device, in rows.

use std::collections::BTreeMap;

use forebay_sys::device_facts::DeviceFacts;
use forebay_sys::machine_facts::MachineFacts;
use serde::Serialize;

use super::device::cpus_or_none;

/// One row: a fact and its value.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(super) struct Ability {
    /// Fact.
    pub(super) name: &'static str,
    /// Value, in words.
    pub(super) value: String,
}

/// Rows about the machine, and about the device if there is one.
pub(super) fn of(machine: &MachineFacts, device: Option<&DeviceFacts>) -> Vec<Ability> {
    let rows = of_machine(machine).into_iter().chain(device.into_iter().flat_map(of_device));
    let row = |(name, value): (_, Option<String>)| Some(Ability { name, value: value? });
    rows.filter_map(row).collect()
}

type Row = (&'static str, Option<String>);

fn of_machine(machine: &MachineFacts) -> Vec<Row> {
    let memlock = match machine.memlock_bytes {
        u64::MAX => "unlimited".to_owned(),
        bytes => format!("{} KiB", bytes >> 10),
    };
    let governors = machine.governors.iter().map(|(name, cpus)| format!("{name} on {cpus}"));
    let governors: Vec<_> = governors.collect();
    let may = |missing: bool| if missing { "no" } else { "yes" };
    let privileges = format!(
        "AF_XDP {}, AF_PACKET {}, unlimited locked memory {}",
        may(machine.af_xdp.is_some()),
        may(machine.af_packet.is_some()),
        may(machine.ipc_lock.is_some())
    );
    vec![
        ("kernel", machine.kernel.as_ref().map(|release| format!("Linux {release}"))),
        ("CPUs", Some(machine.allowed.to_string())),
        ("isolated", machine.isolated.as_ref().map(cpus_or_none)),
        ("governor", (!governors.is_empty()).then(|| governors.join(", "))),
        ("huge pages", machine.transparent_huge_pages.clone()),
        ("privileges", Some(privileges)),
        ("memlock", Some(memlock)),
    ]
}

fn of_device(device: &DeviceFacts) -> Vec<Row> {
    let interface = &device.interface;
    let xdp = device.xdp.map(|xdp| match (xdp.is_native, xdp.is_zero_copy) {
        (false, _) => "generic only",
        (true, false) => "native, copied",
        (true, true) => "native, zero-copy",
    });
    let queues = match device.rx_queues_max {
        Some(max) => format!("{} of {max}", interface.rx_queues),
        None => interface.rx_queues.to_string(),
    };
    let kind = interface.tun.map(|tun| if tun.is_tap { "TAP" } else { "TUN" });
    let interrupts = device.interrupts.iter().map(|it| format!("{} on {}", it.name, it.cpus));
    let interrupts: Vec<_> = interrupts.collect();
    let on = device.features.as_ref().map(|features| {
        let on = features.active.iter().filter(|name| name.starts_with("rx-"));
        on.cloned().collect::<Vec<_>>().join(", ")
    });
    vec![
        ("device", Some(interface.name.clone())),
        ("driver", interface.driver.clone()),
        ("kind", kind.map(str::to_owned)),
        ("MTU", Some(interface.mtu.to_string())),
        ("rx queues", Some(queues)),
        ("XDP", xdp.filter(|_| kind.is_none()).map(str::to_owned)),
        ("XDP programs", (!device.programs.is_empty()).then(|| device.programs.join(", "))),
        ("rx ring", device.rings.map(|rings| format!("{} of {}", rings.rx, rings.rx_max))),
        ("offloads", on.filter(|on| !on.is_empty())),
        ("hash", device.rss.as_ref().map(hash)),
        ("interrupts", (!interrupts.is_empty()).then(|| interrupts.join(", "))),
        ("memory node", device.node.map(|node| node.to_string())),
    ]
}

fn hash(rss: &forebay_sys::ethtool_netlink::RssSettings) -> String {
    let mut entries = BTreeMap::<u32, usize>::new();
    for queue in &rss.indirection {
        *entries.entry(*queue).or_default() += 1;
    }
    format!(
        "key of {} bytes, {} entries for {} queues",
        rss.key.len(),
        rss.indirection.len(),
        entries.len()
    )
}
