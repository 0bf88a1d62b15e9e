//! Metrics of a run, read by promtool and scraped by Prometheus.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::Judgement;

/// Name and function of a judge, and the tool that it needs.
type MetricsJudge = (&'static str, fn() -> Judgement, &'static str);

/// All judges.
pub(crate) const TRIALS: [MetricsJudge; 5] = [
    ("met_1_promtool_accepts_a_scrape", judge_scrape, "promtool"),
    ("met_6_promtool_accepts_the_rules", judge_rules, "promtool"),
    ("met_6_ended_run_is_alerted", judge_alerts, "promtool"),
    ("met_6_prometheus_scrapes_a_run", judge_prometheus, "prometheus"),
    ("ops_5_federation_keeps_instances", judge_federation, "prometheus"),
];

/// Alert rules of this project.
const RULES: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib/prometheus/forebay.rules.yml");

/// Chapter on fleets.
const FLEETS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/guide/fleets.md");

/// Longest time until Prometheus has scraped and judged: only to end a hang.
const SCRAPE_TIME: Duration = Duration::from_secs(240);

/// Tool that is missing, if it is.
pub(crate) fn missing(tool: &str) -> Option<String> {
    let found = Command::new(tool).arg("--version").output();
    found.err().map(|error| format!("there is no {tool}: {error}"))
}

fn judge_scrape() -> Judgement {
    let run = MeasuredRun::start()?;
    // Some packets, so that no family is empty.
    while run.delivered()? == 0.0 {
        thread::yield_now();
    }
    promtool_accepts(&run.get("/metrics")?)
}

/// promtool finds no fault with a text.
pub(crate) fn promtool_accepts(text: &str) -> Judgement {
    let mut promtool = Command::new("promtool");
    promtool.args(["check", "metrics"]).stdin(Stdio::piped());
    let mut promtool = promtool.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    promtool.stdin.take().ok_or("it has no input")?.write_all(text.as_bytes())?;
    succeeded(&promtool.wait_with_output()?)
}

fn judge_rules() -> Judgement {
    succeeded(&Command::new("promtool").args(["check", "rules", RULES]).output()?)
}

/// A run that ends after five minutes is told of two minutes later, and one that goes on is not.
fn judge_alerts() -> Judgement {
    let directory = tempfile::tempdir()?;
    let test = format!(
        "rule_files: [{RULES:?}]\nevaluation_interval: 1m\ntests:\n  - interval: 1m\n    input_series:\n\
         \x20     - {{series: 'up{{job=\"forebay\", instance=\"a\"}}', values: '1x4 0x20'}}\n\
         \x20     - {{series: 'up{{job=\"forebay\", instance=\"b\"}}', values: '1x30'}}\n\
         \x20   promql_expr_test:\n\
         \x20     - expr: count by (alertname, instance) (ALERTS{{alertstate=\"firing\"}})\n\
         \x20       eval_time: 7m\n        exp_samples:\n\
         \x20         - {{labels: '{{alertname=\"ForebayRunDown\", instance=\"a\"}}', value: 1}}\n"
    );
    let file = directory.path().join("alerts.yml");
    fs::write(&file, test)?;
    succeeded(&Command::new("promtool").args(["test", "rules"]).arg(file).output()?)
}

/// Prometheus scrapes a run twice, and evaluates the alert rules on what it got.
fn judge_prometheus() -> Judgement {
    let run = MeasuredRun::start()?;
    let directory = tempfile::tempdir()?;
    let config = format!(
        "global:\n  scrape_interval: 1s\n  evaluation_interval: 1s\nrule_files: [{RULES:?}]\n\
         scrape_configs:\n  - job_name: forebay\n    static_configs:\n      - targets: [{:?}]\n",
        run.address
    );
    let file = directory.path().join("prometheus.yml");
    fs::write(&file, config)?;
    let prometheus = Prometheus::start(&file, directory.path())?;
    let delivered = "sum(forebay_packets_delivered_total)";
    let first = prometheus.wait_for(delivered, |value| value > 0.0)?;
    prometheus.wait_for(delivered, |value| value > first)?;
    prometheus.wait_for("up{job=\"forebay\"}", |value| value == 1.0)?;
    prometheus.wait_for("sum(forebay:packets_received:rate5m)", |value| value > 0.0)?;
    let rules = prometheus.ask("/api/v1/rules")?;
    let groups = rules["data"]["groups"].as_array().into_iter().flatten();
    let rules: Vec<_> =
        groups.flat_map(|group| group["rules"].as_array().into_iter().flatten()).collect();
    let unhealthy: Vec<_> = rules.iter().filter(|rule| rule["health"] != "ok").collect();
    if rules.len() < 10 || !unhealthy.is_empty() {
        return Err(format!("{} rules, of which these fail: {unhealthy:?}", rules.len()).into());
    }
    Ok(())
}

