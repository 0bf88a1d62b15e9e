//! AF_PACKET against the kernel's own senders and receivers, over cables between network
//! namespaces.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod forward; //   from one interface to another
mod intake; //    receiving frames
mod slots; //     receiving frames into slots
mod taker; //     a source polled by hand

use forebay_testkit::namespaces;
use forebay_testkit::namespaces::trial;

pub(crate) fn trials() -> Vec<libtest_mimic::Trial> {
    let missing = namespaces::missing(&["ip", "ethtool", "tcpreplay"]);
    let trials = [intake::TRIALS, slots::TRIALS, forward::TRIALS].concat();
    let trials = trials.into_iter().map(|(name, test)| trial(name, missing.as_ref(), test));
    trials.collect()
}
