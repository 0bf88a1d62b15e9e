//! Properties of rings with an honest device, and with one that writes anything anywhere.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use forebay_buf::Region;
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

use super::reference::ReferenceDevice;
use super::*;

#[derive(Clone, Debug)]
enum Step {
    /// Numbers of pieces that the device reads, and that it writes.
    Post(usize, usize),
    PostAgain,
    Publish,
    /// The device takes that many buffers.
    DeviceTakes(usize),
    /// The device returns one of the buffers that it has.
    DeviceGives(prop::sample::Index, u32),
    /// The driver reads that many used entries.
    Read(u16),
    AskForKick(bool),
    AskForCall(bool),
    DeviceCalls,
    /// A word of the ring gets any value.
    Scribble(prop::sample::Index, u16),
    /// All words get any values.
    ScribbleAll(u64),
    /// The used index advances.
    UsedIndex(u16),
    /// A descriptor of a packed ring gets used flags.
    UsedFlags(prop::sample::Index, u16, bool),
}

fn honest_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0usize..3, 0usize..3).prop_map(|(read, written)| Step::Post(read, written)),
        2 => Just(Step::PostAgain),
        3 => Just(Step::Publish),
        2 => (1usize..6).prop_map(Step::DeviceTakes),
        4 => (any::<prop::sample::Index>(), 0u32..2000)
            .prop_map(|(which, len_bytes)| Step::DeviceGives(which, len_bytes)),
        3 => (1u16..6).prop_map(Step::Read),
        1 => any::<bool>().prop_map(Step::AskForKick),
        1 => any::<bool>().prop_map(Step::AskForCall),
        1 => Just(Step::DeviceCalls),
    ]
}

fn hostile_step() -> impl Strategy<Value = Step> {
    let word = || prop_oneof![any::<u16>(), 0u16..10, Just(0x8080), Just(0x80), Just(0x8000)];
    let which = any::<prop::sample::Index>;
    prop_oneof![
        4 => (0usize..3, 0usize..3).prop_map(|(read, written)| Step::Post(read, written)),
        2 => Just(Step::PostAgain),
        4 => Just(Step::Publish),
        4 => (1u16..40).prop_map(Step::Read),
        1 => any::<bool>().prop_map(Step::AskForCall),
        2 => (which(), word()).prop_map(|(at, word)| Step::Scribble(at, word)),
        1 => any::<u64>().prop_map(Step::ScribbleAll),
        3 => prop_oneof![9 => 0u16..3, 1 => any::<u16>()].prop_map(Step::UsedIndex),
        4 => (which(), 0u16..6, any::<bool>())
            .prop_map(|(at, id, wrap)| Step::UsedFlags(at, id, wrap)),
    ]
}

fn config() -> impl Strategy<Value = RingConfig> {
    (any::<bool>(), 0u32..5, any::<bool>()).prop_map(|(is_packed, bits, event_idx)| RingConfig {
        layout: if is_packed { VirtqueueLayout::Packed } else { VirtqueueLayout::Split },
        size: 1 << bits,
        event_idx,
    })
}

fn queue(config: RingConfig) -> Virtqueue {
    let len_bytes = ring_bytes(config.layout, config.size);
    let memory = Arc::new(Region::allocate_shared(len_bytes));
    let claim = Region::claim(&memory, 0..len_bytes).unwrap();
    Virtqueue::new(&Arc::new(claim), config)
}

/// Model of the expected state.
struct Model {
    size: u16,
    pieces: u64,
    posted: BTreeMap<BufferId, u16>,
    /// Buffers of one piece that were taken, with nothing posted since.
    again: Vec<(BufferId, RingDescriptor, Direction)>,
    last: BTreeMap<BufferId, (RingDescriptor, Direction)>,
    /// Buffers in the form that the device must receive.
    unseen: VecDeque<Sent>,
    seen: VecDeque<Sent>,
    /// Buffers that the used entries being read may name: those visible at the last look.
    usable: BTreeSet<BufferId>,
    /// Split ring only: the next used entry to read, and the used index at the last look.
    used_next: u16,
    used_seen: u16,
}

