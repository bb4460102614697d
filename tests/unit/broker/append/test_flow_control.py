from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.broker.append.content import Credit, FlowControl
from support.vectors import cases


@pytest.mark.parametrize("case", cases("broker", "flow_control"))
def test_vectors(case):
    flow, now = None, 0
    for step in case["steps"]:
        verdict = None
        if step["op"] == "reset":
            flow = FlowControl(min_rate=case["min_rate"], global_max_rate=step.get("global_max", 0))
            now = step["now"]
            flow.reset(step["max_rate"], now)
        elif step["op"] == "chunk":
            verdict = flow.chunk(step["n"])
            assert verdict == (Credit.HOLD if flow.charge else Credit.GO)
        elif step["op"] == "invalidate":
            flow.invalidate()
        else:
            now += step["dt"]
            verdict = flow.tick(now)
            assert (verdict is Credit.UNDERFLOW) == step.get("underflow", False)
        for name, value in step.get("expect", {}).items():
            assert getattr(flow, name) == value, (step, name)


def test_credit_which_an_append_did_not_use_is_there_for_the_next():
    flow = FlowControl(min_rate=10)
    flow.reset(1000, 0)
    assert flow.chunk(400) is Credit.GO
    flow.reset(1000, 100)
    assert (flow.balance, flow.total_chunks, flow.spent) == (700, 0, 10)
    assert flow.chunk(700) is Credit.GO
    assert flow.chunk(1) is Credit.HOLD


@given(st.integers(0, 2000), st.integers(1, 5000), st.sampled_from([0, 10, 700]))
def test_a_chunk_and_an_empty_one_may_be_charged_together(balance, length, min_rate):
    together, apart = FlowControl(min_rate=min_rate), FlowControl(min_rate=min_rate)
    for flow in (together, apart):
        flow.reset(0, 0)
        flow.balance = balance  # left from a time with a maximum rate
    assert together.chunk(length, messages=2) is Credit.GO
    assert (apart.chunk(length), apart.chunk(0)) == (Credit.GO, Credit.GO)
    assert vars(together) == vars(apart)


def test_a_journal_without_content_saves_up_no_credit():
    flow = FlowControl(min_rate=10)
    flow.reset(1000, 0)
    assert flow.chunk(0) is Credit.GO  # the commit of a pulse
    flow.reset(1000, 60_000)
    assert flow.balance == 1000


def test_no_minimum_rate_never_aborts():
    flow = FlowControl(min_rate=0)
    flow.reset(0, 0)
    assert flow.tick(10_000_000) is Credit.GO


def test_a_tick_earlier_than_the_last_is_ignored():
    flow = FlowControl(min_rate=1000)
    flow.reset(1000, 5000)
    flow.chunk(3000)
    assert flow.tick(4000) is Credit.HOLD
    assert (flow.spent, flow.charge) == (1000, 2000)


def test_an_invalidated_append_is_no_longer_held_and_keeps_its_credit():
    flow = FlowControl(min_rate=1)
    flow.reset(1000, 0)
    flow.chunk(1500)
    flow.invalidate()
    assert flow.charge == 0
    assert flow.chunk(10**9) is Credit.GO


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 500)), max_size=60),
)
def test_no_more_than_the_rate_and_its_burst_ever_passes(rate, steps):
    flow, now, passed = FlowControl(min_rate=0), 0, 0
    flow.reset(rate, now)
    for length, pause in steps:
        if flow.charge == 0:
            before = flow.charge
            flow.chunk(length)
            passed += length - flow.charge + before
        held = flow.charge
        now += pause
        flow.tick(now)
        passed += held - flow.charge
        assert passed <= rate + rate * now // 1000 + 1
        assert 0 <= flow.balance <= 10 * rate
