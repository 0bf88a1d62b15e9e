//! Programs of calls, run on the kernel's sockets and then with the library preloaded: the answers are equal.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod compiled; // programs in C
mod datagrams; // several processes with UDP sockets at one address
mod forks; //  a process that listens, and children that serve
mod hidden; // descriptors that a program does not know
mod kept; //   listeners for the program that a process runs next
mod limits; // a process with few descriptors
mod listeners; // listeners and their connections in one process
mod matrix; // all calls, in all modes
mod registrations; // sets of epoll
mod relays; // connections that children use
mod privileges; // a process that gives up its privileges
mod workers; // several processes with one listener
mod processes; // what processes keep, and what they learn of the ends of others

use std::fs;
use std::io;
use std::net::UdpSocket;
use std::process::{Command, Output};
use std::thread;
use std::time::Duration;

use forebay_testkit::namespaces::cable::{Cable, Namespace};
use forebay_testkit::namespaces::{missing, trial_inside};
use libtest_mimic::Arguments;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const NEAR: &str = "10.9.0.1:7";
const FAR: &str = "10.9.0.2:9";

/// Argument with which this program makes the calls.
const CALLS: &str = "--make-calls";

fn main() {
    if std::env::args().nth(1).as_deref() == Some(CALLS) {
        return make_calls();
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let missing = self::missing(&["ip"]);
    let trials = [
        ("exe_2_udp_calls_answer_over_af_packet", (|| same_answers("af_packet")) as fn()),
        ("exe_2_udp_calls_answer_over_af_xdp", || same_answers("af_xdp")),
        ("exe_1_other_ports_stay_the_kernels", others),
    ];
    let mut trials: Vec<_> =
        trials.map(|(name, test)| trial_inside(name, missing.as_ref(), test)).into();
    let without_cc = missing.clone().or_else(|| self::missing(&["cc"]));
    let compiled = [
        ("exe_4_handlers_use_sockets", compiled::handlers_use_sockets as fn()),
        ("exe_4_closing_spares_other_threads", compiled::closing_spares_threads),
        ("exe_5_child_closes_all_copies", compiled::children_close_copies),
    ];
    trials.extend(compiled.map(|(name, test)| trial_inside(name, without_cc.as_ref(), test)));
    let missing = missing.or_else(python_missing);
    let by_python = [
        ("exe_2_vfork_leaves_sockets_in_place", vforked as fn()),
        ("exe_4_calls_answer_over_af_packet", || matrix::same_answers("af_packet")),
        ("exe_4_calls_answer_over_af_xdp", || matrix::same_answers("af_xdp")),
        ("exe_5_closing_all_spares_af_packet", || hidden::all_are_closed("af_packet")),
        ("exe_5_closing_all_spares_af_xdp", || hidden::all_are_closed("af_xdp")),
        ("exe_5_waits_find_no_hidden_numbers", hidden::none_are_found),
        ("exe_4_connection_waits_for_descriptors", limits::few_descriptors),
        ("exe_5_limited_memory_leaves_room", limits::little_memory),
        ("exe_5_low_limits_leave_numbers", limits::low_limits),
        ("exe_4_closed_connection_has_no_events", listeners::no_events_once_closed),
        ("exe_4_checked_poll_serves_listener", listeners::checked_poll),
        ("exe_4_registrations_outlive_bind", || {
            ["af_packet", "af_xdp"].into_iter().for_each(registrations::outlive_binding);
        }),
        ("exe_4_lacking_option_is_told", listeners::lacking_is_told),
        ("exe_4_arrivals_are_signalled", listeners::arrivals_are_signalled),
        ("exe_4_mtu_is_told_by_both_families", listeners::mtu_by_family),
        ("exe_4_small_path_is_heard_of", listeners::path_mtu_is_heard),
        ("exe_4_fragmented_segments_are_joined", listeners::fragments_are_joined),
        ("exe_6_end_returns_from_no_accept", listeners::no_return_at_the_end),
        ("exe_4_refused_listener_stays_refused", listeners::refused_twice),
        ("exe_5_parent_closes_engines_of_children", processes::engines_are_closed),
        ("exe_5_child_finds_locks_free", processes::locks_are_free),
        ("exe_5_failed_lock_is_told", processes::failed_lock),
        ("exe_5_failed_turn_is_told", processes::failed_turn),
        ("exe_7_dead_programs_socket_is_replaced", processes::socket_is_replaced),
        ("exe_7_listener_needs_no_control", processes::without_control),
        ("exe_5_child_serves_its_parents_listener", forks::child_serves),
        ("exe_5_devices_are_opened_at_start", privileges::none_are_needed),
        ("exe_5_next_process_serves_in_turn", forks::turns_are_taken),
        ("exe_8_processes_divide_connections", workers::connections_are_divided),
        ("exe_8_child_serves_beside_its_parent", workers::child_serves_beside),
        ("exe_8_killed_process_is_replaced", workers::killed_is_replaced),
        ("exe_8_unaccepted_connections_are_passed_on", workers::unaccepted_are_passed_on),
        ("exe_8_unaccepted_connections_await_next_process", workers::unaccepted_await_heir),
        ("exe_8_connections_without_room_are_reset", workers::refused_are_reset),
        ("exe_8_listener_is_reopened_while_others_serve", workers::listener_is_reopened),
        ("exe_5_closed_copy_leaves_port", forks::port_is_left),
        ("exe_5_child_binds_beside_its_parent", forks::child_binds),
        ("exe_7_newest_process_is_controlled", workers::newest_is_controlled),
        ("exe_6_bytes_outlive_their_process", forks::bytes_outlive),
        ("exe_6_bytes_outlive_waiting_threads", forks::bytes_outlive_waiting),
        ("exe_6_end_returns_from_no_call", forks::late_calls_do_not_return),
        ("exe_5_mode_of_listener_is_kept", forks::mode_is_kept),
        ("exe_5_second_process_is_told_why", forks::second_is_told),
        ("exe_5_failed_opening_is_told_once", forks::failure_is_told_once),
        ("exe_5_closed_udp_copies_leave_port", forks::copies_leave_port),
        ("exe_5_childs_bind_depends_on_backend", forks::udp_is_of_one),
        ("exe_5_children_use_inherited_connections", || relays::children_echo("af_packet")),
        ("exe_5_children_use_connections_over_af_xdp", || relays::children_echo("af_xdp")),
        ("exe_5_children_lack_packet_memory", || {
            ["af_packet", "af_xdp"].into_iter().for_each(relays::children_lack_memory);
        }),
        ("exe_5_children_see_resets", relays::resets_are_seen),
        ("exe_5_programs_use_inherited_connections", relays::programs_echo),
        ("exe_5_passed_connections_are_used", relays::passed_echo),
        ("exe_5_inherited_connections_are_the_kernels", relays::ways_are_the_kernels),
        ("exe_5_inherited_connection_outlives_parents_exit", relays::owner_exits),
        ("exe_5_streams_are_written_at_exit", relays::streams_are_written),
        ("exe_5_children_see_owners_end", relays::owner_is_killed),
        ("exe_10_next_program_serves_listener", kept::next_program_serves),
        ("exe_10_exec_without_memory_faults", kept::without_memory_fails),
        ("exe_10_programs_serve_beside_their_parent", kept::serves_beside),
        ("exe_10_others_get_no_listener", kept::others_get_none),
        ("exe_10_devices_are_opened_for_listeners", kept::devices_are_opened),
        ("exe_8_processes_divide_datagrams", datagrams::are_divided),
        ("exe_2_fragments_are_joined", datagrams::fragments_are_joined),
        ("exe_2_sums_of_tunnels_are_completed", datagrams::sums_are_completed),
        ("exe_2_all_queues_are_taken", datagrams::all_queues_are_taken),
        ("exe_8_children_share_parents_socket", datagrams::are_the_childrens),
        ("exe_8_child_sends_by_parents_socket", datagrams::child_sends),
        ("exe_8_child_asks_by_connected_socket", datagrams::child_asks),
        ("exe_8_connected_socket_has_its_flow", datagrams::flow_is_the_connecteds),
    ];
    trials.extend(by_python.map(|(name, test)| trial_inside(name, missing.as_ref(), test)));
    libtest_mimic::run(&arguments, trials).exit();
}

/// Prints the result of each call, and at last how many datagrams the kernel's UDP has received.
fn make_calls() {
    let mut buffer = [0; 100];
    let socket = UdpSocket::bind(NEAR).unwrap();
    say("local", socket.local_addr());
    say("peer", socket.peer_addr());
    say("again", UdpSocket::bind(NEAR));
    say("foreign", UdpSocket::bind("10.77.0.1:7"));
    socket.set_nonblocking(true).unwrap();
    say("nothing", socket.recv_from(&mut buffer));
    say("not readable", is_readable(&socket, 0));
    socket.set_nonblocking(false).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    say("timeout", socket.recv_from(&mut buffer));
    say("timeout is", socket.read_timeout());
    socket.set_read_timeout(None).unwrap();
    say("sent", socket.send_to(b"question", FAR));
    say("readable", is_readable(&socket, -1));
    say("peeked", socket.peek_from(&mut buffer[..3]));
    say("cut", socket.recv_from(&mut buffer[..5]));
    println!("{:?}", &buffer[..5]);
    say("read again", is_readable(&socket, 0));
    say("empty", socket.send_to(b"", FAR));
    say("empty", socket.recv_from(&mut buffer));
    say("unconnected", socket.send(b"whom"));
    say("port 0", socket.send_to(b"x", "10.9.0.2:0"));
    say("family", socket.send_to(b"x", "[::1]:9"));
    say("too long", socket.send_to(&[0; 70_000], FAR));
    say("connected", socket.connect(FAR));
    say("peer", socket.peer_addr());
    let other = socket.try_clone().unwrap();
    drop(socket);
    say("sent", other.send(b"by a duplicate"));
    say("received", other.recv(&mut buffer));
    say("ttl", other.set_ttl(7).and_then(|()| other.ttl()));
    say("ttl", other.set_ttl(0));
    say("long", other.send(&[1; 1400]));
    say("long", other.recv(&mut [0; 2000]));
    say("error", other.take_error());
    drop(other);
    say("free again", UdpSocket::bind(NEAR));
    println!("kernel {}", kernel_received());
}

fn say<T: std::fmt::Debug>(call: &str, result: io::Result<T>) {
    match result {
        Ok(value) if call == "again" || call.starts_with("free") => {
            drop(value);
            println!("{call}");
        }
        Ok(value) => println!("{call}: {value:?}"),
        Err(error) => println!("{call}: {:?}", error.raw_os_error()),
    }
}

fn is_readable(socket: &UdpSocket, seconds: i64) -> io::Result<bool> {
    let timeout = Timespec { tv_sec: seconds, tv_nsec: 0 };
    let mut polled = [PollFd::new(socket, PollFlags::IN)];
    poll(&mut polled, (seconds >= 0).then_some(&timeout))?;
    Ok(polled[0].revents().contains(PollFlags::IN))
}

/// `InDatagrams` of the kernel's UDP in this namespace.
fn kernel_received() -> u64 {
    let text = fs::read_to_string("/proc/self/net/snmp").unwrap();
    let line = text.lines().filter(|line| line.starts_with("Udp:")).nth(1).unwrap();
    line.split(' ').nth(1).unwrap().parse().unwrap()
}

/// Runs a program with the library, and with this configuration.
fn preloaded<'a>(command: &'a mut Command, config: &str) -> &'a mut Command {
    let own = std::env::current_exe().unwrap();
    let library = own.with_file_name("libforebay_preload.so");
    assert!(library.exists(), "{} is built with the tests", library.display());
    command.env("LD_PRELOAD", library).env("FOREBAY_EXEC", config)
}

