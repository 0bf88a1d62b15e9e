//! Client that asks a server over a UDP socket of the kernel, one request after the other.

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering};
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

const REQUEST_BYTES: usize = 64;

/// Number of the next request, which begins with it.
static NEXT_REQUEST: AtomicU64 = AtomicU64::new(0);

pub(super) fn run(args: &OwnArgs) -> Result<(), Failure> {
    let refused = |error: std::io::Error| {
        Failure::usage(format!("asking {}: {error}", args.to), "check that it can be reached")
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
    let warm_up_answers = exchange(&socket, args.rate, warm_up).map_err(refused)?.times.len();
    let Exchange { requests, mut times } = exchange(&socket, args.rate, window).map_err(refused)?;
    times.sort_unstable();
    let at_ns = |percent: usize| {
        let time = times.get((times.len() * percent / 100).min(times.len() - 1))?;
        u64::try_from(time.as_nanos()).ok()
    };
    let result = json!({
        "p50_ns": at_ns(50),
        "p99_ns": at_ns(99),
        "requests": requests,
        "answers": times.len(),
        "warm_up_answers": warm_up_answers,
    });
    output::print(&format!("{result}\n"))
}

/// Requests of a while, and the time that each answer took.
#[derive(Default)]
struct Exchange {
    requests: u64,
    times: Vec<Duration>,
}

/// Asks for a while.
fn exchange(socket: &UdpSocket, rate: u32, lasts: Duration) -> io::Result<Exchange> {
    let period = Duration::from_secs(1).checked_div(rate).unwrap_or_default();
    let (began, mut exchange, mut lost) = (Instant::now(), Exchange::default(), 0);
    let mut next = began;
    while began.elapsed() < lasts || exchange.times.is_empty() {
        thread::sleep(next.saturating_duration_since(Instant::now()));
        let asked = Instant::now();
        // A late request does not hurry the next ones.
        next = next.max(asked) + period;
        let mut request = [7; REQUEST_BYTES];
        request[..8].copy_from_slice(&NEXT_REQUEST.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        socket.send(&request)?;
        exchange.requests += 1;
        match await_answer(socket, &request, asked) {
            Ok(()) => {
                exchange.times.push(asked.elapsed());
                lost = 0;
            }
            Err(error) if lost == LOST_MAX => return Err(gone(error)),
            Err(_) => lost += 1,
        }
    }
    Ok(exchange)
}

/// Error of a server that has not answered too many requests in a row.
fn gone(error: io::Error) -> io::Error {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            let why = format!("{} requests in a row had no answer", LOST_MAX + 1);
            io::Error::new(ErrorKind::TimedOut, why)
        }
        _ => error,
    }
}

/// Receives until the answer to this request comes. Late answers to earlier ones are passed over.
fn await_answer(socket: &UdpSocket, request: &[u8], asked: Instant) -> io::Result<()> {
    let mut answer = [0; 2048];
    while asked.elapsed() < ANSWER_TIMEOUT {
        let len = socket.recv(&mut answer)?;
        if answer[..len] == *request {
            return Ok(());
        }
    }
    Err(ErrorKind::TimedOut.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cmp_5_lost_requests_are_counted() {
        let server = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        client.connect(server.local_addr().unwrap()).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        thread::spawn(move || {
            let mut request = [0; REQUEST_BYTES];
            for number in 0.. {
                let (len, from) = server.recv_from(&mut request).unwrap();
                if number >= 2 {
                    server.send_to(&request[..len], from).unwrap();
                }
            }
        });
        // It lasts until the first answer.
        let exchange = exchange(&client, 0, Duration::ZERO).unwrap();
        assert_eq!(exchange.times.len(), 1);
        assert!(exchange.requests >= 3, "{}", exchange.requests);
    }

    #[test]
    fn cmp_2_silent_server_is_named() {
        let server = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        client.connect(server.local_addr().unwrap()).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let silent = exchange(&client, 0, Duration::ZERO).err().unwrap();
        assert_eq!(silent.to_string(), "6 requests in a row had no answer");
        drop(server);
        let refused = exchange(&client, 0, Duration::ZERO).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    }
}
