//! Storms: scripts that change all settings, in any order, faster than a backlog drains.

use std::fmt::Write as _;

use forebay_rx::hash::toeplitz::{STANDARD_KEY, SYMMETRIC_KEY};
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_sys::random::Random;

use crate::order::{DESTINATION, PORTS, source};

/// Minimum and maximum number of frames between two changes.
const GAP_FRAMES: (u64, u64) = (50, 400);

/// State of a storm being written.
struct Storm {
    random: Random,
    cpus: u64,
    flows: u64,
    key: &'static [u8],
    mask: u64,
    script: String,
}

/// A script for the given number of flows of [`source`], which initially hash by the standard key.
pub(crate) fn script(cpus: u16, flows: usize, frames: usize) -> String {
    let mut storm = Storm {
        random: Random::new(flows as u64),
        cpus: cpus.into(),
        flows: flows as u64,
        key: &STANDARD_KEY,
        mask: (1 << cpus) - 1,
        script: String::new(),
    };
    let mut frame = 500;
    while frame + 2000 < frames as u64 {
        storm.change(frame);
        frame += storm.random.between(GAP_FRAMES.0, GAP_FRAMES.1);
    }
    storm.script
}

impl Storm {
    fn change(&mut self, frame: u64) {
        match self.random.below(20) {
            0..6 => {
                self.mask = self.random.between(1, (1 << self.cpus) - 1);
                let mask = self.mask;
                self.set(frame, "rps_cpus", format_args!("{mask:x}"));
            }
            6..12 => self.move_applications(frame),
            12 => {
                let slots = [0, 2, 16, 300, 4096][self.drawn(5)];
                self.set(frame, "rps_flow_cnt", slots);
            }
            13 => {
                let entries = [16, 1000, 32_768][self.drawn(3)];
                self.set(frame, "rps_sock_flow_entries", entries);
            }
            14 => {
                self.key = [&STANDARD_KEY[..], &SYMMETRIC_KEY[..]][self.drawn(2)];
                self.set(frame, "hash_key", hex::encode(self.key));
            }
            15 => {
                let out = self.random.below(self.cpus);
                let others: Vec<_> = (0..self.cpus).filter(|cpu| *cpu != out).collect();
                let others: Vec<_> = others.iter().map(u64::to_string).collect();
                self.set(frame, "cpus", others.join(","));
                let last = self.cpus - 1;
                self.set(frame + 300, "cpus", format_args!("0-{last}"));
            }
            16 => {
                let cpu = self.random.below(self.cpus);
                self.set(frame, "kill", cpu);
            }
            17 => {
                let coalesce = ["gro", "off", "lro"][self.drawn(3)];
                self.set(frame, "coalesce", coalesce);
            }
            18 => {
                let packets = [100, 1000, 3000][self.drawn(3)];
                self.set(frame, "netdev_max_backlog", packets);
            }
            _ => {
                let cpu = self.random.below(self.cpus);
                self.set(frame, "pause", cpu);
                self.set(frame + 200, "resume", cpu);
            }
        }
    }

    /// Some flows are read on another CPU of the mask.
    fn move_applications(&mut self, frame: u64) {
        let hasher = Hasher::toeplitz(self.key).unwrap();
        for _ in 0..8 {
            let flow = self.random.below(self.flows);
            let cpus: Vec<_> = (0..self.cpus).filter(|cpu| self.mask >> cpu & 1 == 1).collect();
            let cpu = cpus[self.drawn(cpus.len())];
            let FlowHash(hash) = hash_of(&hasher, u32::try_from(flow).unwrap());
            self.set(frame, "rfs_desired", format_args!("{hash:08x}:{cpu}"));
        }
    }

    fn set(&mut self, frame: u64, knob: &str, value: impl std::fmt::Display) {
        // Writing to a string never fails.
        let _ = writeln!(self.script, "{frame}:{knob}={value}");
    }

    fn drawn(&mut self, bound: usize) -> usize {
        usize::try_from(self.random.below(bound as u64)).unwrap()
    }
}

fn hash_of(hasher: &Hasher, flow: u32) -> FlowHash {
    let addresses = [source(flow), DESTINATION].concat();
    let ports = [PORTS.0.to_be_bytes(), PORTS.1.to_be_bytes()].concat();
    hasher.hash_tuple(&addresses, ports.first_chunk())
}
