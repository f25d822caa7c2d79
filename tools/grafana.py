"""Write the Grafana dashboard of a run, examples/grafana/etude.json, from the tables of what is exported.

    python tools/grafana.py

Every figure of :mod:`etude.telemetry.exported` has a panel, those of a step as the page draws them: what stands in one
chart there is one panel here. Another row is of what gateways export themselves.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from etude.telemetry.exported import EXPORTED, TRAIN, Exported
from etude.telemetry.metrics import METRICS, charts
from etude.types import Json

FILE = Path(__file__).resolve().parent.parent / "examples" / "grafana" / "etude.json"
SECTIONS = ("Run", "Training", "Rollouts", "Engines", "Weights")
UNITS: Mapping[str, str] = {"s": "s", "bytes": "bytes"}
"""Unit → Grafana's name for it."""
WIDTH, HEIGHT, COLUMNS = 8, 7, 24
RUN = '{run=~"$run"}'
GATEWAY: Mapping[str, str] = {
    "Model calls a second": "sum by (status, traffic) (rate(etude_calls_total[1m]))",
    "Model calls, 95th percentile of seconds": (
        "histogram_quantile(0.95, sum by (le, traffic) (rate(etude_call_seconds_bucket[5m])))"
    ),
    "First token, 95th percentile of seconds": (
        "histogram_quantile(0.95, sum by (le, traffic) (rate(etude_first_token_seconds_bucket[5m])))"
    ),
    "Tokens a second": "sum by (kind, traffic) (rate(etude_tokens_total[1m]))",
}
"""Title → query, for the metrics that a run's gateways export."""


def dashboard() -> str:
    """The dashboard as Grafana imports it."""
    rows = {section: list(_panels(section)) for section in SECTIONS}
    rows["Gateways"] = [_panel(title, [query]) for title, query in GATEWAY.items()]
    whole: dict[str, Json] = {
        "title": "étude",
        "uid": "etude",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "tags": ["etude"],
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                {
                    "name": "run",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "$source"},
                    "query": "label_values(etude_step, run)",
                    "includeAll": True,
                    "multi": True,
                    "refresh": 2,
                },
            ]
        },
        "panels": list(_placed(rows)),
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _panels(section: str) -> Iterator[dict[str, Json]]:
    """The panels of one row."""
    drawn: set[str] = set()
    if section == "Training":
        for part in ("Learning", "Health"):
            for chart, names in charts(part):
                drawn |= {TRAIN + name for name in names}
                yield _panel(
                    chart.title, [f"{TRAIN}{name}{RUN}" for name in names], [METRICS[name].label for name in names]
                )
    for name, figure in EXPORTED.items():
        if figure.section == section and name not in drawn:
            yield _panel(_title(figure), [_query(name, figure)], unit=UNITS.get(figure.unit, ""))


def _query(name: str, figure: Exported) -> str:
    return f"{name}{RUN}" if figure.kind == "gauge" else f"rate({name}_total{RUN}[1m])"


def _title(figure: Exported) -> str:
    title = figure.title[0].upper() + figure.title[1:]
    return f"{title}, a second" if figure.kind == "counter" else title


def _panel(title: str, queries: list[str], legends: list[str] | None = None, unit: str = "") -> dict[str, Json]:
    source: Json = {"type": "prometheus", "uid": "$source"}
    targets: list[Json] = [
        {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend or "__auto", "datasource": source}
        for number, (query, legend) in enumerate(zip(queries, legends or [""] * len(queries), strict=True))
    ]
    return {
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": unit or "short"}, "overrides": []},
    }


def _placed(rows: Mapping[str, list[dict[str, Json]]]) -> Iterator[Json]:
    """Rows and their panels, with their places."""
    y, number = 0, 0
    for title, panels in rows.items():
        number += 1
        yield {"id": number, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1}}
        y += 1
        for index, panel in enumerate(panels):
            number += 1
            x = index * WIDTH % COLUMNS
            yield {
                **panel,
                "id": number,
                "gridPos": {"x": x, "y": y + index * WIDTH // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT},
            }
        y += -(-len(panels) * WIDTH // COLUMNS) * HEIGHT


def main() -> int:
    """Write the file."""
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(dashboard(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
