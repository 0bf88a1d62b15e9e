//! `forebay advise`: recommends masks for this machine, with reasons.

use std::path::Path;

use comfy_table::presets::NOTHING;
use comfy_table::{ContentArrangement, Table};
use forebay_rx::CpuId;
use forebay_sys as sys;
use forebay_sys::cpu_list::CpuList;
use forebay_sys::topology::{Advice, SYSFS, Scope, Standing, Topology};
use serde::Serialize;
use tracing::warn;

use crate::args::AdviseArgs;
use crate::failure::Failure;
use crate::options::cpus::cpus_of;
use crate::output;

mod load; // the load of a capture on the advised masks

use load::LoadAdvice;

/// Size that Documentation/networking/scaling.rst suggests. The flow tables of all queues share it.
const RPS_SOCK_FLOW_ENTRIES: u32 = 32_768;

/// Prints the recommendations.
pub(crate) fn run(args: &AdviseArgs) -> Result<(), Failure> {
    let advised = Advised::of(args)?;
    output::print(&if args.json {
        serde_json::to_string(&advised).unwrap_or_default() + "\n"
    } else {
        advised.render()
    })
}

/// Document that `--json` prints.
#[derive(Serialize)]
struct Advised {
    /// CPUs that packets can go to.
    cpus: String,
    queues: Vec<QueueAdvice>,
    rps_sock_flow_entries: Setting,
    /// Load of the capture, if one was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    load: Option<LoadAdvice>,
}

#[derive(Serialize)]
struct QueueAdvice {
    queue: String,
    polling_cpu: u16,
    /// All CPUs of the mask, best first.
    order: Vec<u16>,
    /// CPUs of `order` in groups, with the reason for their order.
    groups: Vec<CpuGroup>,
    rps_cpus: AdvisedMask,
    /// Mask without the polling CPU, if another CPU exists.
    rps_cpus_without_polling: Option<AdvisedMask>,
    rps_flow_cnt: Setting,
}

#[derive(Serialize)]
struct CpuGroup {
    /// Position in the order; `None` for CPUs that are left out.
    place: Option<usize>,
    cpus: String,
    why: String,
}

#[derive(Serialize)]
struct AdvisedMask {
    /// The mask in the kernel's format.
    mask: String,
    cpus: String,
    why: String,
}

#[derive(Serialize)]
struct Setting {
    value: u32,
    why: String,
}

impl Advised {
    fn of(args: &AdviseArgs) -> Result<Self, Failure> {
        let available = available(&args.sysfs)?;
        let cpus = cpus_of(args.cpus.as_deref(), &available)?;
        let missing = cpus.cpus().iter().copied().filter(|cpu| !available.contains(*cpu));
        let missing = CpuList::new(missing);
        if !missing.is_empty() {
            warn!(
                cpus = %missing,
                "CPUs {missing} are not among those that there are ({available}): where \
                 nothing is known of them, they count as near"
            );
        }
        let polling = polling(args, &cpus)?;
        let queues = args.queues.map_or(polling.len(), |queues| queues.get().into());
        let topology = Topology::read(&args.sysfs, &cpus);
        let all_poll =
            cpus.cpus().iter().all(|cpu| polling.iter().take(queues).any(|it| it == cpu));
        let polling = || polling.iter().cycle().take(queues);
        let advise = |(queue, &polling): (usize, &CpuId)| {
            let advice = topology.advise(polling, &cpus);
            QueueAdvice::of(queue, &advice, queues, all_poll, topology.mask_width(&cpus))
        };
        let load = args.file.as_deref().map(|file| {
            // All of the CPUs that suit a queue, even if RPS is not advised for lack of a second one.
            let masks = polling().map(|&polling| topology.advise(polling, &cpus).rps_cpus());
            LoadAdvice::of(file, &args.hash, &masks.collect::<Vec<_>>())
        });
        Ok(Self {
            queues: polling().enumerate().map(advise).collect(),
            cpus: cpus.to_string(),
            rps_sock_flow_entries: Setting {
                value: RPS_SOCK_FLOW_ENTRIES,
                why: "turns RFS on, with room for as many flows as are active at once".to_owned(),
            },
            load: load.transpose()?,
        })
    }

    fn render(&self) -> String {
        let Setting { value, why } = &self.rps_sock_flow_entries;
        let row = ["rps_sock_flow_entries".to_owned(), value.to_string(), why.clone()];
        let queues: String = self.queues.iter().map(QueueAdvice::render).collect();
        let load = self.load.as_ref().map_or(String::new(), LoadAdvice::render);
        queues + "all queues\n\n" + &aligned(["knob", "value", "why"], [row]) + &load
    }
}

/// CPUs that may be used here; of another machine's sysfs, the CPUs that are online.
fn available(sysfs: &Path) -> Result<CpuList, Failure> {
    if sysfs == Path::new(SYSFS) {
        return Ok(CpuList::new(sys::allowed_cpus()));
    }
    Topology::online(sysfs).ok_or_else(|| {
        let file = sysfs.join("devices/system/cpu/online");
        let problem = format!("{} does not say which CPUs are online", file.display());
        Failure::usage(problem, "give a copy of a machine's /sys/devices/system/cpu below DIR")
    })
}

