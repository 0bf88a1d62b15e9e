//! Names of knobs in requests: paths in the tree, or ends of paths.

use std::borrow::Cow;

use forebay_engine::knobs::{ChangeText, Knob};
use forebay_sys::errno::Errno;
use forebay_sys::refused::Refused;

use super::handle::Control;
use super::tree::File;

impl Control {
    /// Name of what a change sets, as a [config file](super::ConfigFile::apply) leaves it out: the
    /// knob, or the path of its file if the change is of one queue or one CPU.
    #[must_use]
    pub fn name_of(&self, change: &ChangeText) -> String {
        let file = match (change.queue(), change.cpu(), Knob::named(change.knob())) {
            (Some(queue), _, Some(knob)) => Some(File::Knob(knob, queue)),
            (_, Some(cpu), _) => Some(File::CpuOnline(cpu)),
            _ => None,
        };
        let Some(file) = file else { return change.knob().to_owned() };
        let of_file = self.tree().files().find(|(_, at)| *at == file);
        of_file.map_or_else(|| change.to_string(), |(path, _)| path)
    }
}

/// Paths of all files that can be written.
pub(super) fn knobs(control: &Control) -> Vec<String> {
    let tree = control.tree();
    let files = tree.files().filter(|(_, file)| file.mode() & 0o200 != 0);
    files.map(|(path, _)| path).collect()
}

/// Paths that a name fits.
///
/// # Errors
/// `ENOENT` if there are none; `EISDIR` if the name is that of a directory.
pub(super) fn find(control: &Control, name: &str) -> Result<Vec<String>, Refused> {
    control.named(name).map_err(|errno| {
        let why = match errno {
            Errno::IsDir => format!("{name:?} is a directory, not a knob"),
            _ => format!("there is no knob {name:?}; `list` names those there are"),
        };
        Refused::new(errno, why)
    })
}

/// Paths that a write to a name goes to: one, or those of the same file of all queues or devices
/// that the name fits.
///
/// # Errors
/// As [`find`]; `EINVAL` if the name fits several other files.
pub(super) fn find_for_writing(control: &Control, name: &str) -> Result<Vec<String>, Refused> {
    let found = find(control, name)?;
    if found.len() > 1 && !found.iter().all(|path| OfDevice::of(path).is_some()) {
        let names = Names::of(&found);
        let names: Vec<_> = found.iter().map(|path| names.short(path)).collect();
        let why = format!("{name:?} fits {}; say which of them", names.join(", "));
        return Err(Refused::new(Errno::Inval, why));
    }
    Ok(found)
}

/// A file of a device: in its directory, or in that of one of its queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct OfDevice<'a> {
    pub(super) device: &'a str,
    /// Directory of the queue, as in `rx-0`.
    pub(super) queue: Option<&'a str>,
    pub(super) file: &'a str,
}

impl<'a> OfDevice<'a> {
    /// File at a path, if it is one of a device.
    pub(super) fn of(path: &'a str) -> Option<Self> {
        let (device, below) = path.strip_prefix("sys/class/net/")?.split_once('/')?;
        match below.strip_prefix("queues/") {
            Some(below) => {
                let (queue, file) = below.split_once('/')?;
                Some(Self { device, queue: Some(queue), file })
            }
            None => Some(Self { device, queue: None, file: below }),
        }
    }

    /// True if `name` is the file's name behind its device's: `eth0/mtu`, `eth0/rx-0/rps_cpus`, or
    /// `eth0/rps_cpus` for all queues.
    pub(super) fn is_called(self, name: &str) -> bool {
        let below = name.strip_prefix(self.device).and_then(|below| below.strip_prefix('/'));
        let of_queue = below.and_then(|below| below.strip_suffix(self.file));
        match (of_queue, self.queue) {
            (Some(""), _) => true,
            (Some(above), Some(queue)) => above.strip_suffix('/') == Some(queue),
            _ => false,
        }
    }
}

/// Form of the short names of files, which are unique within a tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Names {
    /// True if names begin with the device, since there are several.
    with_device: bool,
}

