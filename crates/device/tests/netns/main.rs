//! Tests of devices that need root, network namespaces and the kernel's own tools. A missing tool
//! is reported, and the tests that need it are ignored.

mod rx_filter; //   the kernel's programs against the reference filter
mod af_packet; //   rings of packet sockets
mod af_xdp; //      frames in packet memory
mod xdp_program; // attaching the XDP program
mod tun; //         TUN and TAP

use libtest_mimic::Arguments;

fn main() {
    if let Ok(name) = std::env::var(xdp_program::KILLED) {
        return xdp_program::be_killed(&name);
    }
    let mut arguments = Arguments::from_args();
    // A tool started by one test inherits the descriptors of all others for a moment, and so their
    // links.
    arguments.test_threads = Some(1);
    let trials = [
        rx_filter::trials(),
        af_packet::trials(),
        af_xdp::trials(),
        xdp_program::trials(),
        tun::trials(),
    ];
    libtest_mimic::run(&arguments, trials.into_iter().flatten().collect()).exit();
}
