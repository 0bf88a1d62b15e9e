//! Numbers as the kernel parses them: `kstrtoul` for writes to sysfs, `proc_dointvec` for writes to
//! /proc/sys. Both take decimal, `0x` and a leading 0 for octal, and agree on little else.

use super::errno::Errno;

/// Size of a page. One write to a sysfs file passes at most this many bytes; `proc_dointvec`
/// examines at most one byte less.
pub const PAGE_BYTES: usize = 4096;

/// A number in /proc/sys has fewer characters than this, sign and leading zeros included
/// (`TMPBUFLEN` in kernel/sysctl.c, without the NUL).
const SYSCTL_NUMBER_CHARS: usize = 21;

/// `isspace` of the kernel, which uses Latin-1.
pub(crate) fn is_space(byte: u8) -> bool {
    matches!(byte, b'\t'..=b'\r' | b' ' | 0xa0)
}

/// Parses a number as sysfs files do (`kstrtoul` with base 0, lib/kstrtox.c): a plus sign may
/// precede it, one newline may follow it, and a NUL ends it. Other white space is invalid.
///
/// # Errors
/// `ERANGE` if the number does not fit in 64 bits, whatever follows it; `EINVAL` if there is no
/// number.
pub fn kstrtoul(text: &[u8]) -> Result<u64, Errno> {
    let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
    let (number, rest) = unsigned(text.strip_prefix(b"+").unwrap_or(text)).ok_or(Errno::Inval)?;
    let number = number.ok_or(Errno::Range)?;
    if matches!(rest, [] | [b'\n']) { Ok(number) } else { Err(Errno::Inval) }
}

/// Parses a number as files of /proc/sys do (`proc_dointvec` for one `int`, kernel/sysctl.c), and
/// returns the number of bytes consumed. White space around the number is consumed; the rest is
/// left for another write. The number is `None` if nothing was written.
///
/// # Errors
/// `EINVAL` if there is no number, or it does not fit in an `int`.
pub fn dointvec(written: &[u8]) -> Result<(Option<i32>, usize), Errno> {
    if written.is_empty() {
        return Ok((None, 0));
    }
    let text = without_spaces(&written[..written.len().min(PAGE_BYTES - 1)]);
    let start = &text[..text.len().min(SYSCTL_NUMBER_CHARS)];
    let (digits, is_negative) = match start {
        [b'-', digits @ ..] => (digits, true),
        _ => (start, false),
    };
    let (number, rest) = unsigned(digits).ok_or(Errno::Inval)?;
    let len = start.len() - rest.len();
    let ends = text.get(len).is_none_or(|next| matches!(next, b' ' | b'\t' | b'\n'));
    // As `proc_get_long`: the number fills the buffer, or the byte behind it is not a separator.
    if len == SYSCTL_NUMBER_CHARS || !ends {
        return Err(Errno::Inval);
    }
    let number = number.and_then(|number| i64::try_from(number).ok()).ok_or(Errno::Inval)?;
    let number = if is_negative { -number } else { number };
    let number = i32::try_from(number).map_err(|_| Errno::Inval)?;
    Ok((Some(number), written.len() - without_spaces(&text[len..]).len()))
}

/// Parses a boolean as sysfs files do (`kstrtobool`, lib/kstrtox.c).
///
/// # Errors
/// `EINVAL` if the text begins with none of its words.
pub fn kstrtobool(text: &[u8]) -> Result<bool, Errno> {
    match text {
        [b'y' | b'Y' | b't' | b'T' | b'1', ..] | [b'o' | b'O', b'n' | b'N', ..] => Ok(true),
        [b'n' | b'N' | b'f' | b'F' | b'0', ..] | [b'o' | b'O', b'f' | b'F', ..] => Ok(false),
        _ => Err(Errno::Inval),
    }
}

