//! Tables of a model: their columns, cells and order.

use super::cell::{Cell, Cut};
use super::figures::{ago, percent, short};
use super::flows::FlowRow;
use super::model::{CpuRow, DropRow, Model, QueueRow, SocketRow, TcpRow};

/// Width of the bar of a CPU's busy time, in cells.
const BAR_CELLS: usize = 6;

/// Kind of a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum TableKind {
    /// CPUs, and why packets go there.
    #[default]
    Cpus,
    /// Rx queues.
    Queues,
    /// Flows with the most packets.
    Flows,
    /// Drops by name.
    Drops,
    /// UDP sockets.
    Sockets,
    /// TCP listeners and connections.
    Tcp,
}

impl TableKind {
    /// All kinds, in the order in which they are shown.
    pub(super) const ALL: [Self; 6] =
        [Self::Cpus, Self::Queues, Self::Flows, Self::Drops, Self::Sockets, Self::Tcp];

    /// Position in [`ALL`](Self::ALL).
    pub(super) fn index(self) -> usize {
        self as usize
    }

    /// Name in the plural.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Cpus => "CPUs",
            Self::Queues => "queues",
            Self::Flows => "flows",
            Self::Drops => "drops",
            Self::Sockets => "sockets",
            Self::Tcp => "TCP sockets",
        }
    }

    /// Columns; one of the last fills the rest of the line.
    pub(super) fn columns(self) -> &'static [Column] {
        match self {
            Self::Cpus => &CPU_COLUMNS,
            Self::Queues => &QUEUE_COLUMNS,
            Self::Flows => &FLOW_COLUMNS,
            Self::Drops => &DROP_COLUMNS,
            Self::Sockets => &SOCKET_COLUMNS,
            Self::Tcp => &TCP_COLUMNS,
        }
    }

    /// Rows of the table, in the order of the model.
    pub(super) fn rows(self, model: &Model) -> Vec<Vec<Cell>> {
        match self {
            Self::Cpus => model.cpus.iter().map(cpu_cells).collect(),
            Self::Queues => model.queues.iter().map(queue_cells).collect(),
            Self::Flows => model.flows.iter().map(flow_cells).collect(),
            Self::Drops => model.drops.iter().map(drop_cells).collect(),
            Self::Sockets => model.sockets.iter().map(socket_cells).collect(),
            Self::Tcp => model.tcp.iter().map(tcp_cells).collect(),
        }
    }
}

/// Column of a table.
#[derive(Debug)]
pub(super) struct Column {
    pub(super) title: &'static str,
    /// Width in cells; `None` for the rest of the line.
    pub(super) width: Option<u16>,
    pub(super) is_text: bool,
    /// Side of texts that is cut off if they do not fit.
    pub(super) cut: Cut,
}

impl Column {
    /// The same column, whose names are told apart by their ends.
    const fn by_ends(self) -> Self {
        Self { cut: Cut::Front, ..self }
    }
}

const fn text(title: &'static str, width: u16) -> Column {
    Column { title, width: Some(width), is_text: true, cut: Cut::End }
}

const fn number(title: &'static str, width: u16) -> Column {
    Column { title, width: Some(width), is_text: false, cut: Cut::End }
}

const fn rest(title: &'static str) -> Column {
    Column { title, width: None, is_text: true, cut: Cut::End }
}

const CPU_COLUMNS: [Column; 8] = [
    number("CPU", 4),
    number("busy", 6),
    text("", 6),
    number("pps", 7),
    number("share", 6),
    number("backlog", 8),
    number("wait", 8),
    rest("why packets go there"),
];

const QUEUE_COLUMNS: [Column; 10] = [
    rest("queue").by_ends(),
    number("CPU", 3),
    number("rps_cpus", 8),
    number("pps", 7),
    number("bit/s", 7),
    number("drop/s", 7),
    number("move/s", 7),
    number("hold/s", 7),
    number("stay/s", 7),
    number("held", 8),
];

const FLOW_COLUMNS: [Column; 6] = [
    rest("flow, by a sample"),
    number("CPU", 4),
    number("pps", 7),
    number("share", 6),
    text("queue", 9).by_ends(),
    text("hash", 8),
];

const DROP_COLUMNS: [Column; 5] = [
    rest("drops at").by_ends(),
    text("reason", 26),
    number("pps", 7),
    number("total", 12),
    number("last", 10),
];

