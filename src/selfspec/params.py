"""Parameters of a request: how tokens are chosen, what is reported of them, and when the output ends."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from transformers import LogitsProcessor, StoppingCriteria

from selfspec.constraint import Constraint, Kind
from selfspec.errors import InvalidParameterError
from selfspec.ranges import check_number

SamplingMode = Literal["auto", "coupled", "speculative"]

MOST_LOGPROBS = 20
"""Maximum number of alternatives that are reported with a token, as in OpenAI's and vLLM's interface."""

LEAST_TEMPERATURE = 1e-5
"""Less is greedy decoding: logits divided by it could be no numbers."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Attributes:
        max_new_tokens: longest output, in tokens.
        temperature: 0, and less than ``LEAST_TEMPERATURE``, is greedy decoding; otherwise logits are divided by it.
        top_k: keep the ``k`` most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens with at least this probability mass.
        min_p: drop tokens less probable than this share of the most probable one.
        repetition_penalty: above 1 makes tokens of the context less likely (Keskar et al. 2019).
        presence_penalty: subtracted from the logit of every token that the output contains (as OpenAI defines it; the
            prompt does not count), -2 to 2.
        frequency_penalty: subtracted from a token's logit once for every time that the output contains it, -2 to 2.
        logit_bias: added to the logits of single tokens, -100 to 100 by token id.
        min_tokens: end-of-sequence ids and ``stop_token_ids`` are impossible before the output has this many tokens.
            Stop strings and criteria still end it.
        json_schema: a JSON schema, as a mapping or as JSON: the output is a JSON text that it allows, followed by an
            end-of-sequence token. ``{"type": "object"}`` allows any JSON object. An output that ends for another reason
            (length, a stop string) is the beginning of such a text. Kept as JSON.
        regex: a regular expression (Rust's syntax) that the whole output matches, followed as a schema is.
        grammar: a grammar of the output in Lark's notation as llguidance has it, or in llama.cpp's GBNF. Only one of
            ``json_schema``, ``regex`` and ``grammar`` can be given.
        logprobs: report for each token of the output its log-probability, and this many of the most probable tokens
            with theirs, 0 to 20; ``None`` reports nothing. The distribution is the model's own: the softmax of its
            logits before all of the above (vLLM's default).
        prompt_logprobs: the same for the tokens of the prompt. ``max_new_tokens`` may then be 0.
        seed: fixes the random numbers of sampling.
        acceptance: ``coupled`` keys the noise by (seed, position), so that the text depends on the seed alone,
            whichever method drafts; ``speculative`` is rejection sampling (Leviathan et al. 2023), which accepts a
            little more often and gives the same distribution; ``auto`` is coupled with a seed, and with a random one
            where kernels draw then: on a CPU, without ``logits_processors``; else speculative.
        stop: strings that end the output, the token that completes one included.
        stop_token_ids: token ids that end the output, included in it, in addition to the model's end-of-sequence ids.
        ignore_eos: continue past the model's end-of-sequence ids.
        adapter: the name of one of the engine's adapters, with which the output is written; ``None`` for the model
            itself.
        logits_processors: more Hugging Face processors, applied after those of the parameters above.
        stopping_criteria: Hugging Face criteria, called after every token.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    acceptance: SamplingMode = "auto"
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    adapter: str | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    stopping_criteria: tuple[StoppingCriteria, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "logits_processors", "stopping_criteria"):
            value = getattr(self, name)
            if not isinstance(value, Iterable):
                raise InvalidParameterError(f"{name} must be a list, not {value!r}")
            object.__setattr__(self, name, tuple(value))
        check_number("max_new_tokens", self.max_new_tokens, 1 if self.prompt_logprobs is None else 0, whole=True)
        check_number("top_k", self.top_k, 0, whole=True)
        check_number("temperature", self.temperature, 0)
        if self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        check_number("top_p", self.top_p, 0, 1, above=True)
        check_number("min_p", self.min_p, 0, 1)
        check_number("repetition_penalty", self.repetition_penalty, 0, above=True)
        check_number("presence_penalty", self.presence_penalty, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        check_number("min_tokens", self.min_tokens, 0, whole=True)
        if self.min_tokens > self.max_new_tokens:
            raise InvalidParameterError(
                f"min_tokens is {self.min_tokens}, more than max_new_tokens, which is {self.max_new_tokens}"
            )
        object.__setattr__(self, "json_schema", _checked_schema(self.json_schema))
        self._check_constraint()
        if not isinstance(self.ignore_eos, bool):
            raise InvalidParameterError(f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0, MOST_LOGPROBS, whole=True)
        if self.adapter is not None and (not isinstance(self.adapter, str) or not self.adapter):
            raise InvalidParameterError(f"adapter must be the name of an adapter, not {self.adapter!r}")
        if self.seed is not None:
            check_number("seed", self.seed, whole=True)
        if self.acceptance not in ("auto", "coupled", "speculative"):
            raise InvalidParameterError(f"acceptance is 'auto', 'coupled' or 'speculative', not {self.acceptance!r}")
        if self.acceptance == "coupled" and self.seed is None and self.temperature > 0:
            raise InvalidParameterError("coupled sampling needs a seed")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise InvalidParameterError("stop strings must be non-empty strings")
        for token_id in self.stop_token_ids:
            check_number("stop_token_ids", token_id, 0, whole=True)

    @property
    def constraint(self) -> Constraint | None:
        """What the output has to be; ``None`` for any text."""
        given = self._constraints
        return given[0] if given else None

    @property
    def _constraints(self) -> list[Constraint]:
        return [Constraint(kind, getattr(self, kind)) for kind in get_args(Kind) if getattr(self, kind) is not None]

    def _check_constraint(self) -> None:
        given = self._constraints
        kinds = [kind for kind, _ in given]
        if len(given) > 1:
            raise InvalidParameterError(f"{kinds[1]} and {kinds[0]}: the output can follow one of them; drop the other")
        if given and self.min_tokens:
            raise InvalidParameterError(f"min_tokens and {kinds[0]}: the {kinds[0]} says where the text ends; drop one")
        for kind, text in given:
            if not isinstance(text, str) or not text:
                raise InvalidParameterError(f"{kind} must be a non-empty text, not {text!r:.100}")

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random."""
        return self.temperature > 0


def _checked_bias(bias: object) -> dict[int, float]:
    """A copy of a ``logit_bias`` that no one else holds, so that it cannot change."""
    if not isinstance(bias, Mapping):
        raise InvalidParameterError(f"logit_bias must map token ids to numbers, not {bias!r}")
    for token_id, value in bias.items():
        check_number("a token id of logit_bias", token_id, 0, whole=True)
        check_number(f"logit_bias of token {token_id}", value, -100, 100)
    return {token_id: float(value) for token_id, value in bias.items()}


def _checked_schema(schema: object) -> str | None:
    """A ``json_schema`` as JSON."""
    if schema is None:
        return None
    if not isinstance(schema, (str, Mapping)):
        raise InvalidParameterError(f"json_schema must be a mapping or JSON, not {schema!r}")
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else dict(schema)
        text = json.dumps(parsed, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameterError(f"json_schema is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidParameterError(f"json_schema must be a JSON object, not {text}")
    return text