/// Id of a buffer, and the address, length and direction of its pieces.
type Sent = (BufferId, Vec<(u64, u32, bool)>);

impl Model {
    fn new(size: u16) -> Self {
        Self {
            size,
            pieces: 0,
            posted: BTreeMap::new(),
            again: Vec::new(),
            last: BTreeMap::new(),
            unseen: VecDeque::new(),
            seen: VecDeque::new(),
            usable: BTreeSet::new(),
            used_next: 0,
            used_seen: 0,
        }
    }

    /// Number of descriptors that no posted buffer has.
    fn free(&self) -> u16 {
        self.size - self.posted.values().sum::<u16>()
    }

    fn post(&mut self, queue: &mut Virtqueue, read: usize, written: usize) -> TestCaseResult {
        let mut piece = || {
            self.pieces += 1;
            let len_bytes = u32::try_from(self.pieces % 5000).unwrap();
            RingDescriptor { address: self.pieces << 8, len_bytes }
        };
        let request: Vec<_> = (0..read).map(|_| piece()).collect();
        let answer: Vec<_> = (0..written).map(|_| piece()).collect();
        let needed = read + written;
        if needed == 0 {
            return Ok(());
        }
        let free = queue.free();
        let id = match queue.post_request(&request, &answer) {
            Ok(id) => id,
            Err(full) => {
                prop_assert_eq!(full, Full { needed, free });
                prop_assert!(usize::from(free) < needed);
                return Ok(());
            }
        };
        prop_assert!(needed <= usize::from(free) && id.index() < usize::from(self.size));
        let previous = self.posted.insert(id, u16::try_from(needed).unwrap());
        prop_assert_eq!(previous, None, "an id has one buffer");
        self.again.clear();
        if let [(piece, direction)] = [
            request.iter().map(|piece| (*piece, Direction::ToDevice)).collect::<Vec<_>>(),
            answer.iter().map(|piece| (*piece, Direction::ToDriver)).collect(),
        ]
        .concat()[..]
        {
            self.last.insert(id, (piece, direction));
        } else {
            self.last.remove(&id);
        }
        let pieces = request.iter().map(|piece| (piece.address, piece.len_bytes, false));
        let pieces =
            pieces.chain(answer.iter().map(|piece| (piece.address, piece.len_bytes, true)));
        self.unseen.push_back((id, pieces.collect()));
        Ok(())
    }

    fn post_again(&mut self, queue: &mut Virtqueue) -> TestCaseResult {
        if let Some((id, piece, direction)) = self.again.pop() {
            queue.post_again(id);
            prop_assert_eq!(self.posted.insert(id, 1), None);
            let is_written = direction == Direction::ToDriver;
            self.unseen.push_back((id, vec![(piece.address, piece.len_bytes, is_written)]));
        }
        Ok(())
    }

    /// Notes that the next used entry is about to be read. In a split ring the index is read when
    /// all entries up to the last one were read.
    fn read(&mut self, used_index: Option<u16>) {
        if used_index.is_none() || self.used_next == self.used_seen {
            self.used_seen = used_index.unwrap_or(0);
            let unseen = |id: &BufferId| self.unseen.iter().any(|(unseen, _)| unseen == id);
            self.usable = self.posted.keys().copied().filter(|id| !unseen(id)).collect();
        }
    }

    /// Takes the buffer of an id that the device named.
    fn take(&mut self, queue: &mut Virtqueue, used: Used) -> TestCaseResult {
        let taken = queue.take(used.id);
        let Some(id) = taken else {
            let known = self.usable.iter().find(|id| id.index() == used.id as usize);
            prop_assert_eq!(known, None, "a buffer that the device has can be taken");
            return Ok(());
        };
        prop_assert_eq!(id.index(), used.id as usize);
        prop_assert!(self.usable.remove(&id), "only what the device could see is taken");
        let pieces = self.posted.remove(&id);
        prop_assert!(pieces.is_some(), "only what is posted is taken");
        if let (Some(1), Some((piece, direction))) = (pieces, self.last.get(&id)) {
            self.again.push((id, *piece, *direction));
        }
        Ok(())
    }
}

