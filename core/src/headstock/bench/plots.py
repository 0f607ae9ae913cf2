"""A comparison drawn: time over batch, time over context, and the roofline, as PNG files and one page that holds all.

Needs matplotlib, which the extra `headstock[bench]` brings; it is imported here, on use.
"""

from __future__ import annotations

import base64
import html
import io
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headstock.bench.compare import Measured
from headstock.bench.report import COLUMNS, configured, failures, ordered, row, summary
from headstock.bench.timing import Limits
from headstock.bench.workload import Workload
from headstock.errors import HeadstockError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")  # told apart by most eyes
MARKERS = {"decode": "o", "extend": "s", "cascade": "^"}
MOST_PANELS = 4


class Line(NamedTuple):
    """A panel's figures: its title, and by backend the points (x, measured)."""

    title: str
    points: Mapping[str, Sequence[tuple[int, Measured]]]


def draw(measured: Sequence[Measured], limits: Limits) -> dict[str, bytes]:
    """PNG images by name: "time-over-batch", "time-over-context", "roofline"; the first two where something varies."""
    timed = [each for each in measured if each.device is not None]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(sorted({each.label for each in timed}))}
    images = {}
    for name, axis, panels in (
        ("time-over-batch", "batch (requests)", _panels(timed, lambda w: w.rows, _title_of_context)),
        ("time-over-context", "context (keys of a request)", _panels(timed, lambda w: w.context, _title_of_batch)),
    ):
        if panels:
            images[name] = _png(_times(panels, axis, colours, limits))
    if timed:
        images["roofline"] = _png(_roofline(timed, colours, limits))
    return images


def page(images: Mapping[str, bytes], measured: Sequence[Measured], limits: Limits, where: Mapping[str, Any]) -> str:
    """One HTML page without a reference to anything else: the images, the table, what failed, and the machine."""
    told = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in where.items())
    pictures = "".join(
        f'<figure><img alt="{name}" src="data:image/png;base64,{base64.b64encode(image).decode()}"></figure>'
        for name, image in images.items()
    )
    head = "".join(f"<th>{_text(column)}</th>" for column in (*COLUMNS, "kernel"))
    cells = ((*row(each, limits), configured(each)) for each in ordered(measured))
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in each) + "</tr>" for each in cells)
    failed = "".join(f"<li>{_text(line)}</li>" for line in failures(measured))
    untimed = f"<h2>Not timed</h2><ul>{failed}</ul>" if failed else ""
    limit = _text(summary(limits, str(where.get("dtype", ""))))
    return PAGE.format(told=told, limit=limit, pictures=pictures, head=head, body=body, untimed=untimed)


def save(folder: Path, measured: Sequence[Measured], limits: Limits, where: Mapping[str, Any]) -> list[Path]:
    """Writes the images and `bench.html` into `folder`, which is made in one that is there; returns the files."""
    images = draw(measured, limits)
    contents = {f"{name}.png": image for name, image in images.items()}
    contents["bench.html"] = page(images, measured, limits, where).encode()
    make_folder(folder)
    with _refusing(folder):
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    return [folder / name for name in contents]


