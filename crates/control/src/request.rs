//! Requests of the control socket: lines of UTF-8, at most [`LINE_BYTES_MAX`] each.
//!
//! | request | answer, before the last line |
//! |---|---|
//! | `get KNOB` | text of the file; if the name fits several, a line `NAME VALUE` for each |
//! | `set KNOB VALUE…` | `now NAME VALUE` for each file written; `in effect: …` and `ignored CPUS: …` if the value is not in force as written |
//! | `list` | for each knob its path, value, default and meaning, with tabs between them; behind them the value as it was requested, if only a part of it is in force |
//! | `watch [KNOB]` | `NAME VALUE` now and after each change, until the client goes or sends another line |
//! | `explain FLOW` | CPU of the flow, and the reason, in words; its TCP connection in those of `ss -i`, if the run has sockets |
//! | `explain --json FLOW` | the same, one line with a JSON document |
//! | `flows` | for each flow with the most packets in a sample, `PACKETS OF_PACKETS QUEUE HASH CPU NAME` |
//! | `rfs_desired FLOWHASH CPU` | as `set`; the hash in hexadecimal, as in `deliver.csv` |
//! | `pause CPU`, `resume CPU`, `kill CPU` | nothing |
//! | `config` | the path of the config file that the run was started with |
//! | `metrics` | the metrics of the run, in the OpenMetrics format |
//!
//! The last line is `ok`, or `error ERRNO: what, why, what to do`; no other line has that form. A
//! connection takes any number of requests, one after another.
//!
//! KNOB is a path in the tree of knobs, or the end of one: `rps_cpus` stands for all queues,
//! `rx-0/rps_cpus` for the first queue of each device, `eth1/rx-0/rps_cpus` for one queue, and
//! `eth1/rps_cpus` for the queues of one device. `set` accepts the end of several paths only if all
//! are of devices. NAME is the shortest such name: `rx-0/rps_cpus` (with several devices
//! `eth1/rx-0/rps_cpus`), `cpu1/online`, `netdev_max_backlog`. VALUE is the text that `echo` would
//! write to the file: in `set KNOB=VALUE` everything behind the `=`, blanks included; otherwise
//! without the blanks around it. FLOW is a [`FlowName`].

use forebay_rx::CpuId;
use forebay_rx::hash::FlowHash;
use forebay_sys::errno::Errno;
use forebay_sys::refused::Refused;

use super::flow::FlowName;

/// Maximum length of a line, its newline included, in bytes.
pub const LINE_BYTES_MAX: usize = 4096;

/// Words of all requests.
const WORDS: &str =
    "get, set, list, watch, explain, flows, rfs_desired, pause, resume, kill, config and metrics";

/// Request of a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Request {
    /// Read a knob.
    Get(String),
    /// Write to a knob.
    Set {
        /// Name of the knob.
        knob: String,
        /// Value that is written.
        value: String,
    },
    /// List the knobs.
    List,
    /// Watch all knobs, or one, from now on.
    Watch(Option<String>),
    /// Explain a flow.
    Explain {
        /// The flow.
        flow: FlowName,
        /// True if the answer is a JSON document.
        json: bool,
    },
    /// Find the flows with the most packets.
    Flows,
    /// Record that the application of this flow runs on this CPU.
    RfsDesired(FlowHash, CpuId),
    /// Pause of a CPU, which then leaves its backlogs alone.
    Pause(CpuId),
    /// End of a CPU's pause.
    Resume(CpuId),
    /// Fault injection: a CPU's thread ends, and is replaced.
    Kill(CpuId),
    /// Path of the config file that the run was started with.
    Config,
    /// Metrics of the run, in the OpenMetrics format.
    Metrics,
}

