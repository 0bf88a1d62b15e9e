//! Link of a device: that of an interface, or the connection to a back end.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_sys::error::Result;
use forebay_sys::interface::{Interface, InterfaceIndex, LinkState, LinkStatus};

/// Length of an Ethernet header with two VLAN tags.
pub(crate) const LINK_BYTES: u32 = 22;

/// Maximum number of shut queues that are told of: as many as a device has.
#[cfg(feature = "vhost-user")]
const SHUT_MAX: usize = 128;

/// Link of a device, without which no packets pass.
#[derive(Clone, Debug)]
pub enum DeviceLink {
    /// Link of an interface, as the kernel reports it.
    Interface(Interface),
    /// Connection to the back end of a vhost-user device.
    BackEnd(Arc<BackEndLink>),
}

impl DeviceLink {
    /// Status now; `None` if the interface is gone.
    ///
    /// # Errors
    /// If the kernel does not answer.
    pub fn status(&self) -> Result<Option<LinkStatus>> {
        match self {
            Self::Interface(interface) => interface.link_status(),
            Self::BackEnd(link) => Ok(Some(link.status())),
        }
    }

    /// Number of the interface; `None` for a back end.
    #[must_use]
    pub fn interface_index(&self) -> Option<InterfaceIndex> {
        match self {
            Self::Interface(interface) => Some(interface.index),
            Self::BackEnd(_) => None,
        }
    }
}

/// Connection to a back end. Written by the session's thread, read by observers.
#[derive(Debug, Default)]
pub struct BackEndLink {
    is_up: AtomicBool,
    losses: AtomicU32,
    news: Mutex<BackEndNews>,
}

/// Reasons why a back end passes no packets, for messages.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BackEndNews {
    /// State of the connection, as in "waiting for a back end at v.sock: No such file".
    pub state: String,
    /// True if no back end is connected, and the next one is waited for.
    pub is_waiting: bool,
    /// Reason why none can connect, as the socket was removed and cannot be made again.
    pub blocked: Option<String>,
    /// Reason why the latest back end could not be set up; `None` once one was.
    pub refused: Option<String>,
    /// Reason why the last one was lost.
    pub lost: Option<String>,
    /// Queues that were shut since the latest back end was set up, and the reasons; oldest first. The
    /// connection may go on.
    pub shut: Vec<String>,
}

impl BackEndLink {
    /// Records that a back end was set up.
    #[cfg(feature = "vhost-user")]
    pub(crate) fn begin(&self) {
        let mut news = self.news_now();
        (news.refused, news.shut) = (None, Vec::new());
        drop(news);
        self.is_up.store(true, Ordering::Release);
    }

    /// Records the end of a connection, and the reason.
    #[cfg(feature = "vhost-user")]
    pub(crate) fn end(&self, why: &str) {
        self.news_now().lost = Some(why.to_owned());
        self.losses.fetch_add(1, Ordering::Relaxed);
        self.is_up.store(false, Ordering::Release);
    }

    /// Records the state of a connection.
    #[cfg(feature = "vhost-user")]
    pub(crate) fn set_state(&self, state: String) {
        let mut news = self.news_now();
        (news.state, news.is_waiting, news.blocked) = (state, false, None);
    }

    /// Records that there is no connection, that a back end is waited for, and why none can connect.
    #[cfg(feature = "vhost-user")]
    pub(crate) fn wait(&self, state: String, blocked: Option<String>) {
        let mut news = self.news_now();
        (news.state, news.is_waiting, news.blocked) = (state, true, blocked);
    }

    /// Records the reason why a back end could not be set up.
    #[cfg(feature = "vhost-user")]
    pub(crate) fn refuse(&self, why: &str) {
        self.news_now().refused = Some(why.to_owned());
    }

    /// Records a queue that was shut, and the reason.
    #[cfg(feature = "vhost-user")]
    pub(crate) fn shut(&self, what: String) {
        let mut news = self.news_now();
        if news.shut.len() < SHUT_MAX {
            news.shut.push(what);
        }
    }

    /// Returns the latest reasons.
    #[must_use]
    pub fn news(&self) -> BackEndNews {
        self.news_now().clone()
    }

    fn news_now(&self) -> MutexGuard<'_, BackEndNews> {
        // The news are consistent after every operation, so a poisoned lock is usable.
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Status now: a back end is there, or none. Its losses are those of the carrier.
    #[must_use]
    pub fn status(&self) -> LinkStatus {
        let is_up = self.is_up.load(Ordering::Acquire);
        let state = if is_up { LinkState::Running } else { LinkState::NoCarrier };
        LinkStatus { state, carrier_losses: self.losses.load(Ordering::Relaxed) }
    }
}
