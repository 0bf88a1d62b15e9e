//! Queries of the dashboard, answered by a Prometheus.

use std::collections::BTreeSet;
use std::fs;
use std::net::UdpSocket;

use libtest_mimic::Failed;
use serde_json::Value;

use crate::Judgement;
use crate::live::Judge;
use crate::live::sockets::Program;
use crate::metrics::{MeasuredRun, Prometheus};

pub(crate) const TRIALS: [Judge; 1] = [("met_6_every_panel_has_data", judge)];

const DASHBOARD: &str = include_str!("../../../../../contrib/grafana/forebay.json");

/// A Prometheus scrapes a program with sockets and a run with a destination. Each query of each panel
/// has values of them.
fn judge() -> Judgement {
    let program = Program::start()?;
    let directory = tempfile::tempdir()?;
    let to = format!("pcap:{}", directory.path().join("seen").display());
    let fixed = ["lo", "--via", "af_packet", "--take", "udp:9", "--no-control", "--metrics", "0"];
    let run = MeasuredRun::of("run", &[&fixed[..], &["--to", &to]].concat())?;
    UdpSocket::bind("127.0.0.1:0")?.send_to(b"one", "127.0.0.1:9")?;
    let config = format!(
        "global:\n  scrape_interval: 1s\nscrape_configs:\n  - job_name: forebay\n    \
         static_configs:\n      - targets: [{:?}, {:?}]\n",
        run.address,
        program.server.address().to_string(),
    );
    let file = directory.path().join("prometheus.yml");
    fs::write(&file, config)?;
    let prometheus = Prometheus::start(&file, directory.path())?;
    // A rate takes two samples of both.
    let sampled = "min(count_over_time(forebay_build_info[5m])) * (count(up) == bool 2)";
    prometheus.wait_for(sampled, |value| value >= 2.0)?;
    let queries = queries()?;
    let empty = queries.iter().filter_map(|(panel, query)| {
        let answer = prometheus.query(query);
        let is_there = answer.as_ref().is_ok_and(|answer| {
            answer["status"] == "success"
                && answer["data"]["result"].as_array().is_some_and(|values| !values.is_empty())
        });
        (!is_there).then(|| format!("{panel}: {query}: {answer:?}"))
    });
    let empty: Vec<_> = empty.collect();
    if empty.is_empty() { Ok(()) } else { Err(empty.join("\n").into()) }
}

/// Panels and their queries, with the dashboard's variables set, and without the filter that hides
/// what did not happen.
fn queries() -> Result<Vec<(String, String)>, Failed> {
    let dashboard: Value = serde_json::from_str(DASHBOARD)?;
    let mut queries = Vec::new();
    let mut silent = BTreeSet::new();
    for panel in dashboard["panels"].as_array().into_iter().flatten() {
        let title = panel["title"].as_str().unwrap_or_default().to_owned();
        if panel["type"] != "row" {
            silent.insert(title.clone());
        }
        for target in panel["targets"].as_array().into_iter().flatten() {
            let query = target["expr"].as_str().ok_or("a target without a query")?;
            let query = query.replace("$__rate_interval", "1m").replace("$instance", ".*");
            let query = query.strip_suffix(" > 0").unwrap_or(&query).to_owned();
            silent.remove(&title);
            queries.push((title.clone(), query));
        }
    }
    if !silent.is_empty() || queries.len() < 20 {
        return Err(format!("{} queries; none for {silent:?}", queries.len()).into());
    }
    Ok(queries)
}
