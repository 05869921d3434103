"""IPython extension: chart data of matplotlib figures, data of data frames."""

import math
import os

from IPython.core.formatters import BaseFormatter
from traitlets import ObjectName, Unicode

_saved = []


def push_env(env):
    _saved.append({k: os.environ.get(k) for k in env})
    os.environ.update(env)


def pop_env():
    for k, v in _saved.pop().items():
        if v is None:
            os.environ.pop(k, None)
        else:
            os.environ[k] = v


def plain(v):
    """v as JSON can tell it."""
    if hasattr(v, "isoformat"):
        return v.isoformat()
    if hasattr(v, "item"):
        v = v.item()
    if isinstance(v, float) and not math.isfinite(v):
        return None
    return v if isinstance(v, (str, int, float, bool)) or v is None else str(v)


def axis(name, ax):
    from matplotlib import category, dates
    it = getattr(ax, name + "axis")
    label = it.get_label_text() or None
    unit = None
    if label and label.endswith(")") and "(" in label:
        unit = label[label.rindex("(") + 1:-1] or None
    scale = it.get_scale()
    convert = plain
    if isinstance(it.get_converter() if hasattr(it, "get_converter") else it.converter, category.StrCategoryConverter):
        scale = "categorical"
    elif isinstance(it.get_major_locator(), (dates.DateLocator, dates.AutoDateLocator)):
        scale = "datetime"
        convert = lambda v: dates.num2date(v).isoformat()  # noqa: E731
    return {
        name + "_label": label, name + "_unit": unit, name + "_scale": scale,
        name + "_ticks": [convert(v) for v in it.get_ticklocs()],
        name + "_tick_labels": [t.get_text() for t in it.get_ticklabels()],
    }, convert


def named(artist, n):
    label = str(artist.get_label() or "")
    return label if label and not label.startswith("_") else "Line %d" % n


def boxes(ax):
    """The boxes of a box plot: each is one line or patch of five corners or
    more, with two whiskers, two caps and a median."""
    from matplotlib.patches import PathPatch
    found = []
    lines = [l.get_xydata() for l in ax.lines]
    shapes = [p.get_path().vertices for p in ax.patches if isinstance(p, PathPatch)] + [l for l in lines if len(l) == 5 and tuple(l[0]) == tuple(l[4])]
    labels = [t.get_text() for t in ax.get_xticklabels()]
    for i, box in enumerate(shapes):
        xs, ys = [p[0] for p in box], [p[1] for p in box[:5]]
        lo, hi, mid = min(ys), max(ys), (min(xs) + max(xs)) / 2
        own = [l for l in lines if len(l) and abs(sum(p[0] for p in l) / len(l) - mid) < 1e-9]
        whiskers = [l for l in own if len(l) == 2 and l[0][0] == l[1][0]]
        flat = [l for l in own if len(l) == 2 and l[0][1] == l[1][1] and l[0][0] != l[1][0]]
        ends = [p[1] for l in whiskers for p in l]
        medians = [l[0][1] for l in flat if lo <= l[0][1] <= hi]
        low, high = min(ends, default=lo), max(ends, default=hi)
        # Caps can lie on the box's own edges, where a whisker has no length.
        inner = [m for m in medians if m not in (low, high)] or medians
        fliers = [p[1] for l in ax.lines if l.get_linestyle() == "None" for p in l.get_xydata() if abs(p[0] - mid) < 1e-9]
        found.append({
            "label": labels[i] if i < len(labels) else "", "min": plain(low), "first_quartile": plain(lo),
            "median": plain(inner[0]) if inner else None, "third_quartile": plain(hi), "max": plain(high),
            "outliers": [plain(v) for v in fliers],
        })
    return found


def chart_of_axes(ax):
    from matplotlib.collections import PathCollection
    from matplotlib.container import BarContainer
    from matplotlib.patches import Wedge
    chart = {"type": "unknown", "title": ax.get_title() or None, "elements": []}
    wedges = [p for p in ax.patches if isinstance(p, Wedge)]
    if wedges:
        chart["type"] = "pie"
        chart["elements"] = [{"label": str(w.get_label()), "angle": plain(round(float(abs(w.theta2 - w.theta1)), 4)), "radius": plain(w.r)} for w in wedges]
        return chart
    x, to_x = axis("x", ax)
    y, to_y = axis("y", ax)
    bars = [c for c in ax.containers if isinstance(c, BarContainer)]
    points = [c for c in ax.collections if isinstance(c, PathCollection)]
    if bars:
        chart["type"] = "bar"
        names = dict(zip(x["x_ticks"], x["x_tick_labels"]))
        for n, c in enumerate(bars):
            sideways = getattr(c, "orientation", "vertical") == "horizontal"
            for p in c.patches:
                at = p.get_y() + p.get_height() / 2 if sideways else p.get_x() + p.get_width() / 2
                if sideways:
                    names = dict(zip(y["y_ticks"], y["y_tick_labels"]))
                label = next((t for k, t in names.items() if isinstance(k, (int, float)) and abs(k - at) < 1e-9 and t), None)
                chart["elements"].append({"label": label if label is not None else str(plain(at)),
                                          "value": plain(p.get_width() if sideways else p.get_height()),
                                          "group": named(c, n).replace("Line ", "Group ")})
    elif points:
        chart["type"] = "scatter"
        for n, c in enumerate(points):
            chart["elements"].append({"label": named(c, n), "points": [[to_x(p[0]), to_y(p[1])] for p in c.get_offsets()]})
    elif ax.lines:
        chart["elements"] = boxes(ax)
        if chart["elements"]:
            chart["type"] = "box_and_whisker"
        else:
            chart["type"] = "line"
            for n, l in enumerate(ax.lines):
                chart["elements"].append({"label": named(l, n), "points": [[to_x(a), to_y(b)] for a, b in zip(l.get_xdata(orig=False), l.get_ydata(orig=False))]})
    chart.update(x)
    chart.update(y)
    return chart


def chart_of_figure(fig):
    try:
        charts = [chart_of_axes(ax) for ax in fig.axes]
    except Exception:  # a figure that cannot be read still has its picture
        return {"type": "unknown", "title": None, "elements": []}
    if not charts:
        return None
    if len(charts) == 1:
        return charts[0]
    title = fig._suptitle.get_text() if getattr(fig, "_suptitle", None) else None
    return {"type": "superchart", "title": title, "elements": charts}


def data_of_frame(df):
    if df.size > 100_000:
        return None  # its HTML is shortened too
    return {str(c): [plain(v) for v in df.iloc[:, i]] for i, c in enumerate(df.columns)}


class ChartFormatter(BaseFormatter):
    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = dict

    def __call__(self, obj):
        if any(c.__module__ == "matplotlib.figure" and c.__name__ == "Figure" for c in type(obj).__mro__):
            return chart_of_figure(obj)
        return super().__call__(obj)


class DataFormatter(BaseFormatter):
    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = dict


def load_ipython_extension(shell):
    formatters = shell.display_formatter.formatters
    chart, data = ChartFormatter(parent=shell.display_formatter), DataFormatter(parent=shell.display_formatter)
    chart.for_type_by_name("matplotlib.figure", "Figure", chart_of_figure)
    data.for_type_by_name("pandas.core.frame", "DataFrame", data_of_frame)
    formatters["e2b/chart"], formatters["e2b/data"] = chart, data
