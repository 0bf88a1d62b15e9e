//! Messages about the links of a run's interfaces, whose changes do not end a run.

use std::time::Duration;

use forebay_run::run::To;
use forebay_sys::interface::{Interface, LinkState, LinkStatus};
use tracing::{error, info, warn};

use super::args::RunArgs;
use crate::ticker::Ticker;

/// Interval between two looks at a link. The kernel counts losses in between.
const LOOK_PERIOD: Duration = Duration::from_millis(200);

/// Interface of a run, and its link when it was last looked at.
struct Link {
    interface: Interface,
    /// True if packets are received there: the run ends with the interface then, and tells it.
    is_received_from: bool,
    /// `None` once the interface is gone.
    last: Option<LinkStatus>,
}

/// Change of a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LinkChange {
    Down,
    CarrierLost,
    Restored,
    /// The carrier was lost so many times between two looks, and is there now.
    Interrupted(u32),
    Gone,
}

/// Starts to report changes of the links that packets come by or leave by.
pub(super) fn watch(args: &RunArgs) -> Ticker {
    let devices = args.devices.iter().map(|device| device.name.as_str());
    let to = args.to.iter().filter_map(|to| match to {
        To::Tun(name) | To::Dev(name) => Some(name.as_str()),
        To::Count | To::Pcap(_) => None,
    });
    let links = devices.map(|name| (name, true)).chain(to.map(|name| (name, false)));
    let mut links: Vec<_> = links.filter_map(|(name, is_from)| Link::of(name, is_from)).collect();
    links.sort_by_key(|link| !link.is_received_from);
    let mut seen = Vec::new();
    links.retain(|link| {
        let is_new = !seen.contains(&link.interface.index);
        seen.push(link.interface.index);
        is_new
    });
    Ticker::every(LOOK_PERIOD, move || links.iter_mut().for_each(Link::look))
}

impl Link {
    /// Link of an interface; `None` if there is none by that name, as of a device of a process.
    fn of(name: &str, is_received_from: bool) -> Option<Self> {
        let interface = Interface::named(name).ok()?;
        let last = interface.link_status().ok()??;
        Some(Self { interface, is_received_from, last: Some(last) })
    }

    fn look(&mut self) {
        let Some(last) = self.last else { return };
        // An unanswered request is repeated at the next look.
        let Ok(now) = self.interface.link_status() else { return };
        self.last = now;
        if let Some(change) = change(last, now) {
            self.tell(change);
        }
    }

    fn tell(&self, change: LinkChange) {
        let device = self.interface.name.as_str();
        match change {
            LinkChange::Down => warn!(
                device,
                link = "down",
                "{device} is down, so no packets pass; ip link set {device} up"
            ),
            LinkChange::CarrierLost => warn!(
                device,
                link = "no_carrier",
                "{device} has lost its carrier, so no packets pass; see its other end or its cable"
            ),
            LinkChange::Restored => {
                info!(device, link = "running", "{device} has its link again");
            }
            LinkChange::Interrupted(losses) => warn!(
                device,
                link = "running",
                losses,
                "{device} had lost its carrier ({losses} times), and has it again"
            ),
            LinkChange::Gone if self.is_received_from => {}
            LinkChange::Gone => error!(
                device,
                link = "gone",
                "the interface {device} is gone, so nothing can be sent there; start again when it \
                 is back"
            ),
        }
    }
}

/// Change between two looks, if any.
fn change(last: LinkStatus, now: Option<LinkStatus>) -> Option<LinkChange> {
    let Some(now) = now else { return Some(LinkChange::Gone) };
    let losses = now.carrier_losses.wrapping_sub(last.carrier_losses);
    match (last.state, now.state) {
        (LinkState::Running, LinkState::Running) if losses > 0 => {
            Some(LinkChange::Interrupted(losses))
        }
        (last, now) if last == now => None,
        (_, LinkState::Running) => Some(LinkChange::Restored),
        (_, LinkState::NoCarrier) => Some(LinkChange::CarrierLost),
        (_, LinkState::Down) => Some(LinkChange::Down),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ops_3_each_change_has_its_message() {
        use LinkState::{Down, NoCarrier, Running};
        let status = |state, carrier_losses| LinkStatus { state, carrier_losses };
        for (last, now, expected) in [
            ((Running, 3), (Running, 3), None),
            ((Running, 3), (Running, 5), Some(LinkChange::Interrupted(2))),
            ((Running, u32::MAX), (Running, 0), Some(LinkChange::Interrupted(1))),
            ((Running, 3), (NoCarrier, 4), Some(LinkChange::CarrierLost)),
            ((Running, 3), (Down, 4), Some(LinkChange::Down)),
            ((NoCarrier, 4), (NoCarrier, 4), None),
            ((NoCarrier, 4), (Running, 4), Some(LinkChange::Restored)),
            ((Down, 4), (Down, 4), None),
            ((Down, 4), (NoCarrier, 4), Some(LinkChange::CarrierLost)),
        ] {
            let [last, now] = [last, now].map(|(state, losses)| status(state, losses));
            assert_eq!(change(last, Some(now)), expected, "{last:?}, {now:?}");
            assert_eq!(change(last, None), Some(LinkChange::Gone));
        }
    }
}
