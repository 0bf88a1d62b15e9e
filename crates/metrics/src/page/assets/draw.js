// Drawing: elements, colors, numbers and charts. Texts are set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

// Colors that people with any color vision can tell apart (Okabe and Ito).
const COLORS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#8a8a8a"];

export const colorOf = (index) => COLORS[index % COLORS.length];

export function element(name, text, classes) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (classes) made.className = classes;
  return made;
}

export function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Shape with a text that appears while the pointer is on it.
export function told(made, text) {
  made.append(shape("title", {}, text));
  return made;
}

export const grouped = (number) => Math.round(number).toLocaleString("en-US");

export function scaled(number) {
  if (number >= 1e6) return `${(number / 1e6).toFixed(2)} M`;
  if (number >= 1e4) return `${(number / 1e3).toFixed(1)} k`;
  return grouped(number);
}

export function duration(ns) {
  if (ns >= 1e9) return `${(ns / 1e9).toFixed(2)} s`;
  if (ns >= 1e6) return `${(ns / 1e6).toFixed(1)} ms`;
  if (ns >= 1e3) return `${(ns / 1e3).toFixed(1)} µs`;
  return `${Math.round(ns)} ns`;
}

// Row of a table: texts, or elements; numbers are aligned to the right.
export function row(cells) {
  const made = element("tr");
  for (const cell of cells) {
    const isNumber = typeof cell === "object" && "number" in cell;
    const data = element("td", undefined, isNumber ? "number" : "");
    data.append(isNumber ? cell.number : cell);
    made.append(data);
  }
  return made;
}

// Legend of a chart: pairs of a color and a text.
export function legend(entries) {
  const made = element("div", undefined, "legend");
  for (const [color, text] of entries) {
    const entry = element("span");
    const mark = shape("svg", { viewBox: "0 0 10 10" });
    mark.append(shape("rect", { width: 10, height: 10, fill: color }));
    entry.append(mark, text);
    made.append(entry);
  }
  return made;
}

// Smallest round number that is not below.
function roundUp(number) {
  const power = 10 ** Math.floor(Math.log10(Math.max(number, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((round) => round >= number);
}

const WIDTH = 560;
const HEIGHT = 150;
const LEFT = 48;
const BOTTOM = 18;

// Lines over the last `count` values; `null` is a gap. Values are drawn from the right.
export function lineChart(place, series, { count, max, label = scaled }) {
  const values = series.flatMap(({ values }) => values.filter((value) => value !== null));
  const top = max ?? roundUp(Math.max(1, ...values));
  const x = (index, length) => WIDTH - ((length - 1 - index) / (count - 1)) * (WIDTH - LEFT);
  const y = (value) => 6 + (1 - Math.min(value / top, 1)) * (HEIGHT - BOTTOM - 6);
  const chart = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  for (const part of [0, 0.5, 1]) {
    const height = y(top * part);
    chart.append(shape("line", { x1: LEFT, x2: WIDTH, y1: height, y2: height, class: "grid" }));
    chart.append(shape("text", { x: LEFT - 5, y: height + 4, "text-anchor": "end", class: "faint" }, label(top * part)));
  }
  chart.append(shape("text", { x: LEFT, y: HEIGHT - 3, class: "faint" }, `${count} s ago`));
  chart.append(shape("text", { x: WIDTH, y: HEIGHT - 3, "text-anchor": "end", class: "faint" }, "now"));
  for (const { values, color } of series) {
    let path = "";
    let isGap = true;
    values.forEach((value, index) => {
      if (value !== null) {
        path += `${isGap ? "M" : "L"}${x(index, values.length).toFixed(1)} ${y(value).toFixed(1)}`;
      }
      isGap = value === null;
    });
    chart.append(shape("path", { d: path, fill: "none", stroke: color, "stroke-width": 1.8 }));
  }
  const entries = series.map(({ name, color, values }) => {
    const last = values.at(-1);
    return [color, last === null || last === undefined ? name : `${name} ${label(last)}`];
  });
  place.replaceChildren(chart, legend(entries));
}
