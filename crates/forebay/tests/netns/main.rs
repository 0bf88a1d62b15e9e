//! Tests of the stack and its sockets in network namespaces, with the kernel at the other end.

mod parts; //        processes that are measured or killed
mod network; //      hostile packets, compared with the kernel's verdict
mod socket_table; // socket look-up, compared with the kernel's
mod sockets; //      the calls of applications
mod tcp; //          connections
mod many_sockets; // as many sockets as possible

use libtest_mimic::Arguments;

fn main() {
    if parts::played(&[many_sockets::PARTS, &tcp::parts()].concat()) {
        return;
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let trials = [
        network::trials(),
        socket_table::trials(),
        sockets::trials(),
        tcp::trials(),
        many_sockets::trials(),
    ];
    libtest_mimic::run(&arguments, trials.into_iter().flatten().collect()).exit();
}
