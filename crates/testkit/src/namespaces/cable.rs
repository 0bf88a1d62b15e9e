//! Network namespaces that live as long as a descriptor, with links between them.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::thread;

use nix::sched::{CloneFlags, setns};

use super::{command, enter_new};

/// A network namespace. It goes, with all that is in it, when this does.
pub struct Namespace(File);

impl Namespace {
    /// An empty one, without IPv6: its kernel says nothing by itself.
    pub fn new() -> Self {
        let made = thread::spawn(|| {
            enter_new();
            for which in ["all", "default"] {
                let knob = format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6");
                // A kernel without IPv6 says nothing of that kind either.
                let _ = std::fs::write(knob, "1");
            }
            File::open("/proc/thread-self/ns/net").unwrap()
        });
        Self(made.join().unwrap())
    }

    /// Runs on a thread of its own in this namespace.
    pub fn run<R: Send>(&self, act: impl FnOnce() -> R + Send) -> R {
        thread::scope(|scope| {
            let inside = || {
                setns(&self.0, CloneFlags::CLONE_NEWNET).unwrap();
                act()
            };
            scope.spawn(inside).join().unwrap()
        })
    }

    /// Runs `ip`, or `ethtool` and the like, in this namespace.
    pub fn command(&self, line: &str) {
        self.run(|| command(line));
    }

    /// Name for `ip link set netns`.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }
}

/// A cable (veth) from `near` to `far`, which are stations 1 and 2 on it, both ends up.
pub struct Cable<'a> {
    /// Namespace of the near end, and its interface.
    pub near: (&'a Namespace, &'a str),
    /// The same of the far end.
    pub far: (&'a Namespace, &'a str),
}

impl Cable<'_> {
    /// Lays it.
    pub fn lay(&self) {
        let ((near, a), (far, b)) = (self.near, self.far);
        near.command(&format!(
            "ip link add {a} address 02:00:00:00:00:01 type veth peer name {b} \
             address 02:00:00:00:00:02 netns {}",
            far.path()
        ));
        near.command(&format!("ip link set {a} up"));
        far.command(&format!("ip link set {b} up"));
    }
}
