"""What a server says about itself: engine, version, model, and the draft tokens that it accepted so far."""

from dataclasses import dataclass
from typing import Any

from selfspec.errors import InvalidParameterError
from selfspec_lab.conformance.answer import ServerFaultError, member
from selfspec_lab.conformance.client import Client

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
"""The counter of accepted draft tokens, as vLLM and selfspec name it."""

_NO_ENGINES = ("uvicorn", "hypercorn", "nginx", "me", "system", "organization-owner")
"""Names of HTTP servers and placeholders that say nothing about the engine."""


@dataclass(frozen=True)
class ServerInfo:
    """What a server is.

    Attributes:
        engine: its name; ``None`` if it does not say.
        version: of the engine; ``None`` if it does not say.
        model: name of the model that is asked.
        chooses_drafts: whether a request may turn off speculation (``speculative``, as selfspec has it).
    """

    engine: str | None
    version: str | None
    model: str
    chooses_drafts: bool

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return dict(vars(self))


async def look_up(client: Client, engine: str | None = None) -> ServerInfo:
    """Asks a server what it is, and sets the client's model if it has none.

    Args:
        client: asks.
        engine: name and version that the user gives, instead of what the server says.

    Raises:
        ServerFaultError: it does not answer.
        InvalidParameterError: no model is given, and the server lists none.
    """
    version = await client.send("GET", "/version")
    try:
        models = await client.json("GET", "/v1/models")
    except ServerFaultError:
        if not client.model:
            raise
        models = None
    listed = [each for each in member(models, "data") or () if isinstance(member(each, "id"), str)]
    if not client.model and not listed:
        raise InvalidParameterError(f"{client.url}/v1/models lists no model; name one by --model")
    client.model = client.model or listed[0]["id"]
    card = next((each for each in listed if each["id"] == client.model), None)
    names = (member(card, "owned_by"), version.headers.get("server"))
    name = next((each for each in names if isinstance(each, str) and each not in _NO_ENGINES), None)
    drafts = isinstance(member(card, "selfspec", "methods"), list)
    if engine is not None:
        return ServerInfo(engine, None, client.model, drafts)
    return ServerInfo(name, _version(version), client.model, drafts)


async def accepted_drafts(client: Client) -> float | None:
    """Draft tokens that a server has accepted since it started; ``None`` if it does not count them."""
    try:
        response = await client.send("GET", "/metrics")
    except ServerFaultError:
        return None
    lines = [line.rsplit(" ", 1) for line in response.text.splitlines() if line.startswith(ACCEPTED)]
    counts = [value for name, value in lines if name.partition("{")[0] in (ACCEPTED, f"{ACCEPTED}_total")]
    try:
        return sum(map(float, counts)) if response.status_code == 200 and counts else None
    except ValueError:
        return None


def _version(response: Any) -> str | None:
    """The version in an answer of ``/version``; other servers answer anything there."""
    try:
        found = response.json() if response.status_code == 200 else None
    except ValueError:
        found = None
    version = member(found, "version")
    return version if isinstance(version, str) else None