impl Request {
    /// Parses a line.
    ///
    /// # Errors
    /// `EINVAL`, with the form that the line should have.
    pub fn parse(line: &str) -> Result<Self, Refused> {
        let line = line.trim_end_matches(['\r', '\n']).trim_start();
        let (word, rest) = split(line);
        let words: Vec<_> = rest.split_whitespace().collect();
        match (word, words.as_slice()) {
            ("get", [knob]) => Ok(Self::Get((*knob).to_owned())),
            ("get", _) => Err(form("get KNOB")),
            ("set", _) => Self::parse_set(rest),
            ("list", []) => Ok(Self::List),
            ("list", _) => Err(form("list")),
            ("watch", []) => Ok(Self::Watch(None)),
            ("watch", [knob]) => Ok(Self::Watch(Some((*knob).to_owned()))),
            ("watch", _) => Err(form("watch [KNOB]")),
            ("explain", ["--json", ..]) => Self::parse_explain(split(rest).1, true),
            ("explain", _) => Self::parse_explain(rest.trim_end(), false),
            ("flows", []) => Ok(Self::Flows),
            ("flows", _) => Err(form("flows")),
            ("rfs_desired", [flow, cpu]) => {
                Ok(Self::RfsDesired(parse_hash(flow)?, parse_cpu(cpu)?))
            }
            ("rfs_desired", _) => Err(form("rfs_desired FLOWHASH CPU")),
            ("pause", [cpu]) => parse_cpu(cpu).map(Self::Pause),
            ("pause", _) => Err(form("pause CPU")),
            ("resume", [cpu]) => parse_cpu(cpu).map(Self::Resume),
            ("resume", _) => Err(form("resume CPU")),
            ("kill", [cpu]) => parse_cpu(cpu).map(Self::Kill),
            ("kill", _) => Err(form("kill CPU")),
            ("config", []) => Ok(Self::Config),
            ("config", _) => Err(form("config")),
            ("metrics", []) => Ok(Self::Metrics),
            ("metrics", _) => Err(form("metrics")),
            _ => Err(invalid(format!("{word:?} is not a request; there are {WORDS}"))),
        }
    }

    fn parse_set(rest: &str) -> Result<Self, Refused> {
        let end = rest.find(|char: char| char == '=' || char.is_whitespace());
        let (knob, value) = rest.split_at(end.unwrap_or(rest.len()));
        if let Some(value) = value.strip_prefix('=')
            && !knob.is_empty()
        {
            return Ok(Self::Set { knob: knob.to_owned(), value: value.to_owned() });
        }
        let value = value.trim();
        let is_given = value.starts_with('=');
        let value = value.strip_prefix('=').unwrap_or(value).trim_start();
        if knob.is_empty() || value.is_empty() && !is_given {
            return Err(form("set KNOB VALUE"));
        }
        Ok(Self::Set { knob: knob.to_owned(), value: value.to_owned() })
    }

    fn parse_explain(flow: &str, json: bool) -> Result<Self, Refused> {
        let flow = flow.parse().map_err(|error: forebay_sys::Error| invalid(error.to_string()))?;
        Ok(Self::Explain { flow, json })
    }
}

/// First word of a text, and the rest.
fn split(text: &str) -> (&str, &str) {
    let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    (word, rest.trim_start())
}

fn parse_hash(text: &str) -> Result<FlowHash, Refused> {
    match text.parse() {
        Ok(FlowName::Hash(hash)) => Ok(hash),
        _ => Err(invalid(format!("{text:?} is not a flow's hash; give one such as 0badcafe"))),
    }
}

fn parse_cpu(text: &str) -> Result<CpuId, Refused> {
    let number = text.parse().map(CpuId);
    number.map_err(|_| invalid(format!("{text:?} is not a CPU; give its number")))
}

fn form(form: &str) -> Refused {
    invalid(format!("a request is missing something, or has too much; it has the form {form}"))
}

