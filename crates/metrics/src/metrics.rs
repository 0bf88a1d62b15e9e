//! Parts of a run that are measured, and their text.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use forebay::Control;
use forebay::net::Net;
use forebay::net::counters::SocketCounts;
use forebay_device::{Device, DeviceLink, KernelCounts, Via};
use forebay_engine::{DeviceQueues, Measured};
use forebay_rx::sink::SinkCounters;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::registry::Registry;

use crate::families::Families;
use crate::format::TextFormat;
use crate::sockets::ListedSockets;
use crate::{coalesce, cpus, queues, sinks, sockets, tcp};

/// First part of every metric's name.
const PREFIX: &str = "forebay";

/// Parts of a run that are measured. Cheap to clone; usable from any thread.
#[derive(Clone, Default)]
pub struct Metrics {
    pub(crate) control: Option<Control>,
    pub(crate) devices: Vec<MeasuredDevice>,
    pub(crate) sinks: Vec<(String, Vec<Arc<SinkCounters>>)>,
    pub(crate) net: Option<Net>,
    pub(crate) sockets: Option<SocketCounter>,
    /// True of a text for a view.
    shows_connections: bool,
}

/// Number of a socket, its local address and its counters.
pub(crate) type CountedSocket = (usize, SocketAddr, SocketCounts);

/// Reader of the sockets, one after another.
type SocketCounter = Arc<dyn Fn(&mut dyn FnMut(CountedSocket)) + Send + Sync>;

/// Device with the counters of its queues.
#[derive(Clone)]
pub(crate) struct MeasuredDevice {
    pub(crate) name: String,
    pub(crate) via: Via,
    pub(crate) counts: Vec<Arc<KernelCounts>>,
    /// Link, and the number of times that it had been lost before; `None` if the device has none.
    pub(crate) link: Option<(DeviceLink, u32)>,
}

impl MeasuredDevice {
    fn of(name: String, device: &Device) -> Self {
        let link = device.link().and_then(|link| {
            let status = link.status().ok()??;
            Some((link, status.carrier_losses))
        });
        Self { name, via: device.via, counts: device.counts.clone(), link }
    }
}

impl Metrics {
    /// No parts.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an engine: its queues, CPUs and coalescing. From now on the engine measures times of
    /// delivery, too.
    #[must_use]
    pub fn with_engine(self, control: Control) -> Self {
        Self { control: Some(control), ..self }.measuring()
    }

    /// Adds an engine without asking it to measure times: they are there if it does so for others.
    #[must_use]
    pub fn with_counted_engine(self, control: Control) -> Self {
        Self { control: Some(control), ..self }
    }

    /// Adds devices, with the drops of the kernel and the counters of drivers in this process. To be
    /// called before an engine takes the sources of the devices, or after that.
    #[must_use]
    pub fn with_devices(mut self, devices: &[Device]) -> Self {
        // As the engine names them: a device that is not an interface has a path.
        let named = DeviceQueues::of(devices).into_iter().zip(devices);
        let named = named.map(|(DeviceQueues { name, .. }, device)| (name, device));
        self.devices.extend(named.map(|(name, device)| MeasuredDevice::of(name, device)));
        self.measuring()
    }

    /// Adds a destination of packets, with the counters of its sinks.
    #[must_use]
    pub fn with_sinks(mut self, to: impl Into<String>, counters: Vec<Arc<SinkCounters>>) -> Self {
        self.sinks.push((to.into(), counters));
        self
    }

    /// Adds sockets and the network layer below them.
    #[must_use]
    pub fn with_sockets(self, net: Net) -> Self {
        let counted = net.clone();
        let sockets: SocketCounter = Arc::new(move |each| counted.socket_totals().for_each(each));
        Self { net: Some(net), sockets: Some(sockets), ..self }
    }

    /// Adds sockets: `counts` returns the number of each, its local address and its counters, and is
    /// called for each text.
    #[must_use]
    pub fn with_socket_counts(
        self,
        counts: impl Fn() -> Vec<(usize, SocketAddr, SocketCounts)> + Send + Sync + 'static,
    ) -> Self {
        let sockets: SocketCounter = Arc::new(move |each| counts().into_iter().for_each(each));
        Self { sockets: Some(sockets), ..self }
    }

    /// Lets the engine measure times; the age of packets only if devices stamp them.
    fn measuring(self) -> Self {
        if let Some(control) = &self.control {
            let is_stamped = !self.devices.is_empty();
            let measured = if is_stamped { Measured::TimesAndLatency } else { Measured::Times };
            control.state().measure(measured);
        }
        self
    }

    /// Text of all metrics now, in the OpenMetrics format, for a view such as `forebay top`: it also has the
    /// TCP connections with the most bytes, at most [`CONNECTIONS_LISTED_MAX`](tcp::CONNECTIONS_LISTED_MAX).
    /// Their names come and go, so that a database is better off without them.
    #[must_use]
    pub fn view_text(&self) -> String {
        let of_view = Self { shows_connections: true, ..self.clone() };
        of_view.text(TextFormat::OpenMetrics)
    }

    /// Text of all metrics now, in the format that the client accepts.
    #[must_use]
    pub fn text(&self, format: TextFormat) -> String {
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register_collector(Box::new(self.clone()));
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = text::encode(&mut text, &registry);
        match format {
            TextFormat::OpenMetrics => text,
            TextFormat::Prometheus => crate::format::prometheus_text(&text),
        }
    }
}

impl Collector for Metrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut families = Families::new(encoder);
        let build = ("build", "Version of Forebay");
        families.infos(build, [[("version", env!("CARGO_PKG_VERSION"))]])?;
        if let Some(control) = &self.control {
            // CPUs first, so that no more frames are delivered than were received.
            cpus::encode(control.state(), &mut families)?;
            queues::encode(control.state(), &mut families)?;
            coalesce::encode(control.state(), &mut families)?;
        }
        queues::encode_devices(&self.devices, &mut families)?;
        sinks::encode(&self.sinks, &mut families)?;
        if let Some(net) = &self.net {
            sockets::encode_network(net, &mut families)?;
            tcp::encode(net, &mut families)?;
            if self.shows_connections {
                tcp::encode_connections(net, &mut families)?;
            }
        }
        let Some(counts) = &self.sockets else { return Ok(()) };
        let mut listed = ListedSockets::default();
        counts(&mut |socket| listed.add(socket));
        listed.encode(&mut families)
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices: Vec<_> = self.devices.iter().map(|device| &device.name).collect();
        write!(f, "Metrics({devices:?}, {} destinations)", self.sinks.len())
    }
}