const SOCKET_COLUMNS: [Column; 7] = [
    number("socket", 7),
    rest("local").by_ends(),
    number("pps", 7),
    number("memory", 8),
    number("buffer", 8),
    number("drop/s", 7),
    number("drops", 8),
];

const TCP_COLUMNS: [Column; 7] = [
    rest("TCP"),
    text("state", 10),
    number("in bit/s", 8),
    number("out", 6),
    number("lost/s", 6),
    number("recv-q", 6),
    number("send-q", 6),
];

fn cpu_cells(row: &CpuRow) -> Vec<Cell> {
    let busy = if row.is_online { percent(row.busy) } else { "off".to_owned() };
    let is_full = row.busy >= 0.95;
    vec![
        Cell::number(row.cpu.into(), row.cpu.to_string()),
        Cell::number(row.busy, busy).alarming(is_full),
        Cell::number(row.busy, bar(row.busy)).alarming(is_full),
        Cell::rate(row.delivered),
        Cell::number(row.share, percent(row.share)),
        Cell::count(row.backlog).alarming(row.refused > 0.0),
        Cell::span(row.wait_s),
        Cell::text(why(row)),
    ]
}

/// Reasons for which packets go to a CPU, as in `rps 98%, held 2%`.
fn why(row: &CpuRow) -> String {
    let narrow = |part: f64| percent(part).replace(' ', "");
    let parts = row.reasons.iter().map(|(reason, part)| format!("{reason} {}", narrow(*part)));
    let mut parts: Vec<_> = parts.collect();
    if row.refused > 0.0 {
        parts.insert(0, format!("{}/s refused", short(row.refused)));
    }
    parts.join(", ")
}

fn bar(share: f64) -> String {
    let cells = (0..BAR_CELLS).filter(|cell| share * f64_of(BAR_CELLS) > f64_of(*cell) + 0.5);
    "|".repeat(cells.count())
}

#[expect(clippy::cast_precision_loss, reason = "the number of a cell is small")]
fn f64_of(cell: usize) -> f64 {
    cell as f64
}

fn queue_cells(row: &QueueRow) -> Vec<Cell> {
    vec![
        Cell::name(&row.name),
        Cell::number(row.polling_cpu, format!("{:.0}", row.polling_cpu)),
        Cell::mask(&row.mask),
        Cell::rate(row.received),
        Cell::rate(row.received_bytes * 8.0),
        Cell::loss(row.dropped),
        Cell::rate(row.moves),
        Cell::rate(row.holds),
        Cell::rate(row.stayed),
        Cell::span(row.hold_s),
    ]
}

fn flow_cells(row: &FlowRow) -> Vec<Cell> {
    let cpu = row.cpu.map_or_else(|| "-".to_owned(), |cpu| cpu.to_string());
    vec![
        Cell::name(row.name.to_string()),
        Cell::number(row.cpu.map_or(-1.0, |cpu| cpu.0.into()), cpu),
        Cell::rate(row.packets),
        Cell::number(row.share, percent(row.share)),
        Cell::name(&row.queue),
        Cell::text(&row.hash),
    ]
}

fn drop_cells(row: &DropRow) -> Vec<Cell> {
    let last = match row.since_s {
        Some(0.0) => "now".to_owned(),
        Some(seconds) => ago(seconds),
        None => "before".to_owned(),
    };
    vec![
        Cell::name(&row.place),
        Cell::text(&row.reason),
        Cell::loss(row.per_s),
        Cell::number(row.total, format!("{:.0}", row.total)),
        Cell::number(row.since_s.unwrap_or(f64::MAX), last),
    ]
}

fn socket_cells(row: &SocketRow) -> Vec<Cell> {
    vec![
        Cell::name(&row.number),
        Cell::name(&row.local),
        Cell::rate(row.queued),
        Cell::count(row.memory),
        Cell::count(row.buffer),
        Cell::loss(row.errors),
        Cell::count(row.errors_total),
    ]
}

fn tcp_cells(row: &TcpRow) -> Vec<Cell> {
    vec![
        Cell::name(&row.name),
        Cell::text(&row.state),
        Cell::rate(row.received * 8.0),
        Cell::rate(row.sent * 8.0),
        Cell::loss(row.resent),
        Cell::count(row.unread),
        Cell::count(row.unacknowledged),
    ]
}

