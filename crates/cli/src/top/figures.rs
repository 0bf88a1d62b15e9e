//! Numbers that fit a column.

/// Rate or number with at most six characters, as in `590.1k`.
pub(super) fn short(number: f64) -> String {
    match number {
        n if n >= 999_950_000_000.0 => scaled(n / 1e12, "T"),
        n if n >= 999_950_000.0 => scaled(n / 1e9, "G"),
        n if n >= 999_950.0 => scaled(n / 1e6, "M"),
        n if n >= 9_999.5 => format!("{:.1}k", n / 1e3),
        n if n >= 99.95 || n == 0.0 => format!("{n:.0}"),
        n => format!("{n:.1}"),
    }
}

fn scaled(number: f64, unit: &str) -> String {
    let decimals = if number >= 99.95 { 1 } else { 2 };
    format!("{number:.decimals$}{unit}")
}

/// Rate with its unit, as in `590.1 kpps`.
pub(super) fn unit(number: f64, unit: &str) -> String {
    let short = short(number);
    let (digits, prefix) = short.split_at(short.trim_end_matches(char::is_alphabetic).len());
    format!("{digits} {prefix}{unit}")
}

/// Whole number with at most six characters.
pub(super) fn count(number: f64) -> String {
    if number < 99.95 { format!("{number:.0}") } else { short(number) }
}

/// Share as in `48 %`; one that would be 0 % or 100 % by rounding only is `<1 %` or `>99 %`.
pub(super) fn percent(share: f64) -> String {
    match share * 100.0 {
        n if 0.0 < n && n < 0.5 => "<1 %".to_owned(),
        n if (99.5..100.0).contains(&n) => ">99 %".to_owned(),
        n => format!("{n:.0} %"),
    }
}

/// Time with at most eight characters, as in `28.1 µs`.
pub(super) fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 5_997.0 => format!("{:.1} h", s / 3600.0),
        s if s >= 999.95 => format!("{:.1} min", s / 60.0),
        s if s >= 0.99995 => format!("{s:.1} s"),
        s if s >= 0.99995e-3 => format!("{:.1} ms", s * 1e3),
        s if s >= 999.5e-9 => format!("{:.1} µs", s * 1e6),
        s => format!("{:.0} ns", s * 1e9),
    }
}

/// Time since an event with at most ten characters, as in `28 min ago`.
pub(super) fn ago(seconds: f64) -> String {
    match seconds {
        s if s >= 359_820.0 => format!("{:.0} d ago", s / 86_400.0),
        s if s >= 5_970.0 => format!("{:.0} h ago", s / 3600.0),
        s if s >= 999.5 => format!("{:.0} min ago", s / 60.0),
        s => format!("{s:.0} s ago"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_fit_their_columns() {
        for (number, text) in [
            (0.0, "0"),
            (0.3, "0.3"),
            (99.96, "100"),
            (1234.0, "1234"),
            (9_999.6, "10.0k"),
            (590_100.0, "590.1k"),
            (999_999.0, "1.00M"),
            (1_210_000.0, "1.21M"),
            (336e6, "336.0M"),
            (1e9, "1.00G"),
            (999_999e6, "1.00T"),
        ] {
            assert_eq!(short(number), text);
            assert!(text.len() <= 6);
        }
        assert_eq!([3.0, 24.0, 1001.0, 212_992.0].map(count), ["3", "24", "1001", "213.0k"]);
        assert_eq!(unit(590_100.0, "pps"), "590.1 kpps");
        assert_eq!(unit(7.0, "bit/s"), "7.0 bit/s");
        for (share, text) in
            [(0.0, "0 %"), (0.001, "<1 %"), (0.48, "48 %"), (0.999, ">99 %"), (1.0, "100 %")]
        {
            assert_eq!(percent(share), text);
        }
        for (seconds, text) in [
            (0.0, "0 ns"),
            (999.6e-9, "1.0 µs"),
            (28.1e-6, "28.1 µs"),
            (999.94e-6, "999.9 µs"),
            (999.96e-6, "1.0 ms"),
            (2.2e-3, "2.2 ms"),
            (0.99996, "1.0 s"),
            (61.0, "61.0 s"),
            (999.96, "16.7 min"),
            (5_998.0, "1.7 h"),
        ] {
            assert_eq!(time(seconds), text);
            assert!(text.chars().count() <= 8);
        }
        for (seconds, text) in [
            (7.2, "7 s ago"),
            (999.4, "999 s ago"),
            (1234.0, "21 min ago"),
            (5_969.0, "99 min ago"),
            (5_970.0, "2 h ago"),
            (359_819.0, "100 h ago"),
            (86_400_000.0, "1000 d ago"),
        ] {
            assert_eq!(ago(seconds), text);
            assert!(text.chars().count() <= 10);
        }
    }
}
