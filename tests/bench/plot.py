"""Throughput against block size, as an SVG for people."""
import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 440, 56, 90, 62, 62
COLOURS = ("#777777", "#1f77b4", "#d62728", "#2ca02c", "#9467bd")
MARKS = (  # by line, so that they are told apart without colours
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "M-4-4H4V4H-4z", "M0-5L5 4H-5z", "M0-5L5 0L0 5L-5 0z",
    "M-5-4H5L0 5z",
)
TICKS_MAX = 8
LABEL_GAP = 16
APART = 9  # lines, so that the bars of one x stand side by side


def size_name(count: float) -> str:
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:g} {unit}"
    return f"{count:g} B"


def tick_step(top: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(top / TICKS_MAX))
    return next(m * power for m in (1, 2, 5, 10) if m * power * TICKS_MAX >= top)


def label_places(wanted: list[float]) -> list[float]:
    """The wanted heights, moved down where two would overlap."""
    places = wanted[:]
    below = -math.inf
    for index in sorted(range(len(wanted)), key=wanted.__getitem__):
        places[index] = below = max(wanted[index], below + LABEL_GAP)
    return places


def svg(
    title: str,
    y_name: str,
    x_name: str,
    xs: Sequence[float],
    lines: dict[str, Sequence[tuple[float, float, float]]],
    x_text=size_name,
) -> str:
    """One point an x, evenly spaced; a line's points are (median, lowest, highest)."""
    tick = tick_step(max(high for points in lines.values() for _, _, high in points))
    count = math.ceil(max(high for points in lines.values() for _, _, high in points) / tick)
    pad = APART * len(lines)
    step = (WIDTH - LEFT - RIGHT - 2 * pad) / max(1, len(xs) - 1)

    def x(index: int, number: float) -> float:
        return LEFT + pad + index * step + (number - (len(lines) - 1) / 2) * APART

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / (tick * count) * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="{LEFT}" y="42" fill="#555">{escape(y_name)}; '
        "points: median of the runs, bars: lowest to highest</text>",
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - 16}" text-anchor="middle" '
        f'fill="#555">{escape(x_name)}</text>',
    ]
    for number in range(count + 1):
        at = y(number * tick)
        out.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{number * tick:g}</text>')
    for index, value in enumerate(xs):
        middle = (len(lines) - 1) / 2
        out.append(f'<text x="{x(index, middle):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">'
                   f"{escape(x_text(value))}</text>")
    places = label_places([y(points[-1][0]) for points in lines.values()])
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x(i, number):.1f},{y(p[0]):.1f}" for i, p in enumerate(points))
        for i, (_, low, high) in enumerate(points):
            out.append(f'<path d="M{x(i, number):.1f} {y(low):.1f}V{y(high):.1f}" stroke="{colour}" '
                       'stroke-width="4" stroke-opacity="0.3"/>')
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for i, (middle, _, _) in enumerate(points):
            out.append(f'<path d="{MARKS[number % len(MARKS)]}" fill="{colour}" '
                       f'transform="translate({x(i, number):.1f} {y(middle):.1f})"/>')
        out.append(f'<text x="{WIDTH - RIGHT + 10}" y="{places[number] + 4:.1f}" fill="{colour}" '
                   f'font-weight="bold">{escape(name)}</text>')
    return "\n".join([*out, "</svg>", ""])
