//! IPv4 options, as parsed by `ip_options_compile`. Routes and timestamps requested by options are
//! not recorded, as options are never passed to an application.

use super::drop::NetworkDrop;

const END: u8 = 0;
const NOOP: u8 = 1;
const RECORD_ROUTE: u8 = 7;
const TIMESTAMP: u8 = 68;
const LOOSE_SOURCE_ROUTE: u8 = 131;
const CIPSO: u8 = 134;
const STRICT_SOURCE_ROUTE: u8 = 137;
const ROUTER_ALERT: u8 = 148;

/// Smallest valid pointer of an option. Pointers count from 1, and the first valid position is
/// after the option's fixed fields.
const ROUTE_FIRST: usize = 4;
const TIMESTAMP_FIRST: usize = 5;

/// Defined flags of a timestamp option that make its entries longer.
const TIMES_AND_ADDRESSES: u8 = 1;
const TIMES_OF_NAMED: u8 = 3;

/// Options found so far that may appear only once.
#[derive(Default)]
struct FoundOption {
    source_route: bool,
    record_route: bool,
    timestamp: bool,
}

/// Validates the bytes between the fixed header and the payload.
pub(super) fn judge(mut options: &[u8]) -> Result<(), NetworkDrop> {
    let mut found = FoundOption::default();
    loop {
        options = match *options {
            [] | [END, ..] => break,
            [NOOP, ref rest @ ..] => rest,
            [_] | [_, 0 | 1, ..] => return Err(NetworkDrop::IpInhdr),
            [_, len, ..] => {
                let split = options.split_at_checked(len.into());
                let (option, rest) = split.ok_or(NetworkDrop::IpInhdr)?;
                found.judge(option).ok_or(NetworkDrop::IpInhdr)?;
                rest
            }
        };
    }
    // The kernel's default: `accept_source_route` is 0 in `all`.
    if found.source_route { Err(NetworkDrop::SourceRoute) } else { Ok(()) }
}

impl FoundOption {
    /// Validates one option of the length that it states. `None` if invalid.
    fn judge(&mut self, option: &[u8]) -> Option<()> {
        match *option.first()? {
            LOOSE_SOURCE_ROUTE | STRICT_SOURCE_ROUTE => {
                first(&mut self.source_route)?;
                (pointer(option)? >= ROUTE_FIRST).then_some(())
            }
            RECORD_ROUTE => {
                first(&mut self.record_route)?;
                let pointer = pointer(option)?;
                let has_room = pointer + 3 <= option.len();
                let is_full = pointer > option.len();
                (pointer >= ROUTE_FIRST && (is_full || has_room)).then_some(())
            }
            TIMESTAMP => {
                first(&mut self.timestamp)?;
                timestamp(option)
            }
            ROUTER_ALERT => (option.len() >= 4).then_some(()),
            CIPSO => None, // no domain of interpretation is configured
            _ => Some(()),
        }
    }
}

fn timestamp(option: &[u8]) -> Option<()> {
    let &[_, _, _, flags, ..] = option else { return None };
    let (pointer, overflow, flags) = (pointer(option)?, flags >> 4, flags & 0x0f);
    let entry_bytes = match flags {
        TIMES_AND_ADDRESSES | TIMES_OF_NAMED => 8,
        _ => 4,
    };
    let is_right = match pointer {
        0..TIMESTAMP_FIRST => false,
        _ if pointer > option.len() => flags == TIMES_OF_NAMED || overflow < 15,
        _ => pointer + entry_bytes - 1 <= option.len(),
    };
    is_right.then_some(())
}

/// Marks an option as found; `None` if it was found before.
fn first(is_found: &mut bool) -> Option<()> {
    (!std::mem::replace(is_found, true)).then_some(())
}

fn pointer(option: &[u8]) -> Option<usize> {
    option.get(2).copied().map(usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Options that the kernel accepts, and the same with one field changed.
    #[test]
    fn option_errors_are_the_kernels() {
        let taken: [&[u8]; 14] = [
            &[],
            &[NOOP, NOOP, NOOP, END, 99, 99],
            &[RECORD_ROUTE, 7, 4, 0, 0, 0, 0],
            &[RECORD_ROUTE, 7, 8, 0, 0, 0, 0],
            &[RECORD_ROUTE, 7, 255, 0, 0, 0, 0],
            &[RECORD_ROUTE, 3, 4],
            &[TIMESTAMP, 8, 5, 0, 0, 0, 0, 0],
            &[TIMESTAMP, 8, 5, 2, 0, 0, 0, 0],
            &[TIMESTAMP, 8, 9, 0xe0, 0, 0, 0, 0],
            &[TIMESTAMP, 8, 9, 0xf3, 0, 0, 0, 0],
            &[TIMESTAMP, 12, 5, 1, 0, 0, 0, 0, 0, 0, 0, 0],
            &[ROUTER_ALERT, 4, 1, 1],
            &[99, 2, 77, 2],
            &[130, 3, 0],
        ];
        for option in taken {
            assert_eq!(judge(option), Ok(()), "{option:?}");
        }
        let refused: [&[u8]; 16] = [
            &[99],
            &[99, 0],
            &[99, 1],
            &[99, 3],
            &[RECORD_ROUTE, 2],
            &[RECORD_ROUTE, 7, 3, 0, 0, 0, 0],
            &[RECORD_ROUTE, 7, 5, 0, 0, 0, 0],
            &[RECORD_ROUTE, 3, 4, RECORD_ROUTE, 3, 4],
            &[TIMESTAMP, 3, 5],
            &[TIMESTAMP, 8, 4, 0, 0, 0, 0, 0],
            &[TIMESTAMP, 8, 6, 0, 0, 0, 0, 0],
            &[TIMESTAMP, 8, 9, 0xf0, 0, 0, 0, 0],
            &[TIMESTAMP, 8, 5, 1, 0, 0, 0, 0],
            &[ROUTER_ALERT, 3, 0],
            &[CIPSO, 8, 0, 0, 0, 1, 1, 2],
            &[LOOSE_SOURCE_ROUTE, 3, 3],
        ];
        for option in refused {
            assert_eq!(judge(option), Err(NetworkDrop::IpInhdr), "{option:?}");
        }
        for kind in [LOOSE_SOURCE_ROUTE, STRICT_SOURCE_ROUTE] {
            assert_eq!(judge(&[kind, 3, 4]), Err(NetworkDrop::SourceRoute));
            assert_eq!(judge(&[kind, 3, 4, kind, 3, 4]), Err(NetworkDrop::IpInhdr));
        }
    }
}