/// Order of a table's rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Sorting {
    /// Column; `None` for the order of the model.
    pub(super) column: Option<usize>,
    /// True if the smallest is last for text, and first for numbers.
    pub(super) is_reversed: bool,
}

/// Rows that contain `filter`, in order: the largest numbers and the first texts on top.
pub(super) fn arranged(mut rows: Vec<Vec<Cell>>, filter: &str, sorting: Sorting) -> Vec<Vec<Cell>> {
    let filter = filter.to_lowercase();
    let contains = |cell: &Cell| cell.text.to_lowercase().contains(&filter);
    rows.retain(|row| row.iter().any(contains));
    if let Some(column) = sorting.column {
        rows.sort_by(|one, other| match (one.get(column), other.get(column)) {
            (Some(one), Some(other)) => one.compare(other),
            _ => std::cmp::Ordering::Equal,
        });
    }
    if sorting.is_reversed {
        rows.reverse();
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_column(rows: &[Vec<Cell>]) -> Vec<&str> {
        rows.iter().map(|row| row[0].text.as_str()).collect()
    }

    #[test]
    fn top_3_rows_are_sorted_and_filtered() {
        let row = |name: &str, value| vec![Cell::text(name), Cell::rate(value)];
        let rows = vec![row("rx-0", 5.0), row("rx-1", 70.0), row("eth1/rx-2", 5.5)];
        let arrange = |filter, column, is_reversed| {
            arranged(rows.clone(), filter, Sorting { column, is_reversed })
        };
        assert_eq!(first_column(&arrange("", None, false)), ["rx-0", "rx-1", "eth1/rx-2"]);
        assert_eq!(first_column(&arrange("", None, true)), ["eth1/rx-2", "rx-1", "rx-0"]);
        assert_eq!(first_column(&arrange("", Some(0), false)), ["eth1/rx-2", "rx-0", "rx-1"]);
        assert_eq!(first_column(&arrange("", Some(1), false)), ["rx-1", "eth1/rx-2", "rx-0"]);
        assert_eq!(first_column(&arrange("RX", Some(1), true)), ["rx-0", "eth1/rx-2", "rx-1"]);
        assert_eq!(first_column(&arrange("eth1", None, false)), ["eth1/rx-2"]);
        assert!(arrange("eth2", None, false).is_empty());
        assert_eq!(arrange("", Some(9), false), rows, "no such column");
    }

    #[test]
    fn top_3_sockets_are_sorted_by_numbers() {
        let socket = |number: u32| SocketRow {
            number: number.to_string(),
            local: format!("10.0.0.{number}:53"),
            queued: 0.0,
            memory: 0.0,
            buffer: 0.0,
            errors: 0.0,
            errors_total: 0.0,
        };
        let model = Model { sockets: [10, 2, 9].map(socket).into(), ..Model::default() };
        for column in [0, 1] {
            let sorting = Sorting { column: Some(column), is_reversed: false };
            let rows = arranged(TableKind::Sockets.rows(&model), "", sorting);
            assert_eq!(first_column(&rows), ["2", "9", "10"]);
        }
    }

    #[test]
    fn top_2_tables_have_a_cell_per_column() {
        let model = Model {
            cpus: vec![CpuRow {
                cpu: 3,
                is_online: true,
                busy: 0.5,
                delivered: 1.0,
                share: 1.0,
                backlog: 0.0,
                refused: 7.0,
                wait_s: None,
                reasons: vec![("rps".to_owned(), 0.98), ("held".to_owned(), 0.02)],
            }],
            ..Model::default()
        };
        let rows = TableKind::Cpus.rows(&model);
        assert_eq!(rows[0].len(), TableKind::Cpus.columns().len());
        let texts: Vec<_> = rows[0].iter().map(|cell| cell.text.as_str()).collect();
        let why = "7.0/s refused, rps 98%, held 2%";
        assert_eq!(texts, ["3", "50 %", "|||", "1.0", "100 %", "0", "-", why]);
        for kind in TableKind::ALL {
            let fixed: u16 =
                kind.columns().iter().map(|column| column.width.unwrap_or(0) + 1).sum();
            assert!(fixed < 80 - 4, "{kind:?} has room for its text at 80 columns");
            assert_eq!(TableKind::ALL[kind.index()], kind);
        }
    }
}
