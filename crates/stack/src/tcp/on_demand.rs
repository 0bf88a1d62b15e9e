//! Values that take no memory until they are first changed.

use std::ops::{Deref, DerefMut};

/// A value that is read without memory of its own as long as nothing has changed it.
pub(super) trait Initial: Sized + 'static {
    /// Value before the first change.
    const INITIAL: Self;

    /// Shared copy that connections read before their first change.
    fn initial() -> &'static Self;
}

/// A value that an idle connection does not keep: allocated when it is changed first, and until it is
/// [released](Self::release).
#[derive(Debug)]
pub(super) struct OnDemand<T>(Option<Box<T>>);

impl<T> Default for OnDemand<T> {
    fn default() -> Self {
        Self::UNCHANGED
    }
}

impl<T> OnDemand<T> {
    pub(super) const UNCHANGED: Self = Self(None);

    /// True if it takes memory.
    pub(super) fn is_allocated(&self) -> bool {
        self.0.is_some()
    }

    /// Sets it back, and gives its memory back.
    pub(super) fn release(&mut self) {
        self.0 = None;
    }
}

impl<T: Initial> Deref for OnDemand<T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &self.0 {
            Some(value) => value,
            None => T::initial(),
        }
    }
}

impl<T: Initial> DerefMut for OnDemand<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.get_or_insert_with(|| Box::new(T::INITIAL))
    }
}
