//! Messages about the connection of a vhost-user device to its back end.

use forebay_device::BackEndNews;
use forebay_sys::interface::{LinkState, LinkStatus};
use tracing::{info, warn};

use super::{LinkChange, change};

/// Number of looks after which a back end that was never there is told.
const LOOKS_WITHOUT_BACK_END: u32 = 5;

/// Maximum number of reasons told why back ends could not be set up, or were lost at once, until one
/// stays: a back end that fails again and again may do so in many ways.
const REASONS_MAX: usize = 5;

/// News of a back end that were told, or are not to be told again.
#[derive(Default)]
pub(super) struct BackEndLog {
    /// Number of looks without a back end.
    looks_without: u32,
    /// True if it was told that there was no back end yet.
    has_told_absence: bool,
    /// Queues told as shut that were so at the last look.
    shut: Vec<String>,
    /// Reasons told why back ends could not be set up, until one was.
    refusals: Vec<String>,
    /// Reason told why no back end can connect, as long as it holds.
    blocked: Option<String>,
    /// Reasons told why back ends were lost, until one stayed for a look.
    losses: Vec<String>,
}

/// Change of a back end that is to be told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum BackEndChange {
    Link(LinkChange),
    /// Set up and lost so many times between two looks, and not there.
    LostAgain(u32),
    /// Queue that was shut, while the others go on.
    Shut(String),
    /// Failed setup, and the reason.
    Refused(String),
    /// No back end can connect, and the reason.
    Blocked(String),
    /// No back end so far.
    Missing,
}

impl BackEndLog {
    /// Returns what is to be told after a look.
    pub(super) fn look(
        &mut self,
        last: LinkStatus,
        now: LinkStatus,
        news: &BackEndNews,
    ) -> Vec<BackEndChange> {
        let is_up = now.state == LinkState::Running;
        if is_up {
            self.refusals.clear();
            self.losses.clear();
        }
        let change = change(last, Some(now)).map(BackEndChange::Link);
        let mut changes: Vec<_> =
            change.or_else(|| self.loss(last, now, news)).into_iter().collect();
        if is_up {
            changes.extend(self.newly_shut(news));
        } else {
            if let (Some(BackEndChange::Link(_)), Some(why)) = (changes.first(), &news.lost) {
                self.losses.push(why.clone());
            }
            changes.extend(self.absence(now, news));
        }
        changes
    }

    /// Returns the loss of a back end that came since the last look, if its reason is a new one.
    fn loss(
        &mut self,
        last: LinkStatus,
        now: LinkStatus,
        news: &BackEndNews,
    ) -> Option<BackEndChange> {
        let losses = now.carrier_losses.wrapping_sub(last.carrier_losses);
        let is_told = losses > 0 && adds_reason(&mut self.losses, news.lost.as_ref()?);
        is_told.then_some(BackEndChange::LostAgain(losses))
    }

    /// Returns the queues that were shut since the last look.
    fn newly_shut(&mut self, news: &BackEndNews) -> Vec<BackEndChange> {
        let shut = news.shut.iter().filter(|shut| !self.shut.contains(shut));
        let shut = shut.cloned().map(BackEndChange::Shut).collect();
        self.shut.clone_from(&news.shut);
        shut
    }

    /// Returns the reason why there is no back end, if it is a new one.
    fn absence(&mut self, now: LinkStatus, news: &BackEndNews) -> Option<BackEndChange> {
        self.looks_without = self.looks_without.saturating_add(1);
        if self.blocked != news.blocked {
            self.blocked.clone_from(&news.blocked);
            return news.blocked.clone().map(BackEndChange::Blocked);
        }
        if let Some(why) = &news.refused {
            let is_told = adds_reason(&mut self.refusals, why);
            return is_told.then(|| BackEndChange::Refused(why.clone()));
        }
        let is_told = !self.has_told_absence
            && news.is_waiting
            && now.carrier_losses == 0
            && self.looks_without >= LOOKS_WITHOUT_BACK_END;
        self.has_told_absence |= is_told;
        is_told.then_some(BackEndChange::Missing)
    }
}

/// Adds a reason, if it is a new one and there is room. Returns true if so.
fn adds_reason(told: &mut Vec<String>, why: &String) -> bool {
    let is_new = !told.contains(why) && told.len() < REASONS_MAX;
    if is_new {
        told.push(why.clone());
    }
    is_new
}

impl BackEndChange {
    /// Logs the change.
    pub(super) fn log(&self, device: &str, news: &BackEndNews) {
        match self {
            Self::Link(change) => log_link(*change, device, news),
            Self::LostAgain(losses) => warn!(
                device,
                link = "no_carrier",
                losses,
                "{device} had a back end and has lost it ({losses} times), so no packets pass; see \
                 that one's log, as it is connected to again: {}",
                lost(news)
            ),
            Self::Shut(shut) => warn!(
                device,
                link = "running",
                "{device} passes no packets by one of its queues until its back end comes again; \
                 see that one's log: {shut}"
            ),
            Self::Refused(why) => warn!(
                device,
                link = "no_carrier",
                "{device} cannot set its back end up, so no packets pass; see that one's log and \
                 settings, as it is tried again: {why}"
            ),
            Self::Blocked(why) => warn!(
                device,
                link = "no_carrier",
                "{device} was removed and cannot be made again, so no back end can connect; it is \
                 tried again: {why}"
            ),
            Self::Missing => warn!(
                device,
                link = "no_carrier",
                "{device} has no back end yet, so no packets pass; start one, or see whether the \
                 path is right: {}",
                news.state
            ),
        }
    }
}

