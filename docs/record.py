#!/usr/bin/env python3
"""Records a run for the book: types commands, runs them, and writes what was seen as an animated SVG.

usage: docs/record.py PROGRAM >docs/src/recording.svg
"""

import os
import shlex
import subprocess
import sys
from html import escape

COMMANDS = [
    "forebay replay --cpus 2 --work 2000 --loops 10 --at 100000:rps_cpus=2 --at 200000:rps_cpus=3",
    'forebay replay --cpus 2 --rps 3 --seed 1 --deterministic --explain "udp 10.9.0.2:39796 > 10.9.0.1:53"',
    "forebay sim elephant --seeds 20",
]
COLUMNS, LINE_PX, CHAR_PX = 132, 17, 7.8
TYPING_S, LINE_S, PAUSE_S = 1.2, 0.06, 3.0


def main(program):
    """Runs the commands, and prints the SVG."""
    shown, at_s = [], 0.5
    for command in COMMANDS:
        shown.append((at_s, "$ " + command, True))
        words = [program, *shlex.split(command)[1:]]
        plain = {**os.environ, "NO_COLOR": "1", "COLUMNS": str(COLUMNS)}
        run = subprocess.run(words, capture_output=True, text=True, env=plain, check=True)
        at_s += TYPING_S
        for line in run.stdout.rstrip("\n").split("\n"):
            shown.append((at_s, line[:COLUMNS], False))
            at_s += LINE_S
        shown.append((at_s, "", False))
        at_s += PAUSE_S
    print(svg(shown))


def svg(shown):
    """The lines, each with the time in seconds at which it appears."""
    width, height = int(COLUMNS * CHAR_PX) + 24, len(shown) * LINE_PX + 24
    rows = "\n".join(
        f'<text x="12" y="{(number + 1) * LINE_PX + 6}" opacity="0" fill="{"#9fe29f" if typed else "#dddddd"}" '
        f'xml:space="preserve">{escape(text)}'
        f'<animate attributeName="opacity" from="0" to="1" begin="{at_s:.2f}s" dur="0.01s" fill="freeze"/></text>'
        for number, (at_s, text, typed) in enumerate(shown)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="monospace" font-size="13">\n<title>forebay: a replay, an explanation, a simulation</title>\n'
        f'<rect width="100%" height="100%" rx="6" fill="#1e1e1e"/>\n{rows}\n</svg>'
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
