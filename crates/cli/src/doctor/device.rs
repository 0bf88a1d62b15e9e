//! From facts about a device to findings.

use std::collections::BTreeMap;

use forebay_rx::hash::toeplitz::STANDARD_KEY;
use forebay_sys::cpu_list::CpuList;
use forebay_sys::device_facts::{DeviceFacts, Interrupt, KernelRps};
use forebay_sys::machine_facts::{MachineFacts, MissingPrivilege};

use super::finding::Finding;
use super::finding::Severity::{Costs, Note, Stops};

/// Largest MTU whose frames a program without multi-buffer support can get: that of `af_xdp`.
const WHOLE_MTU_MAX: u32 = 3400;
/// Bytes of a hash key that tell it from another.
const KEY_BYTES_COMPARED: usize = 16;
/// Length of a ring below which bursts are lost.
const RING_SHORT: u32 = 512;

/// Findings about a device.
pub(super) fn judge(device: &DeviceFacts, machine: &MachineFacts) -> Vec<Finding> {
    let findings = if device.interface.tun.is_some() {
        vec![link(device), tun(device)]
    } else {
        vec![
            link(device),
            xdp(device),
            programs(device),
            default_route(device),
            large_frames(device),
            queues(device, machine),
            kernel_rps(device, machine),
            merging(device),
            tags(device),
            device_hash(device),
            hash_key(device),
            indirection(device),
            ring(device),
            shared_interrupts(device),
            far_interrupts(device),
            irqbalance(device, machine),
            deferral(device),
            missed(device),
        ]
    };
    findings.into_iter().flatten().collect()
}

fn link(device: &DeviceFacts) -> Option<Finding> {
    let name = &device.interface.name;
    if !device.interface.is_up {
        let finding = Finding::new(Stops, "link", format!("{name} is down"));
        return Some(finding.command(format!("ip link set up dev {name}")).gain("packets arrive"));
    }
    let is_silent = !device.interface.is_running && device.interface.tun.is_none();
    is_silent.then(|| Finding::new(Costs, "link", format!("{name} is up, but its link is not")))
}

fn tun(device: &DeviceFacts) -> Option<Finding> {
    let MissingPrivilege { capabilities, help } = device.tun.as_ref()?;
    let name = &device.interface.name;
    let found = format!("{name} needs {capabilities}, which this process does not have: {help}");
    let finding = Finding::new(Stops, "privileges", found);
    let mode = if device.interface.tun.is_some_and(|tun| tun.is_tap) { "tap" } else { "tun" };
    let made = format!("{name} mode {mode}");
    let command = format!("ip tuntap del {made} && ip tuntap add {made} user USER");
    Some(finding.command(command).gain("its owner needs no privilege; root makes it once"))
}

fn xdp(device: &DeviceFacts) -> Option<Finding> {
    let xdp = device.xdp?;
    let name = &device.interface.name;
    if !xdp.is_native {
        let driver = device.interface.driver.as_deref().unwrap_or("the driver");
        let found = format!("XDP runs behind {driver}, in generic mode: each frame is copied");
        let finding = Finding::new(Note, "xdp", found);
        // `veth_set_xdp_features` in drivers/net/veth.c.
        return Some(if driver == "veth" {
            let finding =
                finding.command(format!("ethtool -L PEER tx {}", device.interface.rx_queues));
            finding.gain("native XDP, which a veth has if its peer has no more tx queues")
        } else {
            let finding = finding.command(format!("forebay run {name} --via af_packet"));
            finding.gain("the same cost, and other programs keep their copies")
        });
    }
    if xdp.is_zero_copy {
        let finding = Finding::new(Note, "xdp", "native XDP, and zero-copy");
        return Some(finding.gain("the device writes frames into packet memory by itself"));
    }
    let finding = Finding::new(Note, "xdp", "native XDP; the kernel copies each frame");
    Some(finding.gain("only another device or driver is faster here"))
}

