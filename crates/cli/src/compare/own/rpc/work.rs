//! Work of a request, in the working set of its connection.

use clap::Args;

/// Words of a cache line.
const LINE_WORDS: usize = 8;

/// Work of each request.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct WorkPlan {
    /// Steps of work per request; each reads and writes a line of the connection's working set
    #[arg(long = "work", value_name = "STEPS", default_value_t = 0)]
    steps: u32,

    /// Bytes of each connection's working set
    #[arg(long, value_name = "N", default_value_t = 16_384,
          value_parser = clap::value_parser!(u32).range(64..=1 << 30))]
    set_bytes: u32,
}

/// Working set of a connection.
pub(crate) struct WorkingSet {
    steps: u32,
    lines: Vec<[u64; LINE_WORDS]>,
    /// Sum of the work so far, which names the next line.
    sum: u64,
}

impl WorkingSet {
    pub(crate) fn new(plan: WorkPlan) -> Self {
        let bytes = usize::try_from(plan.set_bytes).unwrap_or(usize::MAX);
        let lines = (bytes / size_of::<[u64; LINE_WORDS]>()).max(1);
        Self { steps: plan.steps, lines: vec![[1; LINE_WORDS]; lines], sum: 0 }
    }

    /// Does the work of one request. The result depends on every step.
    pub(crate) fn work(&mut self) -> u64 {
        let count = self.lines.len() as u64;
        for _ in 0..self.steps {
            // The generator of Knuth's MMIX: no line follows from the one before by a stride.
            self.sum = self.sum.wrapping_mul(6_364_136_223_846_793_005);
            self.sum = self.sum.wrapping_add(1_442_695_040_888_963_407);
            let line = usize::try_from((self.sum >> 32) % count).unwrap_or(0);
            let word = &mut self.lines[line][0];
            *word = word.wrapping_add(self.sum >> 32);
            self.sum ^= *word;
        }
        self.sum
    }
}
