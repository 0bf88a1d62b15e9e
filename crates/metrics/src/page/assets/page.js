// The page: reads the counters every second, and shows what changed.

import { colorOf, duration, element, grouped, legend, lineChart, row, scaled, shape, told } from "/draw.js";
import * as flow from "/flow.js";
import * as knobs from "/knobs.js";

const PERIOD_MS = 1000;
const SLOW_PERIOD_MS = 2000;
const KEPT = 120;

// CPUs with lines of their own in a chart; the table has all.
const LINES_MAX = 8;

const place = (id) => document.getElementById(id);
const rows = (id, made) => document.querySelector(`#${id} tbody`).replaceChildren(...made);

let last = null;
let isPaused = false;
const history = { received: [], delivered: [], dropped: [], moves: [], holds: [], busy: new Map() };

const sum = (list, of) => list.reduce((total, each) => total + of(each), 0);

function keep(values, value) {
  values.push(value);
  if (values.length > KEPT) values.shift();
}

// One turn after another; one that fails says so, and ends none of the later ones.
async function turns(turn, periodMs) {
  try {
    if (!isPaused) await turn();
  } catch (error) {
    fail(`this is a bug: please report it: ${error}`);
  } finally {
    setTimeout(turns, periodMs, turn, periodMs);
  }
}

function fail(why) {
  place("status").textContent = why;
  place("status").className = "lost";
  last = null;
}

async function turn() {
  const state = await knobs.ask("/api/state");
  if (state.error) fail(state.error);
  else show(state);
}

async function slowTurn() {
  showMap(await knobs.ask("/api/map"));
  await knobs.read();
}

// True if `now` is a later state of the same run as `then`, and has the same CPUs and queues.
function isLaterThan(then, now) {
  const isSame = now.run === then.run && now.cpus.length === then.cpus.length && now.queues.length === then.queues.length;
  return isSame && now.at_ns > then.at_ns;
}

function show(state) {
  state.cpus ??= [];
  state.queues ??= [];
  const isLater = last !== null && isLaterThan(last, state);
  const before = isLater ? last : state;
  const seconds = (state.at_ns - before.at_ns) / 1e9;
  // A sum of counters falls when one of them goes.
  const rate = (now, then) => (seconds > 0 ? Math.max(0, now - then) / seconds : 0);
  place("status").className = "";
  place("status").textContent = `version ${state.version}, running for ${duration(state.at_ns)}`;
  place("devices").textContent = state.devices.map(({ name, via }) => `${name} (${via})`).join(", ");
  showCpus(state, before, rate, seconds);
  showQueues(state, before, rate);
  showDrops(state, before, rate);
  if (state.sockets) showSockets(state.sockets, before.sockets, rate);
  if (state.tcp) showTcp(state.tcp, before.tcp, rate);
  if (isLater) showCharts(state, before, rate, seconds);
  last = state;
}

function showCharts(state, before, rate, seconds) {
  const change = (of) => rate(of(state), of(before));
  const total = (part, of) => (from) => sum(from[part], of);
  keep(history.received, change(total("queues", (queue) => queue.packets)));
  keep(history.delivered, change(total("cpus", (cpu) => cpu.packets)));
  keep(history.dropped, change((from) => sum(Object.values(from.drops), (count) => count)));
  keep(history.moves, change(total("queues", (queue) => queue.moves)));
  keep(history.holds, change(total("queues", (queue) => queue.holds)));
  const line = (name, index) => ({ name, color: colorOf(index), values: history[name] });
  lineChart(place("rates"), [line("received", 0), line("delivered", 2), line("dropped", 5)], { count: KEPT });
  lineChart(place("moves"), [line("moves", 0), line("holds", 1)], { count: KEPT });
  const busy = state.cpus.slice(0, LINES_MAX).map((cpu, index) => {
    if (!history.busy.has(cpu.cpu)) history.busy.set(cpu.cpu, []);
    const values = history.busy.get(cpu.cpu);
    keep(values, busyPercent(cpu, before.cpus[index], seconds));
    return { name: `CPU ${cpu.cpu}`, color: colorOf(cpu.cpu), values };
  });
  const label = (value) => `${Math.round(value)} %`;
  lineChart(place("busy"), busy, { count: KEPT, max: 100, label });
}