fn programs(device: &DeviceFacts) -> Option<Finding> {
    let name = &device.interface.name;
    (!device.programs.is_empty()).then(|| {
        let found = format!("{} is attached to {name} already", device.programs.join(", "));
        let finding = Finding::new(Stops, "xdp", found);
        let finding = finding.command(format!("forebay run {name} --replace"));
        let finding = finding.command(format!("forebay run {name} --via af_packet"));
        finding.gain("the other program loses its packets, or both get them")
    })
}

fn default_route(device: &DeviceFacts) -> Option<Finding> {
    let name = &device.interface.name;
    device.is_default_route?.then(|| {
        let found = format!("a default route goes out of {name}: a run must say what it takes");
        let finding = Finding::new(Note, "default route", found);
        let finding = finding.command(format!("forebay run {name} --take udp:53"));
        finding.gain("the machine can be reached while the run lasts")
    })
}

fn large_frames(device: &DeviceFacts) -> Option<Finding> {
    let (mtu, xdp) = (device.interface.mtu, device.xdp?);
    let name = &device.interface.name;
    let is_refused = mtu > WHOLE_MTU_MAX && xdp.is_native && !xdp.is_multi_buffer;
    is_refused.then(|| {
        let found = format!("the MTU is {mtu}; the driver's XDP gets frames of one buffer only");
        let finding = Finding::new(Costs, "mtu", found);
        let finding = finding.command(format!("ip link set mtu {WHOLE_MTU_MAX} dev {name}"));
        let finding = finding.command(format!("forebay run {name} --via af_packet"));
        finding.gain("native XDP instead of generic, or large frames by packet sockets")
    })
}

fn queues(device: &DeviceFacts, machine: &MachineFacts) -> Option<Finding> {
    let (name, queues) = (&device.interface.name, device.interface.rx_queues);
    let cpus = machine.allowed.cpus().len();
    if queues > 1 {
        let found = format!("{name} has {queues} rx queues: a run polls the first one by default");
        let finding = Finding::new(Costs, "queues", found);
        let finding = finding.command(format!("forebay run {name} --queues {queues}"));
        let finding = finding.command(format!("ethtool -L {name} combined 1"));
        return Some(finding.gain("all packets are taken, not only those of the first queue"));
    }
    let max = device.rx_queues_max.filter(|max| *max > 1)?;
    let found = format!("one rx queue of {max} is in use; software spreads it over {cpus} CPUs");
    let finding = Finding::new(Note, "queues", found);
    let finding = finding.command(format!("ethtool -L {name} combined N"));
    Some(finding.gain("more polling CPUs, if one cannot keep up (time_squeeze in softnet_stat)"))
}

/// RPS of the kernel acts before packet sockets and generic XDP, but after native XDP.
fn kernel_rps(device: &DeviceFacts, machine: &MachineFacts) -> Option<Finding> {
    let name = &device.interface.name;
    let of_queue = |rps: &KernelRps| {
        (!rps.cpus.is_empty()).then(|| format!("rx-{} to CPUs {}", rps.queue, rps.cpus))
    };
    let masks: Vec<_> = device.rps.iter().filter_map(of_queue).collect();
    let is_native = device.xdp.is_some_and(|xdp| xdp.is_native);
    (!masks.is_empty()).then(|| {
        let rfs = match machine.rps_sock_flow_entries {
            Some(1..) => ", by RFS where flows have sockets",
            _ => "",
        };
        let found = format!("the kernel spreads packets of {}{rfs}", masks.join(", "));
        let severity = if is_native { Note } else { Costs };
        let finding = Finding::new(severity, "kernel rps", found);
        let command =
            format!("for f in /sys/class/net/{name}/queues/rx-*/rps_cpus; do echo 0 > $f; done");
        finding.command(command).gain(if is_native {
            "none for --via af_xdp, which takes packets before; one hop between CPUs less for \
             af_packet"
        } else {
            "one hop between CPUs less, and no second steering in front of ours"
        })
    })
}

