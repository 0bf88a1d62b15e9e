//! Keys, and the actions they mean.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::state::{Action, PromptKind, ViewState};
use super::tables::TableKind;

/// Number of rows by which a page key scrolls.
const PAGE_ROWS: isize = 10;

/// Keys for people, and their meanings.
pub(super) const KEYS: [(&str, &str); 13] = [
    ("q, Ctrl-C", "end"),
    ("Tab, 1 to 6", "choose CPUs, queues, flows, drops, sockets or TCP for the next keys"),
    ("Enter", "show that table alone, or all of them"),
    ("arrows, j k, PgUp PgDn", "scroll"),
    ("s, S", "sort by the next column; back to the first order"),
    ("r", "reverse the order"),
    ("/", "show only rows that contain a text"),
    ("f", "follow a flow: what `forebay explain` says of it"),
    ("F", "follow no flow"),
    ("=", "set a knob, as `forebay set` does, and see the answer"),
    ("p, Space", "stop the display, and resume it"),
    ("Esc", "end the line, message, filter or flow"),
    ("?, h", "show or hide these keys"),
];

/// Meaning of a key in this state; `None` if it has none.
pub(super) fn action(key: KeyEvent, state: &ViewState) -> Option<Action> {
    if key.kind == KeyEventKind::Release {
        return None;
    }
    let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('c' | 'd') if is_control => Some(Action::Quit),
        KeyCode::Esc => Some(Action::Cancel),
        code if state.prompt.is_some() => typing(code, is_control),
        _ if is_control => None,
        code => command(code, state),
    }
}

fn typing(code: KeyCode, is_control: bool) -> Option<Action> {
    match code {
        KeyCode::Enter => Some(Action::Enter),
        KeyCode::Backspace => Some(Action::Erase),
        KeyCode::Char('u') if is_control => Some(Action::EraseAll),
        KeyCode::Char(char) if !is_control => Some(Action::Type(char)),
        _ => None,
    }
}

fn command(code: KeyCode, state: &ViewState) -> Option<Action> {
    Some(match code {
        KeyCode::Char('q') => Action::Quit,
        KeyCode::Tab => Action::NextTable,
        KeyCode::BackTab => Action::PreviousTable,
        KeyCode::Char('1') => Action::Table(TableKind::Cpus),
        KeyCode::Char('2') => Action::Table(TableKind::Queues),
        KeyCode::Char('3') => Action::Table(TableKind::Flows),
        KeyCode::Char('4') => Action::Table(TableKind::Drops),
        KeyCode::Char('5') => Action::Table(TableKind::Sockets),
        KeyCode::Char('6') => Action::Table(TableKind::Tcp),
        KeyCode::Enter => Action::Zoom,
        KeyCode::Up | KeyCode::Char('k') => Action::Scroll(-1),
        KeyCode::Down | KeyCode::Char('j') => Action::Scroll(1),
        KeyCode::PageUp => Action::Scroll(-PAGE_ROWS),
        KeyCode::PageDown => Action::Scroll(PAGE_ROWS),
        KeyCode::Home => Action::Scroll(isize::MIN),
        KeyCode::End => Action::Scroll(isize::MAX),
        KeyCode::Char('s') => Action::Sort,
        KeyCode::Char('S') => Action::Unsort,
        KeyCode::Char('r') => Action::Reverse,
        KeyCode::Char('/') => Action::Ask(PromptKind::Filter),
        KeyCode::Char('f') => Action::Ask(PromptKind::Flow),
        KeyCode::Char('F') if state.flow.is_some() => Action::Unfollow,
        KeyCode::Char('=') => Action::Ask(PromptKind::Knob),
        KeyCode::Char('p' | ' ') => Action::Pause,
        KeyCode::Char('?' | 'h') => Action::Help,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::state::Prompt;
    use super::*;

    fn press(code: KeyCode) -> KeyEvent {
        KeyEvent::new(code, KeyModifiers::NONE)
    }

    #[test]
    fn top_3_keys_mean_actions() {
        let state = ViewState::default();
        for (code, expected) in [
            (KeyCode::Char('q'), Some(Action::Quit)),
            (KeyCode::Tab, Some(Action::NextTable)),
            (KeyCode::Char('3'), Some(Action::Table(TableKind::Flows))),
            (KeyCode::Char('='), Some(Action::Ask(PromptKind::Knob))),
            (KeyCode::Char(' '), Some(Action::Pause)),
            (KeyCode::Char('F'), None),
            (KeyCode::Char('x'), None),
            (KeyCode::F(1), None),
        ] {
            assert_eq!(action(press(code), &state), expected, "{code:?}");
        }
        let released = KeyEvent { kind: KeyEventKind::Release, ..press(KeyCode::Char('q')) };
        assert_eq!(action(released, &state), None);
    }

    #[test]
    fn top_3_typed_keys_are_no_commands() {
        let prompt = Prompt { kind: PromptKind::Knob, typed: String::new(), flow: None };
        let state = ViewState { prompt: Some(prompt), ..ViewState::default() };
        assert_eq!(action(press(KeyCode::Char('q')), &state), Some(Action::Type('q')));
        assert_eq!(action(press(KeyCode::Enter), &state), Some(Action::Enter));
        assert_eq!(action(press(KeyCode::Esc), &state), Some(Action::Cancel));
        let control = |char| KeyEvent::new(KeyCode::Char(char), KeyModifiers::CONTROL);
        assert_eq!(action(control('c'), &state), Some(Action::Quit));
        assert_eq!(action(control('u'), &state), Some(Action::EraseAll));
        assert_eq!(action(control('q'), &state), None);
        assert_eq!(action(press(KeyCode::Tab), &state), None);
    }
}
