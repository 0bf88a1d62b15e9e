//! Link of a device: that of an interface, or the connection to a back end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use forebay_sys::error::Result;
use forebay_sys::interface::{Interface, InterfaceIndex, LinkState, LinkStatus};

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
}

impl BackEndLink {
    /// Records that a back end was set up.
    #[cfg(feature = "vhost-user")]
    pub(crate) fn begin(&self) {
        self.is_up.store(true, Ordering::Release);
    }

    /// Records the end of a connection.
    #[cfg(feature = "vhost-user")]
    pub(crate) fn end(&self) {
        self.losses.fetch_add(1, Ordering::Relaxed);
        self.is_up.store(false, Ordering::Release);
    }

    /// Status now: a back end is there, or none. Its losses are those of the carrier.
    #[must_use]
    pub fn status(&self) -> LinkStatus {
        let is_up = self.is_up.load(Ordering::Acquire);
        let state = if is_up { LinkState::Running } else { LinkState::NoCarrier };
        LinkStatus { state, carrier_losses: self.losses.load(Ordering::Relaxed) }
    }
}
