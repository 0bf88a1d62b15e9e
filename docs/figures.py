#!/usr/bin/env python3
"""Draws the figures of the book.

usage: docs/figures.py DIRECTORY     (docs/src/figures)
"""

import sys
from html import escape
from pathlib import Path

INK, PAPER, MUTED = "#24292f", "#ffffff", "#6e7781"
FLOW, OTHER, WARM, COOL = "#0969da", "#afb8c1", "#bf8700", "#1a7f37"
FONT = "font-family='DejaVu Sans, Verdana, sans-serif'"


class Figure:
    """A drawing of boxes, arrows and words, in pixels from the top left."""

    def __init__(self, title, width, height):
        self.title, self.width, self.height = title, width, height
        self.parts = []

    def box(self, x, y, width, height, text="", fill="#f6f8fa", stroke=INK, dashed=False, ink=INK):
        """Draws a box with words in its middle, one line for each `|`."""
        dash = " stroke-dasharray='5 4'" if dashed else ""
        self.parts.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='4' fill='{fill}' stroke='{stroke}'{dash}/>"
        )
        lines = text.split("|") if text else []
        for row, line in enumerate(lines):
            at_y = y + height / 2 + 4 + (row - (len(lines) - 1) / 2) * 15
            self.words(x + width / 2, at_y, line, anchor="middle", ink=ink)

    def words(self, x, y, text, anchor="start", ink=INK, size=12, bold=False):
        """Writes one line; `y` is its baseline."""
        weight = " font-weight='bold'" if bold else ""
        self.parts.append(
            f"<text x='{x}' y='{y}' text-anchor='{anchor}' font-size='{size}' fill='{ink}'{weight}>{escape(text)}</text>"
        )

    def arrow(self, *points, ink=INK, dashed=False, head=True):
        """Draws a line through the points, with a head at its end."""
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        dash = " stroke-dasharray='5 4'" if dashed else ""
        end = f" marker-end='url(#head{ink[1:]})'" if head else ""
        self.parts.append(f"<path d='{path}' fill='none' stroke='{ink}' stroke-width='1.4'{dash}{end}/>")

    def svg(self):
        """The whole as text."""
        heads = "".join(
            f"<marker id='head{ink[1:]}' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
            f"<path d='M0 0 L8 4 L0 8 z' fill='{ink}'/></marker>"
            for ink in (INK, MUTED, FLOW, WARM, COOL)
        )
        body = "\n".join(self.parts)
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}' width='{self.width}' "
            f"height='{self.height}' {FONT}>\n<title>{escape(self.title)}</title>\n<defs>{heads}</defs>\n"
            f"<rect width='100%' height='100%' rx='6' fill='{PAPER}'/>\n{body}\n</svg>\n"
        )


def path():
    """The two spines, the rings between them, and the way home of frames."""
    figure = Figure("Life of a packet: intake on the polling CPU, delivery where the flow is", 860, 330)
    figure.box(16, 40, 408, 112, fill="#ddf4ff", stroke=FLOW)
    figure.words(28, 60, "Intake: the CPU that polls the queue", bold=True)
    for at, stage in enumerate(["source", "parse", "hash", "coalesce", "steer"]):
        figure.box(28 + at * 79, 84, 64, 44, stage, fill=PAPER)
        if at:
            figure.arrow((28 + at * 79 - 15, 106), (28 + at * 79 - 1, 106))
    for row, cpu in enumerate(["CPU 0", "CPU 1", "CPU 2"]):
        y = 26 + row * 76
        figure.box(474, y + 14, 96, 34, "", fill=PAPER)
        for slot in range(1, 6):
            figure.arrow((474 + slot * 16, y + 14), (474 + slot * 16, y + 48), ink=MUTED, head=False)
        figure.arrow((424, 106), (450, 106), (450, y + 31), (472, y + 31), ink=FLOW)
        figure.box(604, y, 240, 62, fill="#dafbe1", stroke=COOL)
        figure.words(614, y + 17, f"Delivery on {cpu}", bold=True)
        figure.box(614, y + 26, 92, 28, "stack", fill=PAPER)
        figure.box(736, y + 26, 98, 28, "socket, handler", fill=PAPER)
        figure.arrow((706, y + 40), (734, y + 40))
        figure.arrow((570, y + 31), (602, y + 31), ink=FLOW)
    figure.words(522, 262, "backlog: one ring from each", anchor="middle", ink=MUTED, size=11)
    figure.words(522, 276, "queue to each CPU (SPSC)", anchor="middle", ink=MUTED, size=11)
    figure.arrow((784, 240), (784, 302), (60, 302), (60, 154), ink=WARM)
    figure.words(300, 294, "frames return to the pool that owns them, 32 at a time", ink=WARM)
    return figure


