//! Writes to shared memory at any time: its contents change while they are read, or its pages
//! vanish.

use rustix::fs::{FallocateFlags, fallocate};

use crate::back_end::queues::Header;
use crate::hostile::{Comes, In, Lie, Scene};
use crate::rings::{Told, placed};

pub(crate) const LIES: &[Lie] = &[
    ("garbage_tail", In::Both, Comes::Nothing, garbage_tail),
    ("header_rewritten_behind", In::Both, Comes::Anything, rewritten),
    ("payload_rewritten_behind", In::Both, Comes::Anything, payload_rewritten),
    ("scribbles_everywhere", In::Both, Comes::Anything, scribbles),
    ("written_on_after_it_was_stopped", In::Both, Comes::Anything, written_on),
    ("memory_cut_short", In::Both, Comes::Nothing, cut_short),
    ("memory_given_back", In::Both, Comes::Anything, given_back),
];

/// Writes garbage behind the used bytes.
fn garbage_tail(scene: &mut Scene) -> Told {
    for len in [60, 300, 1400] {
        let frame = scene.frame(len);
        let buffer = scene.device.buffer(0)?;
        let memory = scene.device.memory.clone().unwrap();
        for part in &buffer.parts {
            memory.write(part.address, &vec![0xff; part.len_bytes.try_into().unwrap()]);
        }
        scene.device.stock[0].push_front(buffer);
        scene.device.deliver(0, Header::default(), &frame)?;
    }
    Ok(())
}

/// Changes the header continuously while the driver reads it.
fn rewritten(scene: &mut Scene) -> Told {
    let headers = [(0, 0, 0), (u16::MAX, 255, 255), (2, 1, 1), (1, 0, 2)];
    for at in 0..400 {
        let packet = placed(scene, Header::default(), if at % 2 == 0 { 100 } else { 1400 })?;
        scene.device.give(0, &packet);
        for (buffers, gso_type, flags) in headers {
            let num_buffers = Some(buffers);
            packet.rewrite(Header { num_buffers, gso_type, flags, ..Header::default() });
        }
    }
    scene.restart();
    Ok(())
}

fn payload_rewritten(scene: &mut Scene) -> Told {
    for at in 0..200u8 {
        let packet = placed(scene, Header::default(), 3000)?;
        scene.device.give(0, &packet);
        packet.scribble(at);
    }
    scene.restart();
    Ok(())
}

/// Writes any byte anywhere, repeatedly.
fn scribbles(scene: &mut Scene) -> Told {
    let mut state = 0x5eed_u64;
    let mut random = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % below
    };
    for _ in 0..10 {
        let memory = scene.device.memory.clone().unwrap();
        let areas = [0, 1].map(|ring| scene.device.ring(ring).place().areas).concat();
        for _ in 0..2000 {
            let byte = u8::try_from(random(256)).unwrap();
            let area = areas[usize::try_from(random(6)).unwrap()];
            memory.write(area + random(AREA_BYTES - 3), &[byte; 3]);
            for (at, len) in memory.regions() {
                memory.write(at + random(len - 512), &[byte; 512]);
            }
        }
        // The driver may have reset its rings before these writes. The next device finds the rings
        // reset here.
        scene.end();
        for area in areas {
            memory.write(area, &vec![0; AREA_BYTES.try_into().unwrap()]);
        }
        scene.meet();
    }
    Ok(())
}

/// Bound of each area of a ring of 64 entries: that many bytes from its start hold only rings.
const AREA_BYTES: u64 = 16 * 64;

/// Writes on into buffers taken before the device was stopped, while the next device has them.
fn written_on(scene: &mut Scene) -> Told {
    scene.device.stocked(0, 48)?;
    let stock: Vec<_> = scene.device.stock[0].drain(..).collect();
    let memory = scene.device.memory.clone().unwrap();
    let write = |byte| {
        for part in stock.iter().flat_map(|chain| &chain.parts) {
            memory.write(part.address, &vec![byte; part.len_bytes.try_into().unwrap()]);
        }
    };
    write(1);
    scene.restart();
    write(2);
    Ok(())
}

/// Tries to shrink the shared memory, which must fail.
fn cut_short(scene: &mut Scene) -> Told {
    let memory = scene.device.memory.clone().unwrap();
    assert!(memory.files().all(|file| file.set_len(0).is_err() && file.set_len(1 << 40).is_err()));
    Ok(())
}

/// Punches holes into the shared memory: zeros take its place.
fn given_back(scene: &mut Scene) -> Told {
    for _ in 0..20 {
        let packet = placed(scene, Header::default(), 3000)?;
        scene.device.give(0, &packet);
    }
    let memory = scene.device.memory.clone().unwrap();
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for (file, (_, len_bytes)) in memory.files().zip(memory.regions()) {
        fallocate(file, flags, 0, len_bytes).unwrap();
    }
    scene.end();
    scene.meet();
    Ok(())
}
