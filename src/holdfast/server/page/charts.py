"""Small drawings, made here so that the page needs no script for them: sparklines, histograms, timelines."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from markupsafe import Markup, escape


def _svg(width: float, height: float, label: str, inner: str, kind: str) -> Markup:
    # `inner` is put together below from numbers and escaped text only.
    return Markup(  # nosec B704
        f'<svg class="{kind}" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">{inner}</svg>'
    )


def sparkline(values: Sequence[float], label: str) -> Markup:
    """A line over the last values, filled below; a dot at the newest."""
    width, height, edge = 96.0, 24.0, 2.0
    if not values:
        return Markup("")
    low, high = min(values), max(values)
    spread = (high - low) or 1
    step = (width - 2 * edge) / max(len(values) - 1, 1)
    flat = high == low
    points = [
        (edge + n * step, height / 2 if flat else height - edge - (value - low) / spread * (height - 2 * edge))
        for n, value in enumerate(values)
    ]
    if len(points) == 1:
        points = [(edge, points[0][1]), (width - edge, points[0][1])]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    x, y = points[-1]
    inner = (
        f'<polygon class="fill" points="{points[0][0]:.1f},{height} {line} {x:.1f},{height}"/>'
        f'<polyline class="stroke" points="{line}"/><circle class="end" cx="{x:.1f}" cy="{y:.1f}" r="2"/>'
    )
    return _svg(width, height, label, inner, "sparkline")


def histogram(counts: Sequence[int], low: str, high: str) -> Markup:
    """Bars, with the ends of the range below."""
    width, height = 320.0, 72.0
    most = max(counts, default=0) or 1
    step = width / max(len(counts), 1)
    bars = "".join(
        f'<rect x="{n * step + 0.5:.2f}" y="{height - count / most * height:.2f}" width="{max(step - 1, 0.5):.2f}" '
        f'height="{count / most * height:.2f}"><title>{count:,}</title></rect>'
        for n, count in enumerate(counts)
    )
    inner = (
        f"{bars}"
        f'<text x="0" y="{height + 14}">{escape(low)}</text>'
        f'<text x="{width}" y="{height + 14}" text-anchor="end">{escape(high)}</text>'
    )
    return _svg(width, height + 18, f"distribution from {low} to {high}", inner, "histogram")


def timeline(moments: Sequence[tuple[datetime, str, bool]]) -> Markup:
    """When each checkpoint was made: (moment, title, is_marked), oldest first."""
    width, height = 960.0, 46.0
    if len(moments) < 2:
        return Markup("")
    first, last = moments[0][0], moments[-1][0]
    for moment, _, _ in moments:
        first, last = min(first, moment), max(last, moment)  # clocks only decorate (I4)
    whole = (last - first).total_seconds() or 1
    dots = "".join(
        f'<circle class="{"marked" if is_marked else "plain"}" r="{5 if is_marked else 3.5}" '
        f'cx="{8 + (moment - first).total_seconds() / whole * (width - 16):.1f}" cy="16">'
        f"<title>{escape(title)}</title></circle>"
        for moment, title, is_marked in moments
    )
    inner = (
        f'<path class="axis" d="M8 16H{width - 8}"/>{dots}'
        f'<text x="8" y="40">{first:%Y-%m-%d %H:%M:%S}</text>'
        f'<text x="{width - 8}" y="40" text-anchor="end">{last:%Y-%m-%d %H:%M:%S} UTC</text>'
    )
    return _svg(width, height, f"{len(moments)} checkpoints over time", inner, "timeline")
