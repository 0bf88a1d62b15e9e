//! The report, for people.

use std::fmt::Write;

use super::finding::{Finding, Severity};
use super::{Examined, UnseenFact};

impl Examined {
    /// Text of the report: what there is, what to change, and what could not be seen.
    pub(super) fn render(&self) -> String {
        let width = self.abilities.iter().map(|row| row.name.len()).max().unwrap_or(0);
        let mut text = String::new();
        for row in &self.abilities {
            let _ = writeln!(text, "{:width$}  {}", row.name, row.value);
        }
        for finding in &self.findings {
            text += &render(finding);
        }
        if !self.unseen.is_empty() {
            text += "\nnot seen\n";
        }
        for UnseenFact { what, why } in &self.unseen {
            let _ = writeln!(text, "  {what}: {why}");
        }
        let changes = self.findings.iter().filter(|it| it.severity > Severity::Note).count();
        let _ = match changes {
            0 => writeln!(text, "\nnothing to change"),
            1 => writeln!(text, "\n1 thing to change"),
            _ => writeln!(text, "\n{changes} things to change"),
        };
        text
    }
}

fn render(finding: &Finding) -> String {
    let Finding { severity, about, found, commands, gain } = finding;
    let weight = match severity {
        Severity::Note => "note",
        Severity::Costs => "costs",
        Severity::Stops => "stops",
    };
    let mut text = format!("\n{weight}  {about}: {found}\n");
    for command in commands {
        let _ = writeln!(text, "       $ {command}");
    }
    if !gain.is_empty() {
        let _ = writeln!(text, "       gain: {gain}");
    }
    text
}
