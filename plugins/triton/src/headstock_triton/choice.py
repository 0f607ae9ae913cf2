"""The choice of kernels: which one attends to a part of a batch, what it is compiled for, and who merges its splits."""

from __future__ import annotations

from headstock import BackendSpec, ForwardBatch
from headstock_triton.config import Config, able, power_of_two
from headstock_triton.hopper import FORMS, Form
from headstock_triton.launch import Grid, Launch
from headstock_triton.plan import Part


def kernel_of(spec: BackendSpec, part: Part, batch: ForwardBatch, aligned: bool = True) -> str:
    """The kernel that attends to a part: the one its configuration names where that can, else the one that can all.

    Neither of those reads trees of new tokens, nor caches that are not `aligned`. `attend_hopper` starts from nothing
    and ends with what it found: it merges no states of earlier parts and no sinks. It could read shared prefixes, but
    `attend` is as fast there: 61 µs against 66 of a layer with 8192 shared tokens, 111 against 109 with 4096 (H200).
    """
    config = part.shape.config
    plain = "latent" if spec.attention == "mla" else "attend"
    if part.tree(batch) or batch.page_table is None or not aligned or not able(spec, config):
        return plain
    if config.kernel == "attend_hopper" and (part.shared or part.carried or spec.sinks):
        return plain
    return config.kernel


def form_of(config: Config, kernel: str) -> Form:
    """How a kernel works on a tile: as the configuration says, or as it is written."""
    return FORMS.get(kernel) or Form(config.block_n, config.warps, config.stages)


def launches(
    spec: BackendSpec, part: Part, batch: ForwardBatch, aligned: bool, lse: bool, sinks: bool, alibi: bool
) -> list[tuple[Grid, Launch]]:
    """What runs for a part, the same for every layer: the kernel that attends, and one that merges what it leaves."""
    kernel, shape, config = kernel_of(spec, part, batch, aligned), part.shape, part.shape.config
    form, wide, heads = form_of(config, kernel), config.block_m >= 64, spec.num_kv_heads
    window, rope = 0 if part.shared else spec.window or 0, spec.head_dim - spec.v_head_dim
    rows, splits = shape.merging(spec)
    constants = {
        "GROUP": spec.num_heads // heads, "KV_HEADS": heads, "HEAD_DIM": spec.head_dim, "V_HEAD_DIM": spec.v_head_dim,
        "ROPE_DIM": rope, "PAGE": batch.page_size, "ROWS": shape.rows, "BLOCK_M": config.block_m,
        "BLOCK_N": form.keys, "BLOCK_D": power_of_two(spec.head_dim, 16), "BLOCK_V": power_of_two(spec.v_head_dim, 16),
        "BLOCK_P": power_of_two(rope, 16), "BLOCK_R": rows, "BLOCK_S": splits, "WINDOW": window,
        "ORDERED": (batch.causal and not part.shared) or window > 0, "TREE": part.tree(batch), "SHARED": part.shared,
        "CARRY": part.carried, "CAP": spec.softcap is not None, "ALIBI": alibi, "SINKS": sinks, "LSE": lse,
        "SPLIT": shape.split, "PEEL": wide, "AHEAD": batch.page_table is not None and not wide,
        "WITHIN": spec.page_size % form.keys == 0,
    }  # fmt: skip
    options = {"num_warps": form.warps - form.workers}
    if kernel not in FORMS:
        options["num_stages"] = form.stages
        if config.registers:
            options["maxnreg"] = config.registers
    grid: Grid = (heads, shape.items) if kernel == "attend" else (shape.items,)
    if kernel == "attend_hopper":  # programs that run at once share all work
        grid = (min(spec.num_sms or heads * shape.items, heads * shape.items),)
    found = [(grid, Launch(kernel, constants, **options))]
    if part.leaders is not None:
        found.append(((heads, shape.tiles, -(-shape.rows // rows)), Launch("merge", constants)))
    return found
