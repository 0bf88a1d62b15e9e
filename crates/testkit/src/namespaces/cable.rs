//! Network namespaces that live as long as a descriptor, with veth links between them.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::thread;

use nix::sched::{CloneFlags, setns};

use super::{command, enter_new};

/// Network namespace. Removed on drop, with everything in it.
pub struct Namespace(File);

impl Namespace {
    /// Creates an empty namespace without IPv6, so that its kernel sends nothing by itself.
    pub fn new() -> Self {
        let made = thread::spawn(|| {
            enter_new();
            for which in ["all", "default"] {
                let knob = format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6");
                // Fails on a kernel without IPv6, which sends nothing either.
                let _ = std::fs::write(knob, "1");
            }
            File::open("/proc/thread-self/ns/net").unwrap()
        });
        Self(made.join().unwrap())
    }

    /// Runs `act` on a thread in this namespace.
    pub fn run<R: Send>(&self, act: impl FnOnce() -> R + Send) -> R {
        thread::scope(|scope| {
            let inside = || {
                setns(&self.0, CloneFlags::CLONE_NEWNET).unwrap();
                act()
            };
            scope.spawn(inside).join().unwrap()
        })
    }

    /// Runs a tool, such as `ip` or `ethtool`, in this namespace.
    pub fn command(&self, line: &str) {
        self.run(|| command(line));
    }

    /// Path for `ip link set netns`.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }
}

/// Cable (veth) between two namespaces, both ends up; `near` has the MAC address 02:00:00:00:00:01,
/// `far` 02:00:00:00:00:02.
pub struct Cable<'a> {
    /// Namespace of the near end, and its interface.
    pub near: (&'a Namespace, &'a str),
    /// Namespace of the far end, and its interface.
    pub far: (&'a Namespace, &'a str),
}

impl Cable<'_> {
    /// Creates the veth pair, and sets both ends up.
    pub fn lay(&self) {
        self.lay_with("");
    }

    /// Creates the veth pair, with that many queues each way, and sets both ends up.
    pub fn lay_with_queues(&self, queues: u16) {
        self.lay_with(&format!("numrxqueues {queues} numtxqueues {queues}"));
    }

    fn lay_with(&self, options: &str) {
        let ((near, a), (far, b)) = (self.near, self.far);
        near.command(&format!(
            "ip link add {a} {options} address 02:00:00:00:00:01 type veth peer name {b} {options} \
             address 02:00:00:00:00:02 netns {}",
            far.path()
        ));
        near.command(&format!("ip link set {a} up"));
        far.command(&format!("ip link set {b} up"));
    }
}
