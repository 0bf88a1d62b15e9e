//! Sockets of a program, as `forebay top`, the page and the dashboard's queries show them.

use std::io::Write;
use std::net::{SocketAddr, TcpStream as KernelStream, UdpSocket as KernelSocket};
use std::path::PathBuf;
use std::thread::{self, JoinHandle};

use forebay::net::{Net, NetConfig, Stack, TcpListener, TcpStream, UdpSocket};
use forebay::{Config, Device, DeviceConfig, Outcome, Stopper, Via};
use forebay_control::ControlSocket;
use forebay_metrics::{Metrics, MetricsServer, ServerAccess, TextFormat};
use forebay_testkit::namespaces::cable::{Cable, Namespace};
use libtest_mimic::Failed;
use serde_json::Value;
use tempfile::TempDir;

use crate::Judgement;
use crate::browser::Browser;
use crate::live::Judge;
use crate::live::program::wait_until;
use crate::metrics::promtool_accepts;
use crate::top::Screen;

/// Judges that need tmux.
pub(crate) const IN_TERMINAL: [Judge; 1] = [("top_1_sockets_are_the_programs", judge_top)];

/// Judges that need Chromium.
pub(crate) const IN_BROWSER: [Judge; 1] = [("pag_2_sockets_are_the_programs", judge_page)];

/// Judges that need promtool.
pub(crate) const IN_METRICS: [Judge; 1] = [("met_7_tcp_sockets_have_samples", judge_metrics)];

/// Port whose datagrams are read, and one whose are not.
const PORTS: [u16; 2] = [7007, 7008];

const TCP_PORT: u16 = 80;

/// Datagrams to each port: more than the buffer of the unread one holds.
const DATAGRAMS: usize = 500;

/// Buffer of the unread socket, in bytes.
const BUFFER: u32 = 50_000;

/// Bytes of the connection that nobody reads.
const UNREAD: &[u8] = b"hello";

/// A program with two UDP sockets, a TCP connection and one that it has not accepted, on one end of a cable, and their peers at the
/// other. It serves metrics and the page at `server`, and listens for `top` at [`socket`](Self::socket).
pub(crate) struct Program {
    net: Net,
    stopper: Stopper,
    engine: Option<JoinHandle<forebay::Result<Outcome<Stack>>>>,
    metrics: Metrics,
    pub(crate) server: MetricsServer,
    _control: ControlSocket,
    directory: TempDir,
    _sockets: [UdpSocket; 2],
    _tcp: (TcpListener, TcpStream, [KernelStream; 2]),
    /// Peer of the accepted connection.
    peer: SocketAddr,
}

