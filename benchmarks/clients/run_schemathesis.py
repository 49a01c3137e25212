"""``schemathesis``: requests drawn from our OpenAPI document, good ones and bad ones. None may be answered with 5xx."""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from agent_model import make_agent_model
from client import HERE, Client, Setting

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
EXAMPLES, QUICK_EXAMPLES = 1500, 20
"""Requests to draw at most for each operation in a phase."""

LEAST = 20_000
"""Requests of a full run, which begins again with another seed until there are as many."""


def run(setting: Setting) -> dict[str, Any]:
    """Sends the requests. How they were answered is counted in the server's own log."""
    reports = [_drawn(setting, 1)]
    while not setting.quick and len(requests_of(setting.server.log)) < LEAST:
        reports.append(_drawn(setting, len(reports) + 1))
    requests = requests_of(setting.server.log)
    failures = [_told(each) for report in reports for each in report["failures"] + report["errors"]]
    statuses = Counter(each["status"] for each in requests)
    server_errors = sum(count for status, count in statuses.items() if status >= 500)
    return {
        "holds": all(report["complete"] for report in reports) and not failures and not server_errors,
        "requests": len(requests),
        "server_errors": server_errors,
        "failures": failures,
        "slowest_seconds": max(each["seconds"] for each in requests),
        "statuses": {str(status): statuses[status] for status in sorted(statuses)},
        "with_text": Counter(
            each["path"] for each in requests if each["status"] == 200 and "completion_tokens" in each
        ),
        "seconds": round(sum(report["running_time"] for report in reports)),
        "checks": CHECKS.split(","),
    }


def _drawn(setting: Setting, seed: int) -> dict[str, Any]:
    """Sends what is drawn with a seed; gives the client's own report."""
    report, folder = setting.folder / f"report-{seed}.json", setting.folder
    examples = str(QUICK_EXAMPLES if setting.quick else EXAMPLES)
    printed = setting.run(
        *(setting.program("schemathesis"), "run", f"{setting.server.url}/openapi.json", "--no-color", "--workers", "4"),
        *("--phases", "examples,coverage,fuzzing"),  # the stateful one would list the models, over and over
        *("--request-timeout", "60"),  # the machine may be busy; the slowest answer is reported
        *("--checks", CHECKS, "--max-examples", examples, "--continue-on-failure", "--seed", str(seed)),
        *("--report", "json", "--report-json-path", report),
        env={"PYTHONPATH": str(HERE / "hooks"), "SCHEMATHESIS_HOOKS": "selfspec_hooks"},
        check=False,  # a failed check is in the report
        cwd=folder,
    )
    found: dict[str, Any] = json.loads(report.read_text())
    if found["failures"] + found["errors"]:
        print(printed, file=sys.stderr)
    return found


def _told(problem: dict[str, Any]) -> str:
    """A failed check, or what kept schemathesis from making one."""
    return json.dumps(problem)[:1000]


def requests_of(log: Path) -> list[dict[str, Any]]:
    """The requests that a server answered, by its log."""
    lines = (json.loads(line) for line in log.read_text().splitlines() if line.startswith("{"))
    return [line for line in lines if line.get("message") == "request"]


SCHEMATHESIS = Client(
    "schemathesis",
    ["schemathesis==4.32.5"],
    run,
    model=partial(make_agent_model, context=2048),
    options=("--method", "uniform", "--max-new-tokens", "16", "--default-new-tokens", "16", "--max-choices", "8"),
)
