//! Open destinations of packets, and the packets that each took.

use std::sync::Arc;

use forebay_device::Device;
use forebay_device::af_packet::PacketSink;
use forebay_device::pcap::{CaptureOptions, DeliveredCapture};
use forebay_device::tun::TunDevice;
use forebay_metrics::Metrics;
use forebay_rx::sink::{Sink, SinkCounters};
use forebay_rx::{CpuId, RxQueue};
use forebay_sys::error::{Error, Result};
use forebay_sys::failure::FirstFailure;
use forebay_sys::interface::Interface;
use forebay_sys::privilege;

use super::report::SentReport;
use super::to::To;
use crate::outputs::identity;

/// All destinations, each once.
pub(super) struct Destinations(Vec<DestinationPlace>);

struct DestinationPlace {
    to: To,
    /// Counters of packets that the destination took, for each CPU; none if packets are only
    /// counted.
    counters: Vec<Arc<SinkCounters>>,
    /// First failure to write a capture.
    failure: FirstFailure,
}

/// Options of destinations.
#[derive(Clone, Copy, Debug)]
pub(super) struct DestinationOptions {
    /// Options of captures.
    pub(super) captures: CaptureOptions,
    /// True if a TUN is opened as a TAP that takes packets merged inside VXLAN and GENEVE whole.
    pub(super) whole_tunnels: bool,
}

/// One CPU's ways to all destinations.
#[derive(Default)]
pub(super) struct Ways {
    ways: Vec<OpenWay>,
    /// Index of the destination for packets of each queue.
    by_queue: Arc<[usize]>,
}

/// One CPU's way to one destination.
pub(super) struct OpenWay {
    pub(super) way: DestinationWay,
    /// Number of packets handed over.
    pub(super) handed: u64,
}

/// Way in which packets reach their destination.
pub(super) enum DestinationWay {
    /// No way: packets are counted.
    Count,
    /// A capture file.
    Capture(Box<DeliveredCapture>),
    /// The sink of a device.
    Sink(Box<dyn Sink>),
    /// No way any more: the device is gone.
    Gone,
}

impl Destinations {
    /// Opens the destinations for packets of `devices`, and each CPU's ways there. `to` has one
    /// destination for all devices, or one for each; without any, packets are counted. The
    /// directories of captures exist.
    ///
    /// # Errors
    /// If `to` has another number of destinations, or a device cannot be opened.
    pub(super) fn open(
        to: &[To],
        devices: &[Device],
        cpus: &[CpuId],
        options: DestinationOptions,
    ) -> Result<(Self, Vec<Ways>)> {
        let (places, by_device) = places(to, devices.len())?;
        let queues = devices.iter().zip(&by_device);
        let by_queue =
            queues.flat_map(|(device, &place)| vec![place; device.sources.len()]).collect();
        let by_queue: Arc<[usize]> = by_queue;
        let ways = || Ways { ways: Vec::new(), by_queue: Arc::clone(&by_queue) };
        let mut ways: Vec<_> = cpus.iter().map(|_| ways()).collect();
        let places = places.into_iter().map(|to| {
            let (mut counters, failure) = (Vec::new(), FirstFailure::default());
            let opened = open_ways(&to, devices, cpus, (options, &failure))?;
            for (ways, way) in ways.iter_mut().zip(opened) {
                counters.extend(way.counters().cloned());
                ways.ways.push(OpenWay { way, handed: 0 });
            }
            Ok(DestinationPlace { to, counters, failure })
        });
        let places = places.collect::<Result<Vec<_>>>()?;
        Ok((Self(places), ways))
    }

    /// Counters of all destinations, for each CPU.
    pub(super) fn counters(&self) -> Vec<Arc<SinkCounters>> {
        self.0.iter().flat_map(|place| &place.counters).cloned().collect()
    }

    /// First failure of each destination to write a capture.
    pub(super) fn failures(&self) -> impl Iterator<Item = &FirstFailure> {
        self.0.iter().map(|place| &place.failure)
    }

    /// Adds the counters of all destinations that have any.
    pub(super) fn add_to(&self, metrics: Metrics) -> Metrics {
        let places = self.0.iter().filter(|place| !place.counters.is_empty());
        places.fold(metrics, |metrics, place| {
            metrics.with_sinks(place.to.to_string(), place.counters.clone())
        })
    }

    /// Packets that each destination took, of those that the handlers handed over.
    pub(super) fn report<'a>(&self, ways: impl Iterator<Item = &'a Ways>) -> Vec<SentReport> {
        let mut handed = vec![(0, false); self.0.len()];
        for ways in ways {
            for ((packets, is_gone), way) in handed.iter_mut().zip(&ways.ways) {
                *packets += way.handed;
                *is_gone |= matches!(way.way, DestinationWay::Gone);
            }
        }
        let places = self.0.iter().zip(handed).filter(|(place, _)| place.to != To::Count);
        let report = |(place, (handed, is_gone)): (&DestinationPlace, (u64, bool))| {
            SentReport::of(place.to.to_string(), &place.counters, handed, is_gone)
        };
        places.map(report).collect()
    }
}

