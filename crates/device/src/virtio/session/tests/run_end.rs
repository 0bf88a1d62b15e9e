//! The end of a run is no loss of its back end.

use super::*;

#[test]
fn link_ends_with_silent_back_end() {
    let place = Place::new();
    let listener = place.listen();
    let (mut link, _ports) = place.start(Role::Connect, 1).unwrap();
    let mut silent = BackEnd::accept(&listener, Offer::default());
    silent.be_silent_at(FrontendReq::SET_FEATURES);
    let seen = link.back_end();
    link.stop();
    assert!(silent.read().is_none());
    assert_eq!(seen.news().refused, None, "the run ends, and tries no other");
}

#[test]
fn ended_run_loses_no_back_end() {
    let place = Place::new();
    let listener = place.listen();
    let (mut link, _port, mut back_end) = place.up(&listener);
    let seen = link.back_end();
    let answers = thread::spawn(move || back_end.answer_to_the_end());
    link.stop();
    answers.join().unwrap();
    assert_eq!(seen.status(), LinkStatus { state: LinkState::Running, carrier_losses: 0 });
}

/// The sources of a run end one after the other; the last ones may be shut, or in a conversation.
#[test]
fn ending_sources_lose_no_back_end() {
    use FrontendReq as Of;
    let place = Place::new();
    let listener = place.listen();
    let (mut link, mut ports) = place.start(Role::Connect, 2).unwrap();
    let mut back_end = set_up(&listener, 2);
    ports.iter_mut().for_each(|port| wait_for_session(port, 1));
    ports[1].shut(EndKind::UsedIndex.reason("its used index jumped"));
    assert!(back_end.answer_until(Of::SET_VRING_ENABLE, 6));
    drop(ports.remove(0));
    ports[0].stop_receiving();
    back_end.be_silent_at(Of::GET_FEATURES);
    let seen = link.back_end();
    link.stop();
    assert_eq!(seen.status(), LinkStatus { state: LinkState::Running, carrier_losses: 0 });
}
