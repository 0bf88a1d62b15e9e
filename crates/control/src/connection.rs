//! Connections of a flow, as the socket layer tells them.

use std::fmt::{self, Display};
use std::net::SocketAddr;
use std::sync::Arc;

use forebay_rx::hash::FlowHash;
use serde_json::{Value, json};

use super::flow::FlowName;

/// Finds the connections of a flow, which has this hash at present.
pub type FindConnections = Arc<dyn Fn(&FlowName, FlowHash) -> Vec<FlowConnection> + Send + Sync>;

/// Connection of a flow.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FlowConnection {
    /// Address and port of this host.
    pub local: SocketAddr,
    /// Address and port of the peer.
    pub peer: SocketAddr,
    /// State, in the words of `ss`.
    pub state: &'static str,
    /// Names and values, in the words of `ss -i`; a feature has no value.
    pub words: Vec<(&'static str, String)>,
    /// Places where bytes wait, in words.
    pub waits: Vec<String>,
}

impl FlowConnection {
    pub(super) fn document(&self) -> Value {
        let words = self.words.iter().map(|(name, value)| match value.is_empty() {
            true => ((*name).to_owned(), Value::Bool(true)),
            false => ((*name).to_owned(), Value::String(value.clone())),
        });
        json!({
            "local": self.local.to_string(),
            "peer": self.peer.to_string(),
            "state": self.state,
            "info": words.collect::<serde_json::Map<_, _>>(),
            "waits": self.waits,
        })
    }
}

impl Display for FlowConnection {
    /// Writes several lines, each with its newline.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { local, peer, state, words, waits } = self;
        writeln!(f, "connection {local}, peer {peer}: {state}")?;
        if !words.is_empty() {
            let word = |(name, value): &(&str, String)| match value.is_empty() {
                true => (*name).to_owned(),
                false => format!("{name}:{value}"),
            };
            writeln!(f, "  info:  {}", words.iter().map(word).collect::<Vec<_>>().join(" "))?;
        }
        if waits.is_empty() {
            writeln!(f, "  waits: no bytes")?;
        }
        waits.iter().try_for_each(|wait| writeln!(f, "  waits: {wait}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_30_connection_told_in_words_of_ss() {
        let connection = FlowConnection {
            local: ([10, 0, 0, 2], 80).into(),
            peer: ([10, 0, 0, 1], 5000).into(),
            state: "ESTAB",
            words: vec![("sack", String::new()), ("cwnd", "10".to_owned())],
            waits: vec!["5 bytes for the application to read them".to_owned()],
        };
        assert_eq!(
            connection.to_string(),
            "connection 10.0.0.2:80, peer 10.0.0.1:5000: ESTAB\n  info:  sack cwnd:10\n  \
             waits: 5 bytes for the application to read them\n"
        );
        assert_eq!(connection.document()["info"], json!({ "sack": true, "cwnd": "10" }));
        let idle = FlowConnection { words: Vec::new(), waits: Vec::new(), ..connection };
        assert!(idle.to_string().ends_with("ESTAB\n  waits: no bytes\n"));
    }
}
