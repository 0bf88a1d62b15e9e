//! Stand-in.
use std::net::IpAddr;

use mem::Pool;

use super::Identity;
use crate::packet::Packet;

/// Stand-in.
#[derive(Debug, Default)]
pub struct Neighbours;

/// Stand-in.
#[derive(Debug)]
pub enum Resolved {
    /// Known.
    Mac([u8; 6]),
    /// Ask.
    Ask(Packet),
    /// Wait.
    Wait,
}

impl Neighbours {
    /// Stand-in.
    pub fn resolve(&mut self, _: IpAddr, _: &Identity, _: u64, _: &mut Pool) -> Resolved {
        Resolved::Wait
    }
}
