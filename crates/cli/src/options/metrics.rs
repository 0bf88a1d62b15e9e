//! Options of metrics.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use clap::Args;
use forebay_metrics::{Metrics, MetricsServer, PageToken, ServerAccess};
use tracing::info;

use crate::failure::Failure;

/// Options of the server of metrics.
#[derive(Debug, Args)]
pub(crate) struct MetricsOptions {
    /// Serve metrics there for Prometheus, at /metrics, and a page for browsers, at /: PORT of
    /// 127.0.0.1, or ADDR:PORT for other machines too
    #[arg(long, value_name = "ADDR", value_parser = address)]
    pub(crate) metrics: Option<SocketAddr>,

    /// A name by which clients reach that server, besides its addresses and localhost; repeatable
    #[arg(long, value_name = "NAME", requires = "metrics")]
    pub(crate) metrics_host: Vec<String>,

    /// Let those who have the token in FILE change knobs on that server's page; without it they are
    /// read-only
    #[arg(long, value_name = "FILE", requires = "metrics")]
    pub(crate) page_token: Option<PathBuf>,
}

impl MetricsOptions {
    /// Reads the token, if there is one. To be called with the privileges that the run begins with.
    pub(crate) fn access(&self) -> Result<ServerAccess, Failure> {
        let page_token = self.page_token.as_deref().map(PageToken::read).transpose()?;
        Ok(ServerAccess { hosts: self.metrics_host.clone(), page_token })
    }

    /// Starts the server, if one was asked for. Dropping it ends the server.
    pub(crate) fn serve(
        &self,
        access: &ServerAccess,
        metrics: impl FnOnce() -> Metrics,
    ) -> Result<Option<MetricsServer>, Failure> {
        let Some(address) = self.metrics else { return Ok(None) };
        let server = MetricsServer::bind(address, access, metrics())?;
        let address = server.address();
        info!(%address, "metrics at http://{address}/metrics, a page at http://{address}/");
        Ok(Some(server))
    }
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let port = text.strip_prefix(':').unwrap_or(text);
    if let Ok(port) = port.parse() {
        return Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
    }
    text.parse().map_err(|_| "it is PORT, or ADDR:PORT as in 0.0.0.0:9464 or [::]:9464".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn met_3_port_alone_is_loopback() {
        let read = |text: &str| address(text).map(|address| address.to_string());
        for text in ["9464", ":9464", "127.0.0.1:9464"] {
            assert_eq!(read(text), Ok("127.0.0.1:9464".to_owned()), "{text}");
        }
        assert_eq!(read("[::]:1"), Ok("[::]:1".to_owned()));
        for text in ["", "localhost:9464", "10.0.0.1", "65536", "::1", "-1"] {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
