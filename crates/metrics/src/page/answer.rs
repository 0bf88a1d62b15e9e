//! Answers about a run, and changes of its knobs, as the page asks for them.

use forebay::Control;
use forebay_control::explain::explain as explained;
use forebay_control::list::list;
use forebay_control::names::Names;
use forebay_engine::QueueRanges;
use forebay_sys::refused::Refused;
use hyper::StatusCode;
use serde_json::{Value, json};

use super::BODY_BYTES_MAX;

/// Answer to a question: its status, and a document.
pub(crate) type ApiAnswer = (StatusCode, Value);

/// All knobs; `may_set` is true if they can be changed on the page.
pub(crate) fn knobs(control: &Control, may_set: bool) -> ApiAnswer {
    let listed = list(control);
    let paths: Vec<_> = listed.iter().map(|knob| knob.path.as_str()).collect();
    let names = Names::of(&paths);
    let knobs = listed.iter().map(|knob| {
        json!({
            "name": names.short(&knob.path),
            "path": knob.path,
            "value": knob.value,
            "default": knob.default,
            "meaning": knob.meaning,
        })
    });
    (StatusCode::OK, json!({ "may_set": may_set, "knobs": knobs.collect::<Vec<_>>() }))
}

/// CPUs of all hash values: for each queue, runs of ranges with one CPU and one reason.
pub(crate) fn map(control: &Control) -> ApiAnswer {
    match control.hash_ranges() {
        Ok(queues) => {
            let queues: Vec<_> = queues.iter().map(ranges).collect();
            (StatusCode::OK, json!({ "queues": queues }))
        }
        Err(refused) => refusal(&refused),
    }
}

fn ranges(queue: &QueueRanges) -> Value {
    let mut first = 0;
    let runs = queue.desired.chunk_by(|one, next| one == next).map(|run| {
        let from = first;
        first += run.len();
        json!({
            "from": from,
            "ranges": run.len(),
            "cpu": run[0].0.0,
            "because": run[0].1.name(),
        })
    });
    let runs: Vec<_> = runs.collect();
    json!({
        "queue": queue.name,
        "polling_cpu": queue.polling_cpu.0,
        "ranges": queue.desired.len(),
        "runs": runs,
    })
}

/// Explanation of the flow that `query` names as `flow=NAME`.
pub(crate) fn explain(control: &Control, query: &str) -> ApiAnswer {
    let mut pairs = form_urlencoded::parse(query.as_bytes());
    let Some((_, name)) = pairs.find(|(name, _)| name == "flow") else {
        return bad("the request has no flow; it is /api/explain?flow=NAME");
    };
    let name = match name.parse() {
        Ok(name) => name,
        Err(error) => return bad(&format!("{error}")),
    };
    match explained(control, &name) {
        Ok(explanation) => {
            let text = explanation.to_string();
            (StatusCode::OK, json!({ "text": text, "explanation": explanation.document() }))
        }
        Err(refused) => refusal(&refused),
    }
}

/// Writes a knob, as the body says: `{"knob": NAME, "value": TEXT}`.
pub(crate) fn set(control: &Control, body: &[u8]) -> ApiAnswer {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    let (Some(knob), Some(value)) = (body["knob"].as_str(), body["value"].as_str()) else {
        return bad("the body is not {\"knob\": NAME, \"value\": TEXT}");
    };
    debug_assert!(knob.len() + value.len() <= BODY_BYTES_MAX, "they were in the body");
    match control.set_and_report(knob, value) {
        Ok(lines) => (StatusCode::OK, json!({ "lines": lines })),
        Err(refused) => refusal(&refused),
    }
}

fn refusal(refused: &Refused) -> ApiAnswer {
    (StatusCode::UNPROCESSABLE_ENTITY, json!({ "error": refused.to_string() }))
}

fn bad(why: &str) -> ApiAnswer {
    (StatusCode::BAD_REQUEST, json!({ "error": why }))
}
