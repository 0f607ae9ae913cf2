"""The trace of an engine: a JSON line per forward, without a token or a text, for benchmarks to replay."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from headstock.errors import HeadstockError


class Trace:
    """A file that is written a line per forward; what it held before is gone.

    Each has the `phase` ("extend", "decode", or "mixed" where each part of a step ran in its own), the new tokens
    (`query_lens`) and the keys (`kv_lens`) of each row, the `page_size`, `graph` (replayed, or else run eagerly), and
    `ms`, the milliseconds until the tokens were known. Raises HeadstockError for a file that cannot be written.
    """

    def __init__(self, path: str | Path, page_size: int):
        self.path, self.page_size = path, page_size
        try:
            file = Path(path).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115 (kept open; whole lines at once)
        except OSError as error:
            works = "a file in a folder that exists"
            raise HeadstockError(f"cannot write {path}: {error.strerror}", works=works) from None
        self._file = file

    def write(
        self, query_lens: Sequence[int], kv_lens: Sequence[int], *, split: bool, graph: bool, seconds: float
    ) -> None:
        """Adds a forward; `split` says whether its single tokens ran in a segment of their own.

        Raises OSError where the file takes no more.
        """
        decoding = [n == 1 for n in query_lens]
        phase = "decode" if all(decoding) else "mixed" if split and any(decoding) else "extend"
        line = {
            "phase": phase,
            "query_lens": list(query_lens),
            "kv_lens": list(kv_lens),
            "page_size": self.page_size,
            "graph": graph,
            "ms": round(seconds * 1e3, 3),
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        with suppress(OSError):  # of what found no room when it was written
            self._file.close()
