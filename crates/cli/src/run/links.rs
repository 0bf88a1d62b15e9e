//! Messages about the links of a run's interfaces, whose changes do not end a run.

use std::time::Duration;

use forebay_device::{BackEndNews, DeviceLink};
use forebay_run::run::To;
use forebay_sys::interface::{Interface, LinkState, LinkStatus};
use tracing::{error, info, warn};

use super::args::RunArgs;
use crate::ticker::Ticker;

/// Interval between two looks at a link. The kernel counts losses in between.
const LOOK_PERIOD: Duration = Duration::from_millis(200);

/// Number of looks after which a back end that was never there is told.
const LOOKS_WITHOUT_BACK_END: u32 = 5;

/// Maximum number of reasons told why back ends could not be set up, until one is: a back end that
/// fails again and again may do so in many ways.
const REFUSALS_MAX: usize = 5;

/// Link of a run's device, as it was when it was last looked at.
struct Link {
    name: String,
    device: DeviceLink,
    /// True if packets are received there: the run ends with the interface then, and tells it.
    is_received_from: bool,
    /// `None` once the interface is gone.
    last: Option<LinkStatus>,
    /// Number of looks without a back end, until there is one.
    looks_without: u32,
    /// Queue of a back end that was shut last, as it was looked at last.
    shut: Option<String>,
    /// Reasons told why back ends could not be set up, until one was.
    refusals: Vec<String>,
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
pub(super) fn watch(args: &RunArgs, from: &[(String, DeviceLink)]) -> Ticker {
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
    Ticker::every(LOOK_PERIOD, move || links.iter_mut().for_each(Link::look))
}

impl Link {
    /// Link to be looked at; `None` if nothing is known about it, or it is gone already.
    fn of((name, device, is_received_from): (String, DeviceLink, bool)) -> Option<Self> {
        let last = device.status().ok()??;
        let (looks_without, shut, refusals) = (0, None, Vec::new());
        Some(Self {
            name,
            device,
            is_received_from,
            last: Some(last),
            looks_without,
            shut,
            refusals,
        })
    }

    fn look(&mut self) {
        let Some(last) = self.last else { return };
        // An unanswered request is repeated at the next look.
        let Ok(now) = self.device.status() else { return };
        self.last = now;
        let change = change(last, now);
        match &self.device {
            DeviceLink::Interface(_) => change.into_iter().for_each(|it| self.log_interface(it)),
            DeviceLink::BackEnd(link) => {
                let news = link.news();
                self.look_at_back_end(change, &news);
                self.shut = news.shut;
            }
        }
    }

    /// Logs what is new about a back end.
    fn look_at_back_end(&mut self, change: Option<LinkChange>, news: &BackEndNews) {
        let is_up = self.last.is_some_and(|now| now.state == LinkState::Running);
        if is_up {
            self.looks_without = u32::MAX;
            self.refusals.clear();
        }
        self.looks_without = self.looks_without.saturating_add(1);
        match change {
            Some(change) => self.log_back_end(change, news),
            None if is_up => self.log_shut(news),
            None => self.log_absence(news),
        }
    }

    /// Logs a queue that was shut, while the others go on.
    fn log_shut(&self, news: &BackEndNews) {
        let Some(shut) = news.shut.as_ref().filter(|_| news.shut != self.shut) else { return };
        let device = self.name.as_str();
        warn!(
            device,
            link = "running",
            "{device} passes no packets by one of its queues until its back end comes again; see \
             that one's log: {shut}"
        );
    }

    /// Logs the reason why there is no back end.
    fn log_absence(&mut self, news: &BackEndNews) {
        let device = self.name.as_str();
        if let Some(why) = &news.refused {
            if !self.refusals.contains(why) && self.refusals.len() < REFUSALS_MAX {
                warn!(
                    device,
                    link = "no_carrier",
                    "{device} cannot set its back end up, so no packets pass; see that one's log and \
                     settings, as it is tried again: {why}"
                );
                self.refusals.push(why.clone());
            }
        } else if self.looks_without == LOOKS_WITHOUT_BACK_END {
            let state = &news.state;
            warn!(
                device,
                link = "no_carrier",
                "{device} has no back end yet, so no packets pass; start one, or see whether the \
                 path is right: {state}"
            );
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

    /// Logs a change of the connection to a back end.
    fn log_back_end(&self, change: LinkChange, news: &BackEndNews) {
        let device = self.name.as_str();
        let why = news.lost.as_deref().unwrap_or("for an unknown reason");
        match change {
            LinkChange::Restored => {
                info!(device, link = "running", "{device} has a back end");
            }
            LinkChange::Interrupted(losses) => warn!(
                device,
                link = "running",
                losses,
                "{device} had lost its back end ({losses} times), and has one again: {why}"
            ),
            LinkChange::CarrierLost | LinkChange::Down | LinkChange::Gone => warn!(
                device,
                link = "no_carrier",
                "{device} has lost its back end, so no packets pass; it is connected to again once \
                 it is back: {why}"
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
