"""The features that the suite tries of what a record declares, as the fields of a case that ask for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headstock.capabilities import Capabilities
from headstock.testing.rows import Fields, prefixes
from headstock.testing.sizes import QUERY_LENS, Sizes

JOINT = ("window", "softcap", "sinks", "alibi", "lse")
"""Features that a model may have all at once."""
STATES = ("softcap", "sinks", "lse")
"""Features among them that partial states of shared prefixes have a part in."""


class Features:
    """Of one record and the base configuration of its cases, the features that it declares."""

    def __init__(self, record: Capabilities, base: Fields, sizes: Sizes):
        self.record, self.base, self.sizes = record, base, sizes

    def settings(self) -> Iterator[tuple[str, Fields]]:
        """Every feature that is declared, by name, as the fields that ask for it."""
        record, cached, page = self.record, self.sizes.cached, self.base.get("page_size", 4)
        if record.sliding_window:
            for window in dict.fromkeys((1, 2, min(page, 16), min(page, 16) + 1, 1000)):
                yield f"window-{window}", {"window": window}
            if cached:
                yield "window-behind-dropped-pages", {"window": 3, "dropped": 8 * page}
        if record.softcap:
            yield "softcap-0.5", {"softcap": 0.5}
            yield "softcap-30", {"softcap": 30.0}
        if record.sinks:
            yield "sinks", {"sinks": True}
        if record.alibi:
            yield "alibi", {"alibi": True}
        if record.lse:
            yield "lse", {"lse": True}
        if record.query_mask and cached:
            yield "query-mask", {"query_mask": True}
        if record.non_causal:
            yield "non-causal", {"causal": False}
            if cached:
                yield "cross", {"causal": False, "cross": True}
        if record.cascade and cached:
            for depth in (1, 2):
                yield f"cascade-{depth}", {"shared": prefixes(depth)}
        if self.base["phase"] == "decode":
            for n in self.sizes.keep("query_lens", QUERY_LENS, record.query_lens):
                yield f"query-len-{n}", {"query_len": n}

    def joint(self, names: Iterable[str]) -> Fields:
        """All of these features that are declared, at once."""
        return {name: value for _, fields in self.settings() for name, value in fields.items() if name in names}

    def lse(self) -> Fields:
        """The fields that ask for the log-sum-exp, where it is declared."""
        return {"lse": True} if self.record.lse else {}


def together(fields: Fields) -> bool:
    """Whether these settings have a meaning at once."""
    if "shared" in fields and fields.keys() & {"window", "cross", "causal", "dropped", "query_mask", "alibi"}:
        return False
    return not ("query_mask" in fields and fields.keys() & {"cross", "causal"})