fn merging(device: &DeviceFacts) -> Option<Finding> {
    let (name, features) = (&device.interface.name, device.features.as_ref()?);
    let merging = [("rx-lro", "lro"), ("rx-gro-hw", "rx-gro-hw")];
    let is_on =
        |feature: &str| features.active.contains(feature) && features.changeable.contains(feature);
    let on: Vec<_> = merging.into_iter().filter(|(feature, _)| is_on(feature)).collect();
    (!on.is_empty()).then(|| {
        let names: Vec<_> = on.iter().map(|(feature, _)| *feature).collect();
        let found = format!("the device merges segments itself: {}", names.join(", "));
        let finding = Finding::new(Costs, "offloads", found);
        let finding = on.iter().fold(finding, |finding, (_, option)| {
            finding.command(format!("ethtool -K {name} {option} off"))
        });
        finding.gain("XDP gets whole frames; merge here with --coalesce gro, which is reversible")
    })
}

fn tags(device: &DeviceFacts) -> Option<Finding> {
    let name = &device.interface.name;
    let features = device.features.as_ref()?;
    let is_native = device.xdp.is_some_and(|xdp| xdp.is_native);
    let is_stripped = features.active.contains("rx-vlan-hw-parse")
        && features.changeable.contains("rx-vlan-hw-parse");
    (is_stripped && is_native && !device.interrupts.is_empty()).then(|| {
        let found = "the device strips VLAN tags before XDP sees a frame";
        let finding = Finding::new(Note, "offloads", found);
        let finding = finding.command(format!("ethtool -K {name} rxvlan off"));
        finding.gain("tagged frames keep their tags, if there are any")
    })
}

fn device_hash(device: &DeviceFacts) -> Option<Finding> {
    let name = &device.interface.name;
    device.xdp?.has_rx_hash.then(|| {
        let finding = Finding::new(Note, "hash", "the driver gives XDP the device's hash");
        let finding = finding.command(format!("forebay run {name} --hash device"));
        finding.gain("no hash is computed; whoever knows the device's key can aim at one CPU")
    })
}

fn hash_key(device: &DeviceFacts) -> Option<Finding> {
    let (name, rss) = (&device.interface.name, device.rss.as_ref()?);
    let is_known = rss.key.starts_with(&STANDARD_KEY[..KEY_BYTES_COMPARED]);
    let is_zero = !rss.key.is_empty() && rss.key.iter().all(|byte| *byte == 0);
    (device.interface.rx_queues > 1 && (is_known || is_zero)).then(|| {
        let what = if is_known { "the published one" } else { "all zeros" };
        let finding = Finding::new(Costs, "hash", format!("the device's hash key is {what}"));
        let drawn = format!("od -An -v -tx1 -N{} /dev/urandom", rss.key.len());
        let key = format!("$({drawn} | xargs | tr ' ' :)");
        let finding = finding.command(format!("ethtool -X {name} hkey {key}"));
        finding.gain("no stranger can aim all flows at one queue")
    })
}

fn indirection(device: &DeviceFacts) -> Option<Finding> {
    let (name, queues) = (&device.interface.name, device.interface.rx_queues);
    let table = &device.rss.as_ref()?.indirection;
    let mut entries = BTreeMap::<u32, usize>::new();
    for queue in table {
        *entries.entry(*queue).or_default() += 1;
    }
    let (most, least) = (entries.values().max()?, entries.values().min()?);
    let is_even = entries.len() == usize::from(queues) && most - least <= 1;
    (queues > 1 && !is_even).then(|| {
        let found = format!(
            "the indirection table has {} of {queues} queues, with {least} to {most} entries each",
            entries.len()
        );
        let finding = Finding::new(Costs, "indirection", found);
        let finding = finding.command(format!("ethtool -X {name} equal {queues}"));
        finding.gain("each queue gets an even share of the flows")
    })
}

fn ring(device: &DeviceFacts) -> Option<Finding> {
    let (name, rings) = (&device.interface.name, device.rings?);
    (rings.rx > 0 && rings.rx < RING_SHORT && rings.rx < rings.rx_max).then(|| {
        let found = format!("the rx ring has {} entries, of {} at most", rings.rx, rings.rx_max);
        let finding = Finding::new(Costs, "ring", found);
        let wanted = rings.rx_max.min(2048);
        let finding = finding.command(format!("ethtool -G {name} rx {wanted}"));
        finding.gain("bursts are kept while the polling CPU does something else")
    })
}