impl Program {
    /// Starts the program. All datagrams have arrived when it returns.
    pub(crate) fn start() -> Result<Self, Failed> {
        let (near, far) = (Namespace::new(), Namespace::new());
        Cable { near: (&near, "fbs0"), far: (&far, "fbs1") }.lay();
        near.command("ip addr add 10.9.0.1/24 dev fbs0");
        far.command("ip addr add 10.9.0.2/24 dev fbs1");
        near.command("ip neigh replace 10.9.0.2 lladdr 02:00:00:00:00:02 dev fbs0 nud permanent");
        let (net, engine, metrics) = near.run(|| {
            let mut config = DeviceConfig::new("fbs0", Via::AfPacket);
            let take = format!("udp:{},udp:{},tcp:{TCP_PORT}", PORTS[0], PORTS[1]);
            config.take = take.parse().map_err(|error| format!("{take}: {error}"))?;
            let mut devices = [Device::open(&config)?];
            let metrics = Metrics::new().with_devices(&devices);
            let (net, engine) = Net::over(&Config::live(), &NetConfig::default(), &mut devices)?;
            Ok::<_, Failed>((net, engine, metrics))
        })?;
        let (control, stopper) = (engine.control(), engine.stopper());
        let metrics = metrics.with_engine(control.clone()).with_sockets(net.clone());
        let engine = near.run(move || thread::spawn(move || engine.run()));
        let directory = tempfile::tempdir()?;
        let of_top = metrics.clone();
        let socket = ControlSocket::bind(&directory.path().join("s.sock"))?
            .with_metrics(move || of_top.view_text())
            .serve(control, None)?;
        let server =
            MetricsServer::bind("127.0.0.1:0".parse()?, &ServerAccess::default(), metrics.clone())?;
        let sockets = near.run(|| -> std::io::Result<_> {
            let [read, unread] = PORTS.map(|port| net.bind(("10.9.0.1", port)));
            Ok([read?, unread?])
        })?;
        sockets[1].set_recv_buffer_size(BUFFER);
        let listener = near.run(|| TcpListener::bind(&net, ("10.9.0.1", TCP_PORT)))?;
        let kernels = far.run(|| KernelStream::connect(("10.9.0.1", TCP_PORT)))?;
        let (ours, peer) = listener.accept()?;
        (&kernels).write_all(UNREAD)?;
        ours.peek(&mut [0; UNREAD.len()])?;
        let waiting = far.run(|| KernelStream::connect(("10.9.0.1", TCP_PORT)))?;
        send(&far, &net, &sockets[0])?;
        Ok(Self {
            net,
            stopper,
            engine: Some(engine),
            metrics,
            server,
            _control: socket,
            directory,
            _sockets: sockets,
            _tcp: (listener, ours, [kernels, waiting]),
            peer,
        })
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("s.sock")
    }

    /// Name of the accepted connection's flow.
    fn flow(&self) -> String {
        format!("tcp {} > 10.9.0.1:{TCP_PORT}", self.peer)
    }

    /// Rows of the sockets: number, address, memory and buffer in bytes, and drops. Nothing comes
    /// any more, so they stay.
    fn rows(&self) -> Result<Vec<(String, [u64; 3])>, Failed> {
        let mut rows: Vec<_> = self.net.sockets();
        rows.sort_by_key(|(_, local, _)| *local);
        let dropped: Vec<_> = rows.iter().map(|(.., counts)| counts.rcvbuf_errors).collect();
        if rows.len() != PORTS.len() || dropped[0] != 0 || dropped[1] == 0 {
            return Err(format!("the program has other sockets, or none is full: {rows:?}").into());
        }
        let row = |(number, local, counts): (usize, SocketAddr, _)| {
            let counts: forebay::net::counters::SocketCounts = counts;
            let numbers = [counts.rmem.into(), counts.rcvbuf.into(), counts.rcvbuf_errors];
            (format!("{number} {local}"), numbers)
        };
        Ok(rows.into_iter().map(row).collect())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.stopper.stop();
        // Ignored: a judgement has already failed.
        let _ = self.engine.take().map(JoinHandle::join);
    }
}

/// Sends datagrams to both ports, few at once, and reads those to the first.
fn send(far: &Namespace, net: &Net, read: &UdpSocket) -> Judgement {
    let sender = far.run(|| KernelSocket::bind("10.9.0.2:0"))?;
    for number in 1..=DATAGRAMS {
        for port in PORTS {
            sender.send_to(&[7; 18], ("10.9.0.1", port))?;
        }
        read.recv(&mut [0; 18])?;
        let number = u64::try_from(number)?;
        wait_until("the datagrams have come", || {
            let counts = net.sockets();
            let came = counts.iter().map(|(.., of)| of.queued + of.rcvbuf_errors).sum::<u64>();
            Ok(came == 2 * number)
        })?;
    }
    Ok(())
}

