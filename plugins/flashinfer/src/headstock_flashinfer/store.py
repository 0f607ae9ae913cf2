"""Where FlashInfer keeps compiled modules, found without importing it, for a GPU that need not be here.

FlashInfer loads what came compiled (with itself, or in a package of compiled modules) as it is, and has ninja check
what was compiled on this machine; both are one shared library in a folder of the module's name.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from headstock import HeadstockError
from headstock_flashinfer.modules import Module

PREBUILT = "flashinfer_jit_cache"
"""The package of compiled modules that may be installed beside FlashInfer."""


@dataclass(frozen=True, slots=True)
class Store:
    """The modules of one FlashInfer `version` for `architectures`, such as ("9.0a",).

    `prebuilt` are folders of modules that came compiled; `compiled` is the one that FlashInfer compiles into.
    """

    version: str
    architectures: tuple[str, ...]
    prebuilt: tuple[Path, ...]
    compiled: Path

    @classmethod
    def find(cls, compute_capability: int | None) -> Store:
        """The store of the FlashInfer installed here, for a GPU of this capability (major × 10 + minor).

        Raises HeadstockError where FlashInfer is not installed, or no architecture is known to compile for.
        """
        found = find_spec("flashinfer")
        if found is None or not found.submodule_search_locations:
            raise HeadstockError("FlashInfer is not installed", type='pip install "flashinfer-python>=0.6.18,<0.8"')
        version = metadata.version("flashinfer-python")
        architectures = _architectures(compute_capability)
        base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home()), ".cache", "flashinfer", version)
        folder = "_".join(architecture.replace(".", "") for architecture in architectures)
        own = Path(found.submodule_search_locations[0], "data", "aot")
        return cls(version, architectures, (own, *_packaged(architectures)), base / folder / "cached_ops")

    def path(self, module: Module) -> Path | None:
        """The library that FlashInfer would load, None where it would compile it first."""
        files = [folder / module.name / f"{module.name}.so" for folder in (*self.prebuilt, self.compiled)]
        return next((file for file in files if file.is_file()), None)

    def found(self) -> dict[Path, list[str]]:
        """The names of all modules that are there, by folder."""
        folders = (*self.prebuilt, self.compiled)
        files = {folder: folder.glob("*/*.so") for folder in folders}
        return {each: sorted(file.stem for file in files[each] if file.stem == file.parent.name) for each in folders}


def _architectures(compute_capability: int | None) -> tuple[str, ...]:
    """What FlashInfer takes as its targets: what its environment says, else the GPUs here, else the one asked for."""
    if asked := os.environ.get("FLASHINFER_CUDA_ARCH_LIST"):
        named = [architecture.partition(".") for architecture in asked.split()]
        targets = {(int(major), minor if minor[-1:].isalpha() else _minor(int(major), int(minor)))
                   for major, _, minor in named}  # fmt: skip
    else:
        here = set(_visible())
        capabilities = here if compute_capability in here or not compute_capability else {compute_capability}
        targets = {(capability // 10, _minor(*divmod(capability, 10))) for capability in capabilities}
    if not targets:
        raise HeadstockError("there is no GPU to compile FlashInfer's modules for", type="--assume-gpu h200")
    return tuple(f"{major}.{minor}" for major, minor in sorted(targets))


def _minor(major: int, minor: int) -> str:
    """The minor version with the letter that FlashInfer compiles for: features of that architecture, or family."""
    family = (major, minor) == (12, 0)
    return f"{minor}{'f' if family else 'a' if major >= 9 else ''}"


def _visible() -> Iterator[int]:
    """The compute capabilities of the GPUs that torch sees."""
    import torch

    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        yield major * 10 + minor


def _packaged(architectures: tuple[str, ...]) -> Iterator[Path]:
    """The folders of the package of compiled modules that hold code for all these architectures."""
    if find_spec(PREBUILT) is None:
        return
    package = importlib.import_module(PREBUILT)
    if not hasattr(package, "get_jit_cache_providers"):  # before FlashInfer 0.7: one folder for all
        yield Path(package.get_jit_cache_dir())
        return
    wanted = {f"sm{architecture.replace('.', '')}" for architecture in architectures}
    for provider in package.get_jit_cache_providers():
        if wanted <= set(provider.cuda_architectures):
            yield Path(provider.jit_cache_dir)
