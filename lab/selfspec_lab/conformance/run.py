"""Runs all checks on a server."""

import secrets
from collections.abc import Callable
from datetime import datetime, timezone
from itertools import chain

import selfspec
from selfspec.errors import InvalidParameterError
from selfspec_lab.conformance.answer import NotSupportedError, ServerFaultError
from selfspec_lab.conformance.checks import Check, all_checks
from selfspec_lab.conformance.client import Client
from selfspec_lab.conformance.interfaces import INTERFACES, Interface, Request
from selfspec_lab.conformance.report import CheckResult, Report, Settings
from selfspec_lab.conformance.server_info import look_up
from selfspec_lab.conformance.subject import Comparisons, Outcome, Subject
from selfspec_lab.prompts import CHAT_PROMPTS, PROMPTS

TEXTS = tuple(chain.from_iterable(zip(*PROMPTS.values(), strict=True)))
"""Prompts of completions: code, mathematics and prose in turns."""

MESSAGES = (*CHAT_PROMPTS.values(), *TEXTS)
"""Prompts of chats."""

Progress = Callable[[str], None]


async def run_checks(
    client: Client, reference: Client | None, settings: Settings, engine: str | None, progress: Progress
) -> Report:
    """Asks a server by both interfaces, and compares.

    Args:
        client: asks the server.
        reference: asks the same engine without speculation, or ``None``.
        settings: what is asked.
        engine: name and version of the engine, instead of what the server says.
        progress: called with what is being done.

    Raises:
        InvalidParameterError: a setting is out of range, or no model is known.
        ServerFaultError: one of the servers does not answer, or by none of the interfaces.
    """
    check_settings(settings)
    began = datetime.now(timezone.utc).isoformat(timespec="seconds")
    progress("looking at the server")
    info = await look_up(client, engine)
    reference_info = None if reference is None else await look_up(reference, engine)
    salt, results, not_asked = secrets.token_hex(4), [], {}
    for interface in INTERFACES:
        progress(f"{interface.name}: answers alone")
        requests = _requests(interface, settings)
        try:
            texts = [(await client.ask(request)).text for request in requests]
        except ServerFaultError as fault:
            not_asked[interface.name] = str(fault)
            continue
        if not any(texts):
            not_asked[interface.name] = "all answers are empty"
            continue
        subject = Subject(client, info, reference, requests, texts, salt)
        for check in all_checks(settings.at_once):
            progress(f"{interface.name}: {check.name}")
            results.append(CheckResult(check.name, interface.name, await _run(check, subject)))
    if not results:
        raise ServerFaultError("; ".join(f"{name}: {reason}" for name, reason in not_asked.items()))
    return Report(info, reference_info, began, selfspec.__version__, settings, not_asked, tuple(results))


def check_settings(settings: Settings) -> None:
    """Refuses settings out of range.

    Raises:
        InvalidParameterError: one is.
    """
    if not 1 <= settings.prompts <= len(TEXTS):
        raise InvalidParameterError(f"--prompts is from 1 to {len(TEXTS)}, not {settings.prompts}")
    if settings.tokens < 1:
        raise InvalidParameterError(f"--tokens is at least 1, not {settings.tokens}")
    if not all(count >= 2 for count in settings.at_once):
        raise InvalidParameterError("--at-once has numbers of at least 2")


def _requests(interface: Interface, settings: Settings) -> list[Request]:
    texts = (TEXTS if interface.name == "completions" else MESSAGES)[: settings.prompts]
    return [Request(interface, interface.prompt(text), settings.tokens) for text in texts]


async def _run(check: Check, subject: Subject) -> Outcome:
    """Makes a check. What it compared before the server failed counts."""
    found = Comparisons(subject)
    try:
        return found.outcome("passed", await check.run(subject, found))
    except NotSupportedError as reason:
        return found.outcome("not supported", str(reason))
    except ServerFaultError as fault:
        return found.outcome("not supported" if fault.refused and check.may_be_refused else "failed", str(fault))