impl Ways {
    /// Way for packets of a queue.
    pub(super) fn of(&mut self, queue: RxQueue) -> Option<&mut OpenWay> {
        let place = self.by_queue.get(usize::from(queue.0))?;
        self.ways.get_mut(*place)
    }

    /// Writes out buffered packets, so that all of them are counted.
    pub(super) fn flush(&mut self) {
        for open in &mut self.ways {
            if let DestinationWay::Capture(capture) = &mut open.way {
                capture.flush();
            }
        }
    }

    /// Writes out buffered packets, and returns the errors of that and of earlier writes.
    pub(super) fn finish(self) -> impl Iterator<Item = Error> {
        self.ways.into_iter().filter_map(|open| match open.way {
            DestinationWay::Capture(capture) => capture.finish().err(),
            DestinationWay::Count | DestinationWay::Sink(_) | DestinationWay::Gone => None,
        })
    }
}

impl DestinationWay {
    fn counters(&self) -> Option<&Arc<SinkCounters>> {
        match self {
            Self::Capture(capture) => Some(capture.counters()),
            Self::Sink(sink) => Some(sink.counters()),
            Self::Count | Self::Gone => None,
        }
    }
}

/// Destinations, each once, and the index of each device's.
fn places(to: &[To], devices: usize) -> Result<(Vec<To>, Vec<usize>)> {
    let count = To::Count;
    let wished: Vec<_> = match to {
        [] => vec![&count; devices],
        [one] => vec![one; devices],
        _ if to.len() == devices => to.iter().collect(),
        _ => {
            return Err(Error::Setting {
                what: "to",
                value: to.iter().map(To::to_string).collect::<Vec<_>>().join(" "),
                why: format!("there is one place for all, or one for each of {devices} devices"),
            });
        }
    };
    let mut places: Vec<To> = Vec::new();
    let by_device = wished.into_iter().map(|to| {
        places.iter().position(|place| is_same(place, to)).unwrap_or_else(|| {
            places.push(to.clone());
            places.len() - 1
        })
    });
    let by_device = by_device.collect();
    Ok((places, by_device))
}

/// True if packets for both come to the same place: two writers of one directory would overwrite each
/// other's captures.
fn is_same(one: &To, other: &To) -> bool {
    match (one, other) {
        (To::Pcap(one), To::Pcap(other)) => {
            one == other || identity(one).is_some_and(|of_one| identity(other) == Some(of_one))
        }
        _ => one == other,
    }
}

/// Ways of all CPUs to one destination.
fn open_ways(
    to: &To,
    devices: &[Device],
    cpus: &[CpuId],
    (options, failure): (DestinationOptions, &FirstFailure),
) -> Result<Vec<DestinationWay>> {
    let of_run = |name: &str| devices.iter().find(|device| device.is_called(name));
    match to {
        To::Count => Ok(cpus.iter().map(|_| DestinationWay::Count).collect()),
        To::Pcap(directory) => {
            let capture =
                |&cpu| DeliveredCapture::new(directory, cpu, options.captures, Arc::clone(failure));
            Ok(cpus.iter().map(capture).map(Box::new).map(DestinationWay::Capture).collect())
        }
        To::Tun(name) | To::Dev(name) if let Some(device) = of_run(name) => {
            // The run has this device open, so its own sink is used.
            cpus.iter().map(|_| device.sink().map(DestinationWay::Sink)).collect()
        }
        To::Tun(name) => {
            privilege::for_tun(name)?;
            let tun = if options.whole_tunnels {
                TunDevice::open_for_whole_tunnels(name, 1)?
            } else {
                TunDevice::open_to_send(name)?
            };
            Ok(cpus.iter().map(|_| DestinationWay::Sink(Box::new(tun.sink()))).collect())
        }
        To::Dev(name) if name.contains(['/', ':']) => Err(Error::Setting {
            what: "to",
            value: to.to_string(),
            why: "no interface has that name, and a vhost-user device is sent to by the run that \
                  receives from it: name it among the devices, too"
                .to_owned(),
        }),
        To::Dev(name) => {
            let interface = Interface::named(name)?;
            privilege::for_af_packet(name, false)?;
            let way = || Ok(DestinationWay::Sink(Box::new(PacketSink::open(&interface)?)));
            cpus.iter().map(|_| way()).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_place_serves_all_devices() {
        let [dev, count] = [To::Dev("v0".to_owned()), To::Count];
        assert_eq!(places(&[], 2).unwrap(), (vec![count.clone()], vec![0, 0]));
        assert_eq!(places(std::slice::from_ref(&dev), 3).unwrap(), (vec![dev.clone()], vec![0; 3]));
        let mixed = [dev.clone(), count.clone(), dev.clone()];
        assert_eq!(places(&mixed, 3).unwrap(), (vec![dev, count], vec![0, 1, 0]));
        let error = places(&mixed, 2).unwrap_err().to_string();
        assert!(error.contains("one for each of 2 devices"), "{error}");
    }
}
