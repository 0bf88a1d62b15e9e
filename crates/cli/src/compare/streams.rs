//! Bulk streams over TCP between two programs of our side, over sockets of ours or of the kernel.

use std::process::Command;
use std::time::Duration;

use forebay_rx::CpuId;
use serde_json::Value;

use super::CompareSetting;
use super::network::Network;

/// Streams to one port.
#[derive(Clone, Copy)]
pub(super) struct Streams<'a> {
    pub(super) setting: &'a CompareSetting,
    pub(super) network: &'a Network,
    pub(super) port: &'a str,
    pub(super) connections: u16,
}

/// End of the streams.
#[derive(Clone, Copy)]
pub(super) struct StreamEnd<'a> {
    pub(super) namespace: &'static str,
    /// Arguments of its program that select the stack.
    pub(super) stack: &'a [&'static str],
}

impl Streams<'_> {
    /// Command of the receiver, which ends with a result after the window. Losses and growing windows
    /// need a time of at least `warm_up_min` and `window_min`.
    pub(super) fn receiver(
        &self,
        end: StreamEnd<'_>,
        warm_up_min: Duration,
        window_min: Duration,
    ) -> Result<Command, String> {
        let mut command = self.program("bulk-receive", end, self.setting.cpus.receiver)?;
        let warm_up = self.setting.warm_up.max(warm_up_min);
        let window = self.setting.window.max(window_min);
        command.args(["--warm-up", &warm_up.as_millis().to_string()]);
        command.args(["--window", &window.as_millis().to_string()]);
        Ok(command)
    }

    /// Command of the sender.
    pub(super) fn sender(&self, end: StreamEnd<'_>, to: &str) -> Result<Command, String> {
        let mut command = self.program("bulk-send", end, self.setting.cpus.sender)?;
        command.args(["--to", to]);
        Ok(command)
    }

    fn program(&self, what: &str, end: StreamEnd<'_>, cpu: CpuId) -> Result<Command, String> {
        let mut command = self.network.own(end.namespace, what)?;
        command.args(end.stack).args(["--port", self.port, "--cpus", &cpu.to_string()]);
        command.args(["--connections", &self.connections.to_string()]);
        Ok(command)
    }
}

/// Goodput of a receiver's result, in Mbit/s.
pub(super) fn goodput(result: &Value) -> Result<f64, String> {
    Ok(number(result, "bytes")? * 8e3 / number(result, "ns")?)
}

/// CPU time of both ends for a gigabyte, in milliseconds, of a receiver's result and the sender's
/// CPU time. The warm-up is in all of them.
pub(super) fn cpu_ms_per_gb(result: &Value, sender_cpu_ns: f64) -> Result<f64, String> {
    let cpu_ns = number(result, "cpu_ns")? + sender_cpu_ns;
    Ok(cpu_ns * 1e3 / number(result, "bytes_of_run")?)
}

fn number(result: &Value, name: &str) -> Result<f64, String> {
    result[name].as_f64().ok_or_else(|| "the receiver has no result".to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn goodput_is_in_megabits() {
        let result = json!({ "bytes": 25_000_000, "ns": 2_000_000_000_u64 });
        assert!((goodput(&result).unwrap() - 100.0).abs() < 1e-9);
        assert!(goodput(&json!({})).is_err());
    }

    #[test]
    fn cpu_time_is_of_both_ends() {
        let result = json!({ "bytes_of_run": 2_000_000_000_u64, "cpu_ns": 300_000_000 });
        assert!((cpu_ms_per_gb(&result, 5e8).unwrap() - 400.0).abs() < 1e-9);
        assert!(cpu_ms_per_gb(&json!({}), 0.0).is_err());
    }
}
