//! Names by which a server may be reached. A page in a browser can make its own name mean the
//! address of this machine (DNS rebinding), and then read the answers; the `Host` header gives it
//! away.

use std::net::IpAddr;

/// True if a request with this `Host` header may be answered: it has an address, `localhost`, or a
/// name that was allowed.
pub(crate) fn is_allowed(host: &str, allowed: &[String]) -> bool {
    let Some(name) = name_of(host) else { return false };
    let is_named = |known: &str| known.eq_ignore_ascii_case(name);
    let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    address.parse::<IpAddr>().is_ok()
        || is_named("localhost")
        || allowed.iter().any(|known| is_named(known))
}

/// Name in a `Host` header, without the port; `None` if the header is malformed.
fn name_of(host: &str) -> Option<&str> {
    let end = match host.strip_prefix('[') {
        Some(rest) => rest.find(']')? + 2,
        None => host.find(':').unwrap_or(host.len()),
    };
    let (name, port) = host.split_at(end);
    let is_port = |port: &str| port.parse::<u16>().is_ok();
    (port.is_empty() || port.strip_prefix(':').is_some_and(is_port)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn met_3_foreign_host_name_is_refused() {
        let allowed = ["metrics.example".to_owned()];
        for host in [
            "127.0.0.1:9464",
            "127.0.0.1",
            "[::1]:9464",
            "[fe80::1]",
            "localhost",
            "LOCALHOST:1",
            "metrics.example:9464",
            "Metrics.Example",
        ] {
            assert!(is_allowed(host, &allowed), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:9464",
            "evil.example:127",
            "metrics.example.",
            "127.0.0.1:port",
            "127.0.0.1:65536",
            "[::1",
            "[::1]9464",
            "localhost:1:2",
        ] {
            assert!(!is_allowed(host, &allowed), "{host}");
        }
        assert!(!is_allowed("metrics.example", &[]));
    }
}