const busyPercent = (now, then, seconds) => Math.min(100, ((now.busy_ns - then.busy_ns) / 1e7) / (seconds || 1));

function showCpus(state, before, rate, seconds) {
  const packets = (cpu, index) => cpu.packets - before.cpus[index].packets;
  const all = state.cpus.reduce((total, cpu, index) => total + packets(cpu, index), 0);
  rows("cpus", state.cpus.map((cpu, index) => {
    const then = before.cpus[index];
    const percent = seconds > 0 ? busyPercent(cpu, then, seconds) : 0;
    const waits = cpu.waits - then.waits;
    const made = row([
      cpu.online ? `${cpu.cpu}` : `${cpu.cpu} (out of service)`,
      busyBar(percent, colorOf(cpu.cpu)),
      { number: scaled(rate(cpu.packets, then.packets)) },
      { number: all > 0 ? `${((packets(cpu, index) / all) * 100).toFixed(1)} %` : "–" },
      { number: grouped(cpu.queued) },
      { number: grouped(cpu.backlog_max) },
      { number: waits > 0 ? duration((cpu.waits_ns - then.waits_ns) / waits) : "–" },
      reasons(cpu.reasons, then.reasons),
    ]);
    made.dataset.cpu = cpu.cpu;
    made.dataset.packets = cpu.packets;
    return made;
  }));
}

function busyBar(percent, color) {
  const made = element("span");
  const bar = shape("svg", { viewBox: "0 0 150 10", class: "busy" });
  bar.append(shape("rect", { width: 150, height: 10, class: "bar-ground" }));
  bar.append(shape("rect", { width: (percent * 1.5).toFixed(1), height: 10, fill: color }));
  made.append(bar, `${percent.toFixed(0)} %`);
  return made;
}

// Reasons of the packets since the last look, the most frequent first.
function reasons(now, then) {
  const recent = Object.entries(now).map(([name, count]) => [name, count - (then[name] ?? 0)]);
  const all = sum(recent, ([, count]) => count);
  const shown = recent.filter(([, count]) => count > 0).sort((a, b) => b[1] - a[1]);
  return shown.map(([name, count]) => `${name} ${((count / all) * 100).toFixed(0)} %`).join(", ");
}

function showQueues(state, before, rate) {
  rows("queues", state.queues.map((queue, index) => {
    const made = row([
      queue.queue,
      { number: `${queue.polling_cpu ?? "–"}` },
      { number: scaled(rate(queue.packets, before.queues[index].packets)) },
      { number: grouped(queue.dropped) },
      { number: grouped(queue.kernel_dropped) },
      { number: grouped(queue.moves) },
      { number: grouped(queue.holds) },
      { number: queue.holds > 0 ? duration(queue.held_max_ns) : "–" },
      { number: grouped(queue.active_cpus) },
    ]);
    made.dataset.packets = queue.packets;
    made.dataset.moves = queue.moves;
    return made;
  }));
}

function showDrops(state, before, rate) {
  const drops = Object.entries(state.drops).sort((a, b) => b[1] - a[1]);
  const made = drops.map(([name, count]) => {
    const now = rate(count, before.drops[name] ?? 0);
    const cells = row([name, { number: scaled(now) }, { number: grouped(count) }]);
    cells.dataset.reason = name;
    cells.dataset.count = count;
    return cells;
  });
  rows("drops", made.length > 0 ? made : [row(["none", "", ""])]);
}

