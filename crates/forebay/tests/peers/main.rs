//! The answers of the example `dns`, compared with those of Knot DNS to the same queries over the
//! same zone, both parsed by a resolver library; and properties for queries of arbitrary octets.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod knot; //    Knot DNS in a namespace, and its answers
mod laws; //    properties for arbitrary octets
mod queries; // the queries
mod served; //  the service over a device

#[path = "../../examples/dns/answer.rs"]
mod answer;
#[path = "../../examples/dns/body.rs"]
mod body;
#[path = "../../examples/dns/prepared.rs"]
mod prepared;
#[path = "../../examples/dns/serve.rs"]
mod serve;
#[path = "../../examples/dns/zone.rs"]
mod zone;

use domain::zonefile::inplace::Zonefile;
use forebay_testkit::namespaces;
use forebay_testkit::namespaces::{trial, trial_inside};
use libtest_mimic::Arguments;

use crate::prepared::Zone;
use crate::zone::Contents;

/// A zone with an instance of every case.
const ZONE: &str = include_str!("example.test.zone");

/// Program of Knot DNS. The tests need it.
const KNOT: &str = "knotd";

fn main() {
    let arguments = Arguments::from_args();
    let missing = namespaces::missing(&[KNOT, "ip"]);
    let missing = missing.as_ref();
    let no_tap = namespaces::missing(&["ip"]).or_else(namespaces::tun_missing);
    let trials = vec![
        trial_inside("dns_answers_are_those_of_knot", missing, knot::all_that_is_in_the_zone),
        trial_inside("dns_errors_are_those_of_knot", missing, knot::all_that_is_wrong),
        trial_inside("dns_large_zone_answers_equal_knot", missing, knot::large_zone),
        trial_inside("dns_served_whole_in_order", no_tap.as_ref(), served::over_a_tap),
        trial("promise_5_no_octets_break_the_name_server", None, laws::any_octets),
        trial("promise_5_damaged_queries_are_answered_or_not", None, laws::damaged_queries),
        trial("dns_answers_fit_with_truncation", None, laws::sizes),
        trial("dns_aliases_end", None, laws::aliases),
        trial("dns_bad_zone_error_says_why", None, laws::zones_refused),
    ];
    libtest_mimic::run(&arguments, trials).exit();
}

fn zone_of(text: &str) -> Zone {
    Zone::new(&Contents::scan(Zonefile::from(text)).unwrap())
}
