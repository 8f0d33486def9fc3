"""Curves as pictures that can be read on a light and on a dark page."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot  # noqa: E402  # after the choice of what draws

from benchmarks.measure import OURS  # noqa: E402
from benchmarks.setting import Curve  # noqa: E402

# Between light and dark, so that they stand out on either; the page itself shines through.
_LINES = "#7d8590"
_OURS = ["#2f81f7", "#1a9e6b"]
_PEERS = ["#d2762b", "#b05fd6", "#c9505a"]
_STYLE = {
    "font.size": 11,
    "svg.fonttype": "none",
    "svg.hashsalt": "pgmemory",
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"], _LINES),
}


def draw(curve: Curve, file: Path) -> None:
    """Write a curve as an SVG picture."""
    ours, peers = iter(_OURS * 2), iter(_PEERS * 2)
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(7.6, 4.2), layout="constrained")
        for name, points in curve.series.items():
            mine = name.startswith(OURS)
            axes.plot(
                *zip(*points, strict=True),
                label=name,
                color=next(ours if mine else peers),
                linewidth=2.4 if mine else 1.6,
                marker="o" if curve.logarithmic else None,
                markersize=4,
            )
        if curve.logarithmic:
            axes.set(xscale="log", yscale="log")
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.yaxis.set_major_formatter("{x:,g}")
        axes.set(title=curve.title, xlabel=curve.x_label, ylabel=curve.y_label)
        axes.grid(color=_LINES, alpha=0.25, linewidth=0.6)
        axes.legend(frameon=False, fontsize=9)
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
