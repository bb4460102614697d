"""Program of `scripts/soak`: random faults of a cluster under load, for minutes or hours."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence

from crash.cluster_faults import FAULTS, TTL_S, Fault, Outcome, running_stage, suffer, summary
from gazette_sdk.errors import GazetteError

__all__ = ["main"]

STORE_FAILS_S = 30.0
REPLICATION = 3


def main(arguments: Sequence[str]) -> int:
    """Run faults until the time is over; return the exit status.

    It is 0 if every promise was kept and every stall was within its bar, 1 if a stall was longer,
    and 2 if a promise was broken.
    """
    options = _parse(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    replicated = [fault for fault in FAULTS if fault.replication == REPLICATION]
    faults = [fault for fault in replicated if fault.name in (options.faults or [fault.name])]
    _say(f"seed {seed}: {options.minutes:g} min, {TTL_S:g} s lease, {len(faults)} kinds of faults")
    chance = random.Random(seed)
    outcomes: list[Outcome] = []
    try:
        _run(options.minutes * 60, faults, chance, seed, outcomes)
    except (AssertionError, GazetteError, TimeoutError) as error:
        _say(f"BROKEN after {len(outcomes)} faults, seed {seed}: {error}")
        for note in getattr(error, "__notes__", ()):
            _say(note)
        status = 2
    else:
        status = 0 if all(each.is_within_bar for each in outcomes) else 1
    for line in summary(outcomes):
        _say(line)
    return status


def _run(
    lasts_s: float,
    faults: Sequence[Fault],
    chance: random.Random,
    seed: int,
    outcomes: list[Outcome],
) -> None:
    begin = time.monotonic()
    with running_stage(seed=seed, store_fails_s=STORE_FAILS_S, replication=REPLICATION) as stage:
        waiting: list[Fault] = []
        while time.monotonic() < begin + lasts_s:
            if not waiting:  # each kind comes once, then each once more
                waiting = chance.sample(faults, len(faults))
            fault = waiting.pop()
            outcome = suffer(stage, fault, random.Random(chance.random()))
            outcomes.append(outcome)
            mark = "" if outcome.is_within_bar else f"  OVER {fault.bar_s:.2f} s"
            _say(
                f"{(time.monotonic() - begin) / 60:6.1f} min  {fault.name:28}"
                f"stall {outcome.stall_s:6.2f} s  recovered in {outcome.took_s:5.1f} s  "
                f"{stage.load.appended} appends, none lost{mark}"
            )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--seed", type=int, help="of all random choices (default: another one)")
    parser.add_argument(
        "--faults",
        action="append",
        choices=[fault.name for fault in FAULTS if fault.replication == REPLICATION],
        help="only this kind of fault; repeatable",
    )
    return parser.parse_args(arguments)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
