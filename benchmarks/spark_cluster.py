"""A pipeline on a standalone Spark cluster: export to Parquet, then word count, at two sizes.

    python benchmarks/spark_cluster.py [--gigabytes 10] [--workers 3] [--batch-mib 256] [--json]

Fragments, uncompressed and gzip, lie in an S3 emulator. They hold plain messages, some of them
repeated, and transactions, some of them rolled back. Steps are run for a tenth of the size first,
and then for all of it: planning and memory must not grow with the size. Results are compared with
what was generated.

- `fetch` reads the fragments' content, and does nothing with it: what the store costs
- `export` is `gazette_spark.pipelines.export`, committed, in micro-batches of `--batch-mib`
- `words` is `gazette_spark.pipelines.batch` over the journals, committed
- `words of lake` is the same over the Parquet files
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import Figure, add_outputs, check, rows, table
from spark_fragments import Generated, generate
from spark_processes import EMULATOR, Sampler, Use, emulator, standalone

os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming import StreamingQueryListener
from pyspark.sql.types import StructType

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.journal_reader import RetryReader
from gazette_spark import GazetteDataSource
from gazette_spark.options import Options
from gazette_spark.pipelines import export, word_count
from gazette_spark.planning import JournalRange
from gazette_spark.range_read import RangeTransport
from gazette_spark.source import GazetteBatchReader

EXECUTOR_MIB = 1024
SCHEMA = "n long, text string, _journal string, _offset long, _time timestamp"
GROWTH_MAX = 1.5
"""Bar of planning and memory of the whole size, to those of a tenth of it."""

# -------------------------------------------------------------------------- steps


@dataclass
class Step:
    """Measured step of the pipeline.

    Attributes:
        name: its name.
        content_bytes: length of the journals that it reads.
        begin: Unix time in seconds.
        end: Unix time in seconds.
        use: what its processes used.
        tasks: sums of the metrics of its tasks, in seconds.
    """

    name: str
    content_bytes: int
    begin: float
    end: float
    use: Use
    tasks: Counter[str] = field(default_factory=Counter)

    @property
    def seconds(self) -> float:
        """Wall time."""
        return self.end - self.begin


class Progress(StreamingQueryListener):
    """Listener that keeps the durations of micro-batches that read something, in seconds."""

    def __init__(self) -> None:
        self.durations: list[dict[str, float]] = []

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's names
        """Do nothing."""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        """Keep the durations."""
        if event.progress.numInputRows:
            found = event.progress.durationMs
            self.durations.append({name: ms / 1000 for name, ms in found.items()})

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        """Do nothing."""


@dataclass
class Run:
    """All steps for one size.

    Attributes:
        generated: what they read.
        steps: the steps.
        planning_s: time of planning the batch query.
        micro_batches: durations of the phases of each micro-batch of the export.
    """

    generated: Generated
    steps: list[Step] = field(default_factory=list)
    planning_s: float = 0.0
    micro_batches: list[dict[str, float]] = field(default_factory=list)

    def step(self, name: str) -> Step:
        """Return the step of a name."""
        return next(step for step in self.steps if step.name == name)

    @property
    def stream_planning_s(self) -> float:
        """Median time of planning a micro-batch."""
        return statistics.median(each["latestOffset"] for each in self.micro_batches)


class Pipeline:
    """The pipeline over one cluster."""

    def __init__(
        self,
        spark: SparkSession,
        sampler: Sampler,
        store_url: str,
        lake: Path,
        *,
        batch_mib: int,
    ) -> None:
        self._spark, self._sampler = spark, sampler
        self._store_url, self._lake = store_url, lake
        self._batch_mib = batch_mib

    def run(self, generated: Generated) -> Run:
        """Run all steps over what was generated, and check their results."""
        run = Run(generated)
        lake = str(self._lake / generated.prefix)
        source = {"store": self._store_url, "journals": generated.prefix}
        progress = Progress()

        def exported() -> None:
            self._spark.streams.addListener(progress)
            options = {**source, "maxBytesPerTrigger": f"{self._batch_mib}m"}
            batches = export(self._spark, options, lake, schema=SCHEMA)
            assert sum(batch.rows for batch in batches) == sum(
                count for count, _, _ in generated.numbers.values()
            )

        reader = self._spark.read.format("gazette").options(**source).schema("text string")
        self._step(run, "fetch", lambda: self._fetch(source))
        self._step(run, "export", exported)
        self._step(run, "words", lambda: self._check_words(run, reader.load()))
        self._step(
            run, "words of lake", lambda: self._check_words(run, self._spark.read.parquet(lake))
        )
        self._check_numbers(run, lake)
        self._spark.streams.removeListener(progress)
        run.micro_batches = progress.durations
        begun = time.perf_counter()
        GazetteBatchReader(Options.parse(source), StructType([])).partitions()
        run.planning_s = time.perf_counter() - begun
        return run

    def _step(self, run: Run, name: str, work: Callable[[], None]) -> None:
        with self._sampler.measured() as use:
            begin = time.time()
            work()
            end = time.time()
        run.steps.append(Step(name, run.generated.content_bytes, begin, end, use))
        print(f"{name}: {end - begin:.1f} s", file=sys.stderr, flush=True)

    def _fetch(self, source: dict[str, str]) -> None:
        """Read the content of all fragments in tasks, without decoding messages."""
        options = Options.parse({**source, "isolation": "uncommitted"})
        parts = GazetteBatchReader(options, StructType([])).partitions()
        context = self._spark.sparkContext
        read = context.parallelize(parts, len(parts)).map(lambda part: length_of(options, part))
        assert read.sum() == sum(part.end - part.begin for part in parts)

    def _check_words(self, run: Run, messages: DataFrame) -> None:
        """Count words, and compare them with those that were generated."""
        counts = word_count(messages).collect()
        assert Counter({row["word"]: row["count"] for row in counts}) == run.generated.words

    def _check_numbers(self, run: Run, lake: str) -> None:
        """Compare the numbers of the exported messages with those that were generated."""
        found = (
            self._spark.read.parquet(lake)
            .groupBy("_journal")
            .agg(sf.count("n"), sf.sum("n"), sf.bit_xor("n"))
            .collect()
        )
        assert {row[0]: tuple(row[1:]) for row in found} == run.generated.numbers


def length_of(options: Options, part: JournalRange) -> int:
    """Return the length of the content of a range, which is read. Runs in a worker."""

    async def read() -> int:
        async with RangeTransport(options, part) as transport:
            request = pb.ReadRequest(journal=part.journal, offset=part.begin, end_offset=part.end)
            reader, length = RetryReader(transport, request), 0
            try:
                while (content := await reader.read()) is not None:
                    length += len(content)
            finally:
                await reader.aclose()
            return length

    return sdk_loop.run(read())


@contextmanager
def session(master: str, directory: Path) -> Iterator[SparkSession]:
    """Run an application on the cluster, which logs its events."""
    (directory / "events").mkdir()
    spark = (
        SparkSession.builder.master(master)
        .appName("gazette benchmark")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.executor.memory", f"{EXECUTOR_MIB}m")
        .config("spark.local.dir", str(directory))
        .config("spark.sql.shuffle.partitions", "3")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.dir", (directory / "events").as_uri())
        .config("spark.eventLog.compress", "false")
        .config("spark.eventLog.rolling.enabled", "false")
        .getOrCreate()
    )
    spark.dataSource.register(GazetteDataSource)
    try:
        yield spark
    finally:
        spark.stop()


def add_task_times(events: Path, steps: list[Step]) -> None:
    """Add the times of tasks to the steps in which they ran."""
    [log] = (path for path in events.rglob("*") if path.is_file() and "app-" in path.name)
    for line in log.open():
        event = json.loads(line)
        if event["Event"] != "SparkListenerTaskEnd" or "Task Metrics" not in event:
            continue
        ended = event["Task Info"]["Finish Time"] / 1000
        for step in steps:
            if step.begin <= ended <= step.end:
                metrics = event["Task Metrics"]
                step.tasks["count"] += 1
                step.tasks["run"] += metrics["Executor Run Time"] / 1e3
                step.tasks["jvm"] += metrics["Executor CPU Time"] / 1e9
                step.tasks["gc"] += metrics["JVM GC Time"] / 1e3


# ------------------------------------------------------------------------- figures


def figures_of(small: Run, large: Run) -> list[Figure]:
    """Return what must not grow with the size."""
    found = [
        Figure(
            "planning of a micro-batch",
            large.stream_planning_s,
            small.stream_planning_s,
            "s",
            GROWTH_MAX,
            more_is_better=False,
        ),
        Figure(
            "planning of a batch query",
            large.planning_s,
            small.planning_s,
            "s",
            None,
            more_is_better=False,
        ),
    ]
    kinds = ["Python workers", "planners", "executors", "driver's Python", "driver's JVM"]
    for kind in kinds:
        peaks = [
            max(step.use.peak_mib.get(kind, 0.0) for step in run.steps) for run in (large, small)
        ]
        found.append(Figure(f"memory of {kind}", *peaks, "MiB", GROWTH_MAX, more_is_better=False))
    return found


def describe(run: Run) -> str:
    """Return the steps of a size as text."""
    made = run.generated
    gigabytes = made.content_bytes / 1e9
    lines = [
        (
            f"{gigabytes:.2f} GB in {len(made.numbers)} journals: {made.fragments} fragments of"
            f" {made.stored_bytes / 1e9:.2f} GB, {sum(made.words.values()):,} words; generated and"
            f" stored in {made.seconds:.0f} s"
        )
    ]
    for step in run.steps:
        cpu_s = step.use.cpu_s
        ours_s = sum(cpu_s.values()) - cpu_s[EMULATOR]
        lines += [
            (
                f"  {step.name}: {step.seconds:.1f} s, {gigabytes / step.seconds * 1e3:.0f} MB/s;"
                f" {ours_s / gigabytes:.1f} processor seconds per GB, and"
                f" {cpu_s[EMULATOR] / gigabytes:.1f} of the S3 emulator"
            ),
            f"    processor seconds: {_listed(cpu_s.most_common(), '.1f')}",
            f"    peak MiB: {_listed(sorted(step.use.peak_mib.items()), '.0f')}",
            f"    processes: {_listed(step.use.processes.items(), 'd')}",
            f"    tasks: {_listed(step.tasks.items(), ',.1f')}",
        ]
    phases = Counter[str]()
    for each in run.micro_batches:
        phases.update(each)
    plans = sorted(each["latestOffset"] for each in run.micro_batches)
    lines += [
        f"  export: {len(run.micro_batches)} micro-batches; {_listed(phases.most_common(), '.1f')}",
        (
            f"  planning: a micro-batch {plans[0]:.2f} to {plans[-1]:.2f} s, median"
            f" {run.stream_planning_s:.2f} s; the batch query {run.planning_s:.2f} s"
        ),
    ]
    return "\n".join(lines)


def record(run: Run) -> dict[str, Any]:
    """Return the steps of a size for JSON."""
    steps = [
        {
            "name": step.name,
            "seconds": step.seconds,
            "cpu_s": dict(step.use.cpu_s),
            "peak_mib": dict(step.use.peak_mib),
            "tasks": dict(step.tasks),
        }
        for step in run.steps
    ]
    return {
        "content_bytes": run.generated.content_bytes,
        "stored_bytes": run.generated.stored_bytes,
        "steps": steps,
        "planning_s": run.planning_s,
        "micro_batches": run.micro_batches,
    }


def _listed(values: Iterable[tuple[str, float]], form: str) -> str:
    return ", ".join(f"{name} {value:{form}}" for name, value in values)


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--batch-mib", type=int, default=256)
    add_outputs(parser)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which stops what was started
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))  # a file for each object
    runs = []
    with ExitStack() as opened:
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="gazette-bench-")))
        endpoint = opened.enter_context(emulator(directory))
        store_url = f"s3://bench/?endpoint={endpoint}&region=us-east-1"
        sizes = [int(options.gigabytes * 1e8), int(options.gigabytes * 1e9)]
        made = [
            generate(store_url, f"size-{number}/", size, number)
            for number, size in enumerate(sizes)
        ]
        master = opened.enter_context(standalone(directory, options.workers, EXECUTOR_MIB))
        sampler = opened.enter_context(Sampler())
        with session(master, directory) as spark:
            lake = directory / "lake"
            pipeline = Pipeline(spark, sampler, store_url, lake, batch_mib=options.batch_mib)
            runs = [pipeline.run(each) for each in made]
        add_task_times(directory / "events", [step for run in runs for step in run.steps])
    figures = figures_of(*runs)
    if options.json:
        json.dump({"runs": [record(run) for run in runs], "figures": rows(figures)}, sys.stdout)
    else:
        print("\n\n".join([*map(describe, runs), table(figures)]))
    check(figures, options)


if __name__ == "__main__":
    main()
