"""The page ``docs/clients.md``, a function of the committed results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from selfspec_lab.bench.stamp import commit_text

Result = Mapping[str, Any]

_HEAD = """# Compatibility with clients

What clients of OpenAI's and Anthropic's interfaces get from `selfspec serve`. `python benchmarks/clients/run.py all`
makes an environment for each of them, starts a server for it, and writes this page from `benchmarks/results/clients/`.
OpenAI's client is also part of the tests, and Anthropic's where it is installed.

Where tools are called, the model is SmolLM2 with a template that knows tools, and the calls are forced
(`tool_choice`). Agents let the model choose: there a grammar makes a random model say what a script has, two calls and
a text with their results (`benchmarks/clients/scripted_server.py`). Their requests, the template, the reading of calls
and the streams are real.
"""


def render(results: Mapping[str, Result]) -> str:
    """The page.

    Args:
        results: by name of the client, as ``run.py`` keeps them.
    """
    lines = ["| client | version | holds | in short |", "| --- | --- | --- | --- |"]
    for name, result in results.items():
        found = result["found"]
        short = _SHORT.get(name, _checks_in_short)(found)
        lines.append(f"| [{name}](#{name}) | {result['version']} | {_yes(found['holds'])} | {short} |")
    parts = [_HEAD, "\n".join(lines) + "\n"]
    parts += [
        f"## {name}\n\n{_served(result)}\n\n{_LONG.get(name, _checks)(result['found'])}\n"
        for name, result in results.items()
    ]
    return "\n".join(parts)


def _yes(holds: bool) -> str:
    return "yes" if holds else "**no**"


def _served(result: Result) -> str:
    stamp = result["stamp"]
    hardware = f"{stamp['hardware']['processor']}, {stamp['threads']} threads"
    return f"Asked of `{result['server']}`, commit {commit_text(stamp, 9)}, {hardware}; {result['wall_seconds']:.0f} s."


def _checks_in_short(found: Result) -> str:
    return f"{sum(check['holds'] for check in found['checks'])} of {len(found['checks'])} checks hold"


def _checks(found: Result) -> str:
    lines = [f"| {each['name']} | {_yes(each['holds'])} | {_cell(each['detail'])} |" for each in found["checks"]]
    return "\n".join(["| check | holds | |", "| --- | --- | --- |", *lines])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def _lm_eval_in_short(found: Result) -> str:
    return (
        f"{found['log_likelihoods']} log-likelihoods within {found['largest_gap']:.0e} of the backend `hf`, "
        f"{found['equal_texts']} of {found['texts']} texts equal"
    )


def _lm_eval(found: Result) -> str:
    metrics = "\n".join(f"| {name} | {ours:.3f} | {theirs:.3f} |" for name, (ours, theirs) in found["metrics"].items())
    return (
        "Two tasks over 20 questions of our own (`benchmarks/clients/tasks/`): which of four answers is most likely, "
        "and a greedy text of 48 tokens. `local-completions` asks the server, four requests at a time; `hf` runs "
        "transformers on the same float32 weights.\n\n"
        f"- Log-likelihoods: {found['log_likelihoods']}; the largest difference is {found['largest_gap']:.1e}, and "
        f"whether the answer is the greedy one agrees for {found['same_greedy']}.\n"
        f"- Texts: {found['equal_texts']} of {found['texts']} are equal, {found['characters']} characters.\n\n"
        f"| metric | server | `hf` |\n| --- | --- | --- |\n{metrics}"
    )


def _schemathesis_in_short(found: Result) -> str:
    return (
        f"{found['requests']:,} requests, {found['server_errors']} of them 5xx, {len(found['failures'])} failed checks"
    )


def _schemathesis(found: Result) -> str:
    statuses = ", ".join(f"{status}: {count:,}" for status, count in found["statuses"].items())
    texts = ", ".join(f"{count:,} of `{path}`" for path, count in found["with_text"].items())
    return (
        "Requests drawn from `/openapi.json`, those that fit it and those that do not; a hook makes most of those that "
        f"fit such that the model answers. {found['requests']:,} requests in {found['seconds']} s; checked: "
        f"{', '.join(f'`{check}`' for check in found['checks'])}.\n\n"
        f"- Failed checks: {len(found['failures'])}. Answers with 5xx: {found['server_errors']}. Slowest answer: "
        f"{found['slowest_seconds']:.1f} s.\n"
        f"- By status: {statuses}.\n"
        f"- Answered with text of the model: {texts}."
    )


def _guidellm_in_short(found: Result) -> str:
    figures = (f"{load['tokens_per_second']:.0f} tokens/s with {load['streams']}" for load in found["loads"])
    return f"all chats answered in full; {', '.join(figures)}"


def _guidellm(found: Result) -> str:
    lines = [
        f"| {load['streams']} | {load['successful']} | {load['errored']} | {load['output_tokens']:,} | "
        f"{load['tokens_per_second']:.1f} | {load['first_token_ms']:.0f} | {load['between_tokens_ms']:.1f} |"
        for load in found["loads"]
    ]
    head = (
        "| streams | chats | failed | tokens | tokens/s | first token, ms | between tokens, ms |\n"
        "| --- | --- | --- | --- | --- | --- | --- |"
    )
    return (
        "Synthetic chats of 128 tokens with answers of 64; its own figures (medians of times). The client runs on the "
        "server's processors, so these are no figures of speed: those are in [serving.md](serving.md).\n\n"
        + "\n".join([head, *lines])
    )


_SHORT: dict[str, Callable[[Result], str]] = {
    "lm-eval": _lm_eval_in_short,
    "schemathesis": _schemathesis_in_short,
    "guidellm": _guidellm_in_short,
}
_LONG: dict[str, Callable[[Result], str]] = {"lm-eval": _lm_eval, "schemathesis": _schemathesis, "guidellm": _guidellm}
