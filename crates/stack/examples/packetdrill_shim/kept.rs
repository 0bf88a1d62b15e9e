//! Socket options that are kept and told. Most change nothing in scripts.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::errno::Errno;

/// Level and name of an option.
type Name = (i32, i32);

/// Largest buffers (`rmem_max` and `wmem_max`), in bytes, before they are doubled.
pub(crate) const BUFFER_MAX_BYTES: u32 = 4 << 20;

/// Values that were set.
#[derive(Clone, Default, Debug)]
pub(crate) struct Kept(BTreeMap<Name, i32>);

/// Values that an option takes.
enum Values {
    /// A switch, on if not 0.
    Switch,
    /// Any number.
    Any,
    /// Numbers of a range only.
    Within(RangeInclusive<i32>),
    /// One is not kept.
    Fixed,
    /// One of a range is not kept.
    FixedWithin(RangeInclusive<i32>),
    /// None: the option cannot be set.
    Constant,
}

/// Values of an option that is kept, and its first; `None` of others.
fn values((level, name): Name) -> Option<(Values, i32)> {
    Some(match level {
        libc::SOL_SOCKET => match name {
            libc::SO_BROADCAST
            | libc::SO_DEBUG
            | libc::SO_DONTROUTE
            | libc::SO_NO_CHECK
            | libc::SO_REUSEPORT
            | libc::SO_TIMESTAMP => (Values::Switch, 0),
            libc::SO_PRIORITY | libc::SO_MARK => (Values::Any, 0),
            libc::SO_MAX_PACING_RATE => (Values::Any, -1),
            libc::SO_BSDCOMPAT => (Values::Fixed, 0),
            libc::SO_SNDLOWAT => (Values::Constant, 1),
            _ => return None,
        },
        libc::IPPROTO_IP => match name {
            libc::IP_TTL => (Values::Within(1..=255), 64),
            libc::IP_MINTTL => (Values::Within(0..=255), 0),
            libc::IP_MTU_DISCOVER => (Values::Within(0..=5), 1),
            libc::IP_RECVERR | libc::IP_FREEBIND => (Values::Switch, 0),
            _ => return None,
        },
        libc::IPPROTO_IPV6 => match name {
            libc::IPV6_UNICAST_HOPS => (Values::Within(0..=255), 64),
            libc::IPV6_MINHOPCOUNT => (Values::Within(0..=255), 0),
            libc::IPV6_MTU_DISCOVER => (Values::Within(0..=5), 1),
            libc::IPV6_RECVERR | libc::IPV6_V6ONLY => (Values::Switch, 0),
            _ => return None,
        },
        libc::IPPROTO_TCP => match name {
            libc::TCP_NOTSENT_LOWAT => (Values::Any, 0),
            libc::TCP_INQ | libc::TCP_THIN_LINEAR_TIMEOUTS => (Values::Within(0..=1), 0),
            TCP_TX_DELAY => (Values::Within(0..=i32::MAX), 0),
            libc::TCP_SAVE_SYN => (Values::Within(0..=2), 0),
            // It is never on.
            libc::TCP_REPAIR => (Values::Within(0..=0), 0),
            libc::TCP_THIN_DUPACK => (Values::FixedWithin(0..=1), 0),
            _ => return None,
        },
        _ => return None,
    })
}

const TCP_TX_DELAY: i32 = 37;

impl Kept {
    pub(crate) fn set(&mut self, name: Name, value: i32) -> Result<(), Errno> {
        let (values, _) = values(name).ok_or(Errno(libc::ENOPROTOOPT))?;
        let kept = match values {
            Values::Constant => return Err(Errno(libc::ENOPROTOOPT)),
            Values::Within(range) | Values::FixedWithin(range) if !range.contains(&value) => {
                return Err(Errno(libc::EINVAL));
            }
            Values::Fixed | Values::FixedWithin(_) => return Ok(()),
            Values::Switch => i32::from(value != 0),
            Values::Any | Values::Within(_) => value,
        };
        self.0.insert(name, kept);
        Ok(())
    }

    pub(crate) fn value(&self, name: Name) -> Result<i32, Errno> {
        let (_, first) = values(name).ok_or(Errno(libc::ENOPROTOOPT))?;
        Ok(self.0.get(&name).copied().unwrap_or(first))
    }

    /// Values that a connection inherits of its listener.
    pub(crate) fn inherited(&self) -> Self {
        let mut inherited = self.clone();
        inherited.0.retain(|name, _| *name != (libc::SOL_SOCKET, libc::SO_PRIORITY));
        inherited
    }
}