def drain_rule():
    """One flow that moves, over time."""
    figure = Figure("The drain rule: a flow moves when its old CPU has processed all of it", 860, 300)
    lanes = {"arrivals": 58, "hold on the polling CPU": 118, "CPU 1 (old)": 178, "CPU 2 (new)": 238}
    for name, y in lanes.items():
        figure.words(16, y + 5, name, bold=True)
        figure.arrow((190, y + 16), (844, y + 16), ink=MUTED, head=False)
    def packet(x, lane, text, of_flow=True):
        fill = FLOW if of_flow else OTHER
        figure.box(x, lanes[lane] - 14, 26, 26, text, fill=fill, stroke=fill, ink=PAPER if of_flow else INK)
    for number in range(1, 7):
        packet(130 + number * 70, "arrivals", str(number))
    figure.arrow((372, 30), (372, 268), ink=WARM, dashed=True, head=False)
    figure.words(378, 34, "the desired CPU becomes 2", ink=WARM)
    for x, text in ((236, "…"), (306, "1"), (376, "…"), (446, "2"), (490, "3")):
        packet(x, "CPU 1 (old)", text, of_flow=text != "…")
    for x, number in ((446, 4), (500, 5)):
        packet(x, "hold on the polling CPU", str(number))
    figure.words(536, 123, "4 and 5 wait: 3 is not processed yet", ink=MUTED)
    figure.arrow((520, 198), (520, 268), ink=COOL, dashed=True, head=False)
    figure.words(524, 286, "head of CPU 1's ring has passed packet 3: drained", ink=COOL)
    for x, number in ((534, 4), (574, 5), (640, 6)):
        packet(x, "CPU 2 (new)", str(number))
    figure.arrow((513, 132), (545, 222), ink=FLOW)
    figure.words(700, 183, "fed no more by this flow", ink=MUTED, size=11)
    figure.words(700, 243, "in order, without a gap", ink=MUTED, size=11)
    return figure


def frames():
    """One region, pools that own its chunks, and the batches in which they return."""
    figure = Figure("Frames return to the pool that owns them", 860, 300)
    figure.words(16, 28, "Region: one mapping, cut into chunks with headroom", bold=True)
    for chunk in range(12):
        mine = chunk < 6
        figure.box(16 + chunk * 69, 40, 65, 34, "pool 0" if mine else "pool 1",
                   fill="#ddf4ff" if mine else "#fff8c5", stroke=FLOW if mine else WARM)
    figure.box(16, 122, 216, 128, fill="#ddf4ff", stroke=FLOW)
    figure.words(28, 142, "CPU 0: pool 0", bold=True)
    figure.box(28, 154, 192, 34, "free list (owned, no atomics)", fill=PAPER)
    figure.box(28, 202, 192, 34, "inbox of batches (one word)", fill=PAPER)
    figure.arrow((124, 200), (124, 190), ink=FLOW)
    figure.box(330, 122, 200, 128, fill="#dafbe1", stroke=COOL)
    figure.words(342, 142, "CPU 1: reads the packet", bold=True)
    figure.box(342, 154, 176, 34, "Frame (move-only)", fill=PAPER)
    figure.box(342, 202, 176, 34, "return bin of pool 0", fill=PAPER)
    figure.arrow((430, 188), (430, 200), ink=COOL)
    figure.arrow((222, 171), (340, 171), ink=FLOW)
    figure.words(244, 163, "through a ring", ink=MUTED, size=11)
    figure.arrow((340, 219), (222, 219), ink=WARM)
    figure.words(281, 238, "32, or at a", anchor="middle", ink=WARM, size=11)
    figure.words(281, 251, "turn's end", anchor="middle", ink=WARM, size=11)
    figure.words(560, 146, "One writer of each list: the owner of a pool", ink=MUTED)
    figure.words(560, 164, "takes its inbox as a whole, whoever frees", ink=MUTED)
    figure.words(560, 182, "pushes a batch with one exchange.", ink=MUTED)
    figure.words(560, 214, "A slow reader strands no more than its", ink=MUTED)
    figure.words(560, 232, "sockets may hold (rcvbuf, in truesize).", ink=MUTED)
    return figure


def merged():
    """Three segments as one packet."""
    figure = Figure("A merged packet: a chain of the frames it was received in", 860, 250)
    chunk_x = (16, 306, 596)
    for at, x in enumerate(chunk_x):
        figure.box(x, 76, 248, 60)
        figure.box(x + 4, 82, 78, 48, "frame|handles" if at == 0 else "headroom", fill="#fff8c5", stroke=WARM)
        figure.box(x + 86, 82, 78, 48, "headers of|the whole" if at == 0 else "headers|(dead)",
                   fill="#ddf4ff" if at == 0 else PAPER, stroke=FLOW if at == 0 else OTHER, dashed=at > 0)
        figure.box(x + 168, 82, 76, 48, f"payload {at + 1}", fill="#dafbe1", stroke=COOL)
        figure.words(x + 124, 64, f"chunk of segment {at + 1}", anchor="middle", bold=True)
    figure.arrow((48, 130), (48, 168), (450, 168), (450, 140), ink=WARM)
    figure.arrow((48, 168), (740, 168), (740, 140), ink=WARM)
    figure.words(60, 186, "a further frame begins at its payload: merging copies nothing, allocates nothing", ink=WARM)
    figure.words(60, 220, "Cut again, each frame is what was received, byte for byte: the headers of the segments follow from the whole's.",
                 ink=MUTED)
    figure.words(16, 32, "Packet: one cache line, segments = 3, gso_size = length of payload 1", bold=True)
    return figure


def main(directory):
    """Writes each figure to a file of its name."""
    directory = Path(directory)
    directory.mkdir(exist_ok=True)
    for draw in (path, drain_rule, frames, merged):
        name = draw.__name__.replace("_", "-") + ".svg"
        (directory / name).write_text(draw().svg())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
