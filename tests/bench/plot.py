"""Throughput against block size, as an SVG for people."""
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 60, 130, 40, 50
COLOURS = ("#888888", "#1f77b4", "#d62728", "#2ca02c", "#9467bd")


def size_name(count: float) -> str:
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:g} {unit}"
    return f"{count:g} B"


def svg(
    title: str,
    y_name: str,
    xs: Sequence[float],
    lines: dict[str, Sequence[tuple[float, float, float]]],
    x_name=size_name,
) -> str:
    """One point an x, evenly spaced; a line's points are (median, lowest, highest)."""
    top = 1.1 * max(high for points in lines.values() for _, _, high in points)
    step = (WIDTH - LEFT - RIGHT) / max(1, len(xs) - 1)

    def x(index: int) -> float:
        return LEFT + index * step

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="14" y="{TOP - 4}">{escape(y_name)}</text>',
    ]
    for tick in range(6):
        value = top * tick / 5
        out.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.1f}</text>')
    for index, value in enumerate(xs):
        out.append(f'<text x="{x(index):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
                   f"{escape(x_name(value))}</text>")
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x(i):.1f},{y(p[0]):.1f}" for i, p in enumerate(points))
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for i, (middle, low, high) in enumerate(points):
            out.append(f'<path d="M{x(i):.1f} {y(low):.1f}V{y(high):.1f}" stroke="{colour}"/>'
                       f'<circle cx="{x(i):.1f}" cy="{y(middle):.1f}" r="3" fill="{colour}"/>')
        out.append(f'<text x="{WIDTH - RIGHT + 14}" y="{TOP + 16 + 18 * number}" fill="{colour}">'
                   f"{escape(name)}</text>")
    return "\n".join([*out, "</svg>", ""])