def make_folder(folder: Path) -> None:
    """Makes `folder`, in one that is there; raises HeadstockError where it cannot be made or written to."""
    if not folder.parent.is_dir():
        works = "--plots with a folder in one that is there"
        raise HeadstockError(f"cannot write to {folder}: no such folder", given=folder.parent, works=works)
    with _refusing(folder):
        folder.mkdir(exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HeadstockError(f"cannot write to {folder}: {error.strerror}", works="--plots with a folder") from None


def check_installed() -> None:
    """Raises HeadstockError with its cure where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        cure = "pip install 'headstock[bench]'"
        raise HeadstockError("plots need matplotlib, which is not installed", works="no --plots", type=cure) from None


def _panels(
    timed: Iterable[Measured], across: Callable[[Workload], int], title: Callable[[Workload], str]
) -> list[Line]:
    """The figures of uniform workloads that differ in nothing but `across`, at most four sets of them."""
    found: dict[str, dict[str, list[tuple[int, Measured]]]] = {}
    for each in timed:
        load = each.workload
        if len(set(load.query_lens)) == len(set(load.seq_lens)) == 1:
            name = title(load) + ("" if each.group == "all" else f", {each.group}")
            found.setdefault(name, {}).setdefault(each.label, []).append((across(load), each))
    varied = [
        Line(name, {backend: sorted(points, key=lambda p: p[0]) for backend, points in lines.items()})
        for name, lines in found.items()
        if len({x for points in lines.values() for x, _ in points}) > 1
    ]
    return varied[:MOST_PANELS]


def _title_of_context(load: Workload) -> str:
    if load.kind == "cascade":
        return f"cascade, {load.shared} keys shared + {load.context - load.shared}"
    new = load.query_lens[0]
    return f"decode, {load.context} keys" if load.kind == "decode" else f"extend, {new} new of {load.context} keys"


def _title_of_batch(load: Workload) -> str:
    requests = f"{load.rows} request{'s' if load.rows > 1 else ''}"
    if load.kind == "cascade":
        return f"cascade, {requests}, {load.context - load.shared} keys of their own"
    return f"decode, {requests}" if load.kind == "decode" else f"extend, {requests}, {load.query_lens[0]} new each"


def _times(panels: Sequence[Line], axis: str, colours: Mapping[str, str], limits: Limits) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    columns = len(panels) if len(panels) < 4 else 2
    height = -(-len(panels) // columns)
    figure = Figure(figsize=(5.6 * columns + 0.4, 3.9 * height + 0.9), dpi=110, layout="constrained")
    for number, panel in enumerate(panels):
        axes: Axes = figure.add_subplot(height, columns, number + 1)
        floor: dict[int, float] = {}
        for backend, points in panel.points.items():
            xs = [x for x, _ in points]
            times = [each.device for _, each in points if each.device]
            low, high = zip(*(each.quartiles for each in times), strict=True)
            colour = colours[backend]
            axes.fill_between(xs, [t * 1e6 for t in low], [t * 1e6 for t in high], color=colour, alpha=0.2, lw=0)
            axes.plot(xs, [each.median * 1e6 for each in times], "o-", color=colour, label=backend, ms=5)
            floor |= {x: _least(each, limits) * 1e6 for x, each in points}
        least = sorted(floor.items())
        axes.plot(*zip(*least, strict=True), "--", color="#444444", lw=1.2, label="measured limit of the device")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([x for x, _ in least])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.set(title=panel.title, xlabel=axis, ylabel="time of a layer (µs)")
        axes.grid(True, which="major", color="#dddddd")
    _legend(figure, figure.axes)
    return figure


def _roofline(timed: Sequence[Measured], colours: Mapping[str, str], limits: Limits) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(8.2, 5.4), dpi=110, layout="constrained")
    axes: Axes = figure.add_subplot()
    ridge = limits.flops_per_second / limits.bytes_per_second
    intensities = [each.work.flops / each.work.num_bytes for each in timed]
    low, high = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
    roof = [low, ridge, high]
    axes.plot(roof, [min(limits.flops_per_second, x * limits.bytes_per_second) / 1e9 for x in roof], color="#444444")
    for each, intensity in zip(timed, intensities, strict=True):
        assert each.device is not None, "only what was timed is drawn"
        axes.plot(
            intensity, each.work.flops / each.device.median / 1e9, MARKERS[each.workload.kind], ms=7, alpha=0.75,
            color=colours[each.label], mec="white", mew=0.6,
        )  # fmt: skip
    memory, matrix = limits.bytes_per_second / 1e9, limits.flops_per_second / 1e9
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(
        title=f"Roofline: measured limits {memory:.4g} GB/s and {matrix:.4g} GFLOP/s",
        xlabel="FLOPs per byte that has to move", ylabel="GFLOP/s",
    )  # fmt: skip
    axes.grid(True, which="major", color="#dddddd")
    kinds = dict.fromkeys(each.workload.kind for each in timed)
    for each_axis in (axes.xaxis, axes.yaxis):
        each_axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    handles: list[Patch | Line2D] = [Patch(color=colour, label=name) for name, colour in colours.items()]
    handles += [Line2D([], [], marker=MARKERS[kind], ls="", color="#777777", label=kind) for kind in kinds]
    handles.append(Line2D([], [], color="#444444", label="measured limits"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5), frameon=False)
    return figure


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend for all panels, below them."""
    found = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=min(len(found), 4), frameon=False)


def _least(each: Measured, limits: Limits) -> float:
    """Seconds that the measured limits allow at best."""
    return max(each.work.num_bytes / limits.bytes_per_second, each.work.flops / limits.flops_per_second)


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _text(value: object) -> str:
    return html.escape(str(value))


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>headstock bench</title><style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #222 }}
figure {{ margin: 1.5rem 0 }} img {{ max-width: 100%; height: auto }}
table {{ border-collapse: collapse; font-size: 13px }} th, td {{ text-align: left; padding: .25rem .6rem }}
th {{ border-bottom: 2px solid #888 }} td {{ border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem }} dt {{ color: #666 }} dd {{ margin: 0 }}
.wide {{ overflow-x: auto }}
</style></head><body>
<h1>headstock bench</h1><dl>{told}</dl><p>{limit}</p>
{pictures}
<h2>Figures</h2><div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
{untimed}
</body></html>
"""
