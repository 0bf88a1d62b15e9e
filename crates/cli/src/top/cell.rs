//! Cells of tables: their texts, cut to a column's width, and their order.

use std::cmp::Ordering;

use forebay_sys::cpu_list::CpuList;
use ratatui::text::Span;

use super::figures::{count, short, time};

/// Mark in place of what is cut off.
const MARK: char = '…';

/// Cell of a table.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Cell {
    pub(super) text: String,
    /// Text in its place if it does not fit.
    shorter: Option<String>,
    order: Order,
    /// True if the cell needs attention.
    pub(super) is_alarm: bool,
}

/// Order of the cells of a column.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Order {
    /// The largest first.
    Value(f64),
    /// By characters.
    Text,
    /// By characters, and by the values of the numbers among them.
    Name,
}

/// Side of a text that is cut off if it does not fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cut {
    End,
    /// Of names that end with a number by which they are told apart.
    Front,
}

impl Cell {
    pub(super) fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), shorter: None, order: Order::Text, is_alarm: false }
    }

    /// Name with numbers, such as `rx-10`.
    pub(super) fn name(text: impl Into<String>) -> Self {
        Self { order: Order::Name, ..Self::text(text) }
    }

    /// Mask of CPUs; one that does not fit is a list of CPUs.
    pub(super) fn mask(mask: &str) -> Self {
        let list = CpuList::parse_mask(mask).ok().map(|cpus| match cpus.cpus() {
            // The number alone could be taken for a mask.
            [one] => format!("CPU {one}"),
            _ => cpus.to_string(),
        });
        let shorter = list.filter(|list| !list.is_empty() && list.len() < mask.len());
        Self { shorter, ..Self::text(mask) }
    }

    pub(super) fn number(value: f64, text: String) -> Self {
        Self { order: Order::Value(value), ..Self::text(text) }
    }

    pub(super) fn rate(value: f64) -> Self {
        Self::number(value, short(value))
    }

    pub(super) fn count(value: f64) -> Self {
        Self::number(value, count(value))
    }

    /// Number that needs attention unless it is 0.
    pub(super) fn loss(value: f64) -> Self {
        Self::rate(value).alarming(value > 0.0)
    }

    /// The same cell, which needs attention if `is_alarm`.
    pub(super) fn alarming(self, is_alarm: bool) -> Self {
        Self { is_alarm, ..self }
    }

    pub(super) fn span(seconds: Option<f64>) -> Self {
        Self::number(seconds.unwrap_or(-1.0), seconds.map_or_else(|| "-".to_owned(), time))
    }

    /// Text for a column of `width` cells. A mark stands for what is cut off.
    pub(super) fn fitted(&self, width: usize, cut: Cut) -> String {
        let fits = cells(&self.text) <= width;
        let text = self.shorter.as_ref().filter(|_| !fits).unwrap_or(&self.text);
        if cells(text) <= width {
            return text.clone();
        }
        let Some(kept) = width.checked_sub(1) else { return String::new() };
        match cut {
            Cut::End => format!("{}{MARK}", front(text, kept)),
            Cut::Front => format!("{MARK}{}", back(text, kept)),
        }
    }

    /// Order of two cells of a column.
    pub(super) fn compare(&self, other: &Self) -> Ordering {
        match (self.order, other.order) {
            (Order::Value(one), Order::Value(other)) => other.total_cmp(&one),
            (Order::Name, Order::Name) => parts(&self.text).cmp(&parts(&other.text)),
            _ => self.text.cmp(&other.text),
        }
    }
}

/// Cells of a terminal that a text takes: two for each wide character, as of Chinese.
pub(super) fn cells(text: &str) -> usize {
    Span::raw(text).width()
}

fn cells_of(char: char) -> usize {
    Span::raw(&*char.encode_utf8(&mut [0; 4])).width()
}

/// Longest beginning of a text that takes at most `room` cells.
fn front(text: &str, room: usize) -> &str {
    let mut left = room;
    let is_beyond = |char: char| {
        let fits = left.checked_sub(cells_of(char));
        left = fits.unwrap_or(0);
        fits.is_none()
    };
    let end = text.find(is_beyond).unwrap_or(text.len());
    &text[..end]
}

/// Longest end of a text that takes at most `room` cells.
pub(super) fn back(text: &str, room: usize) -> &str {
    let mut left = room;
    let is_beyond = |(_, char): &(usize, char)| {
        let fits = left.checked_sub(cells_of(*char));
        left = fits.unwrap_or(0);
        fits.is_none()
    };
    let beyond = text.char_indices().rev().find(is_beyond);
    &text[beyond.map_or(0, |(at, char)| at + char.len_utf8())..]
}

/// Part of a name.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum NamePart<'a> {
    /// Digits without zeros in front, and how many they are.
    Number(usize, &'a str),
    Letters(&'a str),
}

/// Numbers of a name, and what is between them.
fn parts(mut name: &str) -> Vec<NamePart<'_>> {
    let mut parts = Vec::new();
    while let Some(first) = name.chars().next() {
        let is_number = first.is_ascii_digit();
        let end = name.find(|letter: char| letter.is_ascii_digit() != is_number);
        let (part, rest) = name.split_at(end.unwrap_or(name.len()));
        let digits = part.trim_start_matches('0');
        parts.push(if is_number {
            NamePart::Number(digits.len(), digits)
        } else {
            NamePart::Letters(part)
        });
        name = rest;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn top_2_cut_texts_have_a_mark() {
        for (text, width, cut, shown) in [
            ("eth1/rx-1", 9, Cut::Front, "eth1/rx-1"),
            ("eth1/rx-12", 9, Cut::Front, "…h1/rx-12"),
            ("enp65s0f0/rx-2", 9, Cut::Front, "…0f0/rx-2"),
            ("backlog_full", 8, Cut::End, "backlog…"),
            ("12345678", 7, Cut::End, "123456…"),
            ("ab", 1, Cut::Front, "…"),
            ("ab", 0, Cut::Front, ""),
            ("ab", 0, Cut::End, ""),
            ("ネット0/rx-1", 12, Cut::Front, "ネット0/rx-1"),
            ("ネット0/rx-1", 9, Cut::Front, "…ト0/rx-1"),
            ("ネット0/rx-1", 8, Cut::Front, "…0/rx-1"),
            ("ネットワーク", 6, Cut::End, "ネッ…"),
        ] {
            assert_eq!(Cell::text(text).fitted(width, cut), shown, "{text}");
        }
    }

    #[test]
    fn top_2_long_masks_are_lists() {
        for (mask, shown) in [
            ("ffffffff", "ffffffff"),
            ("ff,ffffffff", "0-39"),
            ("100,00000000", "CPU 40"),
            ("00000000", "00000000"),
            ("aaaaaaaa,aaaaaaaa", "aaaaaaa…"),
            ("no mask at all", "no mask…"),
        ] {
            assert_eq!(Cell::mask(mask).fitted(8, Cut::End), shown);
            assert_eq!(Cell::mask(mask).fitted(20, Cut::End), mask);
        }
    }

    #[test]
    fn top_3_names_are_sorted_by_numbers() {
        let names = ["2", "9", "10", "eth1/rx-2", "eth1/rx-10", "eth2/rx-1", "rx-3", "rx-20"];
        let mut cells = names.map(Cell::name);
        cells.reverse();
        cells.sort_by(Cell::compare);
        assert_eq!(cells, names.map(Cell::name));
    }
}