/// CPUs that poll the queues, in queue order; never empty.
fn polling(args: &AdviseArgs, cpus: &CpuList) -> Result<Vec<CpuId>, Failure> {
    let Some(text) = &args.polling else {
        let queues = args.queues.map_or(1, |queues| queues.get().into());
        return Ok(cpus.cpus().iter().copied().take(queues).collect());
    };
    let help = format!("give one or several of {cpus}, or name it in --cpus too");
    let list = CpuList::parse_list(text)
        .map_err(|error| Failure::usage(format!("--polling {text}: {error}"), &help))?;
    let is_known = |cpu: &CpuId| cpus.contains(*cpu);
    if list.is_empty() || !list.cpus().iter().all(is_known) {
        let problem = format!("--polling {text}: not among the CPUs that packets can go to");
        return Err(Failure::usage(problem, help));
    }
    Ok(list.cpus().to_vec())
}

impl QueueAdvice {
    fn of(queue: usize, advice: &Advice, queues: usize, all_poll: bool, mask_width: u16) -> Self {
        let mask = |cpus: &CpuList, why| AdvisedMask {
            mask: cpus.to_mask(mask_width),
            cpus: cpus.to_string(),
            why,
        };
        let polling = advice.polling;
        let without_polling = advice.rps_cpus_without_polling();
        let rps_cpus = match &without_polling {
            None => mask(&CpuList::default(), "there is nobody else: RPS would only cost".into()),
            Some(_) if all_poll => {
                let why = "every CPU polls a queue: needed only where some queues have more to do";
                mask(&advice.rps_cpus(), why.into())
            }
            Some(_) => mask(&advice.rps_cpus(), scope(advice)),
        };
        let share = RPS_SOCK_FLOW_ENTRIES / u32::try_from(queues).unwrap_or(u32::MAX);
        Self {
            queue: format!("rx-{queue}"),
            polling_cpu: polling.0,
            order: advice.order.iter().map(|(cpu, _)| cpu.0).collect(),
            groups: groups(advice),
            rps_cpus,
            rps_cpus_without_polling: without_polling.map(|cpus| {
                let why = format!(
                    "instead, once polling alone keeps CPU {polling} busy: time_squeeze, the third \
                     column of its line in softnet_stat, rises"
                );
                mask(&cpus, why)
            }),
            rps_flow_cnt: Setting {
                value: share.max(1).next_power_of_two(),
                why: match queues {
                    1 => "as many as rps_sock_flow_entries: there is one queue".to_owned(),
                    _ => format!(
                        "a share of rps_sock_flow_entries: there are {queues} queues; a power of two"
                    ),
                },
            },
        }
    }

    fn render(&self) -> String {
        let Self { queue, polling_cpu, groups, .. } = self;
        let groups = groups.iter().map(|CpuGroup { place, cpus, why }| {
            let place = place.map_or("-".to_owned(), |place| place.to_string());
            [place, cpus.clone(), why.clone()]
        });
        let mask = |AdvisedMask { mask, cpus, why }: &AdvisedMask| {
            [format!("{queue}/rps_cpus"), mask.clone(), cpus.clone(), why.clone()]
        };
        let mut knobs = vec![mask(&self.rps_cpus)];
        knobs.extend(self.rps_cpus_without_polling.as_ref().map(mask));
        let Setting { value, why } = &self.rps_flow_cnt;
        let name = format!("{queue}/rps_flow_cnt");
        knobs.push([name, value.to_string(), String::new(), why.clone()]);
        format!(
            "{queue}, polled by CPU {polling_cpu}\n\n{}\n{}\n",
            aligned(["order", "CPUs", "why"], groups),
            aligned(["knob", "value", "CPUs", "why"], knobs),
        )
    }
}

/// CPUs grouped by standing, and the CPUs that are left out.
fn groups(advice: &Advice) -> Vec<CpuGroup> {
    let polling = advice.polling;
    let standings = [
        (Standing::OtherCore, "other cores".to_owned()),
        (Standing::FurtherThread, "further threads of these cores".to_owned()),
        (Standing::PollingCore, format!("on the core of CPU {polling}, at the cost of polling")),
        (Standing::Polling, "polls the queue, which is work as well".to_owned()),
    ];
    let groups = standings.into_iter().map(|(standing, why)| (advice.of_standing(standing), why));
    let groups = groups.filter(|(cpus, _)| !cpus.is_empty()).zip(1..);
    let group = |((cpus, why), place): ((CpuList, _), _)| CpuGroup {
        place: Some(place),
        cpus: cpus.to_string(),
        why,
    };
    let mut groups: Vec<_> = groups.map(group).collect();
    if !advice.left_out.is_empty() {
        let cpus = advice.left_out.to_string();
        let why = match advice.scope {
            Scope::Cache(level) => format!("left out: behind another last-level cache (L{level})"),
            Scope::Node(_) | Scope::Everything => "left out: on another memory node".to_owned(),
        };
        groups.push(CpuGroup { place: None, cpus, why });
    }
    groups
}

/// Reason for the choice of these CPUs.
pub(crate) fn scope(advice: &Advice) -> String {
    let polling = advice.polling;
    match advice.scope {
        Scope::Cache(level) => {
            format!("the CPUs that share the last-level cache (L{level}) with CPU {polling}")
        }
        Scope::Node(node) => format!(
            "the CPUs of memory node {node}, that of CPU {polling}: none is known to share its cache"
        ),
        Scope::Everything => {
            format!("all: none is known to share a cache or memory node with CPU {polling}")
        }
    }
}

fn aligned<const N: usize>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    table(header, rows).trim_fmt() + "\n"
}

fn table<const N: usize>(header: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header);
    table.add_rows(rows);
    table
}
