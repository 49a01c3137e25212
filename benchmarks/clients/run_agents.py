"""Agents that others wrote: each reads a file and writes one, by two calls of tools that the server's answers make.

What the model says is a script (``scripted_server.py``), since no small model does well enough to say something of the
server; the agents' requests, the templates, the reading of calls and the streams are real.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from agent_model import make_agent_model
from client import HERE, Client, Setting
from run_schemathesis import requests_of

TASK = "Read the note and make a file."
READS, WRITES = "cat note.txt", "echo made > made.txt && echo written"
WITHIN = 400.0
"""Seconds: a prompt of an agent has 10,000 to 30,000 tokens."""

Command = tuple[list[str], Mapping[str, str]]


def claude(setting: Setting, work: Path) -> Command:
    """Claude Code, which asks ``/v1/messages``."""
    env = {"ANTHROPIC_BASE_URL": setting.server.url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": setting.name}
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"}
    return ["claude", "-p", TASK, "--allowedTools", "Bash"], {**env, **quiet}


def codex(setting: Setting, work: Path) -> Command:
    """Codex, which asks ``/v1/responses``."""
    folder = work.parent / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        f'model = "{setting.name}"\nmodel_provider = "selfspec"\n[model_providers.selfspec]\nname = "selfspec"\n'
        f'base_url = "{setting.server.url}/v1"\nwire_api = "responses"\n'
    )
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return ["codex", "exec", *options, TASK], {"CODEX_HOME": str(folder)}


def opencode(setting: Setting, work: Path) -> Command:
    """opencode, which asks ``/v1/chat/completions``."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{setting.server.url}/v1", "apiKey": "none"},
        "models": {setting.name: {"limit": {"context": 131072, "output": 1024}}},
    }
    settings = {"autoupdate": False, "share": "disabled", "permission": "allow", "provider": {"selfspec": provider}}
    (work / "opencode.json").write_text(json.dumps(settings))
    return ["opencode", "run", "--model", f"selfspec/{setting.name}", TASK], {}


def run(setting: Setting, command: Callable[[Setting, Path], Command]) -> dict[str, Any]:
    """Lets an agent do its task, and looks at what it did."""
    home = setting.folder / "home"
    work = home / "work"
    work.mkdir(parents=True)
    word = secrets.token_hex(8)  # which the answers have only if the result of the first call came back
    (work / "note.txt").write_text(f"The word is {word}.\n")
    (name, *arguments), env = command(setting, work)
    done = subprocess.run(
        [setting.program(name), *arguments],
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WITHIN,
        check=False,
    )
    requests = requests_of(setting.server.log)
    tokens = [each["prompt_tokens"] for each in requests if "prompt_tokens" in each]
    wrong = [f"{each['status']} {each['path']}" for each in requests if each["status"] >= 400]
    made = work / "made.txt"
    answer = done.stdout.rpartition("Done:")[2]
    checks = [
        ("it ends without an error", done.returncode == 0, f"exit code {done.returncode}"),
        ("the first call is executed, and what the tool said is read back", word in answer, READS),
        ("so is the second", made.is_file() and made.read_text() == "made\n" and "written" in answer, WRITES),
        (
            "no answer is 4xx or 5xx",
            bool(requests) and not wrong,
            ", ".join(wrong) or f"{len(requests)} requests; the longest prompt has {max(tokens, default=0):,} tokens",
        ),
    ]
    made_checks = [{"name": name, "holds": holds, "detail": detail} for name, holds, detail in checks]
    holds = all(check["holds"] for check in made_checks)
    if not holds:
        print(done.stdout, done.stderr, sep="\n")
    return {"holds": holds, "checks": made_checks}


def _agent(package: str, command: Callable[[Setting, Path], Command], tool: str, field: str, **more: str) -> Client:
    calls = {tool: [{field: each, **more} for each in (READS, WRITES)]}
    return Client(
        package,
        [],
        partial(run, command=command),
        model=partial(make_agent_model, context=131072),
        options=("--method", "autoregressive"),
        program=(str(HERE / "scripted_server.py"), json.dumps(calls)),
    )


AGENTS = (
    _agent("@anthropic-ai/claude-code@2.1.330", claude, "Bash", "command", description="works"),
    _agent("@openai/codex@0.169.0", codex, "exec_command", "cmd"),
    _agent("opencode-ai@1.18.33", opencode, "bash", "command", description="works"),
)
