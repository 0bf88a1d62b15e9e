//! Pictures at 80 columns and 24 lines, without colours.

use forebay_rx::CpuId;
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::super::flows::FlowRow;
use super::super::model::{CpuRow, DropRow, QueueRow, SocketRow, TcpRow};
use super::super::state::Action;
use super::*;

/// Text of a picture, without the blanks at the ends of lines.
fn picture(model: Option<&Model>, state: &ViewState, (width, height): (u16, u16)) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    let view = View { name: "eth1", model, state, silent: None, palette: Palette::plain() };
    terminal.draw(|frame| frame.render_widget(view, frame.area())).unwrap();
    let buffer = terminal.backend().buffer();
    let has_colour =
        |cell: &ratatui::buffer::Cell| (cell.fg, cell.bg) != (Color::Reset, Color::Reset);
    assert!(!buffer.content.iter().any(has_colour), "colours without a palette of colours");
    let rows = buffer.content.chunks(width.into());
    let text = |row: &[ratatui::buffer::Cell]| {
        let line: String = row.iter().map(ratatui::buffer::Cell::symbol).collect();
        line.trim_end().to_owned() + "\n"
    };
    rows.map(text).collect()
}

fn cpu(cpu: u32, busy: f64, delivered: f64) -> CpuRow {
    CpuRow {
        cpu,
        is_online: true,
        busy,
        delivered,
        share: delivered / 590_100.0,
        backlog: 12.0,
        refused: 0.0,
        wait_s: None,
        reasons: vec![("rps".to_owned(), 0.98), ("held".to_owned(), 0.02)],
    }
}

fn model() -> Model {
    let queue = QueueRow {
        name: "rx-0".to_owned(),
        polling_cpu: 0.0,
        mask: "3".to_owned(),
        active_cpus: 2.0,
        received: 590_200.0,
        received_bytes: 42_000_000.0,
        dropped: 100.0,
        moves: 12.0,
        holds: 2.0,
        stayed: 24.0,
        hold_s: Some(0.0022),
    };
    let flow = FlowRow {
        name: "udp [2001:db8::1]:5000 > [2001:db8::2]:53".parse().unwrap(),
        hash: "0badcafe".to_owned(),
        queue: "rx-0".to_owned(),
        cpu: Some(CpuId(1)),
        packets: 177_060.0,
        share: 0.3,
    };
    let drop = |place: &str, reason: &str, per_s, since_s| DropRow {
        place: place.to_owned(),
        reason: reason.to_owned(),
        per_s,
        total: 1_234.0,
        since_s,
    };
    let socket = SocketRow {
        number: "0".to_owned(),
        local: "10.0.0.1:53".to_owned(),
        queued: 5.0,
        memory: 4096.0,
        buffer: 212_992.0,
        errors: 0.0,
        errors_total: 3.0,
    };
    Model {
        totals: Totals {
            received: 590_200.0,
            received_bytes: 42_000_000.0,
            delivered: 590_100.0,
            sent: Some(590_100.0),
            dropped: 100.0,
            dropped_total: 1_240.0,
            backlog: 24.0,
            moves: 12.0,
            holds: 2.0,
            stayed: 24.0,
            hold_s: Some(0.0022),
            merged: None,
        },
        cpus: vec![
            CpuRow { wait_s: Some(28e-6), ..cpu(0, 0.48, 177_000.0) },
            CpuRow { refused: 100.0, backlog: 1001.0, ..cpu(1, 0.999, 413_100.0) },
        ],
        queues: vec![queue],
        flows: vec![flow],
        drops: vec![
            drop("rx-0", "backlog_full", 100.0, Some(0.0)),
            drop("rx-0", "flow_limit", 0.0, Some(7.2)),
            drop("to tun:ft0", "not_sent", 0.0, None),
        ],
        sockets: vec![socket],
        tcp: Vec::new(),
    }
}

#[test]
fn top_2_all_tables_fit_80_columns() {
    let state = ViewState::default();
    assert_eq!(picture(Some(&model()), &state, (80, 24)), include_str!("overview.txt"));
}

