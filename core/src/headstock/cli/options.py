"""What commands can be told: each option once, as a field that the flag, the configuration file and the help share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from headstock.cli.hardware import readable_device
from headstock.policy import GRAPH_SIZES, Mode, PageSize, Policy
from headstock.vocabulary import CACHED

Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1)]


class Options(BaseModel):
    """A set of options. None stands for "not given" where a field allows it; 16 is a number, "16" and true are none."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Choices(Options):
    """What decides which backends run: the model, the device, and the user's explicit choices."""

    model: Path | None = Field(None, description="a Hugging Face folder or .gguf file [default: the embedded model]")
    device: Annotated[Name, AfterValidator(readable_device)] = Field(
        "auto", description="as torch spells it: cpu, cuda, cuda:1; auto is the first GPU, else CPU"
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="of weights and activations; auto is the model's own where the device is fast in it"
    )
    kv_dtype: Literal["auto", *CACHED] = Field(  # type: ignore[valid-type]  # the same vocabulary as everywhere
        "auto", description="of the KV cache: float8_e4m3fn, …; auto is that of the activations"
    )
    max_context: Count | None = Field(None, description="tokens per request [default: the model's own]")
    attention_backend: Name | None = Field(None, description="the backend of every phase [default: negotiated]")
    prefill_attention_backend: Name | None = Field(None, description="the backend of the extend phase")
    decode_attention_backend: Name | None = Field(None, description="the backend of the decode phase")
    page_size: PageSize | None = Field(None, description="tokens per KV page [default: negotiated]")
    kv_layout: Name | None = Field(None, description="the arrangement of a page's bytes [default: negotiated]")
    graph: Mode = Field("auto", description="decode steps are device graphs: where a backend can, always, or never")
    cascade: Mode = Field("auto", description="decoding reads shared prefixes once: where it pays, always, or never")
    expand_from: Annotated[int, Field(ge=2)] | None = Field(
        None, description="new tokens from which a row's latent attention is expanded [default: as tuned, or by shape]"
    )
    profile: bool = Field(True, description="rank backends by what `tune` measured on this machine, where it did")
    profile_file: Path | None = Field(None, description="the profile to use [default: that of this device and model]")
    decision: Path | None = Field(None, description="pin the outcome that `explain --json` wrote to this file")

    def policy(self, origins: Mapping[str, str] = MappingProxyType({})) -> Policy:
        """The explicit choices as negotiation takes them; `origins` tell by field where each was made."""
        fields = {
            "all": "attention_backend",
            "extend": "prefill_attention_backend",
            "decode": "decode_attention_backend",
        }
        named = {scope: getattr(self, field) for scope, field in fields.items()}
        return Policy(
            backends={scope: name for scope, name in named.items() if name},
            origins={scope: origins[field] for scope, field in fields.items() if field in origins},
            page_size=self.page_size,
            kv_layouts={"all": self.kv_layout} if self.kv_layout else {},
            graph=self.graph,
            cascade=self.cascade,
            expand_from=self.expand_from,
        )


class BackendOptions(Options):
    """The settings of single backends."""

    backend_option: Mapping[Name, Mapping[str, Any]] = Field(
        default_factory=dict, description="a backend's own setting, as NAME.KEY=VALUE"
    )


class Limits(BackendOptions):
    """What bounds a run, and the settings of single backends."""

    max_batch: Count = Field(32, description="requests that run at once")
    kv_tokens: Count | None = Field(None, description="tokens the KV cache holds [default: what memory allows]")
    mixed: Literal["auto", "extend", "split"] = Field(
        "auto", description="prompts and decoding rows of a step run in one segment, or split by phase"
    )
    graph_sizes: Annotated[tuple[Count, ...], Field(strict=False)] = Field(
        GRAPH_SIZES, description="rows of the decode steps to capture, up to --max-batch, which always is"
    )


METAVARS = {str: "TEXT", int: "N", float: "X", Path: "PATH"}

Config = Annotated[
    Path | None, typer.Option("--config", metavar="PATH", help="configuration file [default: found from here upward]")
]
AssumeGPU = Annotated[
    str | None, typer.Option(metavar="GPU", help="decide for this GPU, such as h200, whether or not it is here")
]
JSON = Annotated[bool, typer.Option("--json", help="print a JSON document")]


def takes(*records: type[BaseModel]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command a flag for every field of `records`, and --config; it is handed what they come to.

    The command's first parameter receives the `Settings`; its others stay its own.
    """
    flags = [_flag(name, record) for record in records for name in record.model_fields]
    config = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Config)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(config: Path | None, **values: Any) -> None:
            from headstock.cli.settings import Settings

            given = {flag.name: values.pop(flag.name) for flag in flags}
            settings = Settings.load(config, {name: value for name, value in given.items() if value is not None})
            command(settings, **values)

        signature = inspect.signature(command, eval_str=True)
        own = list(signature.parameters.values())[1:]
        run.__signature__ = signature.replace(parameters=[*own, *flags, config])  # type: ignore[attr-defined]
        run.__name__, run.__doc__, run.__annotations__ = command.__name__, command.__doc__, {}
        return run

    return decorate


def some_path(text: str) -> Path:
    """A path that was typed; typer.BadParameter for an empty one, as a variable that is not set leaves."""
    if not text:
        raise typer.BadParameter("given: ''; would work: a path")
    return Path(text)


def flag_name(field: str) -> str:
    """How a field is spelled on the command line and, without the dashes, in the configuration file."""
    return "--" + field.replace("_", "-")


def _flag(name: str, record: type[BaseModel]) -> inspect.Parameter:
    """A field as Typer takes a flag: None when not given, so that the configuration file and then the default count."""
    field = record.model_fields[name]
    default = field.get_default(call_default_factory=True)
    kind = _kind(field.annotation)
    repeated = "; may be repeated" if get_origin(kind) is list else ""
    shown = "" if default is None or default is False or default in ((), {}) else f" [default: {default}]"
    metavar = METAVARS.get(get_args(kind)[0] if get_args(kind) else kind)
    parser = some_path if kind is Path else None
    option = typer.Option(
        help=f"{field.description}{repeated}{shown}", metavar=metavar, show_default=False, parser=parser
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _kind(annotation: Any) -> Any:
    """What a shell can give for a field: text, a number, a path, a switch, or a list of one of them."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(parts[0])
    if origin is tuple:
        return list[_kind(parts[0])]  # type: ignore[misc]
    if origin is Literal:
        return str
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return list[str]
    kinds = [part for part in parts if part is not NoneType]
    return _kind(kinds[0]) if kinds else annotation
