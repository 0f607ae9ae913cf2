"""The safetensors files of a model folder: every header checked first, every tensor read only when asked for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstock.errors import ModelError
from headstock.models.record import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
READABLE = ("F32", "F16", "BF16")
# Buffers that old Llama checkpoints carry; the model computes them itself.
COMPUTED = ".rotary_emb.inv_freq"


class Entry(NamedTuple):
    """Where a tensor is and what its header says: the file, the shape, and the dtype in safetensors' spelling."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class WeightSource:
    """The tensors of a folder with `model.safetensors`, or with shards listed in `model.safetensors.index.json`.

    Opening reads headers alone. Raises ModelError for a file that is missing, truncated or not safetensors.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.entries: dict[str, Entry] = {}
        listed = self._listed()
        for file in sorted(set(listed.values())) or [SINGLE]:
            self.entries.update(_header(self.folder / file))
        for name, file in listed.items():
            if name not in self.entries or self.entries[name].file.name != file:
                raise ModelError(
                    f"{INDEX} says {name} is in {file}, which does not hold it", works="download both again"
                )

    def check(
        self,
        expected: Mapping[str, tuple[int, ...]],
        tied: Mapping[str, str] | None = None,
        spare: Sequence[str] = (),
    ) -> None:
        """Compare with the tensors a model needs (name to shape) before anything is allocated.

        `tied` maps a tensor that may be left out to the one that stands in for it; where a file holds it all the
        same it must be equal. `spare` are beginnings of names that may be there besides. Raises ModelError naming the
        file and the tensor.
        """
        tied = tied or {}
        for name, shape in expected.items():
            if name not in self.entries:
                works = "files and config.json of one and the same model"
                raise ModelError(f"{self.folder}: the tensor {name} is missing", works=works)
            entry = self.entries[name]
            if entry.shape != tuple(shape):
                raise ModelError(f"{entry.file}: {name} has another shape than config.json asks for",
                                 given=f"{list(entry.shape)}", works=f"{list(shape)}")  # fmt: skip
            if entry.dtype not in READABLE:
                raise ModelError(f"{entry.file}: {name} has a dtype that is not supported",
                                 given=entry.dtype, works=", ".join(READABLE))  # fmt: skip
        for name in self.entries.keys() - expected.keys() - tied.keys():
            if not name.endswith(COMPUTED) and not name.startswith(tuple(spare)):
                works = "files and config.json of one and the same model"
                raise ModelError(f"{self.entries[name].file}: the model has no tensor {name}", works=works)
        for copy, original in tied.items():
            if copy in self.entries and not torch.equal(*self.read([copy, original]).values()):
                raise ModelError(
                    f"{self.entries[copy].file}: config.json ties {copy} to {original}, but the file holds another one",
                    works="one of the two", type='"tie_word_embeddings": false in config.json, if the file is right',
                )  # fmt: skip

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors named, on the CPU in the dtype of the file.

        A file is mapped for this one call, so that pages read earlier do not count as memory in use.
        """
        tensors, names = {}, list(names)
        for file in dict.fromkeys(self.entries[name].file for name in names):
            with safe_open(file, framework="pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in names if self.entries[name].file == file})
        return {name: tensors[name] for name in names}

    def _listed(self) -> dict[str, str]:
        """Tensor to shard as the index has it; empty for a single file."""
        if (self.folder / SINGLE).exists() or not (self.folder / INDEX).exists():
            return {}
        listed = read_json(self.folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise ModelError(f"{self.folder / INDEX} has no weight_map", works="download the file again")
        for file in listed.values():
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelError(f"{self.folder / INDEX}: a shard must be a file of the same folder", given=repr(file))
        return listed


def _header(file: Path) -> dict[str, Entry]:
    """Name, shape and dtype of every tensor of a file; opening also checks its length against its header."""
    if not os.path.isfile(file):  # os.path, as a name may be too long to be asked for
        others = [path.name for path in file.parent.glob("*.bin")] if file.name == SINGLE else []
        works = "safetensors files (these *.bin can be converted)" if others else "a complete download"
        raise ModelError(f"{file} is missing", given=", ".join(others) or None, works=works)
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: Entry(file, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        works = "download it again (git lfs pull, where it is a pointer file)"
        raise ModelError(f"{file} is damaged or not a safetensors file: {error}", works=works) from None
