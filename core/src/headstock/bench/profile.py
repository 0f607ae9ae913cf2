"""A profile: what `headstock tune` measured on one machine for one shape of model, as a file that says of what it is.

It is used for nothing else. Torch-free: `explain` reads it.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean, geometric_mean
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headstock.bench.machine import Machine, changed
from headstock.errors import HeadstockError
from headstock.files import read_text
from headstock.models.cache import default_cache_dir
from headstock.offer import describe_validation_error
from headstock.policy import Crossover, Measurement, PageSize, Seconds
from headstock.requirement import Requirement

AGAIN = "headstock tune"
NO_SHAPE = ("page_size", "kv_layout", "wishes", "max_context", "cascade", "graph")
"""Fields of a requirement that are settled or wished for, and no part of a model's shape."""

Count = Annotated[int, Field(ge=1)]
Shape = tuple[dict[str, Any], ...]
Key = tuple[str, str, str, PageSize | None, str | None]
Options = Mapping[str, Mapping[str, Any]]
NONE: Options = MappingProxyType({})


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Point(_Record):
    """Seconds that one layer took: a backend in one role on one workload, under one KV configuration.

    They are the lower quartile of the samples, since what disturbs a machine only adds to them. `plan` is a layer's
    share of what the host planned before. `batch` are rows, `tokens` new ones of all rows, `context` the keys of a row;
    `spread` is the middle half of the samples as a part of their median.
    """

    group: str
    role: str
    backend: str
    page_size: PageSize | None
    kv_layout: str | None
    batch: Count
    tokens: Count
    context: Count
    seconds: Annotated[Seconds, Field(gt=0)]
    plan: Seconds = 0.0
    spread: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class Profile(_Record):
    """Points of one device, with the driver, the package versions and the shape that they are of.

    `options` are those that backends were measured with, as text, by backend; one without any has no entry.
    """

    version: Literal[1] = 1
    device: str
    driver: str
    packages: Mapping[str, str]
    shape: Shape
    options: Mapping[str, Mapping[str, str]] = Field(default_factory=dict)
    points: tuple[Point, ...]

    def measurements(self) -> tuple[Measurement, ...]:
        """The points as negotiation takes them: in decoding a bucket per batch size, elsewhere one for all.

        A bucket reaches from the batch measured before it up to its own, the last one up to any. Contexts count alike,
        by their geometric mean: a backend's lead at a long one does not outweigh a larger lead at a short one.
        What was measured on fewer workloads than others of its role is left out, since it could not be compared.
        """
        keys: dict[Key, dict[tuple[int, int, int], Point]] = {}
        for point in self.points:
            key = (point.group, point.role, point.backend, point.page_size, point.kv_layout)
            keys.setdefault(key, {})[point.batch, point.tokens, point.context] = point
        found = []
        for key, points in keys.items():
            most = max(len(others) for other, others in keys.items() if other[:2] == key[:2])
            if len(points) == most:
                found += list(_buckets(key, list(points.values())))
        return tuple(found)

    def crossovers(self) -> tuple[Crossover, ...]:
        """Where the forms of latent attention cross, for all who were measured in one and the other."""
        taken: dict[Key, dict[tuple[int, int, int], float]] = {}
        for point in self.points:
            if point.role in ("extend", "expand") and point.context > point.tokens // point.batch:
                key = (point.group, point.role, point.backend, point.page_size, point.kv_layout)
                load = (point.tokens // point.batch, point.batch, point.context)
                taken.setdefault(key, {})[load] = point.seconds + point.plan
        return tuple(
            Crossover(group, absorbed, expanded, page_size, kv_layout, tokens)
            for (group, role, absorbed, page_size, kv_layout), own in taken.items() if role == "extend"
            for (other, form, expanded, *_), theirs in taken.items() if (other, form) == (group, "expand")
            if (tokens := _crossing(own, theirs))
        )  # fmt: skip


def _crossing(absorbed: Mapping[tuple[int, int, int], float], expanded: Mapping[tuple[int, int, int], float]) -> int:
    """The fewest new tokens of a row from which on expanding took less time, however many more there were.

    Where it never did, twice the most that were measured; 0 where too few were to tell.
    """
    sums: dict[int, float] = {}  # by new tokens, how much longer absorbed took, on all the workloads of so many
    for load in absorbed.keys() & expanded.keys():
        sums[load[0]] = sums.get(load[0], 0.0) + absorbed[load] - expanded[load]
    if len(sums) < 2:
        return 0
    best = 2 * max(sums)
    for tokens in sorted(sums, reverse=True):
        if sums[tokens] <= 0:
            break
        best = tokens
    return max(best, 2)


def _buckets(key: Key, points: list[Point]) -> Iterable[Measurement]:
    sizes: list[int | None] = [*sorted({point.batch for point in points})] if key[1] == "decode" else [None]
    for size in sizes:
        own = [point for point in points if size is None or point.batch == size]
        seconds = geometric_mean(point.seconds + point.plan for point in own)
        tokens = round(fmean(point.tokens for point in own))
        yield Measurement(*key, seconds, None if size == sizes[-1] else size, tokens)


class Judged(NamedTuple):
    """What a profile is good for here: what was measured, none where it is ignored, and what the user should know."""

    measurements: tuple[Measurement, ...] = ()
    notice: str = ""
    crossovers: tuple[Crossover, ...] = ()


def shape_of(needs: Sequence[Requirement]) -> Shape:
    """What a profile's figures depend on of a model: heads, sizes, dtypes, windows, layers, per group and role."""
    return tuple(json.loads(need.model_dump_json(exclude=set(NO_SHAPE)))
                 for need in needs)  # fmt: skip


def default_file(machine: Machine, needs: Sequence[Requirement], folder: Path | None = None) -> Path:
    """Where the profile of this device and shape lies; each has a file of its own."""
    told = json.dumps([machine.device, shape_of(needs)], sort_keys=True)
    name = hashlib.sha256(told.encode()).hexdigest()[:16]
    return (folder or default_folder()) / f"{name}.json"


def default_folder() -> Path:
    """Where profiles lie that nobody put elsewhere."""
    return default_cache_dir() / "profiles"


def check_writable(file: Path) -> None:
    """Raises HeadstockError where `save` would; the folder of `file` is made."""
    with _refusing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with suppress(FileNotFoundError):
            file.stat()  # raises for links in a circle, which are a file that is not there to all who only ask
        if file.exists() and not file.is_file():
            raise OSError(errno.EINVAL, "it is a device or a pipe, which a file would replace")
        tempfile.TemporaryFile(dir=file.parent).close()


def contents(file: Path) -> str:
    """What the profile has that lies where one is to be written, in words; empty where nothing, or an empty file, does.

    HeadstockError, as `read` has it, for anything else.
    """
    if not file.exists() or not file.stat().st_size:
        return ""
    figures = len(read(file).points)
    written = min(max(file.stat().st_mtime, 0), time.time())  # a file system may tell of years that no calendar has
    return f"{figures} figures of {datetime.date.fromtimestamp(written)}"


def save(profile: Profile, file: Path) -> None:
    """Writes a profile whole or not at all; HeadstockError where the file cannot be written."""
    check_writable(file)
    file = file.resolve()  # what a link points to is replaced, not the link
    with _refusing(file), tempfile.TemporaryDirectory(dir=file.parent) as folder:
        part = Path(folder, file.name)
        part.write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.replace(part, file)


@contextmanager
def _refusing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HeadstockError(f"cannot write {file}: {error.strerror}", works="--profile-file with another") from None


def read(file: Path) -> Profile:
    """The profile in a file; HeadstockError, saying what is wrong with it, for anything else."""
    works = "what headstock tune writes"
    text = read_text(file, works)
    try:
        return Profile.model_validate_json(text)
    except ValidationError as error:
        reason = describe_validation_error(error)[:200]
        raise HeadstockError(f"{file} is no profile: {reason}", works=works, type=AGAIN) from None


def as_text(options: Options) -> dict[str, dict[str, str]]:
    """Options by backend as a profile keeps them, whether a flag or a file gave them."""
    return {name: {key: str(value) for key, value in own.items()} for name, own in options.items() if own}


def judge(
    file: Path, machine: Machine, packages: Mapping[str, str], needs: Sequence[Requirement], options: Options = NONE
) -> Judged:
    """What the profile in `file` tells about a model on this machine, if it is of both.

    It is ignored, by name and with the reason, where it cannot be read, is of another device, shape or package version,
    or of other `options` of a backend; another driver is only warned of.
    """
    try:
        profile = read(file)
    except HeadstockError as error:
        return Judged(notice=f"the profile is ignored: {error.what}; type: {AGAIN}")
    reasons = []
    if profile.device != machine.device:
        reasons.append(f"it is of {profile.device}, this is {machine.device}")
    if profile.shape != shape_of(needs):
        reasons.append("it is of a model of another shape")
    if moved := changed(profile.packages, packages):
        reasons.append(f"packages have changed since: {', '.join(moved)}")
    now = as_text(options)
    if other := sorted({p.backend for p in profile.points if profile.options.get(p.backend) != now.get(p.backend)}):
        reasons.append(f"it was measured with other options of {', '.join(other)}")
    if reasons:
        return Judged(notice=f"the profile {file} is ignored: {'; '.join(reasons)}; type: {AGAIN}")
    if not profile.points:
        return Judged(notice=f"the profile {file} is ignored: it has no figures; type: {AGAIN}")
    notice = ""
    if profile.driver != machine.driver:
        was = f"{profile.driver or 'unknown'} → {machine.driver or 'unknown'}"
        notice = f"the profile {file} is of another driver ({was}) and used all the same; type: {AGAIN}"
    return Judged(profile.measurements(), notice, profile.crossovers())
