//! Reads and writes of the tree's files, with the kernel's answers.

use forebay_device::RxBuffers;
use forebay_engine::Settings;
use forebay_engine::knobs::change::{Change, Queues};
use forebay_engine::knobs::coalesce::CoalesceChange;
use forebay_engine::knobs::knob::{Knob, Value};
use forebay_engine::knobs::write::KnobWrite;
use forebay_engine::knobs::{BalanceChange, SpreadChange};
use forebay_rx::RxQueue;
use forebay_sys::cpu_list::CpuList;
use forebay_sys::errno::Errno;
use forebay_sys::error::Error;
use forebay_sys::number::kstrtobool;
use forebay_sys::refused::{Refused, Written};

use super::handle::Control;
use super::stats::{CpuStats, softnet_stat};
use super::tree::{File, TreeEntry};

impl Control {
    /// Entries of a directory of the tree. Paths begin at its root; leading slashes are ignored.
    ///
    /// # Errors
    /// `ENOENT` or `ENOTDIR`.
    pub fn entries(&self, directory: &str) -> Result<Vec<TreeEntry>, Errno> {
        self.tree().entries(directory)
    }

    /// Paths of the files that a name stands for: a path, or the end of one. `rps_cpus` stands for
    /// a file of each queue, `rx-0/rps_cpus` for one of the first queue of each device.
    ///
    /// # Errors
    /// `ENOENT`, `EISDIR` or `ENOTDIR` if there is none.
    pub fn named(&self, name: &str) -> Result<Vec<String>, Errno> {
        self.tree().named(name)
    }

    /// Text of a file, with its newline.
    ///
    /// # Errors
    /// `ENOENT`, `EISDIR` or `ENOTDIR` for the path; `EACCES` for a file that can only be written.
    pub fn read(&self, path: &str) -> Result<String, Errno> {
        self.read_file(self.tree().file(path)?)
    }

    pub(super) fn read_file(&self, file: File) -> Result<String, Errno> {
        let settings = self.settings();
        let list = |cpus: &CpuList| format!("{cpus}\n");
        Ok(match file {
            // Readers of the key could aim flows at one CPU.
            File::HashKey => return Err(Errno::Access),
            File::FlowKey => format!("{}\n", settings.flow_key),
            File::Knob(knob, queue) => self.value(knob, queue).print(self.machine()),
            File::CpuOnline(cpu) => format!("{}\n", u8::from(settings.cpus.contains(cpu))),
            File::Online | File::Cpus => list(&settings.cpus),
            File::Possible => list(self.state().cpus()),
            File::SoftnetStat => softnet_stat(self.state()),
            File::Coalesce(knob) => format!("{}\n", coalesce_value(knob, &settings)),
            File::Balance(knob) => {
                let current = BalanceChange::current(knob, settings.balance);
                format!("{}\n", current.map(BalanceChange::value).unwrap_or_default())
            }
            File::Spread(knob) => {
                let current = SpreadChange::current(knob, settings.spread);
                format!("{}\n", current.map(SpreadChange::value).unwrap_or_default())
            }
            File::RxBufferSize(queue) => {
                let buffers = self.state().devices().rx_buffers(queue);
                format!("{}\n", buffers.map_or(0, RxBuffers::size_bytes))
            }
            File::Counter(cpu, name) => {
                format!("{}\n", CpuStats::of(cpu, self.state()).named(name))
            }
        })
    }

    /// Text of a file as it was requested: other than that which it reads back if only a part of that is in force.
    pub(super) fn requested(&self, file: File) -> Result<String, Errno> {
        let File::Knob(Knob::RpsCpus, queue) = file else { return self.read_file(file) };
        let requested = self.settings().queue(queue).map(|queue| queue.rps_cpus.clone());
        Ok(Value::Cpus(requested.unwrap_or_default()).print(self.machine()))
    }

