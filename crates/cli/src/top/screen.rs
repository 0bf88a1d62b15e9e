//! Loop of the screen: keys and answers in, pictures out. However it ends, the terminal is as it was
//! before.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_control::FlowName;
use forebay_sys::terminal::{TerminalInput, input_within};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::keys;
use super::model::{History, Model};
use super::sampler::{Ask, Sampler, Told};
use super::state::{Action, Effect, ViewState};
use super::view::{Palette, View};
use crate::failure::Failure;
use crate::signals::on_first_signal;

/// Interval between two looks for answers and signals.
const LOOK_PERIOD: Duration = Duration::from_millis(50);

/// Longest time without a new picture.
const DRAW_PERIOD: Duration = Duration::from_secs(1);

/// Reason for the end of the loop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// A key or a signal.
    Asked,
    /// The run has ended.
    OfRun,
}

/// State of the screen.
pub(super) struct Screen {
    name: String,
    sampler: Sampler,
    history: History,
    model: Option<Model>,
    state: ViewState,
    palette: Palette,
    /// Age of a sample beyond which the run does not answer as it should.
    late: Duration,
}

impl Screen {
    /// Screen of a run with this name, which follows `flow`.
    pub(super) fn new(
        name: String,
        sampler: Sampler,
        flow: Option<FlowName>,
        palette: Palette,
        interval: Duration,
    ) -> Self {
        let state = ViewState { flow: flow.map(|flow| (flow, Vec::new())), ..ViewState::default() };
        sampler.ask(Ask::Follow(flow));
        let late = 2 * interval + Duration::from_secs(1);
        Self { name, sampler, history: History::default(), model: None, state, palette, late }
    }

    /// Shows the run until a key, a signal, or the end of the run.
    pub(super) fn show(mut self) -> Result<End, Failure> {
        let asked = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&asked);
        // A later signal ends the program, if the loop hangs.
        on_first_signal([SIGTERM, SIGINT, SIGHUP].into_iter(), move || {
            told.store(true, Ordering::Relaxed);
        })?;
        let unusable = |error| Failure::Output { error };
        let mut terminal = RestoredTerminal(ratatui::try_init().map_err(unusable)?);
        self.run(&mut terminal.0, &asked).map_err(unusable)
    }

    fn run(&mut self, terminal: &mut DefaultTerminal, asked: &AtomicBool) -> io::Result<End> {
        let mut drawn: Option<Instant> = None;
        loop {
            let mut is_new = drawn.is_none_or(|drawn| drawn.elapsed() >= DRAW_PERIOD);
            while let Some(told) = self.sampler.next() {
                if matches!(told, Told::Ended) {
                    return Ok(End::OfRun);
                }
                self.hear(told);
                is_new = true;
            }
            if is_new {
                terminal.draw(|frame| frame.render_widget(self.view(), frame.area()))?;
                drawn = Some(Instant::now());
            }
            if asked.load(Ordering::Relaxed) {
                return Ok(End::Asked);
            }
            match event_within(LOOK_PERIOD)? {
                TerminalInput::Nothing => continue,
                TerminalInput::HungUp => return Ok(End::Asked),
                TerminalInput::Ready => {}
            }
            // Any event may change the picture.
            drawn = None;
            if let Event::Key(key) = event::read()?
                && let Some(action) = keys::action(key, &self.state)
                && let Some(effect) = self.apply(action)
                && !self.carry_out(effect)
            {
                return Ok(End::Asked);
            }
        }
    }

    fn apply(&mut self, action: Action) -> Option<Effect> {
        let flow = self.model.as_ref().and_then(|model| self.state.first_flow(model));
        let rows = self.rows();
        self.state.apply(action, rows, flow)
    }

    /// Number of rows of the focused table.
    fn rows(&self) -> usize {
        let model = self.model.as_ref();
        model.map_or(0, |model| self.state.rows(self.state.focus, model).len())
    }

    fn view(&self) -> View<'_> {
        let age = self.history.age(Instant::now());
        let silent = age.filter(|age| *age > self.late && !self.state.is_paused);
        let (name, model) = (self.name.as_str(), self.model.as_ref());
        View { name, model, state: &self.state, silent, palette: self.palette }
    }

    fn hear(&mut self, told: Told) {
        match told {
            // One that was on its way when the display was stopped.
            Told::Sample(_) if self.state.is_paused => {}
            Told::Sample(sample) => self.model = self.history.model(sample).or(self.model.take()),
            Told::Flow(flow, lines) => {
                if let Some((followed, told)) = &mut self.state.flow
                    && *followed == flow
                {
                    *told = lines;
                }
            }
            Told::Message(message) => self.state.message = message,
            Told::Ended => {}
        }
    }

    /// Carries out an effect; false ends the loop.
    fn carry_out(&mut self, effect: Effect) -> bool {
        match effect {
            Effect::Quit => return false,
            Effect::Follow(flow) => self.sampler.ask(Ask::Follow(flow)),
            Effect::Set(setting) => self.sampler.ask(Ask::Set(setting)),
            Effect::Pause(is_paused) => {
                if !is_paused {
                    self.history.pause();
                }
                self.sampler.ask(Ask::Pause(is_paused));
            }
        }
        true
    }
}

/// Waits for an event for this time. [`TerminalInput::Ready`] means that there is one.
///
/// `event::poll` never returns once the terminal is gone, since reading then always finds its end:
/// it is called while the terminal is there, and does not wait.
fn event_within(time: Duration) -> io::Result<TerminalInput> {
    let terminal = io::stdin();
    if input_within(&terminal, Duration::ZERO)? == TerminalInput::HungUp {
        return Ok(TerminalInput::HungUp);
    }
    match event::poll(Duration::ZERO) {
        Ok(true) => return Ok(TerminalInput::Ready),
        Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
        _ => {}
    }
    Ok(match input_within(&terminal, time)? {
        // The next call makes an event of it.
        TerminalInput::Ready => TerminalInput::Nothing,
        other => other,
    })
}

/// Terminal that is restored when this is dropped.
struct RestoredTerminal(DefaultTerminal);

impl Drop for RestoredTerminal {
    fn drop(&mut self) {
        // Ignored: a terminal that is gone needs nothing.
        let _ = ratatui::try_restore();
    }
}