function showSockets(sockets, before, rate) {
  place("sockets-section").hidden = false;
  const rest = sockets.bound > sockets.shown.length ? `, of which ${sockets.shown.length} have the most datagrams` : "";
  place("sockets-note").textContent = `${grouped(sockets.bound)} bound${rest}`;
  const key = ({ socket, local }) => `${socket} ${local}`;
  const earlier = new Map((before?.shown ?? []).map((socket) => [key(socket), socket]));
  rows("sockets", sockets.shown.map((socket) => {
    const then = earlier.get(key(socket)) ?? socket;
    const made = row([
      `${socket.socket}`,
      socket.local,
      { number: scaled(rate(socket.datagrams, then.datagrams)) },
      { number: grouped(socket.datagrams) },
      { number: grouped(socket.memory) },
      { number: grouped(socket.buffer) },
      { number: scaled(rate(socket.errors, then.errors)) },
      { number: grouped(socket.errors) },
    ]);
    Object.assign(made.dataset, { local: socket.local, datagrams: socket.datagrams, errors: socket.errors });
    return made;
  }));
}

// Listeners, and then the connections with the most bytes.
function showTcp(tcp, before, rate) {
  const states = Object.entries(tcp.states).map(([state, count]) => `${grouped(count)} ${state}`);
  place("tcp-section").hidden = tcp.listeners.length === 0 && states.length === 0;
  place("tcp-note").textContent = states.length > 0 ? states.join(", ") : "no connection";
  const key = ({ local, peer }) => `${local} ${peer}`;
  const earlier = new Map((before?.connections ?? []).map((of) => [key(of), of]));
  const listeners = tcp.listeners.map(({ local, waiting, backlog }) => {
    const waits = { number: `${grouped(waiting)} of ${grouped(backlog + 1)}` };
    const made = row([local, "", "LISTEN", "", "", "", "", waits, ""]);
    Object.assign(made.dataset, { local, state: "LISTEN" });
    return made;
  });
  const connections = tcp.connections.map((of) => {
    const then = earlier.get(key(of)) ?? of;
    const made = row([
      of.local,
      of.peer,
      of.state,
      { number: scaled(8 * rate(of.received, then.received)) },
      { number: scaled(8 * rate(of.sent, then.sent)) },
      { number: grouped(of.received + of.sent) },
      { number: grouped(of.resent) },
      { number: grouped(of.unread) },
      { number: grouped(of.unacknowledged) },
    ]);
    Object.assign(made.dataset, { peer: of.peer, state: of.state, received: of.received });
    return made;
  });
  rows("tcp", [...listeners, ...connections]);
}

// A bar for each queue: its hash values from left to right, in the colors of their CPUs.
function showMap(map) {
  if (map.error) {
    place("map").replaceChildren(element("p", map.error, "note"));
    return;
  }
  const bars = map.queues.map((queue) => {
    const bar = shape("svg", { viewBox: "0 0 1024 38", role: "img" });
    bar.append(shape("text", { x: 0, y: 11 }, `${queue.queue}, polled by CPU ${queue.polling_cpu}`));
    const width = 1024 / queue.ranges;
    const hash = (range) => Math.floor((range * 2 ** 32) / queue.ranges).toString(16).padStart(8, "0");
    for (const run of queue.runs) {
      const rect = shape("rect", {
        x: (run.from * width).toFixed(2), y: 16, width: (run.ranges * width).toFixed(2), height: 20,
        fill: colorOf(run.cpu), "data-cpu": run.cpu, "data-ranges": run.ranges,
      });
      const text = `from ${hash(run.from)}: CPU ${run.cpu} (${run.because})`;
      bar.append(told(rect, text));
    }
    return bar;
  });
  const cpus = [...new Set(map.queues.flatMap(({ runs }) => runs.map(({ cpu }) => cpu)))].sort((a, b) => a - b);
  place("map").replaceChildren(...bars, legend(cpus.map((cpu) => [colorOf(cpu), `CPU ${cpu}`])));
  if (map.queues.length === 0) place("map").replaceChildren(element("p", "No queue has answered.", "note"));
}

place("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  last = null;
  place("pause").textContent = isPaused ? "Resume" : "Pause";
});
knobs.begin();
flow.begin();
turns(turn, PERIOD_MS);
turns(slowTurn, SLOW_PERIOD_MS);
