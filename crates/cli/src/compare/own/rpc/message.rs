//! Sizes of requests and answers, which both ends must know.

use clap::Args;

/// Largest request or answer.
const MESSAGE_MAX: i64 = 1 << 20;

/// Sizes of requests and answers.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct MessageSizes {
    /// Bytes of a request
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(1..=MESSAGE_MAX))]
    request_bytes: u32,

    /// Bytes of an answer
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(1..=MESSAGE_MAX))]
    answer_bytes: u32,
}

impl MessageSizes {
    /// A request before its bytes are known.
    pub(crate) fn request(self) -> Vec<u8> {
        blank(self.request_bytes)
    }

    /// An answer before its bytes are known.
    pub(crate) fn answer(self) -> Vec<u8> {
        blank(self.answer_bytes)
    }
}

fn blank(len_bytes: u32) -> Vec<u8> {
    vec![0; usize::try_from(len_bytes).unwrap_or(usize::MAX)]
}
