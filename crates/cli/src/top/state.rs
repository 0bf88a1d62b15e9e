//! State of the view: what is shown and how, and what the keys change in it.

use forebay_control::FlowName;

use super::cell::Cell;
use super::model::{LISTEN, Model};
use super::tables::{Sorting, TableKind, arranged};

/// Maximum length of typed text, in characters.
const TYPED_MAX: usize = 200;

/// State of the view.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct ViewState {
    /// Table that keys act on.
    pub(super) focus: TableKind,
    /// True if that table fills the screen.
    pub(super) is_zoomed: bool,
    /// Order of each table.
    pub(super) sortings: [Sorting; TableKind::ALL.len()],
    /// Number of rows of each table above the first one shown.
    pub(super) scrolled: [usize; TableKind::ALL.len()],
    /// Text that shown rows contain.
    pub(super) filter: String,
    pub(super) is_paused: bool,
    pub(super) shows_help: bool,
    /// Line that is being typed.
    pub(super) prompt: Option<Prompt>,
    /// Flow that is followed, and the lines of the last answer about it.
    pub(super) flow: Option<(FlowName, Vec<String>)>,
    /// Last answer to a request, or an error.
    pub(super) message: String,
}

/// Line that is being typed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Prompt {
    pub(super) kind: PromptKind,
    pub(super) typed: String,
    /// Flow that an empty line stands for.
    pub(super) flow: Option<FlowName>,
}

/// Purpose of a typed line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PromptKind {
    /// Text that rows contain.
    Filter,
    /// A flow to follow.
    Flow,
    /// A knob and its value.
    Knob,
}

impl Prompt {
    /// Text in front of the typed one.
    pub(super) fn title(&self) -> String {
        match (self.kind, self.flow) {
            (PromptKind::Filter, _) => "rows with: ".to_owned(),
            (PromptKind::Flow, None) => "follow (addresses and ports, or a hash): ".to_owned(),
            (PromptKind::Flow, Some(flow)) => format!("follow ({flow}): "),
            (PromptKind::Knob, _) => "set KNOB=VALUE: ".to_owned(),
        }
    }
}

/// Meaning of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Action {
    /// Ends the program.
    Quit,
    /// Chooses the next table.
    NextTable,
    /// Chooses the table before.
    PreviousTable,
    /// Chooses a table.
    Table(TableKind),
    /// Lets the table fill the screen, or ends that.
    Zoom,
    /// Sorts by the next column.
    Sort,
    /// Returns to the first order.
    Unsort,
    /// Reverses the order.
    Reverse,
    /// Scrolls down by this number of rows, or up.
    Scroll(isize),
    /// Stops or resumes the display.
    Pause,
    /// Ends following a flow.
    Unfollow,
    /// Shows the keys, or ends that.
    Help,
    /// Begins a line.
    Ask(PromptKind),
    /// Ends the line, the help, or following a flow.
    Cancel,
    /// Adds a character to the line.
    Type(char),
    /// Removes the last character.
    Erase,
    /// Removes all characters.
    EraseAll,
    /// Completes the line.
    Enter,
}

/// Work that an action leaves to the program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Effect {
    /// End the program.
    Quit,
    /// Explain this flow with each sample from now on, or none.
    Follow(Option<FlowName>),
    /// Send this request.
    Set(String),
    /// Take no samples until the next of these.
    Pause(bool),
}

impl ViewState {
    /// Rows of a table that are shown, in order.
    pub(super) fn rows(&self, kind: TableKind, model: &Model) -> Vec<Vec<Cell>> {
        arranged(kind.rows(model), &self.filter, self.sortings[kind.index()])
    }

    /// First flow that is shown: if the TCP table has the focus, that of its first connection.
    pub(super) fn first_flow(&self, model: &Model) -> Option<FlowName> {
        if self.focus == TableKind::Tcp {
            let rows = self.rows(TableKind::Tcp, model);
            let mut shown = rows.iter().skip(self.scrolled[TableKind::Tcp.index()]);
            let connection = shown.find(|row| row.iter().all(|cell| cell.text != LISTEN))?;
            return format!("tcp {}", connection.first()?.text).parse().ok();
        }
        let kind = TableKind::Flows;
        let rows = self.rows(kind, model);
        rows.get(self.scrolled[kind.index()])?.first()?.text.parse().ok()
    }

