//! Library that `forebay exec` loads into an unmodified program. The program's sockets at the ports that
//! `--take` names become sockets of Forebay, and keep their descriptors.
//!
//! `abi` has the exported C functions, which convert arguments and results. A call on a descriptor that is not
//! in the `table` goes to the next definition of the function, in general the C library's.
#![deny(unsafe_code)]

/// Writes a line to standard error, which may be a pipe that nobody reads: there `eprintln!` panics. If it is a connection, as
/// of inetd's children, the line is not for its peer.
macro_rules! report {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        if !crate::relay::is_standard_error() {
            // Ignored: nobody reads it.
            let _ = writeln!(std::io::stderr(), $($text)*);
        }
    }};
}

#[expect(unsafe_code, reason = "the C interface: unsafe island 3")]
mod abi; //         exported C functions, structures of C
mod table; //       sockets by descriptor
mod option; //      names of socket options
mod lacking; //     options that sockets of ours lack
mod socket; //      a socket, of any kind
mod udp; //         a UDP socket: calls as methods
mod udp_options; // options of UDP sockets
mod datagram; //    a datagram of a send call
mod path_errors; // ICMP errors of a UDP socket
mod corked; //      a datagram that is sent in parts
mod ancillary; //   ancillary data, as bytes
mod listener; //    a listening TCP socket
mod stream; //      a TCP connection
mod tcp_options; // options of listeners and connections
mod origin; //      the process that a socket belongs to
mod runtime; //     the engine of this process
mod start_error; // reasons why a process has no engine
mod epoll_sets; //  registrations in sets of epoll
mod critical; //    parts of calls that no signal handler interrupts
mod fork_locks; //  locks that a fork must not copy
mod engine_lock; // the one process, of those forked, that runs an engine
mod shares; //      division of new connections and datagrams among processes with engines
mod mailbox; //     connections that a process passes on to another
mod passing; //     connections that a closed listener leaves to other processes
mod relay; //       connections that other processes use, too
mod kept; //        listeners for the program that a process runs next
mod membership; //  changes of that division, and filters that let its packets pass
mod control; //     control socket of the program
mod errno; //       errors as the kernel's numbers
