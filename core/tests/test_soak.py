"""The soak: random requests, aborts and faults on a cache too small for them, and every text as if it were alone.

    .venv/bin/python core/tests/test_soak.py --requests 2000 [--seed N]

runs in full what the suite runs with fewer requests.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections import Counter

import pytest
import torch
from tokenizers import Tokenizer as Vocabulary
from tokenizers import decoders, models

from headstock import ModelRunner
from headstock.engine.engine import Engine
from headstock.engine.request import Request
from headstock.engine.sampling import SamplingParams
from headstock.engine.tokenizer import Tokenizer
from headstock.models.config import ModelConfig
from headstock.negotiate import Policy
from headstock.runner.sampler import Sampler, SamplingRow
from headstock.testing.specimen import OFFER, Specimen

CONTEXT, PAGE = 64, 4
CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
    }
)  # fmt: skip
VOCABULARY = Vocabulary(models.BPE({chr(0x4E00 + token): token for token in range(64)}, []))
VOCABULARY.decoder = decoders.Fuse()


class Fault(RuntimeError):
    """What a backend raises at a random step."""


class Faulty(Specimen):
    """The specimen, which fails in `faults` of its steps: half of them when it plans, half in the last layer."""

    faults, chance, failing = 0.0, random.Random(), False

    def init_forward_metadata(self, batch):
        self.failing = self.chance.random() < self.faults
        if self.failing and self.chance.random() < 0.5:
            raise Fault("the device is gone")
        super().init_forward_metadata(batch)

    def forward(self, q, k, v, layer, batch, *, out, lse=None):
        super().forward(q, k, v, layer, batch, out=out, lse=lse)
        if self.failing and layer.index == 1:
            raise Fault("the device is gone, at the last moment")


def runner(**sizes):
    offer = OFFER.model_copy(update={"backend": Faulty})
    return ModelRunner(CONFIG, offers=[offer], policy=Policy(page_size=PAGE), dtype="float32", seed=5, **sizes)


def alone(solo, prompt, params, sample):
    """What a prompt comes to in a runner of its own, run at once and then token by token."""
    slot, tokens, new = solo.pages.open(), [], list(prompt)
    while len(tokens) < params.max_tokens and len(prompt) + len(tokens) < CONTEXT:
        sampler = Sampler([SamplingRow(params, params.seed + sample, len(tokens))], "cpu")
        new = sampler(solo.forward([slot], [new])).tokens.tolist()
        tokens += new
    solo.pages.close(slot)
    return tokens


def asked(draw):
    """A prompt, often one that begins like others, and how it is to be served."""
    shared = random.Random(draw.randrange(4)).choices(range(64), k=32)
    prompt = shared[: draw.choice([0, 0, 5, 8, 16, 32])] + draw.choices(range(64), k=draw.randint(1, 12))
    params = SamplingParams(
        max_tokens=draw.randint(1, 20), temperature=draw.choice([0.0, 0.0, 0.8, 1.5]), seed=draw.randrange(2**40)
    )
    return prompt, params, {"n": draw.choice([1, 1, 1, 2, 3]), "priority": draw.choice([0, 0, 0, 1, 5])}


def soak(requests: int, seed: int = 0) -> dict[str, object]:
    """Runs so many requests to their ends; raises AssertionError for whatever is not as it should be."""
    draw, solo, served = random.Random(seed), runner(max_batch=1), runner(max_batch=6, max_tokens=20, kv_tokens=112)
    Faulty.chance, Faulty.faults = random.Random(seed), 0.0
    engine = Engine(served, Tokenizer(VOCABULARY), check=True)
    live: dict[int, list] = {}  # by number: prompt, params, samples still to come
    done, faults, added = Counter[str](), 0, 0
    while engine.busy or added < requests:
        while added < requests and len(engine.scheduler.waiting) < 8 and draw.random() < 0.6:
            prompt, params, given = asked(draw)
            live[engine.add_request(prompt, params, **given)] = [prompt, params, given["n"]]
            added += 1
        if live and draw.random() < 0.02:
            engine.abort(draw.choice(list(live)))
        try:
            Faulty.faults = 0.03
            outputs = engine.step()
        except Fault:
            faults += 1
            continue
        finally:
            Faulty.faults = 0.0
        for number, sample, _, _, completion in [each for each in outputs if each.completion]:
            prompt, params, _ = live[number]
            expected = alone(solo, prompt, params, sample)
            if completion.finish_reason == "abort":
                expected = expected[: len(completion.tokens)]
            assert completion.tokens == expected, f"sample {sample} of request {number} is not what it is alone"
            done[completion.finish_reason] += 1
            live[number][2] -= 1
            if not live[number][2]:
                del live[number]
    stats = engine.stats
    assert not live
    assert stats.finished == done
    assert stats.free_pages + stats.cached_pages == stats.pages == served.memory.num_pages - 1
    assert served.pages.num_free_slots == 6
    gc.collect()
    assert not any(type(each) is Request for each in gc.get_objects()), "nobody holds on to what has ended"
    engine.close()
    assert engine.stats.free_pages == stats.pages
    return {"samples": dict(done), "steps": stats.steps, "faults": faults, "preemptions": stats.preemptions,
            "hit rate": round(stats.hit_rate, 3)}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_random_requests_with_faults_get_what_each_gets_alone():
    report = soak(requests=60)
    assert report["faults"] > 5
    assert report["preemptions"] > 1
    assert report["hit rate"] > 0.1
    assert report["samples"].keys() == {"length", "abort"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options, started = parser.parse_args(), time.monotonic()
    torch.set_num_threads(1)
    print(soak(options.requests, options.seed), f"in {time.monotonic() - started:.0f} s")
