//! Text of `explain`, shortened to what fits: without the queues that have not seen the flow, and
//! without its older moves.

use std::collections::VecDeque;

use super::cell::cells;

/// Beginning of the line of a queue that has not seen the flow.
const NOWHERE: &str = "  now:   nowhere";

/// Beginning of the line with the number of moves.
const MOVES: &str = "  moves:";

/// Indent of moves.
const MOVE: &str = "    ";

/// At most `lines_max` lines of at most `width` cells.
pub(super) fn lines(told: &[String], width: usize, lines_max: usize) -> Vec<String> {
    // The first line names the flow.
    let (key, queues) = parts(told.get(1..).unwrap_or_default());
    let has_seen = |queue: &&[String]| !queue.iter().any(|line| line.starts_with(NOWHERE));
    let seen: Vec<_> = queues.iter().copied().filter(has_seen).collect();
    let shown = if seen.is_empty() { queues } else { seen };
    let told: Vec<&String> = std::iter::once(key).chain(shown).flatten().collect();
    let whole: Vec<_> = told.iter().flat_map(|line| wrapped(line, width)).collect();
    if whole.len() <= lines_max {
        return whole;
    }
    let (moves, others): (Vec<&String>, Vec<&String>) =
        told.into_iter().partition(|line| line.starts_with(MOVE));
    let others = others.into_iter().filter(|line| !line.starts_with(MOVES));
    let mut lines: Vec<_> = others.flat_map(|line| wrapped(line, width)).collect();
    let latest = latest(&moves, width, lines_max.saturating_sub(lines.len() + 1));
    if !moves.is_empty() {
        lines.push(format!("{MOVES} the latest of {}", moves.len()));
    }
    lines.extend(latest);
    lines.truncate(lines_max);
    lines
}

/// Last moves, with at most `lines_max` lines.
fn latest(moves: &[&String], width: usize, lines_max: usize) -> Vec<String> {
    let mut lines = VecDeque::new();
    for line in moves.iter().rev() {
        let wrapped = wrapped(line, width);
        if lines.len() + wrapped.len() > lines_max {
            break;
        }
        wrapped.into_iter().rev().for_each(|line| lines.push_front(line));
    }
    lines.into()
}

/// Lines about the flow's key, and those of each queue.
fn parts(told: &[String]) -> (&[String], Vec<&[String]>) {
    let is_queue = |line: &String| !line.starts_with(' ');
    let begin = told.iter().position(is_queue).unwrap_or(told.len());
    let (key, mut rest) = told.split_at(begin);
    let mut queues = Vec::new();
    while !rest.is_empty() {
        let end = rest.iter().skip(1).position(is_queue).map_or(rest.len(), |end| end + 1);
        let (queue, others) = rest.split_at(end);
        queues.push(queue);
        rest = others;
    }
    (key, queues)
}

/// Lines of at most `width` cells, broken at blanks; all but the first are indented further.
pub(super) fn wrapped(line: &str, width: usize) -> Vec<String> {
    if cells(line) <= width {
        return vec![line.to_owned()];
    }
    let indent = line.len() - line.trim_start().len();
    let blanks = |count: usize| " ".repeat(count.min(width / 2));
    let mut lines = vec![blanks(indent)];
    let mut has_words = false;
    for word in line.split_whitespace() {
        let last =
            lines.last_mut().filter(|last| !has_words || cells(last) + 1 + cells(word) <= width);
        match last {
            Some(last) if has_words => *last += &format!(" {word}"),
            Some(last) => *last += word,
            None => lines.push(blanks(indent + 4) + word),
        }
        has_words = true;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(moves: usize) -> Vec<String> {
        let mut told = vec![
            "flow 10.0.0.1:5 > 10.0.0.2:6, hash 0badcafe".to_owned(),
            "  key:   outer (flow_key=auto)".to_owned(),
            "rx-0, polled by CPU 0, at 1.000000 s".to_owned(),
            "  now:   on CPU 1: its last packet went there".to_owned(),
            format!("  moves: {moves} recorded, the oldest first"),
        ];
        told.extend((0..moves).map(|number| {
            format!(
                "    {number}.000000 s: CPU 0 to CPU 1, since the RPS map says so (rps); at once"
            )
        }));
        told.push("  drops: none recorded".to_owned());
        told.push("rx-1, polled by CPU 1, at 1.000001 s".to_owned());
        told.push(format!("{NOWHERE}: no packet has come through its slot"));
        told
    }

    #[test]
    fn top_4_flow_text_keeps_latest_moves() {
        let told = told(9);
        let all = lines(&told, 80, 100);
        assert_eq!(all, told[1..=14], "all of the queue that has seen it");
        let few = lines(&told, 80, 8);
        assert_eq!(few[..4], [&told[1..4], &told[14..15]].concat());
        assert_eq!(few[4], "  moves: the latest of 9");
        assert_eq!(few[5..], told[11..14]);
        assert_eq!(lines(&told, 80, 3), told[1..4]);
        assert!(lines(&[], 80, 5).is_empty() && lines(&told, 80, 0).is_empty());
    }

    #[test]
    fn top_4_long_lines_break_at_blanks() {
        let text = "  next:  to CPU 1, since the RPS map says so";
        let broken = wrapped(text, 24);
        assert_eq!(broken, ["  next: to CPU 1, since", "      the RPS map says", "      so"]);
        assert_eq!(wrapped(text, 80), [text]);
        for line in lines(&told(3), 30, 100) {
            assert!(line.chars().count() <= 30, "{line}");
        }
    }
}