/// The metrics have the connections by state, and the listener. Only a view has connections.
fn judge_metrics() -> Judgement {
    let program = Program::start()?;
    let text = program.metrics.text(TextFormat::OpenMetrics);
    let socket = text.lines().find_map(|line| {
        line.strip_prefix("forebay_tcp_listener_backlog{socket=\"")?.split_once('"')
    });
    let listener =
        format!("{{socket=\"{}\",local=\"10.9.0.1:80\"}}", socket.ok_or("no listener")?.0);
    let in_both = [
        "forebay_tcp_connections{state=\"ESTAB\"} 2.0".to_owned(),
        "forebay_tcp_connections{state=\"TIME-WAIT\"} 0.0".to_owned(),
        format!("forebay_tcp_listener_waiting_connections{listener} 1.0"),
        format!("forebay_tcp_listener_backlog{listener} 128.0"),
        format!("forebay_tcp_listener_handshakes{listener} 0.0"),
        "forebay_network_events_total{name=\"TcpPassiveOpens\"} 2".to_owned(),
        "forebay_network_events_total{name=\"TcpExtListenOverflows\"} 0".to_owned(),
    ];
    let ends = format!("{{local=\"10.9.0.1:80\",peer=\"{}\"}}", program.peer);
    let in_view = [
        format!("forebay_tcp_connection_received_bytes_total{ends} 5"),
        format!("forebay_tcp_connection_sent_bytes_total{ends} 0"),
        format!("forebay_tcp_connection_unread_bytes{ends} 5.0"),
        format!("forebay_tcp_connection_info{},state=\"ESTAB\"}} 1", ends.trim_end_matches('}')),
    ];
    let view = program.metrics.view_text();
    for (text, lines) in [(&text, &in_both[..]), (&view, &in_both[..]), (&view, &in_view[..])] {
        if let Some(line) = lines.iter().find(|line| !text.lines().any(|other| other == **line)) {
            return Err(format!("there is no {line} in\n{text}").into());
        }
    }
    let memory = "forebay_tcp_memory_bytes ";
    if text.contains("peer=") || text.contains(&format!("{memory}0")) || !text.contains(memory) {
        return Err(format!("peers, or no memory, are in\n{text}").into());
    }
    promtool_accepts(&program.metrics.text(TextFormat::Prometheus))
}

/// The tables have the program's sockets with their numbers; the connection is followed.
fn judge_top() -> Judgement {
    let program = Program::start()?;
    let follow = format!("--no-color --follow '{}'", program.flow());
    let screen = Screen::of(&program.socket(), &follow)?;
    let words = format!("{} bytes for the application to read them", UNREAD.len());
    screen.wait_for(&words)?;
    screen.wait_for(": ESTAB")?;
    screen.keys(&["F", "5", "Enter"])?;
    let rows = program.rows()?;
    screen.wait_for(&format!(":{}", PORTS[1]))?;
    // The rates are those of nothing once two samples have been taken.
    let mut last = String::new();
    wait_until("the sockets are as the program's", || {
        last = screen.text()?;
        let all = last.lines().filter(|line| line.contains("10.9.0.1:")).count();
        let are_shown = rows.iter().all(|(begin, numbers)| is_shown(&last, begin, *numbers));
        Ok(are_shown && all == rows.len())
    })
    .map_err(|failed| format!("{}: {rows:?}\n{last}", failed.message().unwrap_or_default()))?;
    screen.keys(&["6"])?;
    // Rates, and then the queues as in ss: one of 129 waits to be accepted, and 5 bytes to be read.
    let rest = ["0", "0", "0"];
    let listener = [&["10.9.0.1:80", "LISTEN"][..], &rest, &["1", "128"]].concat();
    let peer = program.peer.to_string();
    let accepted = [&[&*peer, ">", "10.9.0.1:80", "ESTAB"][..], &rest, &["5", "0"]].concat();
    wait_until("TCP is as the program's", || {
        last = screen.text()?;
        let has =
            |row: &[&str]| last.lines().any(|line| line.split_whitespace().eq(row.iter().copied()));
        Ok(has(&listener) && has(&accepted) && last.matches(" ESTAB ").count() == 2)
    })
    .map_err(|failed| format!("{}:\n{last}", failed.message().unwrap_or_default()).into())
}