    /// Applies an action; `rows` is the number of rows of the focused table, and `flow` the one to
    /// be followed if none is typed.
    pub(super) fn apply(
        &mut self,
        action: Action,
        rows: usize,
        flow: Option<FlowName>,
    ) -> Option<Effect> {
        let focus = self.focus.index();
        match action {
            Action::Quit => return Some(Effect::Quit),
            Action::NextTable => self.focus(1),
            Action::PreviousTable => self.focus(TableKind::ALL.len() - 1),
            Action::Table(kind) => self.focus = kind,
            Action::Zoom => self.is_zoomed = !self.is_zoomed,
            Action::Sort => {
                let sorting = &mut self.sortings[focus];
                let next = sorting.column.map_or(0, |column| column + 1);
                sorting.column = (next < self.focus.columns().len()).then_some(next);
            }
            Action::Unsort => self.sortings[focus] = Sorting::default(),
            Action::Reverse => self.sortings[focus].is_reversed ^= true,
            Action::Scroll(by) => {
                let scrolled = self.scrolled[focus].saturating_add_signed(by);
                self.scrolled[focus] = scrolled.min(rows.saturating_sub(1));
            }
            Action::Pause => {
                self.is_paused = !self.is_paused;
                return Some(Effect::Pause(self.is_paused));
            }
            Action::Unfollow => {
                self.flow = None;
                return Some(Effect::Follow(None));
            }
            Action::Help => self.shows_help = !self.shows_help,
            Action::Ask(kind) => {
                let is_filter = kind == PromptKind::Filter;
                let typed = if is_filter { self.filter.clone() } else { String::new() };
                let flow = flow.filter(|_| kind == PromptKind::Flow);
                self.prompt = Some(Prompt { kind, typed, flow });
                self.message.clear();
            }
            Action::Cancel => return self.cancel(),
            Action::Type(char) => self.edit(|typed| {
                if typed.chars().count() < TYPED_MAX {
                    typed.push(char);
                }
            }),
            Action::Erase => self.edit(|typed| {
                typed.pop();
            }),
            Action::EraseAll => self.edit(String::clear),
            Action::Enter => return self.enter(),
        }
        None
    }

    fn focus(&mut self, steps: usize) {
        self.focus = TableKind::ALL[(self.focus.index() + steps) % TableKind::ALL.len()];
    }

    /// Changes the typed line. A filter takes effect at once.
    fn edit(&mut self, edit: impl FnOnce(&mut String)) {
        if let Some(prompt) = &mut self.prompt {
            edit(&mut prompt.typed);
            if prompt.kind == PromptKind::Filter {
                self.filter.clone_from(&prompt.typed);
                self.scrolled = Default::default();
            }
        }
    }

    /// Ends the foremost thing: a line, the help, a message, the filter, the followed flow.
    fn cancel(&mut self) -> Option<Effect> {
        if let Some(prompt) = self.prompt.take() {
            if prompt.kind == PromptKind::Filter {
                self.filter.clear();
            }
        } else if self.shows_help {
            self.shows_help = false;
        } else if !self.message.is_empty() {
            self.message.clear();
        } else if !self.filter.is_empty() {
            self.filter.clear();
        } else if self.flow.take().is_some() {
            return Some(Effect::Follow(None));
        }
        None
    }

    fn enter(&mut self) -> Option<Effect> {
        let Prompt { kind, typed, flow } = self.prompt.take()?;
        let is_blank = typed.trim().is_empty();
        match kind {
            PromptKind::Filter => None,
            PromptKind::Knob if is_blank => None,
            PromptKind::Flow if is_blank => flow.map(|flow| self.follow(flow)),
            PromptKind::Flow => match typed.parse::<FlowName>() {
                Ok(flow) => Some(self.follow(flow)),
                Err(error) => {
                    self.message = error.to_string();
                    None
                }
            },
            PromptKind::Knob => Some(Effect::Set(typed)),
        }
    }

