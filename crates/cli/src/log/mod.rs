//! The program's messages: events of `tracing`, on standard error or in the journal.
//!
//! Libraries of this workspace print nothing. They return errors, and keep failures of a run for
//! whoever reports them.

mod limit; // rate limit of messages
mod text; //  messages for people

use std::io;
use std::sync::{LazyLock, OnceLock};
use std::time::Duration;

use limit::{MessageLimit, Suppressed};
use text::PlainText;
use tracing::warn;
use tracing_subscriber::filter::{FilterExt, Targets};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::Registry;

use crate::failure::Failure;
use crate::options::log::{LogFormat, LogOptions};
use crate::ticker::Ticker;

/// Interval between two reports of suppressed messages.
const SUPPRESSED_PERIOD: Duration = Duration::from_secs(1);

/// First part of the targets whose events are messages. Those of dependencies are not.
const TARGET: &str = "forebay";

/// Target of the reports of suppressed messages, and of nothing else.
const REPORTS_TARGET: &str = module_path!();

/// First part of the names of fields in the journal.
const FIELD_PREFIX: &str = "FOREBAY";

/// Limit of the messages of this process.
static LIMIT: LazyLock<MessageLimit> = LazyLock::new(MessageLimit::default);

/// Form of the messages of this process; unset before [`begin`].
static FORMAT: OnceLock<LogFormat> = OnceLock::new();

/// Prints events from now on, as these options say.
///
/// # Errors
/// If the journal cannot be reached.
pub(crate) fn begin(options: &LogOptions) -> Result<(), Failure> {
    let level = options.log_level.filter();
    let shown = Targets::new().with_target(TARGET, level).and(&*LIMIT);
    let layer = layer(options.log)?.with_filter(shown);
    // Refused only if a process calls this function twice.
    let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry().with(layer));
    let _ = FORMAT.set(options.log);
    Ok(())
}

/// True if messages are printed for people.
pub(crate) fn is_for_people() -> bool {
    FORMAT.get().is_none_or(|format| *format == LogFormat::Text)
}

fn layer(format: LogFormat) -> Result<Box<dyn Layer<Registry> + Send + Sync>, Failure> {
    // A failure to write to standard error must not end a run, so it is not reported there.
    let stderr = tracing_subscriber::fmt::layer().with_writer(io::stderr);
    Ok(match format {
        LogFormat::Text => stderr.event_format(PlainText).log_internal_errors(false).boxed(),
        LogFormat::Json => {
            let json = stderr.json().flatten_event(true).log_internal_errors(false);
            json.with_current_span(false).with_span_list(false).boxed()
        }
        LogFormat::Journald => {
            let journal = tracing_journald::layer().map_err(|error| {
                let problem = format!("--log journald: the journal cannot be reached: {error}");
                Failure::usage(problem, "check that systemd-journald runs, or give text or json")
            })?;
            let journal = journal.with_syslog_identifier(TARGET.to_owned());
            journal.with_field_prefix(Some(FIELD_PREFIX.to_owned())).boxed()
        }
    })
}

/// Limit of messages while a run lasts, and reporter of those suppressed. Dropping it reports the
/// last ones.
pub(crate) struct SuppressedReports(Option<Ticker>);

impl SuppressedReports {
    /// Begins to limit messages.
    pub(crate) fn begin() -> Result<Self, Failure> {
        let tell = || log_suppressed(LIMIT.take_ended());
        let ticker = Ticker::every(SUPPRESSED_PERIOD, "counts suppressed messages", tell)?;
        LIMIT.set_on(true);
        Ok(Self(Some(ticker)))
    }
}

impl Drop for SuppressedReports {
    fn drop(&mut self) {
        drop(self.0.take());
        LIMIT.set_on(false);
        log_suppressed(LIMIT.take_all());
    }
}

fn log_suppressed(suppressed: Suppressed) {
    for (message, times) in suppressed.same {
        warn!(
            target: REPORTS_TARGET,
            suppressed = times,
            "{times} times more within a second: {message}"
        );
    }
    if suppressed.others > 0 {
        let others = suppressed.others;
        warn!(
            target: REPORTS_TARGET,
            suppressed = others,
            "{others} further messages within a second are left out"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::{Arc, Mutex};

    use tracing::{Event, Subscriber};
    use tracing_subscriber::layer::Context;

    use super::text::message_of;
    use super::*;

    /// Layer that keeps messages.
    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<String>>>);

    impl<S: Subscriber> Layer<S> for Kept {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            self.0.lock().unwrap().push(message_of(event));
        }
    }

    #[test]
    fn ops_1_reports_are_told_above_limit() {
        let (kept, limit) = (Kept::default(), Box::leak(Box::<MessageLimit>::default()));
        limit.set_on(true);
        let layer = kept.clone().with_filter(&*limit);
        let subscriber = tracing_subscriber::registry().with(layer);
        let printed = || kept.0.lock().unwrap().len();
        tracing::subscriber::with_default(subscriber, || {
            for number in 0..1_000 {
                warn!("{number}");
            }
            let before = printed();
            let same: HashMap<_, _> = (0..50).map(|number| (number.to_string(), 1)).collect();
            for _ in 0..10 {
                log_suppressed(Suppressed { same: same.clone(), others: 7 });
            }
            assert_eq!((before < 1_000, printed() - before), (true, 10 * 51));
        });
    }
}
