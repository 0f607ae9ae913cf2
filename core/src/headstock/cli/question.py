"""The question a command puts to negotiation: what a model needs on a device, and what the user chose. Torch-free."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from headstock.bench.machine import Machine, packages
from headstock.bench.profile import Options, default_file, judge
from headstock.cli.hardware import Hardware, parse_device
from headstock.cli.options import flag_name
from headstock.cli.settings import Settings
from headstock.decision import Decision, check_pin
from headstock.errors import HeadstockError
from headstock.files import read_text
from headstock.load import own_options
from headstock.models.config import ModelConfig
from headstock.models.embedded import embedded_model
from headstock.models.folder import is_gguf
from headstock.models.gguf_header import GGUFHeader
from headstock.models.record import read_json
from headstock.offer import describe_validation_error
from headstock.plugins import discover
from headstock.policy import Policy
from headstock.requirement import Requirement
from headstock.runner.requirements import requirements


def model_config(model: Path) -> ModelConfig:
    """The config of a Hugging Face folder, a config.json or a GGUF file; raises ModelError where there is none."""
    if is_gguf(model):
        return ModelConfig.from_hf(GGUFHeader(model).config() | {"dtype": "bfloat16"})  # it names none: quantised
    if model.suffix == ".json":
        return ModelConfig.from_hf(read_json(model))
    return ModelConfig.from_folder(model)


def asked_hardware(settings: Settings, assume_gpu: str | None) -> Hardware:
    """The device of a run, or the GPU that is assumed in its place; HeadstockError where the two contradict."""
    if assume_gpu is None:
        return Hardware.here(settings.choices.device)
    if parse_device(settings.choices.device)[0] not in ("auto", "cuda"):
        given = f"{assume_gpu} and {settings.origins['device']} {settings.choices.device}"
        raise HeadstockError("--assume-gpu contradicts the device", given=given, works="one of them")
    return Hardware.assumed(assume_gpu)


def question(
    settings: Settings, hardware: Hardware, config: ModelConfig | None = None
) -> tuple[list[Requirement], Policy]:
    """The requirements and the policy that choices come to; raises HeadstockError where they cannot be met by any.

    Options of backends are checked here, for every command. The model is that of `config` where it is given.
    """
    choices = settings.choices
    config = config or model_config(choices.model or embedded_model())
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
        graph=choices.graph,
        cascade=choices.cascade,
    )
    own = own_options(settings.limits.backend_option, discover())
    policy = profiled(choices.policy(settings.origins), settings, hardware, needs, own)
    if choices.decision is None:
        return needs, policy
    pinned = read_decision(choices.decision)
    check_pin(pinned, needs)
    return needs, pinned.pin(policy, discover())


def profiled(
    policy: Policy, settings: Settings, hardware: Hardware, needs: list[Requirement], options: Options
) -> Policy:
    """`policy` with what was measured on this machine for this model and `options`, if it was, and what to know of it.

    What was measured by batch size may then be served by batch size.
    """
    choices = settings.choices
    if not choices.profile:
        if choices.profile_file is not None:
            raise HeadstockError("--no-profile contradicts --profile-file", given=choices.profile_file)
        return policy
    machine, file = machine_of(hardware, choices.device), choices.profile_file
    if file is None:
        file = default_file(machine, needs)
        if not file.exists():
            return policy
    judged = judge(file, machine, packages(discover()), needs, options)
    notices = (judged.notice,) if judged.notice else ()
    profile = {"profile": judged.measurements, "crossovers": judged.crossovers, "profile_file": str(file)}
    return policy.model_copy(update={**profile, "by_batch": True, "notices": notices})


def machine_of(hardware: Hardware, device: str) -> Machine:
    """The machine as profiles name it; one that is only assumed has its name alone."""
    if hardware.assumed_only:
        return Machine(hardware.name, "")
    return Machine.here(hardware.device, parse_device(device)[1])


def read_decision(file: Path) -> Decision:
    """A decision that `explain --json` wrote; raises HeadstockError for anything else."""
    works, cure = "what explain --json prints", "headstock explain --json > decision.json"
    text = read_text(file, f"{works} ({cure})")
    try:
        return Decision.model_validate_json(text)
    except ValidationError as error:
        reason = describe_validation_error(error)
        raise HeadstockError(f"{file} is no decision: {reason[:200]}", works=works, type=cure) from None
