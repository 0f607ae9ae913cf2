"""Observers: the hooks of healthy plugins that watch a run; one that raises is told of and left out."""

from __future__ import annotations

from types import ModuleType

import pytest

from headstock import hookimpl
from headstock.offer import Fault
from headstock.plugins import Observers, Plugin


def plugin(name, *functions, fault=None):
    module = ModuleType(name)
    for function in functions:
        setattr(module, function.__name__, hookimpl(function))
    hooks = tuple(sorted(function.__name__ for function in functions))
    return Plugin(name, f"{name}-dist", "1.0", name, hooks=hooks, fault=fault, implementation=module)


def test_only_what_is_implemented_is_called_with_the_arguments_it_takes():
    seen = []

    def before_forward(batch):
        seen.append(batch)

    def after_forward():
        seen.append("after")

    told = []
    observers = Observers([plugin("one", before_forward), plugin("two", before_forward, after_forward)], told.append)
    observers.notify("before_forward", batch="batch")
    observers.notify("after_forward", batch="batch")
    observers.notify("on_decision", decision="decision")
    assert seen == ["batch", "batch", "after"]
    assert told == []


def test_a_plugin_with_a_fault_and_one_that_did_not_load_watch_nothing():
    def on_decision(decision):
        raise AssertionError("called")

    broken = plugin("broken", on_decision, fault=Fault(what="it is broken"))
    absent = Plugin("absent", "absent-dist", "1.0", "absent", fault=Fault(what="it is not there"))
    told = []
    Observers([broken, absent], told.append).notify("on_decision", decision=None)
    assert told == []


@pytest.mark.parametrize("error", [ValueError("no such counter"), SystemExit("no such counter")])
def test_one_that_raises_is_told_of_once_and_left_out_while_others_go_on(error):
    calls = []

    def after_forward(batch):
        calls.append("bad")
        raise error

    bad = plugin("bad", after_forward)

    def after_forward(batch):
        calls.append("good")

    told = []
    observers = Observers([bad, plugin("good", after_forward)], told.append)
    observers.notify("after_forward", batch=1)
    observers.notify("after_forward", batch=2)
    assert calls == ["bad", "good", "good"]
    [notice] = told
    for words in ("after_forward", "bad (bad-dist 1.0)", "no such counter", "left out"):
        assert words in notice


def test_one_that_raises_while_it_is_called_again_is_told_of_once_and_stops_nothing():
    """As an observer may that runs a step of its own, or one that two threads call."""
    told, depth = [], []

    def after_forward(batch):
        depth.append(batch)
        if len(depth) < 3:
            observers.notify("after_forward", batch=batch)
        raise ValueError("no such counter")

    observers = Observers([plugin("bad", after_forward)], told.append)
    observers.notify("after_forward", batch=1)
    observers.notify("after_forward", batch=2)
    assert (len(depth), len(told)) == (3, 1)


def test_an_interrupt_passes():
    def before_forward(batch):
        raise KeyboardInterrupt

    observers = Observers([plugin("one", before_forward)], print)
    with pytest.raises(KeyboardInterrupt):
        observers.notify("before_forward", batch=None)
