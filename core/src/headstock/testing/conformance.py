"""`AttentionConformance` and `MLAConformance`: the suite as test classes that an author subclasses in six lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from headstock.capabilities import ATTENTION_KINDS
from headstock.offer import Offer


class AttentionConformance:
    """Every case and claim of a backend as a pytest test; pytest runs them through headstock's own plugin.

        class TestMyBackend(AttentionConformance):
            backend = "my-backend"

    `backend` is an installed backend's name, or an `Offer`; `device` as `headstock check --device` takes it; of what it
    offers only the attention `kinds` named are tested. `xfail` maps names of cases, or globs of them, to the reason why
    they are expected to fail, strictly: one that passes is an error. With `pairs` what this backend caches is read by
    every other installed one, so that the cases depend on what is installed. Where cases are slow, `quick` has globs of
    those that the quick level is content with. The tests themselves cannot be overridden.
    """

    backend: ClassVar[str | Offer]
    device: ClassVar[str] = "auto"
    kinds: ClassVar[tuple[str, ...]] = ATTENTION_KINDS
    pairs: ClassVar[bool] = False
    quick: ClassVar[tuple[str, ...]] = ("*",)
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


class MLAConformance(AttentionConformance):
    """The part of the suite that multi-head latent attention needs of a backend, whatever else it offers.

        class TestMyLatentBackend(MLAConformance):
            backend = "my-backend"

    `mla`, absorbed: queries of 1 to 128 heads against latents of several ranks and rope dims, all laws of paged
    attention, and that absorbed is expanded. `ragged`, expanded, where the backend offers it too: values smaller than
    keys, and prefix and new tokens merged by their log-sum-exps. A backend without `mla` is an error of usage.
    """

    kinds = ("mla", "ragged")
