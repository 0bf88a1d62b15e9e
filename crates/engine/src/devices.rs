//! Devices of an engine's queues. Users number the queues of each device from 0; the engine numbers
//! them through all devices.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use forebay_device::{Device, RxBuffers};
use forebay_rx::RxQueue;
use forebay_sys::error::{Error, Result};
use forebay_sys::interface::{NAME_BYTES_MAX, is_interface_name};

/// Name of the device if none is configured.
const UNNAMED: &str = "replay";

/// Name and queues of a device.
#[derive(Clone, Debug)]
pub struct DeviceQueues {
    /// Name of the interface; for a device that is none, a name that an interface can have.
    pub name: String,
    /// Number of its polled rx queues, at least 1.
    pub queues: u16,
    /// True if packets have the device's hash, which does not follow from their addresses.
    pub device_hash: bool,
    /// Receive buffers of each queue; empty unless the device is virtio.
    pub rx_buffers: Vec<Arc<RxBuffers>>,
}

impl DeviceQueues {
    /// A device without known receive buffers.
    #[must_use]
    pub fn new(name: impl Into<String>, queues: u16) -> Self {
        Self { name: name.into(), queues, device_hash: false, rx_buffers: Vec::new() }
    }

    /// Queues of open devices that still have their sources. A device that is not an interface is
    /// named after the last part of its path, with a number appended if that name is taken.
    #[must_use]
    pub fn of<'a>(devices: &'a [Device]) -> Vec<Self> {
        let interfaces = devices.iter().filter(|device| device.via.is_interface());
        let mut taken: BTreeSet<_> = interfaces.map(|device| device.name.clone()).collect();
        let mut of_paths = BTreeMap::new();
        let of = |device: &'a Device| {
            let name = &*device.name;
            let name = if device.via.is_interface() {
                name.to_owned()
            } else {
                // A path opened twice keeps one name, so that `Devices::of` refuses it.
                of_paths.entry(name).or_insert_with(|| name_of_path(name, &mut taken)).clone()
            };
            let queues = u16::try_from(device.sources.len()).unwrap_or(u16::MAX);
            let Device { device_hash, ref rx_buffers, .. } = *device;
            Self { name, queues, device_hash, rx_buffers: rx_buffers.clone() }
        };
        devices.iter().map(of).collect()
    }
}

/// Takes an unused name that an interface can have, made from a path.
fn name_of_path(path: &str, taken: &mut BTreeSet<String>) -> String {
    let last = Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or("vhost-user");
    let plain = |letter: char| {
        let is_plain = letter.is_ascii_alphanumeric() || "._-".contains(letter);
        if is_plain { letter } else { '_' }
    };
    let last: String = last.chars().map(plain).collect();
    let numbered = (0u32..).map(|number| {
        let ending = if number == 0 { String::new() } else { format!("-{number}") };
        let kept = last.len().min(NAME_BYTES_MAX.saturating_sub(ending.len()));
        format!("{}{ending}", &last[..kept])
    });
    // There are more numbers than devices, so one is free.
    let name = numbered.into_iter().find(|name| !taken.contains(name)).unwrap_or(last);
    taken.insert(name.clone());
    name
}

/// Devices of an engine, in the order of their queues.
#[derive(Clone, Debug)]
pub struct Devices(Arc<[DeviceQueues]>);

impl Devices {
    /// Devices of a configuration, which must have `queues` queues together; one device for all
    /// queues if none is named.
    ///
    /// # Errors
    /// If the numbers do not match, or a name is invalid or a duplicate.
    pub fn of(named: &[DeviceQueues], queues: usize) -> Result<Self> {
        let refused = |what: &str, why: String| Error::Setting {
            what: "devices",
            value: what.to_owned(),
            why,
        };
        let Ok(all) = u16::try_from(queues) else {
            let why = format!("an engine has at most {} queues", u16::MAX);
            return Err(refused(&queues.to_string(), why));
        };
        if named.is_empty() {
            return Ok(Self([DeviceQueues::new(UNNAMED, all)].into()));
        }
        let mut names = BTreeSet::new();
        for DeviceQueues { name, queues, .. } in named {
            let why = if !is_interface_name(name) {
                "no interface can have that name"
            } else if !names.insert(name) {
                "a device is opened once in a run"
            } else if *queues == 0 {
                "a device has at least one queue"
            } else {
                continue;
            };
            return Err(refused(name, why.to_owned()));
        }
        let sum: usize = named.iter().map(|device| usize::from(device.queues)).sum();
        if sum != queues {
            let why = format!("they have {sum} queues, and there are {queues} sources");
            let names: Vec<_> = names.into_iter().map(String::as_str).collect();
            return Err(refused(&names.join(", "), why));
        }
        Ok(Self(named.into()))
    }

