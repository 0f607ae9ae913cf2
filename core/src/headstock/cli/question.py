"""The question a command puts to negotiation: what a model needs on a device, and what the user chose. Torch-free."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from headstock.cli.hardware import Hardware
from headstock.cli.options import flag_name
from headstock.cli.settings import Settings
from headstock.decision import Decision, check_pin
from headstock.errors import HeadstockError
from headstock.files import read_text
from headstock.models.config import ModelConfig
from headstock.models.embedded import embedded_model
from headstock.models.folder import is_gguf
from headstock.models.gguf_header import GGUFHeader
from headstock.offer import describe_validation_error
from headstock.plugins import discover
from headstock.policy import Policy
from headstock.requirement import Requirement
from headstock.runner.requirements import requirements


def model_config(model: Path) -> ModelConfig:
    """The config of a Hugging Face folder or a GGUF file; raises ModelError where there is none."""
    if is_gguf(model):
        return ModelConfig.from_hf(GGUFHeader(model).config() | {"dtype": "bfloat16"})  # it names none: quantised
    return ModelConfig.from_folder(model)


def question(settings: Settings, hardware: Hardware) -> tuple[list[Requirement], Policy]:
    """The requirements and the policy that choices come to; raises HeadstockError where they cannot be met by any."""
    choices = settings.choices
    config = model_config(choices.model or embedded_model())
    if choices.max_context and choices.max_context > config.max_context:
        works = f"at most {config.max_context}, the model's own"
        origin = settings.origins.get("max_context", flag_name("max_context"))
        raise HeadstockError(f"{origin} is too long for this model", given=choices.max_context, works=works)
    dtype = hardware.dtype(config.dtype) if choices.dtype == "auto" else choices.dtype
    needs = requirements(
        config,
        device=hardware.device,
        compute_capability=hardware.compute_capability,
        dtype=dtype,
        kv_dtype=None if choices.kv_dtype == "auto" else choices.kv_dtype,
        max_context=choices.max_context,
        cascade=choices.cascade,
    )
    policy = choices.policy(settings.origins)
    if choices.decision is None:
        return needs, policy
    pinned = read_decision(choices.decision)
    check_pin(pinned, needs)
    return needs, pinned.pin(policy, discover())


def read_decision(file: Path) -> Decision:
    """A decision that `explain --json` wrote; raises HeadstockError for anything else."""
    works, cure = "what explain --json prints", "headstock explain --json > decision.json"
    text = read_text(file, f"{works} ({cure})")
    try:
        return Decision.model_validate_json(text)
    except ValidationError as error:
        reason = describe_validation_error(error)
        raise HeadstockError(f"{file} is no decision: {reason[:200]}", works=works, type=cure) from None