    /// Writes `bytes` to a file in one write. The kernel's knobs take bytes that are not UTF-8, of
    /// which 0xa0 is a blank.
    ///
    /// # Errors
    /// As the kernel's, with the reason in words; `EACCES` for a file that can only be read.
    pub fn write(
        &self,
        path: &str,
        bytes: &(impl AsRef<[u8]> + ?Sized),
    ) -> Result<Written, Refused> {
        let bytes = bytes.as_ref();
        let file = self.tree().file(path).map_err(|errno| at_path(errno, path))?;
        let read_only = || Refused::new(Errno::Access, format!("{path} can only be read"));
        if file.mode() & 0o200 == 0 {
            return Err(read_only());
        }
        // Bytes that are not UTF-8 belong to no value of Forebay's own knobs, and neither does their
        // replacement character.
        let text = String::from_utf8_lossy(bytes);
        let line = text.trim();
        let set = |change: Result<Change, Error>| {
            let invalid = |error: Error| match error {
                // Whoever tells a refusal names the knob and its value.
                Error::Setting { why, .. } => Refused::new(Errno::Inval, why),
                error => Refused::new(Errno::Inval, error.to_string()),
            };
            self.change(change.map_err(invalid)?)
        };
        match file {
            File::Knob(knob, queue) => return self.write_knob(knob, queue, bytes),
            // The kernel looks at the first characters as they were written.
            File::CpuOnline(cpu) => self.change(Change::Online(cpu, truth(bytes)?)),
            File::Coalesce(knob) | File::Balance(knob) | File::Spread(knob) => {
                set(format!("{knob}={line}").parse())
            }
            File::HashKey => set(format!("hash_key={line}").parse()),
            File::FlowKey => set(format!("flow_key={line}").parse()),
            File::Cpus => set(format!("cpus={line}").parse()),
            File::Online
            | File::Possible
            | File::SoftnetStat
            | File::Counter(..)
            | File::RxBufferSize(_) => Err(read_only()),
        }
        .map(|written| Written { len_bytes: bytes.len(), ..written })
    }

    /// Writes a line to a file, as `echo` does. An empty line is a write, too: it clears a mask,
    /// and is an invalid number.
    ///
    /// # Errors
    /// As [`write`](Self::write); `EINVAL` of several lines, of which a knob would read the first.
    pub fn echo(&self, path: &str, line: &str) -> Result<Written, Refused> {
        if line.contains('\n') {
            return Err(Refused::new(Errno::Inval, "it takes one line"));
        }
        self.write(path, &format!("{line}\n"))
    }

    fn write_knob(&self, knob: Knob, queue: RxQueue, bytes: &[u8]) -> Result<Written, Refused> {
        let KnobWrite { change, len_bytes } =
            knob.write(Queues::One(queue), bytes, self.machine())?;
        let written = change.map(|change| self.change(change)).transpose()?;
        Ok(Written { len_bytes, ..written.unwrap_or_default() })
    }

    /// Value that a knob reads back.
    fn value(&self, knob: Knob, queue: RxQueue) -> Value {
        let settings = self.settings();
        let of_queue = settings.queue(queue);
        let limits = settings.limits;
        Value::Number(match knob {
            Knob::RpsCpus => {
                return Value::Cpus(self.rps_cpus_in_force(queue).unwrap_or_default());
            }
            Knob::RpsDefaultMask => return Value::Cpus(settings.rps_default_mask),
            Knob::FlowLimitCpuBitmap => return Value::Cpus(settings.flow_limit_cpu_bitmap),
            Knob::RpsFlowCnt => of_queue.map_or(0, |queue| queue.rps_flow_cnt).into(),
            Knob::GroFlushTimeout => settings.coalesce.config.gro_flush_timeout_ns,
            Knob::NapiDeferHardIrqs => settings.coalesce.napi_defer_hard_irqs.into(),
            Knob::Mtu => settings.coalesce.config.mtu.into(),
            Knob::RpsSockFlowEntries => settings.rps_sock_flow_entries.into(),
            Knob::FlowLimitTableLen => settings.flow_limit_table_len.into(),
            Knob::NetdevMaxBacklog => settings.netdev_max_backlog.into(),
            Knob::NetdevBudget => limits.netdev_budget.into(),
            Knob::NetdevBudgetUsecs => limits.netdev_budget_usecs.into(),
            Knob::DevWeight => limits.dev_weight.into(),
            Knob::DevWeightRxBias => limits.dev_weight_rx_bias.into(),
            Knob::SkbDeferMax => limits.skb_defer_max.into(),
        })
    }
}

fn coalesce_value(knob: &str, settings: &Settings) -> String {
    let coalesce = settings.coalesce;
    let change = match knob {
        "coalesce" => CoalesceChange::Mode(coalesce.is_on.then_some(coalesce.config.mode)),
        "coalesce_at" => CoalesceChange::At(coalesce.at),
        _ => CoalesceChange::Descriptors(coalesce.config.descriptors),
    };
    change.value()
}

/// State of a CPU: running or not.
fn truth(bytes: &[u8]) -> Result<bool, Refused> {
    let takes = "it takes 1 to run the CPU and 0 to take it out";
    kstrtobool(bytes).map_err(|errno| Refused::new(errno, takes))
}

fn at_path(errno: Errno, path: &str) -> Refused {
    let why = match errno {
        Errno::IsDir => format!("{path} is a directory"),
        Errno::NotDir => format!("a part of {path} is not a directory"),
        _ => format!("there is no {path}"),
    };
    Refused::new(errno, why)
}
