//! `forebay top` in tmux on a live run, in a mask flip storm, as a flow moves, and as packets drop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::Judgement;
use crate::live::Judge;
use crate::live::program::Run;
use crate::live::watchdog::{link, send};
use crate::top::Screen;

pub(crate) const TRIALS: [Judge; 1] = [("top_4_screen_agrees_on_live_device", judge)];

/// Changes of the mask in the storm; the last one leads to CPU 1.
const FLIPS: usize = 11;

/// Port that the flow is sent from.
const PORT: u16 = 7007;

fn judge() -> Judgement {
    let link = link()?;
    let mut run = Run::start(&link.near, link.args(&["--cpus", "2", "--rps", "1", "--check"]))?;
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let flood = scope.spawn(|| send(&link, PORT, || !is_over.load(Ordering::Relaxed)));
        let judged = judge_screen(&run);
        is_over.store(true, Ordering::Relaxed);
        flood.join().map_err(|_| "the flood has panicked")??;
        judged
    })?;
    run.stop().map(drop)
}

fn judge_screen(run: &Run) -> Judgement {
    let flow = format!("10.7.0.1:{PORT} > 10.7.0.2:9");
    let screen = Screen::of(&run.socket(), &format!("--no-color --follow '{flow}'"))?;
    screen.wait_for("on CPU 0: its last packet went there")?;
    for flip in 0..FLIPS {
        let mask = 2 - flip % 2;
        screen.keys(&["=", &format!("rps_cpus={mask}"), "Enter"])?;
        screen.wait_for(&format!("now rx-0/rps_cpus {mask}"))?;
        screen.wait_for(&format!("now:   on CPU {}: its last packet went there", mask - 1))?;
    }
    let explained = run.asks(&format!("explain {flow}"))?;
    let moves: Vec<_> = explained.iter().filter(|line| line.contains(" s: CPU ")).collect();
    let [.., last] = moves.as_slice() else { return Err("it has not moved".into()) };
    if moves.len() < FLIPS {
        return Err(format!("{FLIPS} moves were expected: {explained:?}").into());
    }
    let begin: String = last.trim_start().chars().take(30).collect();
    screen.wait_for(&begin)?;
    screen.keys(&["=", "netdev_max_backlog=1", "Enter"])?;
    screen.wait_for("backlog_full: the backlog was at")?;
    let explained = run.asks(&format!("explain {flow}"))?;
    let is_named = explained.iter().any(|line| line.contains("backlog_full"));
    if is_named { Ok(()) } else { Err(format!("no drop is explained: {explained:?}").into()) }
}