/// Two hosts on one cable.
struct Hosts {
    near: Namespace,
    far: Namespace,
}

impl Hosts {
    /// Hosts of which the far one returns each datagram.
    fn with_echo() -> Self {
        let this = Self::new();
        let echo = this.far.run(|| UdpSocket::bind(FAR).unwrap());
        thread::spawn(move || {
            let mut buffer = [0; 2000];
            while let Ok((len, from)) = echo.recv_from(&mut buffer) {
                echo.send_to(&buffer[..len], from).unwrap();
            }
        });
        this
    }

    fn new() -> Self {
        Self::on(|cable| cable.lay())
    }

    /// Hosts whose interfaces have that many queues each way.
    fn with_queues(queues: u16) -> Self {
        Self::on(|cable| cable.lay_with_queues(queues))
    }

    fn on(lay: impl FnOnce(&Cable<'_>)) -> Self {
        let (near, far) = (Namespace::new(), Namespace::new());
        lay(&Cable { near: (&near, "exa"), far: (&far, "exb") });
        near.command("ip addr add 10.9.0.1/24 dev exa");
        far.command("ip addr add 10.9.0.2/24 dev exb");
        Self { near, far }
    }

    /// Runs the calls, with the library and this configuration if there is one.
    fn calls(&self, config: Option<&str>) -> (Vec<String>, u64) {
        let own = std::env::current_exe().unwrap();
        let mut lines = self.lines(Command::new(own).arg(CALLS), config);
        let last = lines.pop().unwrap();
        (lines, last.strip_prefix("kernel ").unwrap().parse().unwrap())
    }

    /// Runs a program, and returns the lines that it prints.
    fn lines(&self, command: &mut Command, config: Option<&str>) -> Vec<String> {
        self.lines_and_errors(command, config).0
    }

    /// Runs a program, and returns the lines that it prints, and its standard error.
    fn lines_and_errors(
        &self,
        command: &mut Command,
        config: Option<&str>,
    ) -> (Vec<String>, String) {
        if let Some(config) = config {
            preloaded(command, config);
        }
        let Output { status, stdout, stderr } = self.near.run(|| command.output().unwrap());
        let stderr = String::from_utf8_lossy(&stderr).into_owned();
        let stdout = String::from_utf8(stdout).unwrap();
        assert!(status.success(), "{status} {stderr} {stdout}");
        (stdout.lines().map(ToOwned::to_owned).collect(), stderr)
    }
}

fn same_answers(via: &str) {
    let hosts = Hosts::with_echo();
    let (ours, by_kernel) = hosts.calls(Some(&format!("via={via} take=udp:7 spin=auto dev=exa")));
    assert_eq!(by_kernel, 0, "the sockets were not ours");
    let (kernels, by_kernel) = hosts.calls(None);
    assert!(by_kernel > 0);
    assert_eq!(ours, kernels);
}

/// A program whose sockets are not taken has the kernel's.
fn others() {
    let hosts = Hosts::with_echo();
    let (_, by_kernel) = hosts.calls(Some("via=af_packet take=udp:8 spin=auto dev=exa"));
    assert!(by_kernel > 0);
}

/// Binds, runs a program by `vfork` in a child that closes all descriptors, and uses the socket then.
const VFORKS: &str = "
import socket, subprocess
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(('10.9.0.1', 7))
subprocess.run(['/bin/true'], close_fds=True, check=True)
s.settimeout(20)
s.sendto(b'question', ('10.9.0.2', 9))
print(s.recv(100).decode())
print([line.split()[1] for line in open('/proc/self/net/snmp') if line.startswith('Udp:')][1])
";

fn python_missing() -> Option<String> {
    let imports = Command::new("python3").args(["-c", "import socket, subprocess"]).output();
    let has_it = imports.is_ok_and(|output| output.status.success());
    (!has_it).then(|| "python3 with its socket and subprocess is missing".to_owned())
}

fn vforked() {
    let config = "via=af_packet take=udp:7 spin=auto dev=exa";
    let lines =
        Hosts::with_echo().lines(Command::new("python3").args(["-c", VFORKS]), Some(config));
    assert_eq!(lines, ["question", "0"], "the answer, and datagrams of the kernel's UDP");
}
