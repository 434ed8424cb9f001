"""Reports: one payload, written in the formats that are registered. The JSON's fields are in docs/report-schema.md."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..plugin import BasePlugin
from .suite import NOT_RUN, PASSED, STATUSES

# Raised when a field is removed or changes its meaning; a new field leaves it.
SCHEMA_VERSION = 3


@dataclass
class Table:
    """A table for people: a title, a header, and rows of text."""

    title: str
    header: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)


@dataclass
class Report:
    """What a command found.

    Attributes:
        payload: everything, ready for JSON.
        tables: what a reader sees first, after the verdict.
    """

    payload: dict[str, Any]
    tables: list[Table] = field(default_factory=list)


class ReportPlugin(BasePlugin):
    """Formats by the ending of a file: functions of a `Report` and a path, which write the file."""


def new_payload(
    kind: str,
    command: Sequence[str],
    revision: str | None,
    environment: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """A payload without results."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": list(command),
        "revision": revision,
        "environment": dict(environment),
        "settings": dict(settings),
        "selection": [],
        "coverage": dict.fromkeys(STATUSES, 0),
        "success": False,
        "error": None,
        "cases": [],
    }


def coverage(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many rows have each status."""
    counted = dict.fromkeys(STATUSES, 0)
    for row in rows:
        counted[row["status"]] += 1
    return counted


def is_success(counted: Mapping[str, int]) -> bool:
    """At least one passed, and none failed or was left out."""
    return counted[PASSED] > 0 and counted["failed"] == 0 and counted[NOT_RUN] == 0


def verdict(payload: Mapping[str, Any]) -> str:
    """One line: what became of the cases."""
    counts = ", ".join(f"{number} {status.replace('_', ' ')}" for status, number in payload["coverage"].items())
    word = "passed" if payload["success"] else "FAILED"
    why = f"; {payload['error']}" if payload["error"] else ""
    if not payload["success"] and not payload["coverage"][PASSED]:
        why = f"; no case passed, so nothing is shown{why}"
    return f"{payload['kind']} {word}: {counts}{why}"


def write_reports(report: Report, paths: Iterable[Path]) -> list[str]:
    """Write a report to each path, in the format of its ending; what could not be written, and why."""
    problems = []
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            ReportPlugin(path.suffix.lstrip("."))(report, path)
        except Exception as error:  # noqa: BLE001, what one format cannot write must not take the others with it
            problems.append(f"{path} not written: {error}")
    return problems


def unwritable(path: Path) -> str | None:
    """Why a report cannot be written to a path, as far as can be told before it is made; or None."""
    if path.is_dir():
        return "is a folder"
    there = next((place for place in (path, *path.parents) if place.exists()), Path())
    if there != path and not there.is_dir():
        return f"{there} is no folder"
    return None if os.access(there, os.W_OK) else f"{there} may not be written to"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_finite(item) for item in value]
    return value


@ReportPlugin("json").register()
def write_json(report: Report, path: Path) -> None:
    """The whole payload."""
    path.write_text(json.dumps(_finite(report.payload), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def markdown_table(table: Table) -> str:
    """A table in Markdown."""
    lines = [f"### {table.title}", "", "| " + " | ".join(map(_cell, table.header)) + " |"]
    lines.append("|" + " --- |" * len(table.header))
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in table.rows]
    return "\n".join(lines)


@ReportPlugin("md").register()
def write_markdown(report: Report, path: Path) -> None:
    """Verdict, environment, the implementations with what was left out, and the tables."""
    path.write_text(markdown(report), encoding="utf-8")


def markdown(report: Report) -> str:
    """The text that `write_markdown` writes."""
    payload = report.payload
    surroundings = payload["environment"]
    device = surroundings["accelerator"] or {}
    versions = ", ".join(f"{name} {found}" for name, found in surroundings["packages"].items() if found)
    facts = [
        f"- {payload['created']}, revision {payload['revision'] or 'not given'}, build {surroundings['build']}",
        f"- {device.get('name') or surroundings['processor']}, {surroundings['cpus_allowed']} CPUs, "
        f"{surroundings['threads']} threads, native code {surroundings['native_instruction_set'] or 'none'}",
        f"- python {surroundings['python']}, {versions}",
        f"- `{' '.join(payload['command'])}`",
    ]
    if surroundings["variables"]:
        facts.append("- " + ", ".join(f"{name}={value}" for name, value in surroundings["variables"].items()))
    selected = Table("Implementations", ("operation", "role", "implementation", "left out"))
    for item in payload["selection"]:
        left_out = "; ".join(f"{name}: {reason}" for name, reason in item["excluded"].items()) or "none"
        selected.rows.append((item["operation"], item["role"], item["implementation"], left_out))
    tables = [table for table in (selected, *report.tables) if table.rows]
    parts = [f"# {verdict(payload)}", "\n".join(facts), *map(markdown_table, tables)]
    return "\n\n".join(parts) + "\n"
