"""The CUDA toolkit that compiles FlashInfer's modules, and what is put beside it where it is incomplete.

FlashInfer has every command of its build written out, and ninja compiles again what was compiled by another command. So
what helps the compiler here goes through variables that compilers read themselves, of the process that compiles alone,
and no command changes: the process that runs the model writes the same ones, and finds nothing to do.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from headstock import HeadstockError


def environment(folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    """`given`, the environment of a process that compiles, with what its toolkit lacks; `folder` takes what is made.

    Raises HeadstockError where there is no compiler or no ninja.
    """
    root = _root(compiler(given))
    if shutil.which("ninja", path=given.get("PATH")) is None:
        raise HeadstockError("FlashInfer builds with ninja, which is not on PATH", type="pip install ninja")
    libraries = [place for place in (root / "lib64", root / "lib", root / "lib64" / "stubs") if place.is_dir()]
    _complete(folder, libraries, given)
    search = [*map(str, (*libraries, folder)), *filter(None, [given.get("LIBRARY_PATH")])]
    flags = [f"-isystem {place}" for place in _headers(root)] + [given.get("NVCC_PREPEND_FLAGS", "")]
    return {
        **given,
        "LIBRARY_PATH": os.pathsep.join(search),  # read by the linker's driver
        "NVCC_PREPEND_FLAGS": " ".join(filter(None, flags)),
    }


def compiler(given: Mapping[str, str]) -> str:
    """The compiler that FlashInfer takes; HeadstockError where there is none."""
    home = given.get("CUDA_HOME") or given.get("CUDA_PATH")
    places = [*([f"{home}/bin"] if home else []), given.get("PATH", ""), "/usr/local/cuda/bin"]
    found = shutil.which(given.get("FLASHINFER_NVCC", "nvcc"), path=os.pathsep.join(places))
    if found is None:
        raise HeadstockError(
            "FlashInfer compiles with nvcc, which is not here",
            works="a CUDA toolkit, at CUDA_HOME or with nvcc on PATH",
        )
    return found


def _root(nvcc: str) -> Path:
    """The toolkit of a compiler, which a script elsewhere may only call: as the compiler itself tells it."""
    done = subprocess.run([nvcc, "-dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, text=True)
    told = re.search(r"^#\$ TOP=(.+)$", done.stderr, re.MULTILINE)
    return Path(told[1].strip()).resolve() if told else Path(nvcc).resolve().parents[1]


def _headers(root: Path) -> Iterator[Path]:
    """Folders with the headers of cuRAND, which fa3 includes, where the toolkit has none. After its own: -isystem."""
    if (root / "include" / "curand_kernel.h").is_file():
        return
    packages = find_spec("nvidia")
    for place in (packages.submodule_search_locations or []) if packages else []:
        yield from (header.parent for header in Path(place).glob("*/include/curand_kernel.h"))


def _complete(folder: Path, libraries: list[Path], given: Mapping[str, str]) -> None:
    """Makes in `folder` what the linker looks for and does not find: libcudart.so, and a library for the driver's.

    FlashInfer links its modules with the driver, which a machine without a GPU lacks; those of attention call nothing
    of it, so an empty library does.
    """
    if not any((place / "libcudart.so").exists() for place in libraries):
        for runtime in [file for place in libraries for file in place.glob("libcudart.so.*")][:1]:
            (folder / "libcudart.so").symlink_to(runtime)
    if not any((place / "libcuda.so").exists() for place in libraries):
        command = [*shlex.split(given.get("CXX", "c++")), "-x", "c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
        with suppress(OSError):  # without a compiler the build says so better
            subprocess.run(
                [*command, os.devnull, "-o", str(folder / "libcuda.so")], capture_output=True, env=dict(given)
            )
