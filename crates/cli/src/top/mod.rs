//! `forebay top`: a view of a run in a terminal, over its control socket.

mod sample; //  metrics at one time
mod model; //   rates and shares between two samples
mod flows; //   flows with the most packets
mod figures; // numbers that fit a column
mod cell; //    cells of tables
mod tables; //  tables of a model
mod state; //   what is shown, and what keys change in it
mod keys; //    keys and their actions
mod flow_text; // text about the followed flow
mod view; //    the picture
mod sampler; // the thread that asks the run
mod screen; //  the loop

use std::io::{self, IsTerminal};
use std::thread;
use std::time::Duration;

use clap::Args;
use forebay_control::FlowName;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

use self::cell::cells;
use self::model::History;
use self::sampler::{Link, NoAnswer, Sampler};
use self::screen::{End, Screen};
use self::state::ViewState;
use self::view::{Palette, View};
use crate::control::AskedRun;
use crate::failure::Failure;
use crate::output;

/// Width of a printed view, in cells.
const PRINTED_COLUMNS: u16 = 80;

/// Upper bound of the lines of a printed view.
const PRINTED_LINES_MAX: u16 = 1000;

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    run: AskedRun,

    /// Seconds between two samples, from 0.1 to 3600
    #[arg(long, value_name = "SECS", default_value = "1", value_parser = interval)]
    interval: Duration,

    /// Follow a flow from the beginning, as the key f does: addresses and ports, or a hash
    #[arg(long, value_name = "FLOW")]
    follow: Option<FlowName>,

    /// Use no colours, as with the variable NO_COLOR
    #[arg(long)]
    no_color: bool,

    /// Print one view of 80 columns, over one interval, and end
    #[arg(long)]
    once: bool,
}

/// Shows a run until a key, a signal, or its end.
pub(crate) fn run(args: &TopArgs) -> Result<(), Failure> {
    if !args.once && !io::stdout().is_terminal() {
        let problem = "standard output is not a terminal";
        return Err(Failure::usage(problem, "give --once to print one view"));
    }
    if !args.once && !io::stdin().is_terminal() {
        let problem = "standard input, where keys come from, is not a terminal";
        return Err(Failure::usage(problem, "give --once to print one view"));
    }
    let mut link = Link::open(&args.run.path()?)?;
    let name = link.name();
    // Refusals end the program before it takes the terminal.
    let first = link.sample().map_err(failure)?;
    if args.once {
        let mut history = History::default();
        history.model(first);
        return print_once(args, link, history, &name);
    }
    let sampler = Sampler::start(link, args.interval)?;
    let screen = Screen::new(name, sampler, args.follow, palette(args), args.interval);
    match screen.show()? {
        End::Asked => Ok(()),
        End::OfRun => output::print("forebay: the run has ended\n"),
    }
}

fn palette(args: &TopArgs) -> Palette {
    let is_set = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    if args.no_color || is_set { Palette::plain() } else { Palette::coloured() }
}

fn print_once(
    args: &TopArgs,
    mut link: Link,
    mut history: History,
    name: &str,
) -> Result<(), Failure> {
    thread::sleep(args.interval);
    let model = history.model(link.sample().map_err(failure)?);
    let mut state = ViewState::default();
    if let Some(flow) = args.follow {
        let told = link.ask(&format!("explain {flow}")).map_err(failure)?;
        state.flow = Some((flow, told));
    }
    let area = Rect::new(0, 0, PRINTED_COLUMNS, PRINTED_LINES_MAX);
    let mut buffer = Buffer::empty(area);
    let (model, palette) = (model.as_ref(), Palette::plain());
    View { name, model, state: &state, silent: None, palette }.printed(area, &mut buffer);
    output::print(&text(&buffer))
}

/// Lines of a picture up to the last that has text.
fn text(buffer: &Buffer) -> String {
    let rows = buffer.content.chunks(buffer.area.width.into());
    let line = |row: &[ratatui::buffer::Cell]| {
        let (mut text, mut place) = (String::new(), 0);
        while let Some(cell) = row.get(place) {
            text += cell.symbol();
            // A wide character takes the next cell, too.
            place += cells(cell.symbol()).max(1);
        }
        text.trim_end().to_owned()
    };
    let lines: Vec<_> = rows.map(line).collect();
    lines.join("\n").trim_end().to_owned() + "\n"
}

fn failure(none: NoAnswer) -> Failure {
    match none {
        NoAnswer::Because(error) | NoAnswer::Ended(error) => error.into(),
    }
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds: Option<f64> = text.parse().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "it is from 0.1 to 3600".to_owned())
}

#[cfg(test)]
mod tests {
    use ratatui::style::Style;

    use super::*;

    #[test]
    fn top_2_printed_wide_names_keep_columns() {
        let mut buffer = Buffer::empty(Rect::new(0, 0, 12, 2));
        buffer.set_string(0, 0, "ネット0", Style::new());
        buffer.set_string(9, 0, "5", Style::new());
        assert_eq!(text(&buffer), "ネット0  5\n");
    }
}
