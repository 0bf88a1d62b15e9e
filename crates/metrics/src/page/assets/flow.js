// Search for a flow: the answer of `explain`, and its story as a line in time.

import { ask } from "/knobs.js";
import { colorOf, duration, legend, shape, told } from "/draw.js";

const FOLLOW_MS = 1000;

const WIDTH = 1000;
const LEFT = 60;
const LANE = 34;

// Not the color of any CPU.
const WAITING = "var(--faint)";
const HELD = "var(--bad)";

const search = document.getElementById("search");
const input = document.getElementById("flow");
const follow = document.getElementById("follow");
const explanation = document.getElementById("explanation");
const story = document.getElementById("story");

let timer;
let asked = 0;

// Searches for the flow that the page's address names, and for those that are typed.
export function begin() {
  search.addEventListener("submit", (event) => {
    event.preventDefault();
    location.hash = `flow=${encodeURIComponent(input.value)}`;
    explain();
  });
  follow.addEventListener("change", explain);
  addEventListener("hashchange", fromAddress);
  fromAddress();
}

function fromAddress() {
  const name = new URLSearchParams(location.hash.slice(1)).get("flow");
  if (name !== null && name !== input.value) {
    input.value = name;
    explain();
  }
}

async function explain() {
  clearTimeout(timer);
  if (!input.value) return;
  const number = ++asked;
  const answer = await ask(`/api/explain?flow=${encodeURIComponent(input.value)}`);
  if (number !== asked) return; // another search began meanwhile
  if (follow.checked) timer = setTimeout(explain, FOLLOW_MS);
  explanation.hidden = false;
  explanation.className = answer.error ? "refused" : "";
  explanation.textContent = answer.error ?? answer.text;
  story.replaceChildren();
  for (const queue of answer.explanation?.queues ?? []) {
    const drawn = drawStory(queue);
    if (drawn) story.append(drawn);
  }
}

// Parts of the flow's time: where it was, and what its moves waited for.
function partsOf(queue) {
  const parts = [];
  let since = null;
  for (const move of queue.moves) {
    const waited = Math.max(move.waited_ns, move.held_ns);
    const begin = move.at_ns - waited;
    if (since !== null) parts.push({ cpu: move.from, from: since, to: Math.max(since, begin), kind: "on" });
    if (waited > 0) {
      const text = `waited ${duration(waited)} for CPU ${move.from}: ${move.ahead} packets ahead, ${move.stayed} stayed`;
      parts.push({ cpu: move.from, from: begin, to: move.at_ns, kind: "waiting", text });
    }
    if (move.held_ns > 0) {
      const text = `packets held for ${duration(move.held_ns)}`;
      parts.push({ cpu: move.from, from: move.at_ns - move.held_ns, to: move.at_ns, kind: "held", text });
    }
    since = move.at_ns;
  }
  const open = queue.held ?? queue.stayed;
  const end = queue.at_ns;
  if (queue.cpu !== null) {
    parts.push({ cpu: queue.cpu, from: since, to: open ? open.since_ns : end, kind: "on" });
    if (open) {
      const kind = queue.held ? "held" : "waiting";
      const text = `${open.packets} packets ${queue.held ? "held" : "stayed"} until now`;
      parts.push({ cpu: queue.cpu, from: open.since_ns, to: end, kind, text });
    }
  }
  return parts;
}

// A lane for each CPU; time goes to the right. A flow without moves is on one lane.
function drawStory(queue) {
  const parts = partsOf(queue);
  if (parts.length === 0) return null;
  const known = parts.flatMap(({ from, to }) => [from, to]).filter((time) => time !== null);
  const moves = queue.moves.map((move) => move.at_ns);
  const first = Math.min(...known);
  const lastEvent = Math.max(first, ...moves, queue.held?.since_ns ?? 0, queue.stayed?.since_ns ?? 0);
  const span = Math.max(lastEvent - first, 1e6);
  // The long time since the last event is cut off, so that the events stay apart.
  const begin = first - span * 0.1;
  const end = Math.min(queue.at_ns, lastEvent + span * 0.4);
  const isCut = end < queue.at_ns;
  const x = (time) => LEFT + ((Math.min(time ?? begin, end) - begin) / Math.max(end - begin, 1)) * (WIDTH - LEFT - 10);
  const cpus = [...new Set([...parts.map(({ cpu }) => cpu), ...queue.moves.map(({ to }) => to)])].sort((a, b) => a - b);
  const middle = (cpu) => 30 + cpus.indexOf(cpu) * LANE;
  const height = 30 + cpus.length * LANE + 6;
  const chart = shape("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", class: "story" });
  chart.append(shape("text", { x: 0, y: 10 }, queue.queue));
  for (const cpu of cpus) {
    chart.append(shape("text", { x: 0, y: middle(cpu) + 4 }, `CPU ${cpu}`));
    chart.append(shape("line", { x1: LEFT, x2: WIDTH, y1: middle(cpu), y2: middle(cpu), class: "grid" }));
  }
  for (const { cpu, from, to, kind, text } of parts) {
    const [left, right] = [x(from), x(to)];
    const fill = { on: colorOf(cpu), waiting: WAITING, held: HELD }[kind];
    const thick = kind === "on" ? 8 : kind === "waiting" ? 14 : 6;
    const bar = { x: left, y: middle(cpu) - thick / 2, width: Math.max(right - left, 1.5), height: thick, fill, class: kind };
    chart.append(told(shape("rect", bar), text ?? `on CPU ${cpu}`));
  }
  for (const move of queue.moves) {
    const at = x(move.at_ns);
    const path = `M${at} ${middle(move.from)}V${middle(move.to)}`;
    const line = shape("path", { d: path, stroke: colorOf(move.to), "stroke-width": 3, class: "move" });
    chart.append(told(line, `${(move.at_ns / 1e9).toFixed(6)} s: CPU ${move.from} to CPU ${move.to} (${move.because})`));
  }
  const middleOfAxis = height - 2;
  chart.append(shape("text", { x: LEFT, y: middleOfAxis, class: "faint" }, `${(begin < 0 ? 0 : begin / 1e9).toFixed(3)} s`));
  const last = isCut ? `${(end / 1e9).toFixed(3)} s … now ${(queue.at_ns / 1e9).toFixed(3)} s` : `now ${(end / 1e9).toFixed(3)} s`;
  chart.append(shape("text", { x: WIDTH, y: middleOfAxis, "text-anchor": "end", class: "faint" }, last));
  const entries = [[WAITING, "waited for packets ahead"], [HELD, "packets held"]];
  const made = document.createElement("div");
  made.append(chart, legend(entries));
  return made;
}
