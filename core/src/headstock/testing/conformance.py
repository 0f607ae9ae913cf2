"""`AttentionConformance`: the suite as a test class that an author subclasses in six lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from headstock.offer import Offer


class AttentionConformance:
    """Every case and claim of a backend as a pytest test; pytest runs them through headstock's own plugin.

        class TestMyBackend(AttentionConformance):
            backend = "my-backend"

    `backend` is an installed backend's name, or an `Offer`; `device` as `headstock check --device` takes it. `xfail`
    maps names of cases, or globs of them, to the reason why they are expected to fail, strictly: one that passes is an
    error. With `pairs` what this backend caches is read by every other installed one, so that the cases depend on what
    is installed. The tests themselves cannot be overridden.
    """

    backend: ClassVar[str | Offer]
    device: ClassVar[str] = "auto"
    pairs: ClassVar[bool] = False
    xfail: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in vars(cls):
            if name.startswith("test_") and hasattr(AttentionConformance, name):
                raise TypeError(
                    f"{cls.__name__} overrides {name} of the conformance suite; "
                    'a case that is known to fail is marked: xfail = {"its name": "the reason"}'
                )

    def test_case(self, conformance: Any) -> None:
        """One case, or one claim about what is not declared."""
        conformance()
