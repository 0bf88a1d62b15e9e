//! Tests of the stack and its sockets in network namespaces, by the kernel at the other end.

mod network; //      packets of any kind, and the kernel's verdict
mod socket_table; // the socket that a datagram is for, by the kernel's choice
mod sockets; //      what applications call
mod many_sockets; // as many as there may be

use libtest_mimic::Arguments;

fn main() {
    if many_sockets::played() {
        return;
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let trials =
        [network::trials(), socket_table::trials(), sockets::trials(), many_sockets::trials()];
    libtest_mimic::run(&arguments, trials.into_iter().flatten().collect()).exit();
}