/// Makes the device call if the driver wants it; `call` is the expectation, as far as it is known.
fn call_if_wanted(
    device: &mut ReferenceDevice,
    call: &mut Option<bool>,
    is_waiting: bool,
) -> TestCaseResult {
    let called = device.calls();
    if let Some(call) = *call {
        prop_assert!(!called || call, "no call is wanted");
        prop_assert!(called || !call || !is_waiting, "a driver sleeps for ever");
    }
    if called {
        *call = None;
    }
    Ok(())
}

proptest! {
    /// VQ2 to VQ5, VQ12: the device receives buffers as they were posted, in order, once published;
    /// returned buffers come back in any order; their descriptors are free again; a side that waits
    /// is notified, and one that does not want it is not. From any point of a round.
    #[test]
    fn honest_device_agrees_with_driver(
        config in config(),
        before in prop_oneof![0u32..40, 65_500u32..65_536],
        steps in prop::collection::vec(honest_step(), 1..120),
    ) {
        let mut queue = queue(config);
        let mut device = ReferenceDevice::of(&queue);
        for _ in 0..before {
            queue.post(&[RingDescriptor { address: 0, len_bytes: 1 }], Direction::ToDriver).unwrap();
            let _ = queue.publish();
            let got = device.take().unwrap();
            device.give(got.id, 1);
            let used = queue.next_used().unwrap().unwrap();
            prop_assert!(queue.take(used.id).is_some());
        }
        device.calls();
        let mut model = Model::new(config.size);
        let (mut held, mut given) = (Vec::new(), VecDeque::new());
        // Expected notifications of both sides; `None` until a side has stated its wish.
        let (mut kick, mut call) = (None, None);
        // Descriptors used since the device last decided to call or not.
        let mut unasked = 0;
        for step in steps {
            match step {
                Step::Post(read, written) => model.post(&mut queue, read, written)?,
                Step::PostAgain => model.post_again(&mut queue)?,
                Step::Publish => {
                    let kicked = queue.publish();
                    if model.unseen.is_empty() {
                        prop_assert!(!kicked);
                    } else if let Some(kick) = kick {
                        prop_assert_eq!(kicked, kick);
                    }
                    if kicked {
                        kick = None;
                    }
                    model.seen.append(&mut model.unseen);
                }
                Step::DeviceTakes(count) => {
                    for _ in 0..count {
                        let got = device.take();
                        let shown = model.seen.pop_front();
                        prop_assert_eq!(got.is_some(), shown.is_some());
                        let (Some(got), Some((id, pieces))) = (got, shown) else { break };
                        prop_assert_eq!((usize::from(got.id), got.pieces), (id.index(), pieces));
                        held.push(got.id);
                    }
                }
                Step::DeviceGives(which, len_bytes) if !held.is_empty() => {
                    let id = held.swap_remove(which.index(held.len()));
                    let pieces = model.posted.iter().find(|(posted, _)| posted.0 == id);
                    let pieces = pieces.map_or(0, |(_, pieces)| *pieces);
                    // Within a round; otherwise the device cannot tell which event it has passed.
                    if unasked + pieces > config.size {
                        call_if_wanted(&mut device, &mut call, !given.is_empty())?;
                        unasked = 0;
                    }
                    unasked += pieces;
                    device.give(id, len_bytes);
                    given.push_back(Used { id: u32::from(id), len_bytes });
                }
                Step::Read(count) => {
                    for _ in 0..count {
                        let is_single = given.iter().take(3).all(|used| {
                            model.posted.iter().any(|(id, pieces)| id.index() == used.id as usize && *pieces == 1)
                        });
                        for ahead in 0..3 {
                            if let Some(used) = queue.peek_used(ahead).filter(|_| is_single) {
                                prop_assert_eq!(Some(&used), given.get(usize::from(ahead)));
                            }
                        }
                        model.read(None);
                        let used = queue.next_used();
                        prop_assert_eq!(used, Ok(given.pop_front()));
                        let Ok(Some(used)) = used else { break };
                        model.take(&mut queue, used)?;
                        prop_assert!(!model.posted.keys().any(|id| id.index() == used.id as usize));
                    }
                }
                Step::AskForKick(wanted) => {
                    let came = device.ask_for_kick(wanted);
                    prop_assert_eq!(came, wanted && !model.seen.is_empty());
                    kick = if came { None } else { Some(wanted) };
                }
                Step::AskForCall(wanted) => {
                    let came = queue.ask_for_call(wanted);
                    prop_assert_eq!(came, wanted && !given.is_empty());
                    // Buffers returned before may be called for, too.
                    device.calls();
                    unasked = 0;
                    call = if came { None } else { Some(wanted) };
                }
                Step::DeviceCalls => {
                    call_if_wanted(&mut device, &mut call, !given.is_empty())?;
                    unasked = 0;
                }
                _ => {}
            }
            prop_assert_eq!(queue.free(), model.free());
        }
    }

    /// Promise 5: whatever a device writes, wherever and whenever, only buffers visible to it are
    /// taken, each once, and nothing panics.
    #[test]
    fn promise_5_scribbling_device_takes_nothing(
        config in config(),
        steps in prop::collection::vec(hostile_step(), 1..200),
    ) {
        let mut queue = queue(config);
        let memory = ReferenceDevice::of(&queue).overlay();
        let words = memory.all();
        let RingAddresses { descriptors, device, .. } = queue.addresses();
        let used_index = usize::try_from(device - descriptors).unwrap() / 2 + 1;
        let is_packed = config.layout == VirtqueueLayout::Packed;
        let mut model = Model::new(config.size);
        let mut lie = None;
        for step in steps {
            match step {
                Step::Post(read, written) => model.post(&mut queue, read, written)?,
                Step::PostAgain => model.post_again(&mut queue)?,
                Step::Publish => {
                    let _ = queue.publish();
                    model.unseen.clear();
                }
                Step::AskForCall(wanted) => _ = queue.ask_for_call(wanted),
                Step::Read(count) => for _ in 0..count {
                    let _ = queue.peek_used(count);
                    let _ = queue.peek_used(0);
                    let index = u16::from_le(words[used_index].load(Ordering::Relaxed));
                    model.read((!is_packed).then_some(index));
                    let used = queue.next_used();
                    prop_assert!(lie.is_none() || used == Err(lie.unwrap()), "a lie stays one");
                    match used {
                        Ok(Some(used)) => {
                            model.used_next = model.used_next.wrapping_add(1);
                            model.take(&mut queue, used)?;
                        }
                        Ok(None) => break,
                        Err(told) => lie = Some(told),
                    }
                },
                Step::Scribble(at, word) => words[at.index(words.len())].store(word, Ordering::Relaxed),
                Step::ScribbleAll(seed) => {
                    let mut next = seed | 1;
                    for word in words {
                        next ^= next << 13;
                        next ^= next >> 7;
                        next ^= next << 17;
                        let [low, high, ..] = next.to_le_bytes();
                        word.store(u16::from_le_bytes([low, high]), Ordering::Relaxed);
                    }
                }
                Step::UsedIndex(by) if !is_packed => {
                    words[used_index].fetch_add(by, Ordering::Relaxed);
                }
                Step::UsedFlags(at, id, wrap) if is_packed => {
                    let at = 8 * at.index(usize::from(config.size));
                    words[at + 6].store(id, Ordering::Relaxed);
                    words[at + 7].store(if wrap { 0x8080 } else { 0 }, Ordering::Relaxed);
                }
                _ => {}
            }
            // A descriptor of a packed ring that the device does not return is lost.
            let free = queue.free();
            prop_assert!(free == model.free() || (is_packed && free < model.free()), "{}", free);
        }
        queue.reset(config.event_idx);
        prop_assert_eq!(queue.free(), config.size);
        prop_assert_eq!(queue.next_used(), Ok(None));
    }
}
