//! Partial checksums without a mark.

use std::sync::Arc;

use forebay_buf::{Pool, Position};
use forebay_rx::arrive::Burst;
use forebay_rx::hash::Hasher;
use forebay_rx::intake::{Intake, IntakeConfig};
use forebay_rx::packet::Arrival;
use forebay_rx::parse::{Checksum, DeviceSum, Headers, Verify, parse};
use forebay_rx::steer::{MoveAfter, SpreadPolicy, SteerConfig};
use forebay_rx::{CpuId, RxQueue};
use proptest::prelude::*;
use proptest::sample::{Index, select};

use crate::coalescing::carried::all_shapes;
use crate::coalescing::frames::{AFTER_IPV4, Wire, tcp, udp};
use crate::coalescing::rig::{pool, received};

pub(crate) fn intake(verify: Verify, completes_checksums: bool) -> Intake {
    let mut intake = Intake::new(IntakeConfig {
        queue: RxQueue(0),
        cpus: 1,
        verify,
        completes_checksums,
        hasher: Arc::new(Hasher::keyed(&[7; 16], false)),
        coalesce: None,
        steer: SteerConfig {
            polling_cpu: CpuId(0),
            rps_flow_cnt: 4,
            move_after: MoveAfter { packets: 1, time_ns: u64::MAX },
            hold_max: 64,
            spread: SpreadPolicy::Always,
            batch_max: 64,
        },
        netdev_max_backlog: 64,
    });
    drop(intake.connect(CpuId(0), 64, Position(0), false));
    intake
}

/// Packet after parsing.
type Parsed = (Vec<u8>, Headers, Option<DeviceSum>);

/// Frame after parsing, and number of completed checksums.
fn taken_in(wire: &Wire, verify: Verify, completes: bool, pool: &mut Pool) -> (Parsed, u64) {
    let mut intake = intake(verify, completes);
    let packet = received(wire, Arrival(0), pool);
    let mut burst = Burst { packets: vec![packet], ..Burst::default() };
    let mut parsed = None;
    let show = |packets: &[forebay_rx::Packet]| {
        let packet = &packets[0];
        parsed = Some((packet.frame.data().to_vec(), packet.headers, packet.device_sum));
    };
    let now_ns = 1;
    intake.turn_with_tap(now_ns, &mut burst, pool, show).for_each(drop);
    let counters = intake.counters();
    let is_bad = parsed.as_ref().is_some_and(|(_, it, _)| it.l4_checksum == Checksum::Bad);
    assert_eq!(counters.l4_checksum_bad.get(), u64::from(is_bad));
    let completed = counters.checksums_completed.get();
    (parsed.unwrap(), completed)
}

/// Packet as passed on by a device that puts no header before it.
fn unannounced(wire: Wire) -> Wire {
    Wire { vnet: None, ..wire.partial(0) }
}

#[test]
fn partial_checksum_is_completed() {
    let mut pool = pool(8);
    for shape in all_shapes() {
        for (len, padding) in [(0, &[][..]), (1, &[]), (98, &[0; 4]), (99, &[1, 2, 3])] {
            let padding = if shape.is_udp && len == 0 { &[] } else { padding };
            let good = shape.clone().sized(len).wire().padded(padding);
            let partial = unannounced(good.clone());
            let summed = partial.clone().summed();
            for (wire, verify) in [
                (&partial, Verify::Checksums),
                (&partial, Verify::Nothing),
                (&summed, Verify::Nothing),
            ] {
                let ((bytes, headers, sum), completed) = taken_in(wire, verify, true, &mut pool);
                assert_eq!(bytes, good.bytes, "{shape:?} {len} {padding:?}");
                assert_eq!((headers.l4_checksum, completed), (Checksum::Good, 1));
                assert_eq!(sum, None, "the device's is stale");
            }
            let ((bytes, headers, _), completed) =
                taken_in(&partial, Verify::Checksums, false, &mut pool);
            assert_eq!(bytes, partial.bytes, "where nobody asks, nobody looks");
            assert_eq!((headers.l4_checksum, completed), (Checksum::Bad, 0));
        }
    }
}

#[test]
fn zero_sum_is_sent_as_ones() {
    let field = AFTER_IPV4 + 6;
    let zeroed = udp().wire();
    let end = zeroed.bytes.len() - 2;
    let zeroed = zeroed.edit(end, &[0; 2]).resummed();
    let missing = [zeroed.bytes[field], zeroed.bytes[field + 1]];
    let wire = unannounced(zeroed.edit(end, &missing));
    let ((bytes, ..), completed) = taken_in(&wire, Verify::Checksums, true, &mut pool(8));
    assert_eq!((&bytes[field..field + 2], completed), (&[0xff; 2][..], 1));
}

#[test]
fn complete_or_unknown_checksum_stays() {
    let wire = tcp().wire();
    let field = AFTER_IPV4 + 16;
    let partial = unannounced(wire.clone());
    let fragment = unannounced(udp().wire()).edit(14 + 6, &[0x20, 0]);
    let unsummed = udp().wire().edit(AFTER_IPV4 + 6, &[0; 2]);
    for (wire, verdict) in [
        (wire.clone(), Checksum::Good),
        (wire.edit(field, &[1, 2]), Checksum::Bad),
        (partial.clone().snapped(100), Checksum::Unknown),
        (fragment, Checksum::Unknown),
        (unsummed, Checksum::Unknown),
    ] {
        let ((bytes, headers, _), completed) =
            taken_in(&wire, Verify::Checksums, true, &mut pool(8));
        assert_eq!(bytes, wire.bytes);
        assert_eq!((headers.l4_checksum, completed), (verdict, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 1000 }))]

    /// For any bytes: a correct checksum, or one that cannot be judged, is never changed, and a
    /// changed one is correct.
    #[test]
    fn promise_5_completing_makes_nothing_wrong(
        shape in select(all_shapes()),
        len in 0usize..200,
        edits in proptest::collection::vec((any::<Index>(), any::<u8>()), 0..3),
        is_partial: bool,
    ) {
        let wire = shape.sized(len).wire();
        let mut wire = if is_partial { unannounced(wire) } else { wire };
        for (at, byte) in edits {
            let at = at.index(wire.bytes.len());
            wire = wire.edit(at, &[byte]);
        }
        let before = wire.headers();
        for verify in [Verify::Checksums, Verify::Nothing] {
            let ((bytes, headers, _), completed) = taken_in(&wire, verify, true, &mut pool(8));
            let after = parse(&bytes, wire.wire_len, wire.link, Verify::Checksums);
            if completed == 1 {
                prop_assert_eq!(after.l4_checksum, Checksum::Good);
                prop_assert_eq!(headers.l4_checksum, Checksum::Good);
                prop_assert!(before.l4_checksum == Checksum::Bad || bytes == wire.bytes);
            } else {
                prop_assert_eq!(bytes, &*wire.bytes);
            }
        }
    }
}
