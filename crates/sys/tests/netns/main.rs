//! Tests of calls to Linux that need root and network namespaces.

mod device_facts; // abilities and settings of devices, by `ip` and `ethtool`
mod interface; //    interfaces, by `ip`
mod network_changes; // notifications that are lost
mod privilege; //    privileges that a process has, and drops

use libtest_mimic::Arguments;

fn main() {
    if privilege::played() {
        return;
    }
    let trials = [
        interface::trials(),
        device_facts::trials(),
        network_changes::trials(),
        privilege::trials(),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials.into_iter().flatten().collect()).exit();
}