#[test]
fn top_2_tcp_sockets_fit_80_columns() {
    let listener = TcpRow {
        name: "0.0.0.0:80".to_owned(),
        state: "LISTEN".to_owned(),
        unread: 2.0,
        unacknowledged: 128.0,
        ..TcpRow::default()
    };
    let connection = TcpRow {
        name: "192.168.100.200:65535 > 192.168.100.1:80".to_owned(),
        state: "FIN-WAIT-1".to_owned(),
        received: 125e6,
        sent: 1234.0,
        resent: 3.0,
        unread: 1e6,
        unacknowledged: 65_000.0,
    };
    let model = Model { tcp: vec![listener, connection], ..Model::default() };
    let state = ViewState { focus: TableKind::Tcp, is_zoomed: true, ..ViewState::default() };
    let shown = picture(Some(&model), &state, (80, 24));
    let expected = [
        ">TCP                             state      in bit/s    out lost/s recv-q send-q",
        "0.0.0.0:80                       LISTEN            0      0      0      2    128",
        "192.168.100.200:65535 > 192.168… FIN-WAIT-1    1.00G   9872    3.0  1.00M  65.0k",
    ];
    let lines: Vec<_> = shown.lines().skip(3).take(3).collect();
    assert_eq!(lines, expected, "{shown}");
    let text = picture(Some(&self::model()), &ViewState::default(), (80, 24));
    assert!(!text.contains("TCP"), "a run without TCP has no such table");
}

/// Nothing of a text is cut off unseen, and queues of several devices are told apart.
#[test]
fn top_2_long_texts_are_marked() {
    let mut model = model();
    model.queues[0].name = "enp65s0f0/rx-12".to_owned();
    model.queues[0].mask = "ff,ffffffff".to_owned();
    model.flows[0].queue = "enp65s0f0/rx-12".to_owned();
    model.drops[0].place = "enp65s0f0np0v/rx-12345".to_owned();
    model.drops[0].total = 1e13;
    model.drops[1].since_s = Some(86_399.0);
    let mut state = ViewState::default();
    state.sortings[TableKind::Queues.index()].column = Some(2);
    let shown = picture(Some(&model), &state, (80, 24));
    for line in [
        "queue      CPU rps_cpu↓     pps   bit/s  drop/s  move/s  hold/s  stay/s     held",
        "…0f0/rx-12   0     0-39  590.2k  336.0M     100    12.0     2.0    24.0   2.2 ms",
        "udp [2001:db8::1]:5000 > [2001:db8::2]:53    1  177.1k   30 % …f0/rx-12 0badcafe",
        "…p65s0f0np0v/rx-12345 backlog_full                   100 10000000000…        now",
        "rx-0                  flow_limit                       0         1234   24 h ago",
    ] {
        assert!(shown.contains(line), "{line}\n{shown}");
    }
}

#[test]
fn top_2_alarms_show_without_colours() {
    let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
    let (model, state) = (model(), ViewState::default());
    let view = View {
        name: "eth1",
        model: Some(&model),
        state: &state,
        silent: Some(Duration::from_secs(3)),
        palette: Palette::plain(),
    };
    terminal.draw(|frame| frame.render_widget(view, frame.area())).unwrap();
    let buffer = terminal.backend().buffer();
    let bold = |row: u16| {
        let cells = (0..80).map(|column| &buffer[(column, row)]);
        let bold = cells.filter(|cell| cell.modifier.contains(Modifier::BOLD));
        bold.map(ratatui::buffer::Cell::symbol).collect::<String>()
    };
    assert!(bold(0) == "eth1[no answer for 3 s]", "{}", bold(0));
    assert_eq!(bold(1), "dropped 100/s");
    assert_eq!(bold(5).split_whitespace().collect::<String>(), ">99%||||||1001");
}

