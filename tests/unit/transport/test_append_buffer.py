from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk.transport.append.append_buffer import AppendBuffer, MemoryBudget
from gazette_sdk.transport.append.appender import CHUNK_BYTES
from support.scripted_broker import in_loop, no_pause

STEPS = st.lists(
    st.one_of(
        st.binary(max_size=300),
        st.sampled_from(["checkpoint", "roll back", "spill"]),
    ),
    max_size=30,
)


async def content_of(buffer):
    return b"".join([chunk async for chunk in buffer.chunks()])


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_buffer_keeps_what_was_written_up_to_its_checkpoint(steps):
    async def run():
        budget = MemoryBudget(1 << 20, no_pause)
        buffer = AppendBuffer(budget)
        written, kept = b"", b""
        for step in steps:
            if step == "checkpoint":
                buffer.checkpoint()
                kept = written
            elif step == "roll back":
                buffer.roll_back()
                written = kept
            elif step == "spill":
                await buffer.spill()
            else:
                buffer.write(step)
                written += step
            assert (buffer.written_bytes, buffer.kept_bytes) == (len(written), len(kept))
            assert budget.used_bytes == buffer.memory_bytes
        assert await content_of(buffer) == kept
        assert await content_of(buffer) == kept
        buffer.release()
        assert budget.used_bytes == 0

    asyncio.run(run())


@in_loop
async def test_content_that_is_spilled_while_it_is_sent_is_sent_once():
    buffer = AppendBuffer(MemoryBudget(1 << 30, no_pause))
    parts = [bytes([number]) * CHUNK_BYTES for number in range(40)]
    for part in parts:
        buffer.write(part)
    buffer.checkpoint()
    await buffer.spill()
    for part in parts:
        buffer.write(part)
    buffer.checkpoint()
    chunks = buffer.chunks()
    got = await anext(chunks)
    await buffer.spill()
    async for chunk in chunks:
        got += chunk
    assert got == b"".join(parts) * 2
    buffer.release()


@in_loop
async def test_a_release_during_a_spill_leaves_nothing():
    budget = MemoryBudget(1 << 30, no_pause)
    buffer = AppendBuffer(budget)
    buffer.write(b"x" * (8 << 20))
    buffer.checkpoint()
    spilling = asyncio.create_task(buffer.spill())
    await asyncio.sleep(0)
    buffer.release()
    await spilling
    assert (budget.used_bytes, buffer.memory_bytes, buffer._file) == (0, 0, None)


@in_loop
async def test_small_parts_are_sent_together_and_large_ones_in_pieces():
    buffer = AppendBuffer(MemoryBudget(1 << 30, no_pause))
    for _ in range(1000):
        buffer.write(b"x" * 200)
    buffer.write(b"y" * (2 * CHUNK_BYTES + 1))
    buffer.checkpoint()
    sizes = [len(chunk) async for chunk in buffer.chunks()]
    assert sizes == [131000, 69000, CHUNK_BYTES, CHUNK_BYTES, 1]
    assert max(sizes) <= CHUNK_BYTES
    buffer.release()