/// Logs a change of the connection.
fn log_link(change: LinkChange, device: &str, news: &BackEndNews) {
    let why = lost(news);
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
            "{device} has lost its back end, so no packets pass; it is connected to again once it \
             is back: {why}"
        ),
    }
}

/// Reason why the last back end was lost.
fn lost(news: &BackEndNews) -> &str {
    news.lost.as_deref().unwrap_or("for an unknown reason")
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn up(carrier_losses: u32) -> LinkStatus {
        LinkStatus { state: LinkState::Running, carrier_losses }
    }

    const fn down(carrier_losses: u32) -> LinkStatus {
        LinkStatus { state: LinkState::NoCarrier, carrier_losses }
    }

    #[test]
    fn ops_3_shut_queues_are_each_told() {
        let shut = |queues: &[&str]| BackEndNews {
            shut: queues.iter().map(ToString::to_string).collect(),
            ..BackEndNews::default()
        };
        let told = |queue: &str| BackEndChange::Shut(queue.to_owned());
        let link = BackEndChange::Link;
        let mut log = BackEndLog::default();
        let mut look = |last, now, queues: &[&str]| log.look(last, now, &shut(queues));
        // Shut in the look in which the back end came.
        let came = look(down(0), up(0), &["a", "b"]);
        assert_eq!(came, [link(LinkChange::Restored), told("a"), told("b")]);
        assert_eq!(look(up(0), up(0), &["a", "b"]), []);
        assert_eq!(look(up(0), up(0), &["a", "b", "c"]), [told("c")]);
        let again = look(up(0), up(1), &["d"]);
        assert_eq!(again, [link(LinkChange::Interrupted(1)), told("d")]);
        // Shut in the moment between the two answers to a look.
        assert_eq!(look(up(1), down(2), &["d", "e"]), [link(LinkChange::CarrierLost)]);
        let came = look(down(2), up(2), &["f"]);
        assert_eq!(came, [link(LinkChange::Restored), told("f")]);
    }

    /// Set up and closed between two looks, again and again.
    #[test]
    fn ops_3_closing_back_end_is_told() {
        let lost = |why: &str| BackEndNews { lost: Some(why.to_owned()), ..BackEndNews::default() };
        let mut log = BackEndLog::default();
        let mut look = |last, now, why: &str| log.look(last, now, &lost(why));
        assert_eq!(look(down(0), down(2), "it closed"), [BackEndChange::LostAgain(2)]);
        assert_eq!(look(down(2), down(2), "it closed"), []);
        assert_eq!(look(down(2), down(3), "it closed"), []);
        assert_eq!(look(down(3), down(4), "it said nothing"), [BackEndChange::LostAgain(1)]);
        let mut is_told =
            |number: u32| !look(down(number), down(number + 1), &number.to_string()).is_empty();
        assert_eq!((4..100).filter(|&number| is_told(number)).count(), REASONS_MAX - 2);
        // One that stayed for a look.
        let mut look = |last, now, why: &str| log.look(last, now, &lost(why));
        assert_eq!(look(down(100), up(100), "99"), [BackEndChange::Link(LinkChange::Restored)]);
        assert_eq!(look(up(100), down(101), "a"), [BackEndChange::Link(LinkChange::CarrierLost)]);
        assert_eq!(look(down(101), down(102), "a"), []);
        assert_eq!(look(down(102), down(103), "b"), [BackEndChange::LostAgain(1)]);
    }

    #[test]
    fn ops_3_connected_back_end_is_not_missing() {
        let news = |is_waiting| BackEndNews { is_waiting, ..BackEndNews::default() };
        let mut log = BackEndLog::default();
        let mut look = |losses, is_waiting| log.look(down(losses), down(losses), &news(is_waiting));
        (0..2 * LOOKS_WITHOUT_BACK_END)
            .for_each(|_| assert_eq!(look(0, false), [], "in its setup"));
        assert_eq!(look(1, true), [], "one was there");
        assert_eq!(look(0, true), [BackEndChange::Missing]);
        assert_eq!(look(0, true), [], "once");
        let mut log = BackEndLog::default();
        let mut look = |is_waiting| log.look(down(0), down(0), &news(is_waiting)).len();
        let told: Vec<_> = (0..2 * LOOKS_WITHOUT_BACK_END).map(|_| look(true)).collect();
        assert_eq!(
            told.iter().position(|&count| count > 0),
            Some(LOOKS_WITHOUT_BACK_END as usize - 1)
        );
    }

    #[test]
    fn ops_3_removed_socket_is_told() {
        let news = |why: Option<&str>| BackEndNews {
            is_waiting: true,
            blocked: why.map(str::to_owned),
            ..BackEndNews::default()
        };
        let mut log = BackEndLog::default();
        let mut look = |why| log.look(down(1), down(1), &news(why));
        let told = |why: &str| [BackEndChange::Blocked(why.to_owned())];
        assert_eq!(look(None), []);
        assert_eq!(look(Some("no directory")), told("no directory"));
        assert_eq!(look(Some("no directory")), [], "once");
        assert_eq!(look(Some("denied")), told("denied"));
        assert_eq!(look(None), []);
        assert_eq!(look(Some("denied")), told("denied"), "again, as it held no more");
    }
}
