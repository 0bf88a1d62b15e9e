//! Console blocks of a document, and the commands in them.

/// A fenced block.
pub(crate) struct Block {
    /// Line number of the block in its document.
    pub(crate) line: usize,
    pub(crate) lines: Vec<String>,
}

/// A command and its expected output.
#[derive(Debug, Default)]
pub(crate) struct Step {
    /// One or several lines of bash.
    pub(crate) command: String,
    pub(crate) shown: Vec<String>,
    /// True if the command runs until interrupted by `^C`.
    pub(crate) is_ended: bool,
}

/// All blocks of one kind.
pub(crate) fn of_kind(document: &str, kind: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut within = None;
    for (number, line) in (1..).zip(document.lines()) {
        match (line.strip_prefix("```"), within) {
            (Some(fence), None) => {
                within = Some(fence == kind);
                if fence == kind {
                    blocks.push(Block { line: number, lines: Vec::new() });
                }
            }
            (Some(_), Some(_)) => within = None,
            (None, Some(true)) => {
                blocks.iter_mut().last().unwrap().lines.push(line.to_owned());
            }
            (None, _) => {}
        }
    }
    blocks
}

impl Block {
    /// The block's commands, in order.
    pub(crate) fn steps(&self) -> Result<Vec<Step>, String> {
        let mut steps: Vec<Step> = Vec::new();
        for line in &self.lines {
            if let Some(command) = line.strip_prefix("$ ") {
                steps.push(Step { command: command.to_owned(), ..Step::default() });
                continue;
            }
            let step = steps.last_mut().ok_or(format!("{line:?} comes before any command"))?;
            match line.strip_prefix("> ") {
                Some(more) if step.shown.is_empty() => {
                    step.command += "\n";
                    step.command += more;
                }
                _ if line == "^C" => step.is_ended = true,
                _ => step.shown.push(line.clone()),
            }
        }
        match steps.iter().find(|step| step.lasts() && !step.is_ended) {
            Some(step) => {
                Err(format!("nothing ends {:?}: neither ^C nor --duration", step.command))
            }
            None => Ok(steps),
        }
    }

    /// True if any command contains this word.
    pub(crate) fn names(&self, word: &str) -> bool {
        let typed = |line: &&String| line.starts_with("$ ") || line.starts_with("> ");
        self.lines.iter().filter(typed).any(|line| line.contains(word))
    }
}

impl Step {
    /// True if the command takes packets from devices until told to stop.
    fn lasts(&self) -> bool {
        let is_live =
            self.command.starts_with("forebay run ") || self.command.contains("--example");
        is_live && !self.command.contains("--duration") && !self.command.trim_end().ends_with('&')
    }
}
