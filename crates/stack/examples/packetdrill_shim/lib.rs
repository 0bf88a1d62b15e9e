//! Shared object for packetdrill: runs its scripts against our TCP, in virtual time and without a
//! device. Built by `cargo build --release -p forebay-stack --example packetdrill_shim`.
//!
//! ```text
//!  script ─► abi (C functions) ─► calls (sockets by descriptor) ─► host (network layer, TCP, clock)
//! ```

#![deny(unsafe_code)]
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "calls that wait are those of the script's threads, not of the path"
)]

#[expect(unsafe_code, reason = "the C interface of packetdrill")]
mod abi; //     the only unsafe code: pointers of C
mod calls; //   socket calls, blocking and not
mod writes; //  writes, which also open a connection
mod errno; //   errors of TCP as the kernel's numbers
mod host; //    a host with one device and a virtual clock
mod polls; //   poll and epoll
mod reports; // the error queue
mod pipes; //   bytes from and to other descriptors
mod kept; //    options that change nothing
mod sysctls; // sysctls that a script changes
mod options; // socket options and TCP_INFO
