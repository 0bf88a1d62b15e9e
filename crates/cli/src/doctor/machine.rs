//! From facts about the machine to findings.

use forebay_sys::cpu_list::CpuList;
use forebay_sys::device_facts::DeviceFacts;
use forebay_sys::machine_facts::{MachineFacts, MissingPrivilege};
use forebay_sys::topology::Topology;

use super::finding::Finding;
use super::finding::Severity::{Costs, Note, Stops};
use super::locked_memory_bytes;
use crate::advise;

/// First kernel whose links hold an XDP program.
const XDP_LINKS_SINCE: (u32, u32) = (5, 9);
/// First kernel that reports what a driver's XDP can do.
const XDP_FEATURES_SINCE: (u32, u32) = (6, 3);

/// Findings about the machine and this process. A device decides which privileges a run needs.
pub(super) fn judge(machine: &MachineFacts, device: Option<&DeviceFacts>) -> Vec<Finding> {
    let is_tun = device.is_some_and(|device| device.interface.tun.is_some());
    let queues = device.map_or(1, |device| device.interface.rx_queues);
    let findings = [
        if is_tun { None } else { privileges(machine) },
        if is_tun { None } else { locked_memory(machine, queues) },
        kernel(machine),
        cpus(machine),
        isolation(machine),
        governor(machine),
        huge_pages(machine),
        compiler(machine),
        busy_polling(machine),
    ];
    findings.into_iter().flatten().collect()
}

/// Masks for the queues, each polled by one of the first CPUs.
pub(super) fn judge_masks(
    machine: &MachineFacts,
    topology: &Topology,
    queues: u16,
) -> Option<Finding> {
    let allowed = &machine.allowed;
    let polling = *allowed.cpus().first()?;
    if allowed.cpus().len() < 2 {
        return None;
    }
    let mask = topology.near_polling(queues.into(), allowed);
    let why = advise::scope(&topology.advise(polling, allowed));
    let found = format!("packets go to CPUs {mask} by default: {why}");
    let queues = if queues > 1 { format!(" --queues {queues}") } else { String::new() };
    let gain = "each CPU's place and reason; with a capture, the load of each CPU, and if \
                rps_balance=load would even it out";
    Some(Finding::new(Note, "masks", found).command(format!("forebay advise{queues}")).gain(gain))
}

fn privileges(machine: &MachineFacts) -> Option<Finding> {
    let MissingPrivilege { capabilities, help } = machine.af_xdp.as_ref()?;
    let found = format!("AF_XDP needs {capabilities}, which this process does not have: {help}");
    let finding = Finding::new(Stops, "privileges", found);
    let gain = "a run drops all of them once its devices are open (--user)";
    Some(match &machine.af_packet {
        None => finding.command("forebay run DEV --via af_packet").gain("receives without them"),
        Some(_) => finding.gain(gain),
    })
}

fn locked_memory(machine: &MachineFacts, queues: u16) -> Option<Finding> {
    let queue_bytes = locked_memory_bytes(machine.allowed.cpus().len(), 1);
    let all_bytes = queue_bytes * u64::from(queues);
    if machine.ipc_lock.is_none() || machine.memlock_bytes >= all_bytes {
        return None;
    }
    let enough_for = machine.memlock_bytes / queue_bytes;
    let (limit_kib, queue_kib) = (machine.memlock_bytes >> 10, queue_bytes >> 10);
    let found = format!(
        "{limit_kib} KiB of memory may be locked; the packet memory of AF_XDP takes about \
         {queue_kib} KiB"
    );
    let (severity, found, gain) = match enough_for {
        0 => (Stops, found, "AF_XDP can register its packet memory"),
        // A run polls one queue unless told otherwise.
        _ => (
            Note,
            format!("{found} for each queue: it is enough for {enough_for} of {queues} queues"),
            "a run can poll all queues by AF_XDP",
        ),
    };
    let finding = Finding::new(severity, "memlock", found);
    let finding = finding.command(format!("ulimit -l {}", all_bytes >> 10));
    Some(finding.gain(format!("{gain}; a unit has LimitMEMLOCK for it")))
}

fn kernel(machine: &MachineFacts) -> Option<Finding> {
    let release = machine.kernel.as_deref()?;
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit());
    let mut number = || numbers.next()?.parse::<u32>().ok();
    let version = (number()?, number()?);
    let found = |what: &str| format!("Linux {release} {what}");
    if version < XDP_LINKS_SINCE {
        let found = found("cannot hold an XDP program by a link, which 5.9 can");
        let finding =
            Finding::new(Stops, "kernel", found).command("forebay run DEV --via af_packet");
        return Some(finding.gain("receives without XDP; with a newer kernel, by AF_XDP"));
    }
    (version < XDP_FEATURES_SINCE).then(|| {
        let found = found("does not say what a driver's XDP can do; 6.3 does");
        Finding::new(Note, "kernel", found).gain("zero-copy is seen here, rather than by trying")
    })
}