fn invalid(why: String) -> Refused {
    Refused::new(Errno::Inval, why)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn set(knob: &str, value: &str) -> Request {
        Request::Set { knob: knob.to_owned(), value: value.to_owned() }
    }

    #[test]
    fn every_request_is_read() {
        let flow: FlowName = "10.0.0.1:5 > 10.0.0.2:6".parse().unwrap();
        for (line, request) in [
            ("get rps_cpus", Request::Get("rps_cpus".to_owned())),
            (" get\trx-0/rps_cpus \r\n", Request::Get("rx-0/rps_cpus".to_owned())),
            ("set rps_cpus 3", set("rps_cpus", "3")),
            ("set rps_cpus=0-3,8", set("rps_cpus", "0-3,8")),
            ("set rps_cpus = 3 4 \n", set("rps_cpus", "3 4")),
            ("set rps_cpus=", set("rps_cpus", "")),
            ("set mtu= 1400 \r\n", set("mtu", " 1400 ")),
            ("set mtu==1400", set("mtu", "=1400")),
            ("list", Request::List),
            ("watch", Request::Watch(None)),
            ("watch mtu", Request::Watch(Some("mtu".to_owned()))),
            ("explain 10.0.0.1:5 > 10.0.0.2:6", Request::Explain { flow, json: false }),
            ("explain --json 10.0.0.1:5,10.0.0.2:6", Request::Explain { flow, json: true }),
            ("rfs_desired 0badcafe 3", Request::RfsDesired(FlowHash(0x0bad_cafe), CpuId(3))),
            ("pause 1", Request::Pause(CpuId(1))),
            ("resume 1", Request::Resume(CpuId(1))),
            ("kill 1", Request::Kill(CpuId(1))),
            ("config", Request::Config),
            ("flows", Request::Flows),
            ("metrics", Request::Metrics),
        ] {
            assert_eq!(Request::parse(line), Ok(request), "{line:?}");
        }
    }

    #[test]
    fn non_request_error_lists_requests() {
        for (line, why) in [
            ("", WORDS),
            ("GET rps_cpus", WORDS),
            ("ok", WORDS),
            ("get", "get KNOB"),
            ("get a b", "get KNOB"),
            ("set", "set KNOB VALUE"),
            ("set rps_cpus", "set KNOB VALUE"),
            ("set =3", "set KNOB VALUE"),
            ("list all", "the form list"),
            ("watch a b", "watch [KNOB]"),
            ("explain", "it takes two addresses, not 0"),
            ("explain --json", "it takes two addresses, not 0"),
            ("explain 0", "0 is not a flow's hash"),
            ("rfs_desired 0badcafe", "rfs_desired FLOWHASH CPU"),
            ("rfs_desired 0 1", "not a flow's hash"),
            ("rfs_desired 10.0.0.1 1", "not a flow's hash"),
            ("rfs_desired 0badcafe x", "\"x\" is not a CPU"),
            ("pause", "pause CPU"),
            ("pause 65536", "\"65536\" is not a CPU"),
            ("kill -1", "\"-1\" is not a CPU"),
            ("metrics all", "the form metrics"),
        ] {
            let refused = Request::parse(line).unwrap_err();
            assert_eq!(refused.errno, Errno::Inval, "{line}");
            assert!(refused.why.contains(why), "{line}: {refused}");
        }
    }

    proptest! {
        /// Values are written to the file verbatim, blanks included.
        #[test]
        fn rps_8_value_is_stored_verbatim(value in "[ \t0-9a-fx,=+-]{0,12}|[^\r\n]{0,12}") {
            prop_assert_eq!(Request::parse(&format!("set mtu={value}\n")), Ok(set("mtu", &value)));
        }

        #[test]
        fn promise_5_no_line_panics(
            line in "(get|set|watch|explain|explain --json|rfs_desired|pause)?[ -~]{0,30}|\\PC{0,40}",
        ) {
            if let Err(refused) = Request::parse(&line) {
                prop_assert!(!refused.why.contains('\n'), "an answer is one line: {refused}");
            }
        }
    }
}
