//! What processes keep for others, and what they learn of the ends of others.

use std::process::Command;

use super::Hosts;
use super::forks::CONFIG;

/// want of descriptors: the next but one does not.
const COUNTS: &str = "
import os, resource, select, signal, socket, time
listener = socket.create_server(('10.9.0.1', 7))
answers, answered = os.pipe()
children = []

def fork():
    child = os.fork()
    if child:
        children.append(child)
        return os.read(answers, 1)
    signal.alarm(60)
    select.select([listener], [], [], 0)
    tasks = ['/proc/self/task/%s/comm' % task for task in os.listdir('/proc/self/task')]
    serves = 'forebay-engine\\n' in [open(task).read() for task in tasks]
    os.write(answered, b'1' if serves else b'0')
    signal.pause()

count = lambda: len(os.listdir('/proc/self/fd'))
serving, counts = [], []
for _ in range(4):
    serving.append(fork())
    counts.append(count())
print(serving, len(set(counts[1:])), flush=True)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (8, hard))
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(count() == counts[-1])
time.sleep(1.2)
print(fork(), count() == counts[-1])
for child in children:
    os.kill(child, signal.SIGKILL)
";

pub(crate) fn engines_are_closed() {
    let hosts = Hosts::new();
    let lines = hosts.lines(Command::new("python3").args(["-c", COUNTS]), Some(CONFIG));
    assert_eq!(lines, ["[b'1', b'1', b'1', b'1'] 1", "True", "b'1' True"]);
}
