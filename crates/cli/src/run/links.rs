//! Messages about the links of a run's interfaces, whose changes do not end a run.

use std::time::Duration;

use forebay_device::DeviceLink;
use forebay_run::run::To;
use forebay_sys::error::Result;
use forebay_sys::interface::{Interface, LinkState, LinkStatus};
use tracing::{error, info, warn};

use self::back_end::BackEndLog;
use super::args::RunArgs;
use crate::ticker::Ticker;

mod back_end;

/// Interval between two looks at a link. The kernel counts losses in between.
const LOOK_PERIOD: Duration = Duration::from_millis(200);

/// Link of a run's device, as it was when it was last looked at.
struct Link {
    name: String,
    device: DeviceLink,
    /// True if packets are received there: the run ends with the interface then, and tells it.
    is_received_from: bool,
    /// `None` once the interface is gone.
    last: Option<LinkStatus>,
    back_end: BackEndLog,
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

/// Starts to report changes of the links that packets come by, which are given, or leave by.
pub(super) fn watch(args: &RunArgs, from: &[(String, DeviceLink)]) -> Result<Ticker> {
    let to = args.to.iter().filter_map(|to| match to {
        To::Tun(name) | To::Dev(name) => Interface::named(name).ok(),
        To::Count | To::Pcap(_) => None,
    });
    let to = to.map(|it| (it.name.clone(), DeviceLink::Interface(it), false));
    let from = from.iter().map(|(name, link)| (name.clone(), link.clone(), true));
    let mut links: Vec<_> = from.chain(to).filter_map(Link::of).collect();
    let mut seen = Vec::new();
    links.retain(|link| {
        let Some(interface) = link.device.interface_index() else { return true };
        let is_new = !seen.contains(&interface);
        seen.push(interface);
        is_new
    });
    Ticker::every(LOOK_PERIOD, "watches the links", move || links.iter_mut().for_each(Link::look))
}

impl Link {
    /// Link to be looked at; `None` if nothing is known about it, or it is gone already.
    fn of((name, device, is_received_from): (String, DeviceLink, bool)) -> Option<Self> {
        let last = device.status().ok()??;
        let back_end = BackEndLog::default();
        Some(Self { name, device, is_received_from, last: Some(last), back_end })
    }

    fn look(&mut self) {
        let Some(last) = self.last else { return };
        // An unanswered request is repeated at the next look.
        let Ok(now) = self.device.status() else { return };
        self.last = now;
        match (&self.device, now) {
            (DeviceLink::BackEnd(link), Some(now)) => {
                let news = link.news();
                let changes = self.back_end.look(last, now, &news);
                changes.iter().for_each(|it| it.log(&self.name, &news));
            }
            _ => change(last, now).into_iter().for_each(|it| self.log_interface(it)),
        }
    }

    /// Logs a change of an interface.
    fn log_interface(&self, change: LinkChange) {
        let device = self.name.as_str();
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
