//! Answers to requests.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_sys::random_key;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CACHE_CONTROL, CONTENT_TYPE, HOST, HeaderName, HeaderValue};
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use crate::format::TextFormat;
use crate::host;
use crate::metrics::Metrics;
use crate::page::{self, Api, ApiAnswer, BODY_BYTES_MAX, PageToken};

/// Upper bound of the questions that queues answer at once; further ones are refused.
pub(crate) const QUESTIONS_MAX: usize = 2;

/// Age up to which a text is sent again, so that many requests cost little.
const TEXT_AGE: Duration = Duration::from_millis(100);

/// Age up to which the map of hash ranges is sent again, and the list of knobs: making the former takes
/// a moment of every queue, the latter files of the machine.
const ANSWER_AGE: Duration = Duration::from_millis(500);

type Answer = Response<Full<Bytes>>;

/// Reason for refusing a request, with its status.
type Refusal = (StatusCode, &'static str);

/// Answers requests.
pub(crate) struct Responder {
    metrics: Metrics,
    /// Name of this run, which no other has.
    run: String,
    access: Access,
    last: Mutex<KeptTexts>,
    /// Permits of the questions that are being answered, even if nobody waits for the answer any more.
    questions: Arc<Semaphore>,
}

/// Names that clients use, and what they may do.
pub(crate) struct Access {
    pub(crate) hosts: Vec<String>,
    pub(crate) token: Option<PageToken>,
    /// True if only processes of this machine reach the server, and no proxy is expected.
    pub(crate) is_local: bool,
}

/// Last texts, by what they are of.
#[derive(Default)]
struct KeptTexts {
    texts: Vec<KeptText>,
    /// Number of times that texts were forgotten. What began to be made before is not kept.
    forgotten: u64,
}

/// Text of an answer, sent again while it is recent.
struct KeptText {
    of: TextOf,
    text: Bytes,
    made: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum TextOf {
    Metrics(TextFormat),
    /// Counters; true with the peers of connections.
    State(bool),
    Map,
    Knobs,
}

impl TextOf {
    fn age_max(self) -> Duration {
        match self {
            Self::Metrics(_) | Self::State(_) => TEXT_AGE,
            Self::Map | Self::Knobs => ANSWER_AGE,
        }
    }
}

impl Responder {
    pub(crate) fn new(metrics: Metrics, access: Access) -> Self {
        let questions = Arc::new(Semaphore::new(QUESTIONS_MAX));
        let run = format!("{:032x}", u128::from_ne_bytes(random_key()));
        Self { metrics, run, access, last: Mutex::default(), questions }
    }

    /// Answers a request, and sets `is_whole` once all of it is there. No answer is for other sites'
    /// pages.
    pub(crate) async fn answer(&self, request: Request<Incoming>, is_whole: &AtomicBool) -> Answer {
        is_whole.store(request.body().is_end_stream(), Ordering::Relaxed);
        let mut answer = self.answer_to(request, is_whole).await;
        is_whole.store(true, Ordering::Relaxed);
        page::protect(answer.headers_mut());
        answer
    }

    async fn answer_to(&self, request: Request<Incoming>, is_whole: &AtomicBool) -> Answer {
        let headers = request.headers();
        if headers.get_all(HOST).iter().count() != 1 {
            return plain(StatusCode::BAD_REQUEST, "a request has one Host header\n");
        }
        // The authority of an absolute target counts instead of the header (RFC 9112, 3.2.2): here both do.
        let target = request.uri().scheme().and(request.uri().authority());
        let names = [text_of(headers, HOST), target.map(|target| target.as_str())];
        let is_allowed = |host| host::is_allowed(host, &self.access.hosts);
        if names[0].is_none() || !names.into_iter().flatten().all(is_allowed) {
            let why = "this server is reached by an address, localhost, or a name allowed by --metrics-host\n";
            return plain(StatusCode::MISDIRECTED_REQUEST, why);
        }
        let (method, path) = (request.method(), request.uri().path());
        if let Some(api) = Api::of(path) {
            if !api.takes(method) {
                return not_allowed(api.methods());
            }
            return self.answer_api(api, request, is_whole).await;
        }
        if ![Method::GET, Method::HEAD].contains(method) {
            return not_allowed("GET, HEAD");
        }
        match path {
            "/metrics" => {
                let format = TextFormat::accepted(text_of(headers, ACCEPT).unwrap_or_default());
                let make = || Bytes::from(self.metrics.text(format));
                let text = self.kept_or(TextOf::Metrics(format), make);
                response(StatusCode::OK, format.content_type(), text)
            }
            "/healthz" => plain(StatusCode::OK, "ok\n"),
            _ => match page::file(path) {
                Some(file) => {
                    let text = Bytes::from_static(file.text.as_bytes());
                    response(StatusCode::OK, file.content_type, text)
                }
                None => plain(StatusCode::NOT_FOUND, "there are /, /metrics and /healthz\n"),
            },
        }
    }

    /// Answers a question of the page, or makes a change.
    async fn answer_api(
        &self,
        api: Api,
        request: Request<Incoming>,
        is_whole: &AtomicBool,
    ) -> Answer {
        let headers = request.headers();
        if page::is_of_other_site(headers) {
            return error(StatusCode::FORBIDDEN, "another site's page made this request");
        }
        let Some(control) = self.metrics.control.clone() else {
            return error(StatusCode::NOT_FOUND, "this server has no engine");
        };
        match api {
            Api::State => {
                // Peers are told to those who may search for their flows.
                let shows_peers = self.may_search(headers).is_ok();
                let make = || {
                    let mut state = page::state(&self.metrics, shows_peers);
                    state["run"] = self.run.as_str().into();
                    text(&state)
                };
                let text = self.kept_or(TextOf::State(shows_peers), make);
                response(StatusCode::OK, "application/json", text)
            }
            Api::Knobs => {
                let may_set = self.access.token.is_some();
                self.kept_or_ask(TextOf::Knobs, move || page::knobs(&control, may_set)).await
            }
            Api::Map => self.kept_or_ask(TextOf::Map, move || page::map(&control)).await,
            Api::Explain => {
                if let Err((status, why)) = self.may_search(headers) {
                    return error(status, why);
                }
                let query = request.uri().query().unwrap_or_default().to_owned();
                self.ask(move || page::explain(&control, &query)).await
            }
            Api::Set => {
                if let Err((status, why)) = self.may_set(headers) {
                    return error(status, why);
                }
                match Limited::new(request.into_body(), BODY_BYTES_MAX).collect().await {
                    Ok(body) => {
                        is_whole.store(true, Ordering::Relaxed);
                        let body = body.to_bytes();
                        let answer = self.ask(move || page::set(&control, &body)).await;
                        // Who has changed a knob sees its value.
                        self.forget(TextOf::Knobs);
                        answer
                    }
                    Err(_) => {
                        error(StatusCode::PAYLOAD_TOO_LARGE, "the body is too long, or broken off")
                    }
                }
            }
        }
    }

    /// Refuses the search for flows to those who may not learn their hashes: such a client could aim
    /// flows at one CPU.
    fn may_search(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        match &self.access.token {
            Some(token) if page::is_token_given(headers, token) => Ok(()),
            Some(_) => Err((StatusCode::FORBIDDEN, "a search for flows takes the token")),
            None if self.access.is_local && !page::is_forwarded(headers) => Ok(()),
            None => Err((
                StatusCode::FORBIDDEN,
                "flows are searched on this machine only, or with --page-token",
            )),
        }
    }

    fn may_set(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let Some(token) = &self.access.token else {
            return Err((
                StatusCode::FORBIDDEN,
                "knobs are read-only: the run was started without --page-token",
            ));
        };
        if !page::is_same_origin(headers) {
            return Err((StatusCode::FORBIDDEN, "only this server's page may change knobs"));
        }
        if !page::is_token_given(headers, token) {
            return Err((StatusCode::FORBIDDEN, "the token is missing or wrong"));
        }
        if text_of(headers, CONTENT_TYPE) != Some("application/json") {
            return Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, "the body must be JSON"));
        }
        Ok(())
    }

    /// Answer that takes time: queues are asked, or files read.
    async fn ask(&self, ask: impl FnOnce() -> ApiAnswer + Send + 'static) -> Answer {
        let Ok(permit) = Arc::clone(&self.questions).try_acquire_owned() else {
            return error(StatusCode::SERVICE_UNAVAILABLE, "other questions are being answered");
        };
        // The question goes on if the connection ends, and keeps its permit until then.
        let ask = move || {
            let answer = ask();
            drop(permit);
            answer
        };
        match spawn_blocking(ask).await {
            Ok((status, document)) => response(status, "application/json", text(&document)),
            Err(_) => error(StatusCode::INTERNAL_SERVER_ERROR, "this is a bug: please report it"),
        }
    }

    /// Last answer if it is recent, or a new one that takes time.
    async fn kept_or_ask(
        &self,
        of: TextOf,
        ask: impl FnOnce() -> ApiAnswer + Send + 'static,
    ) -> Answer {
        match self.kept(of) {
            Some(text) => response(StatusCode::OK, "application/json", text),
            None => {
                let forgotten = self.last().forgotten;
                let answer = self.ask(ask).await;
                self.keep_body(of, answer, forgotten).await
            }
        }
    }

    /// Last text, or a new one.
    fn kept_or(&self, of: TextOf, make: impl FnOnce() -> Bytes) -> Bytes {
        let forgotten = self.last().forgotten;
        let text = self.kept(of).unwrap_or_else(make);
        self.keep(of, text.clone(), forgotten);
        text
    }

    /// Last text, if it is recent.
    fn kept(&self, of: TextOf) -> Option<Bytes> {
        let texts = &mut self.last().texts;
        texts.retain(|kept| kept.made.elapsed() < kept.of.age_max());
        texts.iter().find(|kept| kept.of == of).map(|kept| kept.text.clone())
    }

    fn forget(&self, of: TextOf) {
        let mut last = self.last();
        last.texts.retain(|kept| kept.of != of);
        last.forgotten += 1;
    }

    /// Keeps a text, unless a recent one is kept, or texts were forgotten after it began to be made.
    fn keep(&self, of: TextOf, text: Bytes, forgotten: u64) {
        let mut last = self.last();
        if last.forgotten == forgotten && last.texts.iter().all(|kept| kept.of != of) {
            last.texts.push(KeptText { of, text, made: Instant::now() });
        }
    }

    fn last(&self) -> MutexGuard<'_, KeptTexts> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the text of an answer, if it is a good one.
    async fn keep_body(&self, of: TextOf, answer: Answer, forgotten: u64) -> Answer {
        let (parts, body) = answer.into_parts();
        let Ok(body) = body.collect().await.map(|body| body.to_bytes());
        if parts.status == StatusCode::OK {
            self.keep(of, body.clone(), forgotten);
        }
        Response::from_parts(parts, Full::new(body))
    }
}

