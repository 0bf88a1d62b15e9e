//! Whose the queues of an engine are. Outside, queues are counted for each device; inside, through
//! all of them.

use std::collections::BTreeSet;
use std::sync::Arc;

use path::RxQueue;

use crate::error::{Error, Result};
use crate::sys::interface::is_interface_name;

/// What a device is called that nobody has named.
const UNNAMED: &str = "replay";

/// A device, as far as its name and its queues go.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceQueues {
    /// The interface's name.
    pub name: String,
    /// How many rx queues of it are polled, at least one.
    pub queues: u16,
}

/// The devices of an engine, in the order of their queues.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Devices(Arc<[DeviceQueues]>);

impl Devices {
    /// These, if `queues` is how many queues they have; one for all queues if none is named.
    ///
    /// # Errors
    /// When the numbers do not fit, or a name is none or comes twice.
    pub(crate) fn of(named: &[DeviceQueues], queues: usize) -> Result<Self> {
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
            return Ok(Self([DeviceQueues { name: UNNAMED.to_owned(), queues: all }].into()));
        }
        let mut names = BTreeSet::new();
        for DeviceQueues { name, queues } in named {
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

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// The names, each with the numbers of its queues in the engine.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, std::ops::Range<u16>)> {
        let mut first = 0;
        self.0.iter().map(move |DeviceQueues { name, queues }| {
            let own = first..first + queues;
            first = own.end;
            (name.as_str(), own)
        })
    }

    /// What a queue is called: with its device where there are several.
    pub(crate) fn name_of(&self, queue: RxQueue) -> String {
        let device = self.iter().find(|(_, own)| own.contains(&queue.0));
        match device.filter(|_| self.count() > 1) {
            Some((name, own)) => format!("{name}/{}", RxQueue(queue.0 - own.start)),
            None => queue.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(named: &[(&str, u16)], queues: usize) -> Result<Devices, String> {
        let named = named
            .iter()
            .map(|(name, queues)| DeviceQueues { name: (*name).to_owned(), queues: *queues });
        let named: Vec<_> = named.collect();
        Devices::of(&named, queues).map_err(|error| error.to_string())
    }

    #[test]
    fn queues_are_counted_within_their_device_and_named_with_it_where_there_are_several() {
        let two = devices(&[("eth0", 2), ("eth1", 1)], 3).unwrap();
        let names: Vec<_> = (0..4).map(|queue| two.name_of(RxQueue(queue))).collect();
        assert_eq!(names, ["eth0/rx-0", "eth0/rx-1", "eth1/rx-0", "rx-3"]);
        let one = devices(&[], 2).unwrap();
        assert_eq!(one.iter().collect::<Vec<_>>(), [("replay", 0..2)]);
        assert_eq!(one.name_of(RxQueue(1)), "rx-1");
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