fn cpus(machine: &MachineFacts) -> Option<Finding> {
    let allowed = &machine.allowed;
    let online = machine.online.as_ref()?;
    let others = CpuList::new(online.cpus().iter().copied().filter(|cpu| !allowed.contains(*cpu)));
    if allowed.cpus().len() > 1 || online.cpus().len() < 2 {
        return (online.cpus().len() == 1).then(|| {
            let found = "there is one CPU: nothing can be steered, only merged and counted";
            Finding::new(Note, "cpus", found)
        });
    }
    let found = format!("this process may use CPU {allowed} only, of {online}");
    let finding = Finding::new(Costs, "cpus", found);
    Some(
        finding
            .command(format!("taskset -c {online} forebay …"))
            .gain(format!("packets are handled on CPUs {others}, too")),
    )
}

fn isolation(machine: &MachineFacts) -> Option<Finding> {
    let isolated = machine.isolated.as_ref()?;
    let unused =
        CpuList::new(isolated.cpus().iter().copied().filter(|cpu| !machine.allowed.contains(*cpu)));
    if !unused.is_empty() {
        let found = format!("CPUs {unused} are isolated, and a run does not use them by default");
        let finding = Finding::new(Costs, "isolation", found);
        let finding = finding.command(format!("forebay run DEV --cpus {unused}"));
        return Some(finding.gain("no other program interrupts the CPUs of the run"));
    }
    let many = machine.online.as_ref().is_some_and(|online| online.cpus().len() > 2);
    (isolated.is_empty() && many).then(|| {
        let found = "no CPU is isolated: other programs share those of a run";
        let finding = Finding::new(Note, "isolation", found);
        finding.gain(
            "shorter waits at the tail, with isolcpus=managed_irq,domain,LIST nohz_full=LIST on \
             the kernel's command line; the mean hardly changes",
        )
    })
}

fn governor(machine: &MachineFacts) -> Option<Finding> {
    let is_slow = |(name, _): &(&String, &CpuList)| name.as_str() != "performance";
    let slow: Vec<_> = machine.governors.iter().filter(is_slow).collect();
    let told = slow.iter().map(|(name, cpus)| format!("{name} on CPUs {cpus}"));
    let told = told.collect::<Vec<_>>().join(", ");
    (!slow.is_empty()).then(|| {
        let finding = Finding::new(Costs, "governor", format!("the frequency governor is {told}"));
        let finding = finding.command("cpupower frequency-set -g performance");
        finding.gain("a CPU that wakes for a burst is at full speed at once; more power is used")
    })
}

fn huge_pages(machine: &MachineFacts) -> Option<Finding> {
    (machine.transparent_huge_pages.as_deref()? == "never").then(|| {
        let found = "transparent huge pages are off: packet memory is in pages of 4 KiB";
        let file = "/sys/kernel/mm/transparent_hugepage/enabled";
        let finding = Finding::new(Costs, "hugepages", found);
        let finding = finding.command(format!("echo madvise > {file}"));
        finding.gain("fewer misses of the TLB: frames of many flows lie far apart")
    })
}

fn compiler(machine: &MachineFacts) -> Option<Finding> {
    (!machine.is_bpf_compiled?).then(|| {
        let found = "BPF programs are interpreted";
        let finding = Finding::new(Costs, "bpf", found);
        let finding = finding.command("sysctl -w net.core.bpf_jit_enable=1");
        finding.gain("the filter of --take costs each packet several times less")
    })
}

fn busy_polling(machine: &MachineFacts) -> Option<Finding> {
    let (poll_us, read_us) = (machine.busy_poll_us.unwrap_or(0), machine.busy_read_us.unwrap_or(0));
    (poll_us > 0 || read_us > 0).then(|| {
        let found = format!(
            "sockets of all programs poll their devices: net.core.busy_poll is {poll_us} µs, \
             busy_read {read_us} µs"
        );
        let finding = Finding::new(Costs, "busy polling", found);
        let finding = finding.command("sysctl -w net.core.busy_poll=0 net.core.busy_read=0");
        finding.gain("CPUs that a run shares with other programs are not spent on their polling")
    })
}
