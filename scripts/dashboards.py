"""Write the Grafana dashboards that scripts/dashboards.yml describes, for `gazette monitoring`.

    python scripts/dashboards.py

Run it with the Python of .venv. Each dashboard has at most 25 panels, and the variables cluster,
zone, topic and application.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import ReduceDataOptions, VizLegendOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableRefresh,
    VariableSort,
)

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent / "gazette_sdk/cli/monitoring/files/dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
LEGEND = VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
LAST = ReduceDataOptions().calcs(["lastNotNull"])
VARIABLES = {
    "cluster": "label_values(gazette_build_info, cluster)",
    "zone": 'label_values(gazette_build_info{cluster=~"$cluster"}, zone)',
    "topic": 'label_values(gazette_topic_append_bytes_total{cluster=~"$cluster"}, topic)',
    "application": (
        'label_values(gazette_build_info{cluster=~"$cluster",component!="broker"}, component)'
    ),
}


def variables() -> Iterator[dashboard.DatasourceVariable | dashboard.QueryVariable]:
    """Yield the variables of each dashboard."""
    yield dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    for name, query in VARIABLES.items():
        yield (
            dashboard.QueryVariable(name)
            .label(name.title())
            .query(query)
            .datasource(SOURCE)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
            .multi(multi=True)
            .include_all(include_all=True)
            .all_value(".*")
        )


def panel(described: Mapping[str, Any]) -> stat.Panel | timeseries.Panel:
    """Return a panel of lines over time, or of one number."""
    number = described.get("number", "")
    made: Any = stat.Panel().reduce_options(LAST) if number else timeseries.Panel().legend(LEGEND)
    made = made.title(described["title"]).unit(described["unit"]).datasource(SOURCE)
    if "text" in described:
        made = made.description(described["text"])
    queries = {"": number} if number else described["lines"]
    for ref, (legend, expression) in zip("ABCD", queries.items(), strict=False):
        query = prometheus.Dataquery().expr(expression).ref_id(ref)
        made = made.with_target(query.legend_format(legend) if legend else query)
    return made.span(4).height(4) if number else made.min(0).span(8).height(8)


def board(name: str, described: Mapping[str, Any]) -> str:
    """Return the JSON of a dashboard."""
    made = (
        dashboard.Dashboard(described["title"])
        .uid(f"gazette-{name}")
        .tags(["gazette"])
        .refresh("30s")
        .time("now-3h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
    )
    for variable in variables():
        made = made.with_variable(variable)
    for row in described["rows"]:
        made = made.with_row(dashboard.Row(row["title"]))
        for each in row["panels"]:
            made = made.with_panel(panel(each))
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


def boards() -> dict[str, str]:
    """Return the JSON of all dashboards, by the names of their files."""
    described = yaml.safe_load((HERE / "dashboards.yml").read_text(encoding="utf-8"))
    return {f"{name}.json": board(name, each) for name, each in described.items()}


def main() -> None:
    """Write all dashboards."""
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, text in boards().items():
        (TARGET / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