impl Names {
    /// Form of names in a tree with these files.
    #[must_use]
    pub fn of<P: AsRef<str>>(paths: &[P]) -> Self {
        let mut devices = paths.iter().filter_map(|path| OfDevice::of(path.as_ref()));
        let first = devices.next().map(|of_device| of_device.device);
        Self { with_device: devices.any(|of_device| Some(of_device.device) != first) }
    }

    /// Form of names in the tree of a run.
    pub(super) fn in_run(control: &Control) -> Self {
        Self { with_device: control.state().devices().count() > 1 }
    }

    /// Refusal of a write to one of several files, with the names of those that were written before it.
    pub(super) fn after(self, refused: Refused, written: &[String]) -> Refused {
        if written.is_empty() {
            return refused;
        }
        let names: Vec<_> = written.iter().map(|path| self.short(path)).collect();
        let why = format!("{}; set before that: {}", refused.why, names.join(", "));
        Refused::new(refused.errno, why)
    }

    /// Short name of a file: with its queue or CPU, and with its device if there are several.
    #[must_use]
    pub fn short(self, path: &str) -> Cow<'_, str> {
        match OfDevice::of(path) {
            Some(OfDevice { device, queue: Some(queue), file }) if self.with_device => {
                format!("{device}/{queue}/{file}").into()
            }
            Some(OfDevice { device, queue: None, file }) if self.with_device => {
                format!("{device}/{file}").into()
            }
            _ => short(path).into(),
        }
    }
}

/// Shortest end of a path that is unique among the files of one device.
fn short(path: &str) -> &str {
    let parts: Vec<_> = path.rsplitn(3, '/').collect();
    let len_bytes = match parts[..] {
        [last, above, ..] if above.starts_with("rx-") || above.starts_with("cpu") => {
            above.len() + 1 + last.len()
        }
        [last, ..] => last.len(),
        [] => 0,
    };
    &path[path.len() - len_bytes..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_names_identify_devices_queues_cpus() {
        let one = Names::of(&["sys/class/net/eth0/mtu", "sys/class/net/eth0/queues/rx-0/rps_cpus"]);
        let two = Names::of(&["sys/class/net/eth0/mtu", "forebay/cpus", "sys/class/net/eth1/mtu"]);
        for (path, alone, among_others) in [
            ("sys/class/net/eth0/queues/rx-3/rps_cpus", "rx-3/rps_cpus", "eth0/rx-3/rps_cpus"),
            ("sys/class/net/eth0/mtu", "mtu", "eth0/mtu"),
            ("sys/class/net/rx-0/mtu", "rx-0/mtu", "rx-0/mtu"),
            ("sys/devices/system/cpu/cpu1/online", "cpu1/online", "cpu1/online"),
            ("sys/devices/system/cpu/online", "cpu/online", "cpu/online"),
            ("proc/sys/net/core/dev_weight", "dev_weight", "dev_weight"),
            ("forebay/cpus", "cpus", "cpus"),
            ("mtu", "mtu", "mtu"),
            ("", "", ""),
        ] {
            assert_eq!((one.short(path), two.short(path)), (alone.into(), among_others.into()));
        }
    }

    #[test]
    fn device_files_carry_its_name() {
        let is_called = |path, name| OfDevice::of(path).unwrap().is_called(name);
        let mask = "sys/class/net/eth1/queues/rx-3/rps_cpus";
        for (path, name, expected) in [
            (mask, "eth1/rx-3/rps_cpus", true),
            (mask, "eth1/rps_cpus", true),
            (mask, "eth1/rx-33/rps_cpus", false),
            (mask, "eth1/3/rps_cpus", false),
            (mask, "eth/rps_cpus", false),
            (mask, "eth1//rps_cpus", false),
            (mask, "eth1rps_cpus", false),
            ("sys/class/net/eth1/mtu", "eth1/mtu", true),
            ("sys/class/net/eth1/mtu", "eth1/rx-0/mtu", false),
        ] {
            assert_eq!(is_called(path, name), expected, "{path} {name}");
        }
    }
}
