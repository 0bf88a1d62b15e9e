//! Picture of a model and of the view's state.

use std::time::Duration;

use ratatui::buffer::Buffer;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{self, Clear, Paragraph, Row, Table, Widget, Wrap};

use super::cell::{Cell, back, cells};
use super::figures::{count, short, time, unit};
use super::flow_text;
use super::keys::KEYS;
use super::model::{Model, Totals};
use super::state::{Prompt, PromptKind, ViewState};
use super::tables::{Column, Sorting, TableKind};

/// Part of the screen that a followed flow leaves to the tables, in percent.
const TABLES_PERCENT_MAX: u16 = 45;

/// Lines of the figures of the whole run.
const HEAD_LINES: u16 = 3;

/// Upper bound of the lines of an answer.
const MESSAGE_LINES_MAX: usize = 3;

/// Blanks between two columns.
const COLUMN_SPACING: u16 = 1;

/// Upper bound of a name's length, in characters.
const NAME_CHARS_MAX: usize = 16;

/// Width of the keys in the help, in cells.
const KEY_CELLS: usize = 24;

/// Styles of the parts of the picture.
#[derive(Clone, Copy, Debug)]
pub(super) struct Palette {
    heading: Style,
    alarm: Style,
    notice: Style,
}

impl Palette {
    /// Styles with colours.
    pub(super) fn coloured() -> Self {
        Self {
            heading: Style::new().fg(Color::Cyan).add_modifier(Modifier::BOLD),
            alarm: Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
            notice: Style::new().fg(Color::Yellow).add_modifier(Modifier::BOLD),
        }
    }

    /// Styles without colours.
    pub(super) fn plain() -> Self {
        let bold = Style::new().add_modifier(Modifier::BOLD);
        Self { heading: bold, alarm: bold, notice: bold.add_modifier(Modifier::REVERSED) }
    }
}

/// Table, and its rows in their order.
type ShownTable = (TableKind, Vec<Vec<Cell>>);

/// Picture of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    /// Name of the run.
    pub(super) name: &'a str,
    /// Last model; `None` before the second sample.
    pub(super) model: Option<&'a Model>,
    pub(super) state: &'a ViewState,
    /// Time without an answer, if that is longer than it should be.
    pub(super) silent: Option<Duration>,
    pub(super) palette: Palette,
}

impl Widget for View<'_> {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        let message = self.message_lines(area.width.into());
        let message_height = u16::try_from(message.len()).unwrap_or(1);
        let room = area.height.saturating_sub(HEAD_LINES + message_height + 1);
        let tables_room = room / 100 * TABLES_PERCENT_MAX + room % 100 * TABLES_PERCENT_MAX / 100;
        let tables = self.tables(tables_room.into());
        let most = room - tables_room.min(wanted_lines(&tables));
        let flow = self.flow_lines(area.width.into(), most.into());
        let parts = [
            Constraint::Length(HEAD_LINES),
            Constraint::Min(0),
            Constraint::Length(u16::try_from(flow.len()).unwrap_or(most)),
            Constraint::Length(message_height),
            Constraint::Length(1),
        ];
        let [head, body, flow_area, message_area, foot] = Layout::vertical(parts).areas(area);
        self.head(head, buffer);
        self.body(&tables, body, buffer);
        Paragraph::new(flow).render(flow_area, buffer);
        if self.state.shows_help {
            self.help(body.union(flow_area), buffer);
        }
        Paragraph::new(message).render(message_area, buffer);
        self.foot(foot, buffer);
    }
}

