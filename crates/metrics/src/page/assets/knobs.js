// Requests to the run, and its knobs.

import { element, row } from "/draw.js";

const token = document.getElementById("token");
const filter = document.getElementById("filter");
const answer = document.getElementById("answer");
const body = document.querySelector("#knobs tbody");

let knobs = [];
let maySet = false;
let shown = "";

// Answer of the server; a failure has `error`.
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (token.value) headers["X-Forebay-Token"] = token.value;
  try {
    const response = await fetch(path, { ...options, headers, cache: "no-store" });
    return await response.json();
  } catch (error) {
    return { error: `no answer: ${error.message}` };
  }
}

export function begin() {
  filter.addEventListener("input", show);
  body.addEventListener("submit", (event) => event.preventDefault());
  read();
}

// Reads all knobs again.
export async function read() {
  const listed = await ask("/api/knobs");
  if (listed.error) return;
  const now = JSON.stringify(listed);
  if (now === shown) return;
  shown = now;
  ({ knobs, may_set: maySet } = listed);
  document.getElementById("token-line").hidden = !maySet;
  document.getElementById("read-only").hidden = maySet;
  show();
}

function show() {
  // A value that is being typed stays.
  if (body.contains(document.activeElement)) return;
  const isWanted = ({ name, meaning }) => `${name} ${meaning}`.includes(filter.value);
  body.replaceChildren(...knobs.filter(isWanted).map(knobRow));
}

function knobRow(knob) {
  const made = row([knob.name, maySet ? editor(knob) : knob.value, knob.default, knob.meaning]);
  made.dataset.knob = knob.name;
  return made;
}

function editor(knob) {
  const made = element("span");
  const value = element("input");
  value.value = knob.value;
  value.setAttribute("aria-label", knob.name);
  value.addEventListener("keydown", (event) => {
    if (event.key === "Enter") set(knob, value);
  });
  const button = element("button", "set");
  button.type = "button";
  button.addEventListener("click", () => set(knob, value));
  made.append(value, " ", button);
  return made;
}

async function set(knob, input) {
  const told = await ask("/api/set", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ knob: knob.path, value: input.value }),
  });
  answer.className = told.error ? "refused" : "";
  answer.textContent = told.error ?? told.lines.join("\n");
  input.blur();
  document.activeElement?.blur();
  await read();
}