/// Interrupts of rx queues, by their names.
fn of_queues(device: &DeviceFacts) -> impl Iterator<Item = &Interrupt> {
    let is_of_queue = |name: &str| {
        let name = name.to_ascii_lowercase();
        ["rx", "input", "queue"].iter().any(|part| name.contains(part))
    };
    device.interrupts.iter().filter(move |interrupt| is_of_queue(&interrupt.name))
}

fn shared_interrupts(device: &DeviceFacts) -> Option<Finding> {
    let mut by_cpu = BTreeMap::<_, Vec<&Interrupt>>::new();
    for interrupt in of_queues(device) {
        if let [cpu] = interrupt.cpus.cpus() {
            by_cpu.entry(*cpu).or_default().push(interrupt);
        }
    }
    let (cpu, interrupts) = by_cpu.into_iter().find(|(_, interrupts)| interrupts.len() > 1)?;
    let names: Vec<_> = interrupts.iter().map(|interrupt| interrupt.name.as_str()).collect();
    let found = format!("CPU {cpu} alone handles the interrupts {}", names.join(", "));
    let finding = Finding::new(Costs, "interrupts", found);
    let last = interrupts.last()?.number;
    let finding = finding.command(format!("echo CPU > /proc/irq/{last}/smp_affinity_list"));
    Some(finding.gain("the kernel's part of receiving is done by several CPUs"))
}

fn far_interrupts(device: &DeviceFacts) -> Option<Finding> {
    let (node, near) = (device.node?, device.node_cpus.as_ref()?);
    let is_far = |interrupt: &&Interrupt| {
        !interrupt.cpus.is_empty() && interrupt.cpus.cpus().iter().all(|cpu| !near.contains(*cpu))
    };
    let far: Vec<_> = of_queues(device).filter(is_far).collect();
    let first = far.first()?;
    let names: Vec<_> = far.iter().map(|interrupt| interrupt.name.as_str()).collect();
    let found = format!("interrupts are handled far from memory node {node}: {}", names.join(", "));
    let finding = Finding::new(Costs, "interrupts", found);
    let number = first.number;
    let finding = finding.command(format!("echo {near} > /proc/irq/{number}/smp_affinity_list"));
    Some(finding.gain("frames are read from near memory; poll there too, with --cpus"))
}

fn irqbalance(device: &DeviceFacts, machine: &MachineFacts) -> Option<Finding> {
    let is_there = machine.has_irqbalance? && of_queues(device).next().is_some();
    is_there.then(|| {
        let found = "irqbalance moves the device's interrupts from CPU to CPU";
        let finding = Finding::new(Costs, "interrupts", found);
        let finding = finding.command("systemctl disable --now irqbalance");
        finding.gain("interrupts stay where they are put; caches stay warm")
    })
}

fn deferral(device: &DeviceFacts) -> Option<Finding> {
    let name = &device.interface.name;
    let is_native = device.xdp?.is_native && !device.interrupts.is_empty();
    let is_off = device.napi_defer_hard_irqs? == 0 || device.gro_flush_timeout_ns? == 0;
    (is_native && is_off).then(|| {
        let found = "interrupts of the device are not deferred, as --busy-poll needs it";
        let finding = Finding::new(Note, "busy polling", found);
        let finding =
            finding.command(format!("echo 2 > /sys/class/net/{name}/napi_defer_hard_irqs"));
        let finding =
            finding.command(format!("echo 200000 > /sys/class/net/{name}/gro_flush_timeout"));
        finding.gain("with both and --busy-poll, the polling CPU drives the device: no interrupts")
    })
}

fn missed(device: &DeviceFacts) -> Option<Finding> {
    let missed = device.counters?.rx_missed_errors;
    (missed > 0).then(|| {
        let found = format!("{missed} frames were lost for want of buffers since it was created");
        let finding = Finding::new(Note, "ring", found);
        finding.gain("check that this number no longer rises after the changes above")
    })
}

/// CPUs in words; `none` if there is none.
pub(super) fn cpus_or_none(cpus: &CpuList) -> String {
    if cpus.is_empty() { "none".to_owned() } else { cpus.to_string() }
}
