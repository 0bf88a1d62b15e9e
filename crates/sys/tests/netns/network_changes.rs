//! Notifications of changes, of which the kernel has lost some.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use forebay_sys::network_changes::{ChangesSeen, NetworkChanges};
use forebay_testkit::namespaces::{command, ip, missing, trial_inside};

pub(crate) fn trials() -> Vec<libtest_mimic::Trial> {
    let missing = missing(&["ip"]);
    vec![trial_inside("udp_28_losses_meanwhile_are_told", missing.as_ref(), lost)]
}

/// The socket has room again, but the kernel adds nothing until it is empty, and does not say so.
fn lost() {
    let changes = NetworkChanges::open().unwrap();
    ip("link set lo up");
    let batch = std::env::temp_dir().join(format!("forebay-losses-{}", std::process::id()));
    let lines = (0..4000).map(|number| {
        format!("route add 10.{}.{}.0/24 dev lo\n", 100 + number / 250, number % 250)
    });
    std::fs::write(&batch, lines.collect::<String>()).unwrap();
    command(&format!("ip -batch {}", batch.display()));
    std::fs::remove_file(&batch).unwrap();
    let look = || changes.look(&[]).unwrap();
    assert_eq!(look(), ChangesSeen { has_changed: true, has_more: true }, "the first loss");
    ip("addr add 10.8.0.1/24 dev lo");
    let rest = std::iter::repeat_with(look).scan(true, |goes_on, seen| {
        std::mem::replace(goes_on, seen.has_more).then_some(seen.has_changed)
    });
    assert!(rest.fold(false, |some, has_changed| some | has_changed), "the address is lost");
    assert_eq!(look(), ChangesSeen::default());
}
