//! Number formatting.

use indicatif::{HumanBytes, HumanCount};

/// Formats as 1,234,567.
pub(crate) fn grouped(number: u64) -> String {
    HumanCount(number).to_string()
}

/// Formats as `1 flow` and `1,234 flows`.
pub(crate) fn counted(number: u64, what: &str) -> String {
    format!("{} {what}{}", grouped(number), if number == 1 { "" } else { "s" })
}

pub(crate) fn percent(part: f64, whole: f64) -> String {
    format!("{:.1} %", if whole > 0.0 { part / whole * 100.0 } else { 0.0 })
}

pub(crate) fn scaled(number: f64) -> String {
    match number {
        n if n >= 1e6 => format!("{:.2} M", n / 1e6),
        n if n >= 1e3 => format!("{:.1} k", n / 1e3),
        n => format!("{n:.1} "),
    }
}

pub(crate) fn bytes(number: u64) -> String {
    HumanBytes(number).to_string()
}

pub(crate) fn seconds(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.1} ms", seconds * 1e3) } else { format!("{seconds:.2} s") }
}

pub(crate) fn nanoseconds(ns: u64) -> String {
    match as_f64(ns) {
        n if n >= 1e6 => format!("{:.1} ms", n / 1e6),
        n if n >= 1e3 => format!("{:.1} µs", n / 1e3),
        n => format!("{n:.0} ns"),
    }
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
pub(crate) fn as_f64(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_made_for_reading() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(percent(1.0, 3.0), "33.3 %");
        assert_eq!(percent(1.0, 0.0), "0.0 %");
        assert_eq!(scaled(2_345_678.0), "2.35 M");
        assert_eq!(nanoseconds(1_500), "1.5 µs");
        assert_eq!(seconds(0.0123), "12.3 ms");
    }
}
