//! Client that asks a server over a UDP socket of the kernel, one request after the other.

use std::net::{Ipv4Addr, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use forebay_rx::CpuId;
use forebay_sys as sys;
use serde_json::json;

use super::{OwnArgs, ready};
use crate::failure::Failure;
use crate::output;

/// Time to wait for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// Lost requests in a row after which the server counts as gone.
const LOST_MAX: u32 = 5;

const REQUEST: [u8; 64] = [7; 64];

pub(super) fn run(args: &OwnArgs) -> Result<(), Failure> {
    let refused = |error: std::io::Error| {
        Failure::usage(format!("asking {}: {error}", args.to), "see that it can be reached")
    };
    if let Some(&cpu) = args.cpus.first() {
        // Ignored: figures of an unpinned client are still valid.
        let _ = sys::pin_to(CpuId(cpu));
    }
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(refused)?;
    socket.connect((args.to, args.port)).map_err(refused)?;
    socket.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(refused)?;
    ready()?;
    let [warm_up, window] = [args.warm_up, args.window].map(Duration::from_millis);
    let warm_up_answers = exchange(&socket, args.rate, warm_up).map_err(refused)?.len();
    let mut times = exchange(&socket, args.rate, window).map_err(refused)?;
    times.sort_unstable();
    let at_ns = |percent: usize| {
        let time = times.get((times.len() * percent / 100).min(times.len() - 1))?;
        u64::try_from(time.as_nanos()).ok()
    };
    let result = json!({
        "p50_ns": at_ns(50),
        "p99_ns": at_ns(99),
        "answers": times.len(),
        "warm_up_answers": warm_up_answers,
    });
    output::print(&format!("{result}\n"))
}

/// Asks for a while. Returns the time that each answer took.
fn exchange(socket: &UdpSocket, rate: u32, lasts: Duration) -> std::io::Result<Vec<Duration>> {
    let period = Duration::from_secs(1).checked_div(rate).unwrap_or_default();
    let (began, mut times, mut lost) = (Instant::now(), Vec::new(), 0);
    let mut next = began;
    while began.elapsed() < lasts || times.is_empty() {
        thread::sleep(next.saturating_duration_since(Instant::now()));
        next += period;
        let asked = Instant::now();
        socket.send(&REQUEST)?;
        match socket.recv(&mut [0; 2048]) {
            Ok(_) => {
                times.push(asked.elapsed());
                lost = 0;
            }
            Err(error) if lost == LOST_MAX => return Err(error),
            Err(_) => lost += 1,
        }
    }
    Ok(times)
}
