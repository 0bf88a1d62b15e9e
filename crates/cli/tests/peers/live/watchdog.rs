//! The watchdog of a service manager, over the whole program: a socket in the manager's place, and
//! the rules of `Type=notify` with `WatchdogSec` and `Restart=on-failure`.

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use forebay_testkit::namespaces::named::run;
use libtest_mimic::Failed;
use tempfile::TempDir;

use crate::Judgement;
use crate::live::Judge;
use crate::live::forwarding::{DEVICE_MAC, Link, PEER, Way};
use crate::live::program::command;

pub(crate) const TRIALS: [Judge; 2] = [
    ("svc_3_watchdog_restarts_hanging_run", judge_hanging),
    ("svc_3_watchdog_spares_busy_run", judge_busy),
];

/// Time without a feed after which the manager acts, as in the unit of this project.
const WATCHDOG: Duration = Duration::from_secs(10);

/// Feeds of a busy run to wait for: those of twice that time, as one comes every 100 ms.
const FEEDS: usize = 200;

/// Event that the manager sees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ServiceEvent {
    Ready,
    Fed,
    /// No feed came in time.
    Expired,
}

/// A service manager with one service.
struct Manager<'a> {
    link: &'a Link,
    directory: TempDir,
    notices: UnixDatagram,
    args: Vec<&'a str>,
    child: Child,
}

impl<'a> Manager<'a> {
    fn start(link: &'a Link, args: &[&'a str]) -> Result<Self, Failed> {
        let directory = tempfile::tempdir()?;
        let notices = UnixDatagram::bind(directory.path().join("notify"))?;
        notices.set_read_timeout(Some(WATCHDOG))?;
        let args = link.args(args);
        let child = spawn(link, &directory, &args)?;
        Ok(Self { link, directory, notices, args, child })
    }

    /// Next event of the service.
    fn next(&self) -> Result<ServiceEvent, Failed> {
        let mut bytes = [0; 256];
        let len = match self.notices.recv(&mut bytes) {
            Ok(len) => len,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Ok(ServiceEvent::Expired);
            }
            Err(error) => return Err(error.into()),
        };
        match String::from_utf8_lossy(&bytes[..len]).trim_end() {
            "READY=1" => Ok(ServiceEvent::Ready),
            "WATCHDOG=1" => Ok(ServiceEvent::Fed),
            other => Err(format!("{other:?} was not expected").into()),
        }
    }

    fn expect(&self, expected: ServiceEvent) -> Judgement {
        let event = self.next()?;
        if event == expected { Ok(()) } else { Err(format!("{expected:?}: {event:?}").into()) }
    }

    /// Ends the service as systemd does when its watchdog expires, and starts it again.
    fn restart(&mut self) -> Judgement {
        run("kill", &["-s", "ABRT", &self.child.id().to_string()])?;
        if self.child.wait()?.success() {
            return Err("it ended well, so it would not be started again".into());
        }
        self.child = spawn(self.link, &self.directory, &self.args)?;
        Ok(())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

impl Drop for Manager<'_> {
    fn drop(&mut self) {
        // Ignored: it may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(link: &Link, directory: &TempDir, args: &[&str]) -> Result<Child, Failed> {
    let mut command = command(&link.near);
    command.arg("run").args(args).arg("--no-control").current_dir(directory);
    command.env("NOTIFY_SOCKET", directory.path().join("notify"));
    command.env("WATCHDOG_USEC", WATCHDOG.as_micros().to_string()).env_remove("WATCHDOG_PID");
    Ok(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?)
}

/// A link over which the sender reaches the run's end by UDP, without its kernel's help.
pub(super) fn link() -> Result<Link, Failed> {
    let link = Link::new(Way::AfPacket)?;
    let (far, _) = link.sender();
    far.run(&["ip", "address", "add", "10.7.0.1/24", "dev", PEER])?;
    far.run(&["ip", "neigh", "add", "10.7.0.2", "lladdr", DEVICE_MAC, "dev", PEER])?;
    Ok(link)
}

/// Sends datagrams from a port to the run for as long as `goes_on` returns true. Port 0 is any.
pub(super) fn send(link: &Link, port: u16, goes_on: impl Fn() -> bool + Send) -> Judgement {
    let (far, _) = link.sender();
    far.within(move || {
        let socket = UdpSocket::bind(("10.7.0.1", port))?;
        while goes_on() {
            for _ in 0..64 {
                // Ignored: a full queue of the device is not a failure.
                let _ = socket.send_to(&[7; 18], "10.7.0.2:9");
            }
        }
        Ok(())
    })
}

/// A handler that opens a FIFO which nobody reads does not return.
fn judge_hanging() -> Judgement {
    let link = link()?;
    let mut manager = Manager::start(&link, &["--cpus", "1", "--to", "pcap:seen"])?;
    manager.expect(ServiceEvent::Ready)?;
    manager.expect(ServiceEvent::Fed)?;
    run("mkfifo", &[&manager.path("seen/cpu0.pcap").display().to_string()])?;
    let sent = AtomicBool::new(false);
    send(&link, 0, || !sent.swap(true, Ordering::Relaxed))?;
    loop {
        match manager.next()? {
            ServiceEvent::Fed => {}
            ServiceEvent::Expired => break,
            ServiceEvent::Ready => return Err("it is ready twice".into()),
        }
    }
    manager.restart()?;
    manager.expect(ServiceEvent::Ready)?;
    manager.expect(ServiceEvent::Fed)
}

/// A run whose CPU has packets all the time is fed all the time.
fn judge_busy() -> Judgement {
    let link = link()?;
    let manager = Manager::start(&link, &["--cpus", "1", "--spin", "always", "--check"])?;
    manager.expect(ServiceEvent::Ready)?;
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let flood = scope.spawn(|| send(&link, 0, || !is_over.load(Ordering::Relaxed)));
        let fed = (0..FEEDS).try_for_each(|_| manager.expect(ServiceEvent::Fed));
        is_over.store(true, Ordering::Relaxed);
        flood.join().map_err(|_| "the flood has panicked")??;
        fed
    })
}