impl View<'_> {
    /// Draws the figures and the tables, and the flow below them, for a printer: without keys, and
    /// as long as they are.
    pub(super) fn printed(self, area: Rect, buffer: &mut Buffer) {
        let [head, body] =
            Layout::vertical([Constraint::Length(HEAD_LINES + 1), Constraint::Min(0)]).areas(area);
        self.head(head, buffer);
        let end = self.body(&self.tables(usize::MAX), body, buffer);
        let rest = Rect { y: end, height: area.bottom().saturating_sub(end), ..area };
        let flow = self.flow_lines(area.width.into(), rest.height.into());
        Paragraph::new(flow).render(rest, buffer);
    }

    /// Draws the figures of the whole run.
    fn head(&self, area: Rect, buffer: &mut Buffer) {
        let name: String = self.name.chars().take(NAME_CHARS_MAX).collect();
        let mut first = vec![Span::styled(name, self.palette.heading)];
        let paused = self.state.is_paused.then(|| "[paused]".to_owned());
        let silent = self.silent.map(|time| format!("[no answer for {} s]", time.as_secs()));
        for notice in paused.into_iter().chain(silent) {
            first.extend([" ".into(), Span::styled(notice, self.palette.notice)]);
        }
        let mut others = Vec::new();
        match self.model {
            None => first.push("  the first figures come with the second sample".into()),
            Some(Model { totals, .. }) => {
                first.push(rates(totals).into());
                let style = if totals.dropped > 0.0 { self.palette.alarm } else { Style::new() };
                let dropped = format!("dropped {}/s", short(totals.dropped));
                let queued = queued(totals);
                others = vec![
                    Line::from(vec![Span::styled(dropped, style), queued.into()]),
                    moves(totals).into(),
                ];
            }
        }
        let mut lines = vec![Line::from(first)];
        lines.extend(others);
        Paragraph::new(lines).render(area, buffer);
    }

    /// Draws tables. Returns the line below them.
    fn body(&self, tables: &[ShownTable], area: Rect, buffer: &mut Buffer) -> u16 {
        let wanted: Vec<_> = tables.iter().map(|(_, rows)| rows.len().max(1) + 1).collect();
        let heights = heights(&wanted, area.height.into());
        // A blank line below each, if all fit.
        let is_roomy = wanted.iter().sum::<usize>() + wanted.len() <= area.height.into();
        let mut top = area.y;
        for ((kind, rows), height) in tables.iter().zip(heights) {
            let height = u16::try_from(height).unwrap_or(u16::MAX);
            self.table(*kind, rows, Rect { y: top, height, ..area }, buffer);
            top += height + u16::from(is_roomy);
        }
        top
    }

    /// Tables that are shown: one, or all; sockets only if there are some. Beside a followed flow,
    /// one if all have more lines than `room`.
    fn tables(&self, room: usize) -> Vec<ShownTable> {
        let Some(model) = self.model else { return Vec::new() };
        let focus = self.state.focus;
        let has_rows = |kind| match kind {
            TableKind::Sockets => !model.sockets.is_empty(),
            TableKind::Tcp => !model.tcp.is_empty(),
            _ => true,
        };
        let is_shown =
            |kind: &TableKind| *kind == focus || !self.state.is_zoomed && has_rows(*kind);
        let rows = |kind: TableKind| (kind, self.state.rows(kind, model));
        let mut tables: Vec<_> = TableKind::ALL.into_iter().filter(is_shown).map(rows).collect();
        if self.state.flow.is_some() && usize::from(wanted_lines(&tables)) > room {
            tables.retain(|(kind, _)| *kind == focus);
        }
        tables
    }

    fn table(&self, kind: TableKind, rows: &[Vec<Cell>], area: Rect, buffer: &mut Buffer) {
        let (columns, sorting) = (kind.columns(), self.state.sortings[kind.index()]);
        let is_focused = kind == self.state.focus;
        let widths = widths(columns, area.width);
        let titles = columns.iter().zip(&widths).enumerate().map(|(place, (column, width))| {
            let mark = if is_focused && place == 0 { ">" } else { "" };
            let arrow = arrow(sorting, place);
            let room = usize::from(*width).saturating_sub(mark.len() + arrow.chars().count());
            let title: String = column.title.chars().take(room).collect();
            aligned(format!("{mark}{title}{arrow}"), column)
        });
        let room = usize::from(area.height).saturating_sub(1);
        let above = self.state.scrolled[kind.index()].min(rows.len().saturating_sub(1));
        let below = (rows.len() - above).saturating_sub(room);
        // The last line says how many more there are.
        let shown = if below > 0 && room > 1 { room - 1 } else { room };
        let lines = rows.iter().skip(above).take(shown).map(|cells| {
            Row::new(cells.iter().zip(columns).zip(&widths).map(|((cell, column), width)| {
                let style = if cell.is_alarm { self.palette.alarm } else { Style::new() };
                aligned(cell.fitted((*width).into(), column.cut), column).style(style)
            }))
        });
        let header = Row::new(titles).style(self.palette.heading);
        let lengths = widths.iter().copied().map(Constraint::Length);
        let table = Table::new(lines, lengths).header(header).column_spacing(COLUMN_SPACING);
        table.render(area, buffer);
        let last = Rect { y: area.bottom().saturating_sub(1), height: 1, ..area };
        if below > 0 && room > 1 {
            let more = format!("  … {} more {}", rows.len() - above - shown, kind.name());
            Paragraph::new(more).render(last, buffer);
        } else if rows.is_empty() && room > 0 {
            Paragraph::new(format!("  no {}", kind.name())).render(last, buffer);
        }
    }

    /// At most `lines_max` lines about the followed flow.
    fn flow_lines(&self, width: usize, lines_max: usize) -> Vec<Line<'static>> {
        let Some((flow, told)) = &self.state.flow else { return Vec::new() };
        let heading = Span::styled(format!("following {flow}"), self.palette.heading);
        let told = flow_text::lines(told, width, lines_max.saturating_sub(1));
        let lines = std::iter::once(Line::from(heading));
        lines.chain(told.into_iter().map(Line::from)).take(lines_max).collect()
    }

    /// The filter, and what is being typed or else the last answer, cut to [`MESSAGE_LINES_MAX`]
    /// lines; one blank line if there is none of them.
    fn message_lines(&self, width: usize) -> Vec<Line<'static>> {
        let ViewState { prompt, message, filter, .. } = self.state;
        let mut lines = Vec::new();
        let is_typed = prompt.as_ref().is_some_and(|prompt| prompt.kind == PromptKind::Filter);
        if !filter.is_empty() && !is_typed {
            lines.push(Line::from(format!("rows with \"{filter}\" only; Esc shows all")));
        }
        if let Some(prompt) = prompt {
            lines.push(self.prompt_line(prompt, width));
        } else if !message.is_empty() || lines.is_empty() {
            let wrapped = flow_text::wrapped(message, width).into_iter().take(MESSAGE_LINES_MAX);
            lines.extend(wrapped.map(|line| Line::styled(line, self.palette.notice)));
        }
        lines
    }

    fn prompt_line(&self, prompt: &Prompt, width: usize) -> Line<'static> {
        let title = prompt.title();
        // The end of a long text stays in sight.
        let room = width.saturating_sub(cells(&title) + 1);
        let typed = back(&prompt.typed, room).to_owned();
        Line::from(vec![Span::styled(title, self.palette.heading), typed.into(), "_".into()])
    }

    fn foot(&self, area: Rect, buffer: &mut Buffer) {
        let keys =
            "q end  Tab table  Enter zoom  s sort  / filter  f follow  = set  p pause  ? keys";
        Line::styled(keys, self.palette.heading).render(area, buffer);
    }

    fn help(&self, area: Rect, buffer: &mut Buffer) {
        let lines = KEYS.iter().map(|(key, meaning)| {
            let key = Span::styled(format!("{key:KEY_CELLS$}"), self.palette.heading);
            Line::from(vec![key, (*meaning).into()])
        });
        Clear.render(area, buffer);
        Paragraph::new(Text::from_iter(lines)).wrap(Wrap { trim: false }).render(area, buffer);
    }
}

