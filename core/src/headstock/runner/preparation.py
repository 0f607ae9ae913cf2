"""What a model's backends compile ahead: chosen as for a run, prepared, and not started."""

from __future__ import annotations

from headstock.backend import Report
from headstock.runner.instances import FaultyBackend
from headstock.runner.selection import Selection


class Preparation(Selection):
    """A selection whose backends are prepared and not started, so that it needs neither the device nor memory on it.

    A backend that fails in this is passed over, or refused where it was asked for by name, as in any selection.
    """

    def _start(self, kv_tokens: int | None, report: Report) -> None:
        for instance in self.instances:
            try:
                instance.backend_class.prepare(instance.spec, report)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise FaultyBackend(instance.candidate, error, instance.spec.group, instance.spec.phases) from error