/// Leading digits and the text behind them; `None` if there are no digits. The number is `None` if
/// it exceeds 64 bits.
fn unsigned(text: &[u8]) -> Option<(Option<u64>, &[u8])> {
    let (radix, text) = match text {
        [b'0', b'x' | b'X', digit, ..] if digit.is_ascii_hexdigit() => (16, &text[2..]),
        [b'0', ..] => (8, text),
        _ => (10, text),
    };
    let value = |byte: &u8| char::from(*byte).to_digit(radix);
    let len = text.iter().take_while(|byte| value(byte).is_some()).count();
    let (digits, rest) = text.split_at(len);
    let number = digits.iter().filter_map(value).try_fold(0u64, |number, digit| {
        number.checked_mul(radix.into())?.checked_add(digit.into())
    });
    (len > 0).then_some((number, rest))
}

fn without_spaces(text: &[u8]) -> &[u8] {
    let spaces = text.iter().take_while(|byte| is_space(**byte)).count();
    &text[spaces..]
}

#[cfg(test)]
mod tests {
    use super::*;

    const INVALID: Errno = Errno::Inval;

    #[test]
    fn rfs_10_attributes_take_one_number() {
        for (text, number) in [
            ("5", 5),
            ("5\n", 5),
            ("+5", 5),
            ("0x1F", 31),
            ("0X1f\n", 31),
            ("+0x10", 16),
            ("010", 8),
            ("00", 0),
            ("5\0", 5),
            ("5\n\0\n", 5),
            ("0000000000000000000000000000000005", 5),
            ("18446744073709551615", u64::MAX),
            ("0xffffffffffffffff", u64::MAX),
        ] {
            assert_eq!(kstrtoul(text.as_bytes()), Ok(number), "{text:?}");
        }
        for text in [
            "", "\n", "\x005", " 5", "5 ", "5\r", "5\n\n", "5 7", "5x", "08", "0x", "0xg", "-0",
            "-1", "++5", "+-5", "+", "x", "1e3",
        ] {
            assert_eq!(kstrtoul(text.as_bytes()), Err(INVALID), "{text:?}");
        }
        for text in ["18446744073709551616", "99999999999999999999x", "0x10000000000000000"] {
            assert_eq!(kstrtoul(text.as_bytes()), Err(Errno::Range), "{text:?}");
        }
    }

    #[test]
    fn rps_8_sysctls_take_first_number() {
        for (text, number, taken) in [
            ("5", 5, 1),
            ("-5\n", -5, 3),
            ("-0", 0, 2),
            (" \t\n\r\x0b5", 5, 6),
            ("5 \r\n", 5, 4),
            ("5 7", 5, 2),
            ("5\nx", 5, 2),
            ("0x10 ", 16, 5),
            ("-010", -8, 4),
            ("2147483647", i32::MAX, 10),
            ("-2147483648", i32::MIN, 11),
            ("00000000000000000064", 0o64, 20),
        ] {
            assert_eq!(dointvec(text.as_bytes()), Ok((Some(number), taken)), "{text:?}");
        }
        for text in [
            " ",
            "\n",
            "\0",
            "5\0",
            "5\r",
            "5,7",
            "5x",
            "+5",
            "--5",
            "- 5",
            "-",
            "08",
            "0x",
            "2147483648",
            "-2147483649",
            "4294967296",
            "18446744073709551616",
            "000000000000000000064",
            "-00000000000000000005",
        ] {
            assert_eq!(dointvec(text.as_bytes()), Err(INVALID), "{text:?}");
        }
        assert_eq!(dointvec(b""), Ok((None, 0)));
        assert_eq!(dointvec(b"5\xa0"), Err(INVALID));
        assert_eq!(dointvec(b"\xa05"), Ok((Some(5), 2)));
    }

    #[test]
    fn rps_8_sysctls_read_under_a_page() {
        let spaces = " ".repeat(5000);
        let (behind, ahead) = (format!("5{spaces}"), format!("{spaces}5"));
        assert_eq!(dointvec(behind.as_bytes()), Ok((Some(5), 5001)));
        assert_eq!(dointvec(ahead.as_bytes()), Err(INVALID));
        let last = format!("{:4094}x", "5");
        assert_eq!(dointvec(last.as_bytes()), Ok((Some(5), 4094)));
        let beyond = format!("{:4095}x", "5");
        assert_eq!(dointvec(beyond.as_bytes()), Ok((Some(5), 4096)));
    }
}
