"""Whatever runs a backend makes its device the current one, as a GPU that is not the first one has to be."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from headstock import ModelRunner, negotiate
from headstock.bench import timing
from headstock.bench.compare import Comparison
from headstock.bench.diagnose import Diagnosis
from headstock.bench.kernels import kernels
from headstock.bench.tune import Tuner
from headstock.bench.workload import parse
from headstock.device import Device
from headstock.models.config import ModelConfig
from headstock.offer import Candidate
from headstock.policy import Policy
from headstock.runner.requirements import requirements
from headstock.testing.specimen import OFFER, Specimen
from headstock.testing.suite import Suite

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = Device.open("cpu")
CONFIG = ModelConfig.from_hf({
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
})  # fmt: skip
NEEDS = requirements(CONFIG, device="cpu", dtype="float32")
LOADS = parse("decode:2x8 extend:1x8")
where: list[bool] = []
"""Whether the device was the current one, whenever the backend below was called."""
inside = [0]


class Located(Specimen):
    """The specimen, which notes where it is called."""

    def __init__(self, spec, workspace):
        where.append(bool(inside[0]))
        super().__init__(spec, workspace)

    def init_forward_metadata(self, batch):
        where.append(bool(inside[0]))
        super().init_forward_metadata(batch)

    def forward(self, q, k, v, layer, batch, *, out, lse=None):
        where.append(bool(inside[0]))
        super().forward(q, k, v, layer, batch, out=out, lse=lse)


LOCATED = OFFER.model_copy(update={"backend": Located, "name": "located"})
FIELD = [Candidate.of(LOCATED)]


def check():
    suite = Suite(LOCATED, pairs=False)
    assert suite.outcome(suite.cases[0]).good


def bench():
    assert all(each.device for each in Comparison(CONFIG, NEEDS, FIELD, Policy(), CPU, rounds=1).run(LOADS))


def tune():
    assert Tuner(CONFIG, NEEDS, FIELD, Policy(), CPU, rounds=1, cold_bytes=0).run(LOADS).points


def diagnose():
    Diagnosis(CONFIG, negotiate(NEEDS, FIELD), FIELD, CPU, rounds=1, cold_bytes=0).of_workloads(LOADS)


def explain():
    assert list(kernels(negotiate(NEEDS, FIELD), CONFIG, FIELD, CPU))


def generate():
    runner = ModelRunner(CONFIG, offers=[LOCATED], dtype="float32", kv_tokens=64, max_batch=2)
    runner.forward([runner.pages.open()], [[1, 2, 3]])


@pytest.fixture
def active(monkeypatch):
    """A device that is current inside `active()` alone."""

    @contextmanager
    def enter(self):
        inside[0] += 1
        try:
            yield
        finally:
            inside[0] -= 1

    monkeypatch.setattr(Device, "active", enter)
    where.clear()
    yield
    assert not inside[0]


@pytest.mark.parametrize("run", [check, bench, tune, diagnose, explain, generate])
def test_backends_are_called_while_their_device_is_the_current_one(run, active):
    run()
    assert where
    assert all(where)


def test_limits_are_measured_on_the_device_that_is_asked_about(active, monkeypatch):
    seconds = Device.seconds

    def noted(self, run):
        where.append(bool(inside[0]))
        return seconds(self, run)

    monkeypatch.setattr(Device, "seconds", noted)
    timing.measure_limits(CPU, "float32", num_bytes=1 << 16, size=16)
    assert where
    assert all(where)