fn text_of(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok())
}

fn text(document: &Value) -> Bytes {
    Bytes::from(document.to_string())
}

fn error(status: StatusCode, why: &str) -> Answer {
    response(status, "application/json", text(&json!({ "error": why })))
}

fn not_allowed(methods: &'static str) -> Answer {
    let text = Bytes::from(format!("only {}\n", methods.replace(", ", " and ")));
    let mut response = response(StatusCode::METHOD_NOT_ALLOWED, "text/plain; charset=utf-8", text);
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    response
}

fn plain(status: StatusCode, text: &'static str) -> Answer {
    response(status, "text/plain; charset=utf-8", Bytes::from_static(text.as_bytes()))
}

fn response(status: StatusCode, content_type: &'static str, text: Bytes) -> Answer {
    let mut response = Response::new(Full::new(text));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    let nosniff = HeaderValue::from_static("nosniff");
    headers.insert(hyper::header::X_CONTENT_TYPE_OPTIONS, nosniff);
    response
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn responder() -> Responder {
        let access = Access { hosts: Vec::new(), token: None, is_local: true };
        Responder::new(Metrics::new(), access)
    }

    /// A listing that began before a change is not sent to others after it.
    #[test]
    fn pag_3_earlier_list_is_not_kept() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let responder = Arc::new(responder());
            let (release, waits) = mpsc::channel::<()>();
            let (begins, begun) = mpsc::channel();
            let listing = move || {
                begins.send(()).unwrap();
                waits.recv().unwrap();
                (StatusCode::OK, json!({ "value": "old" }))
            };
            let asked = Arc::clone(&responder);
            let client =
                tokio::spawn(async move { asked.kept_or_ask(TextOf::Knobs, listing).await });
            while begun.try_recv().is_err() {
                tokio::task::yield_now().await;
            }
            responder.forget(TextOf::Knobs);
            release.send(()).unwrap();
            assert_eq!(client.await.unwrap().status(), StatusCode::OK);
            assert_eq!(responder.kept(TextOf::Knobs), None);
            let listing = || (StatusCode::OK, json!({ "value": "new" }));
            responder.kept_or_ask(TextOf::Knobs, listing).await;
            assert_eq!(responder.kept(TextOf::Knobs), Some(text(&json!({ "value": "new" }))));
        });
    }

    /// Connections that are ended early do not let in more questions than there are permits.
    #[test]
    fn pag_6_ended_connections_keep_places() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let responder = Arc::new(responder());
            let mut releases = Vec::new();
            for _ in 0..QUESTIONS_MAX {
                let (release, waits) = mpsc::channel::<()>();
                releases.push(release);
                let question = move || {
                    // An error ends the wait as well.
                    let _ = waits.recv();
                    (StatusCode::OK, json!({}))
                };
                let asked = Arc::clone(&responder);
                let connection = tokio::spawn(async move { asked.ask(question).await });
                tokio::task::yield_now().await;
                connection.abort();
                assert!(connection.await.unwrap_err().is_cancelled());
            }
            let ask = || responder.ask(|| (StatusCode::OK, json!({})));
            assert_eq!(ask().await.status(), StatusCode::SERVICE_UNAVAILABLE);
            drop(releases);
            while ask().await.status() != StatusCode::OK {
                tokio::task::yield_now().await;
            }
        });
    }
}