/// A Prometheus gathers two runs from another Prometheus, as the chapter on fleets says.
fn judge_federation() -> Judgement {
    let runs = [MeasuredRun::start()?, MeasuredRun::start()?];
    let directory = tempfile::tempdir()?;
    let start = |name: &str, jobs: String| {
        let own = directory.path().join(name);
        fs::create_dir(&own)?;
        let file = own.join("prometheus.yml");
        fs::write(&file, format!("global:\n  scrape_interval: 1s\nscrape_configs:\n{jobs}"))?;
        Prometheus::start(&file, &own)
    };
    let [one, other] = [&runs[0].address, &runs[1].address];
    let targets = format!("    static_configs:\n      - targets: [{one:?}, {other:?}]\n");
    let site = start("site", format!("  - job_name: forebay\n{targets}"))?;
    let targets = format!("    static_configs:\n      - targets: [{:?}]\n", site.address);
    let chapter = fs::read_to_string(FLEETS)?;
    let job =
        chapter.split("scrape_configs:\n").nth(1).and_then(|rest| rest.split("    static").next());
    let global = start("global", format!("{}{targets}", job.ok_or("the chapter has no job")?))?;
    let instances = "count(count by (instance) (forebay_packets_delivered_total))";
    global.wait_for(instances, |value| value == 2.0)?;
    for address in [one, other] {
        let own = format!("sum(forebay_packets_delivered_total{{instance={address:?}}})");
        global.wait_for(&own, |value| value > 0.0)?;
    }
    Ok(())
}

fn succeeded(output: &Output) -> Judgement {
    if output.status.success() && output.stderr.is_empty() {
        return Ok(());
    }
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    Err(format!("{}\n{}{}", output.status, text(&output.stdout), text(&output.stderr)).into())
}

/// A replay that serves metrics until dropped.
pub(crate) struct MeasuredRun {
    child: Child,
    pub(crate) address: String,
}

impl MeasuredRun {
    fn start() -> Result<Self, Box<dyn std::error::Error>> {
        Self::start_with(&["--rate", "5k"])
    }

    /// A replay with further arguments.
    pub(crate) fn start_with(args: &[&str]) -> Result<Self, Box<dyn std::error::Error>> {
        Self::of("replay", &[&["--loops", "1000000", "--metrics", "0"], args].concat())
    }

    /// A command that serves metrics, and says where.
    pub(crate) fn of(command: &str, args: &[&str]) -> Result<Self, Box<dyn std::error::Error>> {
        let mut run = Command::new(env!("CARGO_BIN_EXE_forebay"));
        run.arg(command).args(args);
        let mut child = run.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let stderr = child.stderr.take().ok_or("it has no standard error")?;
        // From here on, dropping it ends the command.
        let mut run = Self { child, address: String::new() };
        let mut told = BufReader::new(stderr);
        let mut line = String::new();
        while told.read_line(&mut line)? > 0 {
            let address = line.trim_end().strip_prefix("forebay: metrics at http://");
            if let Some((address, _)) = address.and_then(|rest| rest.split_once("/metrics")) {
                address.clone_into(&mut run.address);
                return Ok(run);
            }
            line.clear();
        }
        Err(format!("{command} {args:?} serves no metrics").into())
    }

    pub(crate) fn get(&self, path: &str) -> Result<String, Box<dyn std::error::Error>> {
        get(&self.address, path)
    }

    fn delivered(&self) -> Result<f64, Box<dyn std::error::Error>> {
        let text = self.get("/metrics")?;
        let is_delivered = |line: &&str| line.starts_with("forebay_packets_delivered_total{");
        let counts = text.lines().filter(is_delivered);
        Ok(counts.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
    }
}

impl Drop for MeasuredRun {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A Prometheus, until dropped.
pub(crate) struct Prometheus {
    child: Child,
    address: String,
}

impl Prometheus {
    pub(crate) fn start(
        config: &Path,
        directory: &Path,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        // A free port, which nobody else is likely to take before Prometheus does.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
        let mut prometheus = Command::new("prometheus");
        prometheus.arg(format!("--config.file={}", config.display()));
        prometheus.arg(format!("--storage.tsdb.path={}", directory.join("data").display()));
        prometheus.arg(format!("--web.listen-address={address}")).stdout(Stdio::null());
        let child = prometheus.stderr(Stdio::null()).spawn()?;
        Ok(Self { child, address })
    }

    fn ask(&self, path: &str) -> Result<Value, Box<dyn std::error::Error>> {
        Ok(serde_json::from_str(&get(&self.address, path)?)?)
    }

    /// Answer to an instant query.
    pub(crate) fn query(&self, expression: &str) -> Result<Value, Box<dyn std::error::Error>> {
        self.ask(&format!("/api/v1/query?query={}", encoded(expression)))
    }

    /// Value of an expression, as soon as it is as it should be.
    pub(crate) fn wait_for(
        &self,
        expression: &str,
        is_right: impl Fn(f64) -> bool,
    ) -> Result<f64, Box<dyn std::error::Error>> {
        let until = Instant::now() + SCRAPE_TIME;
        let mut last = String::new();
        while Instant::now() < until {
            match self.query(expression) {
                Ok(answer) => {
                    let value = answer["data"]["result"][0]["value"][1].as_str();
                    if let Some(value) = value.and_then(|value| value.parse().ok())
                        && is_right(value)
                    {
                        return Ok(value);
                    }
                    last = answer.to_string();
                }
                // It has not begun to listen.
                Err(error) => last = error.to_string(),
            }
            thread::sleep(Duration::from_millis(100));
        }
        Err(format!("{expression}: {last}").into())
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Body of the answer to a request.
fn get(address: &str, path: &str) -> Result<String, Box<dyn std::error::Error>> {
    let mut stream = TcpStream::connect(address)?;
    // HTTP 1.0: the body ends with the connection.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("no answer")?;
    if head.split(' ').nth(1) != Some("200") {
        return Err(format!("{path}: {head}").into());
    }
    Ok(body.to_owned())
}

/// Text in a query, with all but letters and digits encoded.
fn encoded(text: &str) -> String {
    let encode = |byte: u8| match byte {
        byte if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}
