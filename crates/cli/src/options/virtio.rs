//! Options of vhost-user: how to reach the back end, and the buffers that it gets.

use clap::Args;
use forebay_device::config::virtio::{
    QUEUE_SIZE_DEFAULT, RX_BUFFER_MAX_BYTES_DEFAULT, Role, RxBufferSizing, VirtioOptions,
};

use crate::failure::Failure;

/// Options that apply to vhost-user only.
#[derive(Debug, Args)]
pub(crate) struct VhostUserOptions {
    /// How large receive buffers are (vhost-user): auto (by the average length of the packets that
    /// came), mtu (one packet of an ordinary network), page, or so many bytes [default: auto]
    #[arg(long, value_name = "auto|mtu|page|BYTES")]
    pub(crate) rx_buffers: Option<RxBufferSizing>,

    /// The most bytes that auto makes a receive buffer (vhost-user) [default: 16384]
    #[arg(long, value_name = "BYTES")]
    pub(crate) rx_buffer_max: Option<u32>,

    /// Entries of each ring, a power of two (vhost-user) [default: 256]
    #[arg(long, value_name = "N")]
    pub(crate) queue_size: Option<u16>,

    /// Have the back end give packets as they were on the wire: checksums done, segments not merged
    /// (vhost-user)
    #[arg(long)]
    pub(crate) no_rx_offloads: bool,

    /// Use packed rings where the back end has them (vhost-user)
    #[arg(long)]
    pub(crate) packed: bool,

    /// Make the socket and wait for the back end, rather than connect to the back end's
    /// (vhost-user)
    #[arg(long)]
    pub(crate) listen: bool,
}

impl VhostUserOptions {
    /// Names of all options, each with true if it is given.
    pub(crate) fn given(&self) -> [(&'static str, bool); 6] {
        [
            ("--rx-buffers", self.rx_buffers.is_some()),
            ("--rx-buffer-max", self.rx_buffer_max.is_some()),
            ("--queue-size", self.queue_size.is_some()),
            ("--packed", self.packed),
            ("--no-rx-offloads", self.no_rx_offloads),
            ("--listen", self.listen),
        ]
    }

    /// Options for opening a device.
    ///
    /// # Errors
    /// If the options are invalid or contradict each other.
    pub(crate) fn options(&self) -> Result<VirtioOptions, Failure> {
        let rx_buffers = self.rx_buffers.unwrap_or_default();
        if self.rx_buffer_max.is_some() && rx_buffers != RxBufferSizing::Auto {
            let problem = format!("--rx-buffer-max with --rx-buffers {rx_buffers}");
            let help = "it bounds what auto chooses: leave it out, or have auto choose";
            return Err(Failure::usage(problem, help));
        }
        let options = VirtioOptions {
            role: if self.listen { Role::Listen } else { Role::Connect },
            queue_size: self.queue_size.unwrap_or(QUEUE_SIZE_DEFAULT),
            packed: self.packed,
            rx_offloads: !self.no_rx_offloads,
            rx_buffers,
            rx_buffer_max_bytes: self.rx_buffer_max.unwrap_or(RX_BUFFER_MAX_BYTES_DEFAULT),
        };
        options.check()?;
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct DeviceLine {
        #[command(flatten)]
        options: VhostUserOptions,
    }

    fn options(line: &str) -> Result<VirtioOptions, String> {
        let words = line.split(' ').filter(|word| !word.is_empty());
        let line = DeviceLine::try_parse_from(["forebay"].into_iter().chain(words));
        let line = line.map_err(|error| error.to_string())?;
        line.options.options().map_err(|failure| failure.to_string())
    }

    #[test]
    fn defaults_are_those_of_the_library() {
        assert_eq!(options(""), Ok(VirtioOptions::default()));
        let said = options("--rx-buffers 2048 --queue-size 1024 --packed --listen").unwrap();
        assert_eq!(said.rx_buffers.to_string(), "2048");
        assert_eq!((said.queue_size, said.packed, said.role), (1024, true, Role::Listen));
        assert_eq!(options("--rx-buffer-max 9216").unwrap().rx_buffer_max_bytes, 9216);
    }

    #[test]
    fn impossible_device_options_are_refused() {
        for (line, part) in [
            ("--queue-size 100", "queue-size cannot be \"100\": it is a power of two"),
            ("--rx-buffers huge", "\"huge\" is not a size of receive buffers"),
            ("--rx-buffers page --rx-buffer-max 9216", "--rx-buffer-max with --rx-buffers page"),
        ] {
            let refused = options(line).unwrap_err();
            assert!(refused.contains(part), "{line}: {refused}");
        }
    }
}