/// Rates of the whole run.
fn rates(totals: &Totals) -> String {
    let [received, delivered] = [totals.received, totals.delivered].map(|rate| unit(rate, "pps"));
    let bits = unit(totals.received_bytes * 8.0, "bit/s");
    let sent = totals.sent.map(|sent| format!("  sent {}", unit(sent, "pps")));
    format!("  in {received}, {bits}  delivered {delivered}{}", sent.unwrap_or_default())
}

/// Drops so far, backlogs and merging of the whole run.
fn queued(totals: &Totals) -> String {
    let merged = totals.merged.map_or_else(String::new, |merged| format!("  merged {merged:.1}:1"));
    format!(", {:.0} in all  backlog {}{merged}", totals.dropped_total, count(totals.backlog))
}

/// Moves and holds of the whole run.
fn moves(totals: &Totals) -> String {
    let each = totals.hold_s.map_or_else(String::new, |hold| format!(", {} each", time(hold)));
    let [moves, holds] = [totals.moves, totals.holds].map(short);
    format!("moves {moves}/s  holds {holds}/s{each}  stayed {}", unit(totals.stayed, "pps"))
}

fn arrow(sorting: Sorting, place: usize) -> &'static str {
    match (sorting.column == Some(place), sorting.is_reversed) {
        (true, false) => "↓",
        (true, true) => "↑",
        (false, _) => "",
    }
}

/// Widths of columns in a line of `width` cells.
fn widths(columns: &[Column], width: u16) -> Vec<u16> {
    let constraints = columns.iter().map(|column| match column.width {
        Some(width) => Constraint::Length(width),
        None => Constraint::Fill(1),
    });
    let line = Rect { x: 0, y: 0, width, height: 1 };
    let places = Layout::horizontal(constraints).spacing(COLUMN_SPACING).split(line);
    places.iter().map(|place| place.width).collect()
}

fn aligned(text: String, column: &Column) -> widgets::Cell<'static> {
    let alignment = if column.is_text { Alignment::Left } else { Alignment::Right };
    widgets::Cell::new(Text::from(text).alignment(alignment))
}

/// Lines that tables want.
fn wanted_lines(tables: &[ShownTable]) -> u16 {
    let lines = tables.iter().map(|(_, rows)| rows.len().max(1) + 1).sum::<usize>();
    u16::try_from(lines).unwrap_or(u16::MAX)
}

/// Heights of tables that want these, so that together they have at most `room`: each line goes to
/// the lowest that wants more.
fn heights(wanted: &[usize], room: usize) -> Vec<usize> {
    let mut heights = vec![0; wanted.len()];
    for _ in 0..room {
        let short = (0..wanted.len()).filter(|&table| heights[table] < wanted[table]);
        let Some(lowest) = short.min_by_key(|&table| heights[table]) else { break };
        heights[lowest] += 1;
    }
    heights
}

#[cfg(test)]
mod tests;
