//! Text format that a client accepts.

/// Text format of a scrape.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TextFormat {
    /// OpenMetrics 1.0.0, for clients that accept it.
    OpenMetrics,
    /// Prometheus 0.0.4, for all others.
    Prometheus,
}

impl TextFormat {
    /// Format for a client that sent this `Accept` header.
    #[must_use]
    pub fn accepted(accept: &str) -> Self {
        let is_open = accept.split(',').any(|range| {
            let mut parts = range.split(';').map(str::trim);
            let is_named = parts
                .next()
                .is_some_and(|media| media.eq_ignore_ascii_case("application/openmetrics-text"));
            // A weight of 0 refuses (RFC 9110, section 12.4.2).
            is_named && !parts.any(|part| matches!(part, "q=0" | "q=0.0" | "q=0.00" | "q=0.000"))
        });
        if is_open { Self::OpenMetrics } else { Self::Prometheus }
    }

    /// Value of the `Content-Type` header.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Converts a text of OpenMetrics. There, counters and facts have a suffix that their family's name
/// lacks; here, a family is named as its samples. Units and the end have no line.
pub(crate) fn prometheus_text(open: &str) -> String {
    let mut text = String::with_capacity(open.len());
    let mut lines = open.lines().peekable();
    while let Some(line) = lines.next() {
        match line.strip_prefix("# ").map(|comment| comment.split(' ').collect::<Vec<_>>()) {
            None => push_line(&mut text, &[line]),
            Some(words) => match words.as_slice() {
                ["HELP", name, help @ ..] => {
                    let kind = lines.peek().and_then(|next| kind_of(next, name));
                    let suffix = suffix(kind.unwrap_or_default());
                    push_line(&mut text, &["# HELP ", name, suffix, " ", &help.join(" ")]);
                }
                ["TYPE", name, kind] => {
                    let shown = if *kind == "info" { "gauge" } else { kind };
                    push_line(&mut text, &["# TYPE ", name, suffix(kind), " ", shown]);
                }
                _ => {}
            },
        }
    }
    text
}

/// Type that a line gives to a family.
fn kind_of<'a>(line: &'a str, family: &str) -> Option<&'a str> {
    line.strip_prefix("# TYPE ")?.strip_prefix(family)?.strip_prefix(' ')
}

fn suffix(kind: &str) -> &'static str {
    match kind {
        "counter" => "_total",
        "info" => "_info",
        _ => "",
    }
}

fn push_line(text: &mut String, parts: &[&str]) {
    parts.iter().for_each(|part| text.push_str(part));
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn met_1_format_is_the_one_accepted() {
        let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;\
                          version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        assert_eq!(TextFormat::accepted(prometheus), TextFormat::OpenMetrics);
        for other in [
            "",
            "*/*",
            "application/openmetrics-text;q=0, text/plain",
            "text/plain",
            "text/html, application/openmetrics-texts",
        ] {
            assert_eq!(TextFormat::accepted(other), TextFormat::Prometheus, "{other}");
        }
    }

    #[test]
    fn met_1_older_format_names_samples() {
        let open = "# HELP a_seconds Some text.\n# TYPE a_seconds counter\n# UNIT a_seconds seconds\n\
                    a_seconds_total{x=\"# HELP\"} 1\n# HELP b Of b\n# TYPE b gauge\nb 2\n\
                    # HELP c Of c\n# TYPE c info\nc_info{v=\"1\"} 1\n# EOF\n";
        let text = "# HELP a_seconds_total Some text.\n# TYPE a_seconds_total counter\n\
                    a_seconds_total{x=\"# HELP\"} 1\n# HELP b Of b\n# TYPE b gauge\nb 2\n\
                    # HELP c_info Of c\n# TYPE c_info gauge\nc_info{v=\"1\"} 1\n";
        assert_eq!(prometheus_text(open), text);
    }
}
