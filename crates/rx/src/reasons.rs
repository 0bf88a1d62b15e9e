//! Enums of reasons: each reason has a name and an index.

/// Declares an enum of reasons with their names in counters, traces and reports. The enum has
/// `ALL`, in the order of declaration, `name`, and `index`, the index in `ALL`. Duplicate names
/// fail to compile.
///
/// ```
/// forebay_rx::reasons! {
///     /// Reasons to stay at home.
///     pub enum Stay {
///         /// It rains.
///         Rain = "rain",
///         /// It is late.
///         Late = "late",
///     }
/// }
/// assert_eq!(Stay::ALL.map(Stay::name), ["rain", "late"]);
/// assert_eq!(Stay::Late.index(), 1);
/// ```
#[macro_export]
macro_rules! reasons {
    ($(#[$about_all:meta])* $visible:vis enum $Reasons:ident {
        $($(#[$about:meta])* $Reason:ident = $name:literal,)+
    }) => {
        $(#[$about_all])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        $visible enum $Reasons {
            $($(#[$about])* $Reason,)+
        }

        impl $Reasons {
            /// Every reason, in the order of declaration.
            $visible const ALL: [Self; [$($name),+].len()] = [$(Self::$Reason),+];

            /// Name in counters, traces and reports.
            #[must_use]
            $visible const fn name(self) -> &'static str {
                match self {
                    $(Self::$Reason => $name,)+
                }
            }

            /// Index in [`ALL`](Self::ALL).
            #[must_use]
            $visible const fn index(self) -> usize {
                self as usize
            }
        }

        const _: () = $crate::reasons::assert_distinct(&[$($name),+]);
    };
}

/// Fails to compile if two names are the same.
#[doc(hidden)]
pub const fn assert_distinct(names: &[&str]) {
    let mut one = 0;
    while one < names.len() {
        let mut other = one + 1;
        while other < names.len() {
            assert!(
                !are_equal(names[one].as_bytes(), names[other].as_bytes()),
                "one name, two reasons"
            );
            other += 1;
        }
        one += 1;
    }
}

const fn are_equal(one: &[u8], other: &[u8]) -> bool {
    if one.len() != other.len() {
        return false;
    }
    let mut at = 0;
    while at < one.len() {
        if one[at] != other[at] {
            return false;
        }
        at += 1;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::assert_distinct;

    #[test]
    fn distinct_names_pass() {
        assert_distinct(&["rain", "late", "rai", ""]);
    }

    #[test]
    #[should_panic(expected = "one name, two reasons")]
    fn equal_names_are_refused() {
        assert_distinct(&["rain", "late", "rain"]);
    }
}
