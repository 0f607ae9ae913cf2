"""What `headstock doctor` tells of FlashInfer here: its version, its compiled modules, and what could compile more."""

from __future__ import annotations

import os
from collections.abc import Iterator

from headstock import BackendSpec, HeadstockError
from headstock_flashinfer import toolkit
from headstock_flashinfer.accessor import inside
from headstock_flashinfer.choice import choose, origin
from headstock_flashinfer.modules import label
from headstock_flashinfer.store import Store
from headstock_flashinfer.workspace import Planner

LLAMA = BackendSpec(
    device="cuda", num_sms=132, dtype="bfloat16", kv_dtype="bfloat16", num_heads=32, num_kv_heads=8, head_dim=128,
    v_head_dim=128, scale=128**-0.5, page_size=16, kv_layout="nhd", max_batch=256, max_tokens=8192, max_context=8192,
)  # fmt: skip


def facts() -> dict[str, str]:
    """The facts by what they are of."""
    try:
        store = Store.find(None)
    except HeadstockError as error:
        return {"modules": str(error)}
    return {
        "FlashInfer": f"{store.version}, for {', '.join(store.architectures)}",
        "its inside": inside(),
        "kernels": origin(),
        "workspace": _workspace(store.version),
        **dict(_modules(store)),
        "compiler": _compiler(),
    }


def _workspace(version: str) -> str:
    """What a well-known shape takes, since there is no model here."""
    floats = Planner(LLAMA, choose(LLAMA), version).graph(256, 1, 0).floats
    return f"from shapes; {floats / 2**20:.0f} MiB for graphs of 256 rows with 32/8 heads of 128 on 132 SMs"


def _modules(store: Store) -> Iterator[tuple[str, str]]:
    """The modules of each folder that has some."""
    found = {folder: names for folder, names in store.found().items() if names}
    for folder, names in found.items():
        yield f"modules in {folder}", f"{len(names)}: {', '.join(map(label, names))}"
    if not found:
        yield "modules", f"none in {store.compiled}; headstock prepare compiles those that a model needs"


def _compiler() -> str:
    try:
        return toolkit.compiler(os.environ)
    except HeadstockError as error:
        return str(error)
