"""Memory that FlashInfer's planners ask for, worked out from shapes before there is a device.

After MLAPlan and PrefillSM90Plan in FlashInfer's `scheduler.cuh`. The first cuts (token, head) pairs into tiles and
keys into chunks, which leave states in the float workspace; the second never splits keys.
"""

from __future__ import annotations

from headstock import BackendSpec, HeadstockError, WorkspaceBytes

ALIGNMENT = 256
MOST_SMS = 192
"""What a GPU is taken to have where the spec does not say: more than any yet."""
ITEMS = 16384
"""Work items that MLAPlan has room for, whatever is planned; it writes past the end of it without a word."""
SHARED_SCHEDULE = 4096
"""Tiles from which on PrefillSM90Plan makes one list for all heads."""


def workspace(spec: BackendSpec) -> WorkspaceBytes:
    """The states of split tiles, and what each plan that may be alive is planned into."""
    plans, sms = spec.max_plans + len(spec.graph_buckets), spec.num_sms or MOST_SMS
    states = 2 * sms * 64 * (2 * spec.v_head_dim + 4) + 32 if spec.attention == "mla" else ALIGNMENT
    return WorkspaceBytes(scratch=states, state=plans * plan_bytes(spec))


def plan_bytes(spec: BackendSpec) -> int:
    """Bytes of one plan's int workspace, aligned."""
    sms = spec.num_sms or MOST_SMS
    if spec.attention == "mla":
        arrays = [ITEMS] * 9 + [sms] * 5
    else:
        tiles = -(-spec.max_tokens // 128) + 2 * spec.max_batch  # a row is two where some of it sees no key
        arrays = [max(min(tiles, SHARED_SCHEDULE) * spec.num_heads, tiles)] * 7 + [sms + 1]
    return -(-sum(-(-4 * n // 16) * 16 for n in arrays) // ALIGNMENT) * ALIGNMENT


def check_items(spec: BackendSpec) -> None:
    """Raises HeadstockError where a batch within `spec` could have more work items than there is room for.

    Tiles are of 128 pairs, or of 64 where rows have no more than that on average; chunks of keys add one item at most
    for each multiprocessor.
    """
    rows, sms = 2 * spec.max_batch, spec.num_sms or MOST_SMS
    decode = spec.max_batch * max(spec.query_lens) if "decode" in spec.phases else 0
    tokens = max(decode, spec.max_tokens if "extend" in spec.phases else 0)
    most = max(tokens * spec.num_heads // 128, rows) + rows + sms
    if most > ITEMS:
        works = f"max_tokens of {max(ITEMS - rows - sms, 0) * 128 // spec.num_heads}, or fewer rows"
        raise HeadstockError(f"FlashInfer plans {ITEMS} tiles of latent attention at most", given=most, works=works)