#[test]
fn top_2_few_lines_show_how_many_more() {
    let mut model = model();
    model.cpus = (0..128).map(|number| cpu(number, 0.5, 4_600.0)).collect();
    let state = ViewState::default();
    let shown = picture(Some(&model), &state, (80, 24));
    assert!(shown.contains("\n  … 121 more CPUs\n"), "{shown}");
    assert!(shown.contains("flow_limit") && shown.contains("10.0.0.1:53"), "{shown}");
    let zoomed = ViewState { is_zoomed: true, scrolled: [120, 0, 0, 0, 0, 0], ..state };
    let shown = picture(Some(&model), &zoomed, (80, 24));
    assert!(shown.contains("\n 127   50 %") && !shown.contains("rx-0"), "{shown}");
}

#[test]
fn top_2_any_size_is_drawn() {
    let mut state = ViewState { shows_help: true, ..ViewState::default() };
    state.flow = Some(("0badcafe".parse().unwrap(), vec!["flow".to_owned(); 9]));
    for width in [1, 2, 7, 30, 80, 300] {
        for height in [1, 2, 3, 5, 9, 24, 100, 1_600] {
            for model in [None, Some(&model())] {
                let shown = picture(model, &state, (width, height));
                assert_eq!(shown.lines().count(), usize::from(height));
            }
        }
    }
}

#[test]
fn top_3_prompt_and_answer_have_lines() {
    let mut state = ViewState::default();
    let last_but_one = |state: &ViewState| {
        let shown = picture(Some(&model()), state, (80, 24));
        shown.lines().nth(22).unwrap().to_owned()
    };
    state.apply(Action::Ask(PromptKind::Knob), 0, None);
    "rps_cpus=3".chars().for_each(|char| drop(state.apply(Action::Type(char), 0, None)));
    assert_eq!(last_but_one(&state), "set KNOB=VALUE: rps_cpus=3_");
    "x".repeat(90).chars().for_each(|char| drop(state.apply(Action::Type(char), 0, None)));
    assert!(last_but_one(&state).ends_with("xx_"));
    state.apply(Action::Enter, 0, None);
    state.message = "now rx-0/rps_cpus 3".to_owned();
    assert_eq!(last_but_one(&state), "now rx-0/rps_cpus 3");
    state = ViewState { filter: "flow_l".to_owned(), is_paused: true, ..ViewState::default() };
    let shown = picture(Some(&model()), &state, (80, 24));
    let rest = "rows with \"flow_l\" only; Esc shows all\n\
                q end";
    assert!(shown.contains(rest), "{shown}");
    state.message = "x".repeat(70) + " " + &"y".repeat(70);
    let both = picture(Some(&model()), &state, (80, 24));
    assert!(both.contains("Esc shows all\nxxx") && both.contains("x\n    yyy"), "{both}");
    assert!(shown.contains("flow_limit") && !shown.contains("backlog_full"), "{shown}");
    assert!(shown.starts_with("eth1 [paused]  in") && shown.contains("\n  no CPUs\n"), "{shown}");
}

#[test]
fn top_4_followed_flow_has_most_lines() {
    let mut told = vec!["flow 0badcafe".to_owned(), "rx-0, polled by CPU 0".to_owned()];
    told.extend((0..99).map(|number| format!("    {number} s: CPU 0 to CPU 1")));
    let flow = Some(("0badcafe".parse().unwrap(), told));
    let state = ViewState { flow, ..ViewState::default() };
    let shown = picture(Some(&model()), &state, (80, 24));
    assert!(shown.contains(">CPU") && !shown.contains("drops at"), "{shown}");
    assert!(shown.contains("following 0badcafe\nrx-0, polled"), "{shown}");
    assert!(shown.contains("  moves: the latest of 99\n    86 s:"), "{shown}");
    let shown = picture(Some(&model()), &state, (80, 60));
    assert!(shown.contains("drops at") && shown.contains("    98 s: CPU 0 to CPU 1\n"), "{shown}");
}

#[test]
fn top_3_help_has_every_key() {
    let state = ViewState { shows_help: true, ..ViewState::default() };
    let shown = picture(Some(&model()), &state, (80, 24));
    for (key, meaning) in KEYS {
        assert!(shown.contains(key) && shown.contains(&meaning[..meaning.len().min(30)]), "{key}");
    }
}