    fn follow(&mut self, flow: FlowName) -> Effect {
        self.flow = Some((flow, Vec::new()));
        Effect::Follow(Some(flow))
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::TcpRow;
    use super::*;

    fn typed(state: &mut ViewState, kind: PromptKind, text: &str) -> Option<Effect> {
        assert_eq!(state.apply(Action::Ask(kind), 0, None), None);
        text.chars().for_each(|char| drop(state.apply(Action::Type(char), 0, None)));
        state.apply(Action::Enter, 0, None)
    }

    #[test]
    fn top_3_flow_is_followed_until_cancelled() {
        let mut state = ViewState::default();
        let flow: FlowName = "0badcafe".parse().unwrap();
        let effect = typed(&mut state, PromptKind::Flow, "0badcafe");
        assert_eq!(effect, Some(Effect::Follow(Some(flow))));
        assert_eq!(state.flow, Some((flow, Vec::new())));
        assert_eq!(typed(&mut state, PromptKind::Flow, "nonsense"), None);
        assert!(state.message.contains("neither an address"), "{}", state.message);
        assert_eq!(state.apply(Action::Cancel, 0, None), None, "ends the message first");
        assert_eq!(state.apply(Action::Cancel, 0, None), Some(Effect::Follow(None)));
        assert_eq!(state, ViewState::default());
        state.apply(Action::Ask(PromptKind::Flow), 0, Some(flow));
        assert_eq!(state.apply(Action::Enter, 0, None), effect, "the one on top");
    }

    #[test]
    fn top_3_tcp_row_gives_its_flow() {
        let row = |name: &str, state: &str| TcpRow {
            name: name.to_owned(),
            state: state.to_owned(),
            ..TcpRow::default()
        };
        let (v4, v6) = ("10.0.0.2:1 > 10.0.0.1:80", "[2001:db8::2]:1 > [2001:db8::1]:80");
        let tcp = vec![row("0.0.0.0:80", "LISTEN"), row(v4, "ESTAB"), row(v6, "CLOSE-WAIT")];
        let model = Model { tcp, ..Model::default() };
        let mut state = ViewState { focus: TableKind::Tcp, ..ViewState::default() };
        let flow = |name: &str| Some(format!("tcp {name}").parse::<FlowName>().unwrap());
        assert_eq!(state.first_flow(&model), flow(v4), "a listener has no flow");
        state.scrolled[TableKind::Tcp.index()] = 2;
        assert_eq!(state.first_flow(&model), flow(v6));
        state.focus = TableKind::Flows;
        assert_eq!(state.first_flow(&model), None, "no flow has packets");
        state = ViewState { focus: TableKind::Tcp, ..ViewState::default() };
        assert_eq!(state.first_flow(&Model { tcp: Vec::new(), ..model }), None);
    }

    #[test]
    fn top_3_knob_is_sent_as_typed() {
        let mut state = ViewState::default();
        let effect = typed(&mut state, PromptKind::Knob, "rps_cpus=3");
        assert_eq!(effect, Some(Effect::Set("rps_cpus=3".to_owned())));
        assert_eq!(typed(&mut state, PromptKind::Knob, " "), None);
        state.apply(Action::Ask(PromptKind::Knob), 0, None);
        (0..2 * TYPED_MAX).for_each(|_| drop(state.apply(Action::Type('x'), 0, None)));
        assert_eq!(state.prompt.as_ref().unwrap().typed.len(), TYPED_MAX);
        state.apply(Action::Erase, 0, None);
        assert_eq!(state.prompt.as_ref().unwrap().typed.len(), TYPED_MAX - 1);
        state.apply(Action::EraseAll, 0, None);
        assert_eq!(state.apply(Action::Enter, 0, None), None);
        assert_eq!(state.prompt, None);
    }

    #[test]
    fn top_3_filter_acts_while_typed() {
        let mut state = ViewState { scrolled: [1, 2, 3, 4, 5, 6], ..ViewState::default() };
        state.apply(Action::Ask(PromptKind::Filter), 0, None);
        state.apply(Action::Type('r'), 0, None);
        assert_eq!((state.filter.as_str(), state.scrolled), ("r", [0; 6]));
        state.apply(Action::Enter, 0, None);
        assert_eq!((state.filter.as_str(), &state.prompt), ("r", &None));
        state.apply(Action::Ask(PromptKind::Filter), 0, None);
        state.apply(Action::Cancel, 0, None);
        assert_eq!(state.filter, "");
    }

    #[test]
    fn top_3_table_has_own_order_and_place() {
        let mut state = ViewState::default();
        state.apply(Action::NextTable, 0, None);
        assert_eq!(state.focus, TableKind::Queues);
        state.apply(Action::Sort, 0, None);
        state.apply(Action::Reverse, 0, None);
        assert_eq!(state.sortings[1], Sorting { column: Some(0), is_reversed: true });
        assert_eq!(state.sortings[0], Sorting::default());
        for _ in TableKind::Queues.columns() {
            state.apply(Action::Sort, 0, None);
        }
        assert_eq!(state.sortings[1].column, None, "back to the first order");
        state.apply(Action::Scroll(5), 3, None);
        assert_eq!(state.scrolled, [0, 2, 0, 0, 0, 0], "the last row stays in sight");
        state.apply(Action::Scroll(-9), 3, None);
        assert_eq!(state.scrolled, [0; 6]);
        state.apply(Action::PreviousTable, 0, None);
        state.apply(Action::PreviousTable, 0, None);
        assert_eq!(state.focus, TableKind::Tcp);
        assert_eq!(state.apply(Action::Pause, 0, None), Some(Effect::Pause(true)));
        assert_eq!(state.apply(Action::Pause, 0, None), Some(Effect::Pause(false)));
    }
}