/// True if a line of the screen has these words: number and address, rate, memory, buffer, rate of
/// drops, and drops.
fn is_shown(screen: &str, begin: &str, [memory, buffer, dropped]: [u64; 3]) -> bool {
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let line = screen.lines().map(words).find(
        |words| matches!(&words[..], [number, local, ..] if format!("{number} {local}") == begin),
    );
    let Some([_, _, queued, shown @ ..]) = line.as_deref() else { return false };
    let [now @ .., in_all] = shown else { return false };
    let [of_memory, of_buffer, losses] = now else { return false };
    queued == "0"
        && losses == "0"
        && is_about(of_memory, memory)
        && is_about(of_buffer, buffer)
        && is_about(in_all, dropped)
}

/// True if a text such as `49.2k` means this number, as exactly as it can.
fn is_about(text: &str, number: u64) -> bool {
    let shown = match text.strip_suffix('k') {
        Some(digits) => digits.parse().map(|thousands: f64| thousands * 1e3),
        None => text.parse(),
    };
    let number = u32::try_from(number).map_or(f64::NAN, f64::from);
    shown.is_ok_and(|shown| (shown - number).abs() <= number / 100.0)
}

/// The page has the same sockets, and the words of the connection.
fn judge_page() -> Judgement {
    let program = Program::start()?;
    let mut browser = Browser::start()?;
    let address = program.server.address();
    browser.open(&format!("http://{address}/"))?;
    browser.wait_for("document.querySelectorAll('#sockets tbody tr').length === 2")?;
    let rows = "JSON.stringify([...document.querySelectorAll('#sockets tbody tr')].map((row) =>
        [...row.cells].map((cell) => cell.textContent.replace(/[^0-9.:]/g, ''))))";
    let shown: Value = serde_json::from_str(browser.value(rows)?.as_str().ok_or("no rows")?)?;
    for (begin, [memory, buffer, dropped]) in program.rows()? {
        let is_row = |row: &Value| {
            let cell = |index: usize| row[index].as_str().unwrap_or_default();
            format!("{} {}", cell(0), cell(1)) == begin
                && [cell(4), cell(5), cell(7)]
                    == [memory, buffer, dropped].map(|number| number.to_string())
        };
        if !shown.as_array().into_iter().flatten().any(is_row) {
            return Err(format!("{begin} {memory} {buffer} {dropped} is not in {shown}").into());
        }
    }
    browser.wait_for("document.querySelectorAll('#tcp tbody tr').length === 3")?;
    let tcp = "[...document.querySelectorAll('#tcp tbody tr')].map((row) =>
        [...row.cells].map((cell) => cell.textContent).join(' ').trim()).join('; ')";
    let peer = program.peer;
    // The other one is behind it: it has no bytes.
    let rows = format!(
        "10.9.0.1:80  LISTEN     1 of 129; 10.9.0.1:80 {peer} ESTAB 0 0 5 0 5 0; 10.9.0.1:80 "
    );
    browser
        .wait_for(&format!("({tcp}).startsWith('{rows}')"))
        .map_err(|error| format!("{error}: {:?} is not {rows}", browser.value(tcp)))?;
    let states = browser.value("document.getElementById('tcp-note').textContent")?;
    if states != "2 ESTAB" {
        return Err(format!("the states are {states}").into());
    }
    let search = format!(
        "{{ document.getElementById('flow').value = '{}';
            document.getElementById('search').requestSubmit(); }}",
        program.flow()
    );
    browser.value(&search)?;
    let told = browser.wait_for("document.getElementById('explanation').textContent")?;
    let told = told.as_str().unwrap_or_default();
    let words = format!("{} bytes for the application to read them", UNREAD.len());
    if !told.contains(": ESTAB") || !told.contains(&words) {
        return Err(format!("the page tells {told}").into());
    }
    if browser.errors.is_empty() { Ok(()) } else { Err(browser.errors.join("\n").into()) }
}
