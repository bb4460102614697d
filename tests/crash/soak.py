"""Program of `scripts/soak`: random faults of a cluster under load, for minutes or hours."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
import traceback
from collections.abc import Sequence

from crash.cluster_faults import FAULTS, TTL_S, Fault, Outcome, running_stage, suffer, summary
from crash.shard_faults import SHARD_FAULTS, fail_over_summary, running_shard_stage
from gazette_sdk.errors import GazetteError

__all__ = ["main"]

STORE_FAILS_S = 30.0
REPLICATION = 3

LOADS: dict[str, Sequence[Fault]] = {
    "appends": [fault for fault in FAULTS if fault.replication == REPLICATION],
    "sums": SHARD_FAULTS,
}
"""Kinds of faults by load."""


def main(arguments: Sequence[str]) -> int:
    """Run faults until the time is over; return the exit status.

    It is 0 if every promise was kept and every stall and fail-over was within its bar, 1 if one
    was longer, and 2 if a promise was broken.
    """
    options = _parse(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    offered = LOADS[options.load]
    faults = [each for each in offered if not options.faults or each.name in options.faults]
    if not faults:
        names = ", ".join(repr(each.name) for each in offered)
        raise SystemExit(f"under --load {options.load} there are the faults {names}")
    _say(f"seed {seed}: {options.minutes:g} min, {TTL_S:g} s lease, {len(faults)} kinds of faults")
    logging.getLogger("examples.stream_sum").setLevel(logging.ERROR)  # late sums are in the table
    chance = random.Random(seed)
    outcomes: list[Outcome] = []
    try:
        _run(options, faults, chance, seed, outcomes)
    except (AssertionError, GazetteError, TimeoutError) as error:
        _say(f"BROKEN after {len(outcomes)} faults, seed {seed}: {error}")
        traceback.print_exception(error, file=sys.stdout)
        status = 2
    else:
        status = 0 if all(each.is_within_bar for each in outcomes) else 1
    for line in (*summary(outcomes), *fail_over_summary(outcomes)):
        _say(line)
    return status


def _run(
    options: argparse.Namespace,
    faults: Sequence[Fault],
    chance: random.Random,
    seed: int,
    outcomes: list[Outcome],
) -> None:
    running = (
        running_shard_stage()
        if options.load == "sums"
        else running_stage(seed=seed, store_fails_s=STORE_FAILS_S, replication=REPLICATION)
    )
    with running as stage:
        begin = time.monotonic()
        waiting: list[Fault] = []
        while time.monotonic() < begin + options.minutes * 60:
            if not waiting:  # each kind comes once, then each once more
                waiting = chance.sample(faults, len(faults))
            fault = waiting.pop()
            outcome = suffer(stage, fault, random.Random(chance.random()))
            outcomes.append(outcome)
            mark = "" if outcome.is_within_bar else "  OVER"
            _say(
                f"{(time.monotonic() - begin) / 60:6.1f} min  {fault.name:28}"
                f"stall {outcome.stall_s:6.2f} s  recovered in {outcome.took_s:5.1f} s  "
                f"{stage.load.done}; {outcome.client}{mark}"
            )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--seed", type=int, help="of all random choices (default: another one)")
    parser.add_argument(
        "--load",
        choices=LOADS,
        default="appends",
        help="appends to journals, or sums of streams by consumers, the example stream_sum",
    )
    parser.add_argument("--faults", action="append", help="only this kind of fault; repeatable")
    return parser.parse_args(arguments)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