    /// Name of the first device whose packets have its own hash.
    #[must_use]
    pub fn hashing(&self) -> Option<&str> {
        self.0.iter().find(|device| device.device_hash).map(|device| device.name.as_str())
    }

    /// Number of devices.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Names, each with the range of its queues' numbers in the engine.
    pub fn iter(&self) -> impl Iterator<Item = (&str, std::ops::Range<u16>)> {
        let mut first = 0;
        self.0.iter().map(move |DeviceQueues { name, queues, .. }| {
            let own = first..first + queues;
            first = own.end;
            (name.as_str(), own)
        })
    }

    /// Receive buffers of a queue, if its device is virtio.
    pub fn rx_buffers(&self, queue: RxQueue) -> Option<&RxBuffers> {
        let of_device = self.0.iter().zip(self.iter());
        let (device, own) = of_device
            .map(|(device, (_, own))| (device, own))
            .find(|(_, own)| own.contains(&queue.0))?;
        device.rx_buffers.get(usize::from(queue.0 - own.start)).map(Arc::as_ref)
    }

    /// Name of a queue, prefixed with its device's if there are several devices.
    pub fn name_of(&self, queue: RxQueue) -> String {
        let device = self.iter().find(|(_, own)| own.contains(&queue.0));
        match device.filter(|_| self.count() > 1) {
            Some((name, own)) => format!("{name}/{}", RxQueue(queue.0 - own.start)),
            None => queue.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_device::Via;

    use super::*;

    fn devices(named: &[(&str, u16)], queues: usize) -> Result<Devices, String> {
        let named = named.iter().map(|(name, queues)| DeviceQueues::new(*name, *queues));
        let named: Vec<_> = named.collect();
        Devices::of(&named, queues).map_err(|error| error.to_string())
    }

    #[test]
    fn queues_counted_and_named_by_device() {
        let two = devices(&[("eth0", 2), ("eth1", 1)], 3).unwrap();
        let names: Vec<_> = (0..4).map(|queue| two.name_of(RxQueue(queue))).collect();
        assert_eq!(names, ["eth0/rx-0", "eth0/rx-1", "eth1/rx-0", "rx-3"]);
        let one = devices(&[], 2).unwrap();
        assert_eq!(one.iter().collect::<Vec<_>>(), [("replay", 0..2)]);
        assert_eq!(one.name_of(RxQueue(1)), "rx-1");
    }

    #[test]
    fn non_interface_names_valid_and_unique() {
        let device = |name: &str, via| Device::of_sources(name, via, Vec::new());
        let paths = [
            "/run/a/vhost.sock",
            "/run/b/vhost.sock",
            "/run/a/vhost.sock",
            "eth0",
            "/run/a name:that is no interface's",
            "/run/a_name_that_is_too",
            "/",
        ];
        let eth0 = device("eth0", Via::AfPacket);
        let others = paths.into_iter().map(|path| device(path, Via::VhostUser));
        let devices: Vec<_> = others.chain([eth0]).collect();
        let named = DeviceQueues::of(&devices);
        let names: Vec<_> = named.iter().map(|device| &*device.name).collect();
        assert_eq!(
            names,
            [
                "vhost.sock",
                "vhost.sock-1",
                "vhost.sock",
                "eth0-1",
                "a_name_that_is_",
                "a_name_that_i-1",
                "vhost-user",
                "eth0"
            ]
        );
        assert!(names.iter().all(|name| is_interface_name(name)));
    }

    #[test]
    fn devices_that_cannot_be_are_refused() {
        for name in ["", ".", "..", "a/b", "a b", "a:b", "a\0b", "sixteen_and_more"] {
            let refused = devices(&[(name, 1)], 1).unwrap_err();
            assert!(refused.contains("no interface can have that name"), "{name}: {refused}");
        }
        for (named, queues, why) in [
            (&[("a", 1), ("a", 1)][..], 2, "opened once"),
            (&[("a", 1), ("b", 0)][..], 1, "at least one queue"),
            (&[("a", 1), ("b", 2)][..], 2, "they have 3 queues, and there are 2 sources"),
            (&[("a", u16::MAX), ("b", 2)][..], 1, "they have 65537 queues"),
            (&[], 65536, "at most 65535 queues"),
        ] {
            let refused = devices(named, queues).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
    }
}
