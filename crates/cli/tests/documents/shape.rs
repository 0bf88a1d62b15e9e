//! Comparison of outputs that ignores differences between runs.

/// Units, which are scaled with their number.
const UNITS: [&str; 17] = [
    "ns", "µs", "ms", "s", "pps", "kpps", "Mpps", "bit/s", "kbit/s", "Mbit/s", "Gbit/s", "B",
    "KiB", "MiB", "GiB", "%", "x",
];

/// Fields that appear only if their count is not zero, or that depend on timing.
const IF_ANY: [&str; 11] = [
    "dropped",
    "noticed",
    "not merged:",
    "flushed:",
    "N packet without a flow hash",
    "N move between CPUs",
    "now:",
    "next:",
    "moves:",
    "N: CPU N to CPU N,",
    "drops:",
];

/// Compares an output with the one shown. The error is the first difference. If nothing is shown,
/// any output is accepted.
pub(crate) fn compare(shown: &[String], output: &str) -> Result<(), String> {
    let shown: Vec<_> =
        shown.iter().map(|line| form(line)).filter(|line| !line.is_empty()).collect();
    let output: Vec<_> = output.lines().map(form).filter(|line| !line.is_empty()).collect();
    if shown.is_empty() || follow(&shown, &output) {
        return Ok(());
    }
    let (shown, output) = (shown.join("\n"), output.join("\n"));
    Err(format!("--- shown is\n{shown}\n--- but it is\n{output}"))
}

fn follow(shown: &[String], output: &[String]) -> bool {
    let is_if_any = |line: &String| IF_ANY.iter().any(|told| line.starts_with(told));
    match (shown, output) {
        ([], []) => true,
        ([gap, rest @ ..], output) if gap == "..." => {
            (0..=output.len()).any(|passed| follow(rest, &output[passed..]))
        }
        ([line, shown @ ..], [told, output @ ..]) if fits(line, told) && follow(shown, output) => {
            true
        }
        (shown, [told, output @ ..]) if is_if_any(told) && follow(shown, output) => true,
        ([line, shown @ ..], output) if is_if_any(line) => follow(shown, output),
        _ => false,
    }
}

/// True if a line matches the one shown, where `…` is any text.
fn fits(shown: &str, told: &str) -> bool {
    let Some((start, rest)) = shown.split_once('…') else { return shown == told };
    let Some(told) = told.strip_prefix(start) else { return false };
    let mut ends = (0..=told.len()).filter(|at| told.is_char_boundary(*at));
    ends.any(|at| fits(rest, &told[at..]))
}

/// A line with all numbers replaced and alignment removed. Drop counts at the end of a table row
/// are left out, as they appear only if not zero.
fn form(line: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    let mut is_counted = false;
    for word in line.split_whitespace() {
        let is_unit = UNITS.contains(&word.trim_end_matches([',', ';', ')', ':']));
        if is_counted && is_unit {
            let unit = word.trim_end_matches([',', ';', ')', ':']);
            words.last_mut().unwrap().push_str(&word[unit.len()..]);
            is_counted = false;
            continue;
        }
        let number = numbered(word);
        let of_many = word.trim_end_matches([',', ';', ')']);
        let is_plural = is_counted && of_many.len() > 2 && of_many.ends_with('s');
        is_counted = number == "N" || number == "(N";
        words.push(match is_plural {
            true => of_many[..of_many.len() - 1].to_owned() + &word[of_many.len()..],
            false => number,
        });
    }
    if let [.., number, name] = words.as_slice()
        && number == "N"
        && name.contains('_')
        && words.len() > 2
        && !words.first().is_some_and(|word| word.starts_with("dropped"))
    {
        words.truncate(words.len() - 2);
    }
    words.join(" ")
}

/// A word with its numbers replaced by `N`, also hashes of eight hexadecimal digits.
fn numbered(word: &str) -> String {
    let bare = word.trim_matches([',', ';', ':', '(', ')']);
    if bare.len() == 8 && bare.chars().all(|digit| matches!(digit, '0'..='9' | 'a'..='f')) {
        return word.replace(bare, "N");
    }
    let mut form = String::new();
    let mut chars = word.chars().peekable();
    while let Some(char) = chars.next() {
        if !char.is_ascii_digit() {
            form.push(char);
            continue;
        }
        form.push('N');
        let mut ahead = chars.clone();
        while let Some(next) = ahead.next() {
            let goes_on = next.is_ascii_digit()
                || matches!(next, ',' | '.') && ahead.peek().is_some_and(char::is_ascii_digit);
            if !goes_on {
                break;
            }
            chars = ahead.clone();
        }
    }
    form
}
