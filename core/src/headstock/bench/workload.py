"""A workload: the lengths of one forward's rows, and the small language that it is written in. Torch-free.

decode:64x4096        64 requests that decode, 4096 keys each, the new token's among them
extend:4x512+8192     4 requests of 512 new tokens after 8192 cached ones
cascade:64x8192+256   64 requests that decode over 8192 keys in common and 256 of their own
decode:{1,8}x{1024,4096}, extend:1x512    all of these, combined within braces; commas or spaces between
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from headstock.errors import HeadstockError
from headstock.requirement import Requirement

Kind = Literal["decode", "extend", "cascade"]
FORMS = {"decode": "decode:64x4096", "extend": "extend:4x512+8192", "cascade": "cascade:64x8192+256"}
MOST = 1 << 24
"""The largest number in a workload: what is above is a slip of the finger."""
COMBINED = 512
"""Most workloads that one text may stand for."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One forward: a new-token count and a key count per row, new ones included, and keys that all rows share.

    `weight` counts how many forwards it stands for. `name` is how a person wrote it.
    """

    kind: Kind
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    shared: int = 0
    weight: int = 1
    name: str = ""

    @property
    def phase(self) -> Literal["decode", "extend"]:
        return "extend" if self.kind == "extend" else "decode"

    @property
    def rows(self) -> int:
        return len(self.query_lens)

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return sum(self.query_lens)

    @property
    def context(self) -> int:
        """Keys of the longest row."""
        return max(self.seq_lens)

    def work(self, need: Requirement, itemsize: int, kv_itemsize: int) -> Work:
        """What one layer of a role has to do at least, whatever the kernel: see `Work`."""
        window = need.sliding_window or MOST
        pairs = keys = 0
        for (new, length), rows in Counter(zip(self.query_lens, self.seq_lens, strict=True)).items():
            full = max(0, min(new, length - window + 1))  # queries that see a whole window
            pairs += rows * (full * window + _pairs(new - full, length - full))
            keys += rows * min(length, window + new - 1)
        if not need.sliding_window:
            keys -= self.shared * (self.rows - 1)
        dims = need.head_dim + need.v_head_dim
        key = (
            need.head_dim if need.attention == "mla" else need.num_kv_heads * dims
        )  # a latent's values are a part of it
        stored = self.tokens * key * (itemsize + kv_itemsize)
        asked = self.tokens * need.num_heads * dims * itemsize
        return Work(keys * key * kv_itemsize + stored + asked, 2 * pairs * need.num_heads * dims)


class Work(NamedTuple):
    """Bytes that must move and floating-point operations of one layer.

    Bytes: each key and value that is seen once, shared ones once for all rows; q in, out written, new keys and values
    read and stored. FLOPs: both products over the pairs that a causal mask and the window show, two for each
    multiplication and addition.
    """

    num_bytes: int
    flops: int


def parse(text: str | Iterable[str]) -> list[Workload]:
    """The workloads of a text, or of several, in the order written and each once; HeadstockError says what is wrong."""
    texts = [text] if isinstance(text, str) else text
    found = [workload for each in texts for item in _items(each) for workload in _expand(item)]
    if not found:
        raise HeadstockError("there is no workload", works=", ".join(FORMS.values()))
    return list(dict.fromkeys(found))


def parse_one(item: str) -> Workload:
    """The workload that `item` writes, without braces."""
    kind, colon, lengths = item.partition(":")
    if not colon or kind not in FORMS:
        raise HeadstockError("no such workload", given=item, works=", ".join(FORMS.values()))
    match = re.fullmatch(r"(\d{1,99})x(\d{1,99})(?:\+(\d{1,99}))?", lengths, re.ASCII)
    if match is None or (match[3] is not None) < (kind == "cascade") or (kind == "decode" and match[3]):
        raise HeadstockError(f"{item}: cannot be read", works=f"{FORMS[kind]}, or sets such as {{1,8}} for a number")
    rows, first, second = int(match[1]), int(match[2]), int(match[3] or 0)
    if not (1 <= rows <= MOST and 1 <= first <= MOST and second <= MOST and (kind != "cascade" or second)):
        raise HeadstockError(f"{item}: a number is out of range", works=f"1…{MOST}")
    if kind == "extend":
        return Workload("extend", (first,) * rows, (first + second,) * rows, name=item)
    if kind == "cascade":
        return Workload("cascade", (1,) * rows, (first + second,) * rows, first, name=item)
    return Workload("decode", (1,) * rows, (first,) * rows, name=item)


def _pairs(new: int, length: int) -> int:
    """Pairs of a query and a key that it sees, without a window: the last `new` of `length` keys are the queries'."""
    return new * (length - new) + new * (new + 1) // 2


def _items(text: str) -> Iterator[str]:
    """The items of a list: apart by commas or spaces outside braces."""
    depth, item = 0, ""
    for character in text:
        depth += (character == "{") - (character == "}")
        if not 0 <= depth <= 1:
            raise HeadstockError("braces do not match", given=text, works="decode:{1,8}x{1024,4096}")
        if depth == 0 and (character == "," or character.isspace()):
            yield from filter(None, [item])
            item = ""
        elif not character.isspace():
            item += character
    if depth:
        raise HeadstockError("braces do not match", given=text, works="decode:{1,8}x{1024,4096}")
    yield from filter(None, [item])


def _expand(item: str) -> Iterator[Workload]:
    """Every workload that an item stands for, the last set varying fastest."""
    parts: Sequence[str] = re.split(r"\{([^}]*)\}", item)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    count = 1
    for each in choices:
        count *= len(each)
    if count > COMBINED:
        raise HeadstockError(f"{item}: too many workloads", given=count, works=f"at most {COMBINED}")
    for chosen in itertools.product(*choices):
        yield parse_one("".join(chosen))
