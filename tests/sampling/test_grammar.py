"""Structured output: masks against a grammar that is written out, and text against plain and slow decoding."""

import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from helpers.checkpoints import make_tokenizer
from helpers.kernels import needs_kernels
from helpers.low_bit_model import SIZES, random_model
from helpers.models import VOCABULARY, build, prompt
from helpers.slow_decoding import p_value_of_samples, slow_greedy
from selfspec import Engine, SamplingParams
from selfspec.constraint import Constraint
from selfspec.errors import InvalidParameterError, MissingPackageError
from selfspec.runtimes.chain import Path
from selfspec.runtimes.kernels import row_limit
from selfspec.sampling.grammar import KEPT_MASKS, MOST_COMPILED, GrammarMask, Grammars
from selfspec.sampling.processors import ScoreProcessor

MODEL = build("llama")
PROMPT = prompt(12)
TOKENIZER = make_tokenizer()
EOS = 0
METHODS: dict[str, dict[str, Any]] = {
    "autoregressive": {},
    "layerskip": {"exit_layer": 4, "draft_length": 4},
    "swift": {"context_window": 6, "confidence_threshold": 0.3, "max_draft_length": 5},
    "prompt-lookup": {"max_matching_ngram_size": 1},
    "token-recycling": {"candidates": 8, "tree_size": 24, "prompt_rows": 0},
}
RECORD = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "colour": {"enum": ["red", "green"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["age", "colour", "flags"],
    "additionalProperties": False,
}
TEXTS = ("ab", "abba", "a", "caab", "cab")
ONE_OF = {"enum": list(TEXTS)}
LETTERS = {"type": "string", "pattern": "^[a-e]*$"}


def engine(method: str = "layerskip") -> Engine:
    return Engine(MODEL, make_tokenizer(), method, settings=METHODS[method])


def letters(text: str) -> list[int]:
    """One token for each character, as the tests' tokenizer has it."""
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert len(token_ids) == len(text)
    return token_ids


def one_of_texts(output: Sequence[int]) -> set[int]:
    """The tokens that ``ONE_OF`` allows, found by trying all texts; every token after what it does not allow."""
    if EOS in output:
        return {EOS}
    texts = [letters(json.dumps(text)) for text in TEXTS]
    continued = [text for text in texts if text[: len(output)] == list(output)]
    if not continued:
        return set(range(VOCABULARY))
    return {text[len(output)] if len(text) > len(output) else EOS for text in continued}


def letters_alone(output: Sequence[int]) -> set[int]:
    """The tokens that ``LETTERS`` allows after what it allows."""
    quote = letters('"')[0]
    if not output:
        return {quote}
    return {EOS} if output.count(quote) == 2 or EOS in output else {quote, *letters("abcde")}


def mask_of(schema: dict[str, Any], prompt_length: int = 0) -> GrammarMask:
    return Grammars(TOKENIZER, VOCABULARY, {EOS}).mask(Constraint("json_schema", json.dumps(schema)), prompt_length)


def allowed_after(mask: GrammarMask, context: Sequence[int]) -> set[int]:
    scores = mask(torch.tensor([list(context)], dtype=torch.long), torch.zeros(1, VOCABULARY))
    assert bool(((scores == 0) | (scores == -torch.inf)).all())
    return set((scores[0] == 0).nonzero()[:, 0].tolist())


pieces = st.lists(st.sampled_from([*'"abcx', "\0"]), max_size=5)
whole_texts = st.sampled_from([json.dumps(text) for text in TEXTS])
jumps = st.lists(st.tuples(whole_texts, st.integers(0, 6), pieces), min_size=1)


@settings(max_examples=150, deadline=None)
@given(jumps)
def test_the_mask_of_a_row_depends_on_its_tokens_alone(rows: list[tuple[str, int, list[str]]]) -> None:
    mask = mask_of(ONE_OF, prompt_length=3)
    for text, kept, others in rows:
        output = letters(text[:kept]) + [EOS if piece == "\0" else letters(piece)[0] for piece in others]
        expected = one_of_texts(output)
        assert allowed_after(mask, [5, 5, 5, *output]) == expected, output


def test_masks_that_are_not_kept_any_more_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.sampling.grammar.KEPT_MASKS", 2)
    mask, output = mask_of(LETTERS), letters('"abcdeabcde')
    for length in [*range(12), 4, 11, 0, 7]:
        assert allowed_after(mask, output[:length]) == letters_alone(output[:length])


@pytest.mark.parametrize("seed", range(4))
def test_masks_are_those_of_a_matcher_that_saw_nothing_before(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after changes of tokens long before the last ones, which no draft makes."""
    monkeypatch.setattr("selfspec.sampling.grammar.KEPT_MASKS", 4)
    constraint, choose = Constraint("regex", "((ab|ba)c?)*"), random.Random(seed)
    grammars = Grammars(TOKENIZER, VOCABULARY, {EOS})
    mask, output = grammars.mask(constraint, 2), list[int]()
    ends = [*letters("abc"), EOS]
    for _ in range(500):
        output = output[: max(0, len(output) - choose.choice([0, 0, 1, 2, 3, 9, 30]))]
        output += letters(choose.choice(["", "a", "b", "ab", "ba", "abc", "bacabba", "abab" * 5]))
        if output and choose.random() < 0.1:
            output[choose.randrange(len(output))] = choose.choice(ends)
        fresh = grammars.mask(constraint, 2)
        assert allowed_after(mask, [5, 5, *output]) == allowed_after(fresh, [5, 5, *output]), output


def test_of_a_long_output_the_last_tokens_alone_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them for each row would take time that grows with the square of the length."""
    mask, output = mask_of(LETTERS), torch.tensor([letters('"' + "abcde" * 300)])
    read, tolist = [0], torch.Tensor.tolist

    def counted(self: torch.Tensor) -> Any:
        read.append(self.numel())
        return tolist(self)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    scores = torch.zeros(1, VOCABULARY)
    for length in range(1, 1500, 3):
        for row in range(4):  # of a draft of which the next round keeps three tokens
            mask(output[:, : length + row], scores)
    assert len(read) == 2001
    assert max(read) <= KEPT_MASKS + 4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("schema", "oracle"), [(ONE_OF, one_of_texts), (LETTERS, letters_alone)], ids=["enum", "abc"])
def test_greedy_text_is_that_of_slow_decoding(
    method: str, schema: dict[str, Any], oracle: Callable[[Sequence[int]], set[int]]
) -> None:
    params = SamplingParams(max_new_tokens=40, json_schema=schema)
    result = engine(method).generate(PROMPT, params)
    assert result.token_ids == slow_greedy(MODEL, PROMPT, params, {EOS}, oracle)
    if result.finish_reason == "eos":
        json.loads(result.text)


WORDS = {"regex": "(ab|ba){2,4}c", "grammar": 'start: pair~2..4 "c"\npair: "ab" | "ba"\n'}
GBNF = 'root ::= pair pair pair? pair? "c"\npair ::= "ab" | "ba"\n'


def words(output: Sequence[int]) -> set[int]:
    """The tokens that ``WORDS`` and ``GBNF`` allow, found by trying all texts."""
    if EOS in output:
        return {EOS}
    texts = ["".join(pairs) + "c" for count in (2, 3, 4) for pairs in itertools.product(("ab", "ba"), repeat=count)]
    continued = [ids for text in texts if (ids := letters(text))[: len(output)] == list(output)]
    return {ids[len(output)] if len(ids) > len(output) else EOS for ids in continued} or set(range(VOCABULARY))


@pytest.mark.parametrize("method", ["autoregressive", "layerskip", "prompt-lookup"])
@pytest.mark.parametrize("asked", [*({name: text} for name, text in WORDS.items()), {"grammar": GBNF}])
def test_a_regular_expression_and_grammars_are_followed(method: str, asked: dict[str, str]) -> None:
    params = SamplingParams(max_new_tokens=12, **asked)
    result = engine(method).generate(PROMPT, params)
    assert result.token_ids == slow_greedy(MODEL, PROMPT, params, {EOS}, words)
    assert re.fullmatch(WORDS["regex"], result.text)


@pytest.mark.parametrize(
    "asked", [{"regex": "("}, {"grammar": "start: nowhere"}, {"grammar": 'root ::= "a'}, {"regex": "(?=a)b"}]
)
def test_what_cannot_be_compiled_is_named(asked: dict[str, str]) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{next(iter(asked))} cannot be compiled: "):
        engine().stream(PROMPT, **asked)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 1.3, "seed": 5, "top_k": 3, "frequency_penalty": 0.5},
        {"temperature": 1.0, "seed": 3, "acceptance": "speculative"},
    ],
    ids=["greedy", "seed", "seed top-k penalty", "speculative"],
)
def test_objects_follow_their_schema_with_every_method(method: str, parameters: dict[str, Any]) -> None:
    params = SamplingParams(max_new_tokens=400, json_schema=RECORD, **parameters)
    result = engine(method).generate(PROMPT, params)
    assert result.finish_reason == "eos"
    assert result.token_ids.index(EOS) == result.new_token_count - 1
    record = json.loads(result.text)
    assert list(record) == ["age", "colour", "flags"]
    assert record["age"] in range(1000)
    assert record["colour"] in ("red", "green")
    assert all(type(flag) is bool for flag in record["flags"])
    assert len(record["flags"]) <= 3
    assert result.accepted > 0 or method == "autoregressive"
    if params.acceptance == "auto":
        assert result.token_ids == engine("autoregressive").generate(PROMPT, params).token_ids


@pytest.mark.parametrize("method", METHODS)
def test_speculative_sampling_has_the_distribution_under_the_mask(method: str) -> None:
    params = SamplingParams(max_new_tokens=200, temperature=1.5, seed=1, acceptance="speculative", json_schema=LETTERS)
    params_of_all = {"logit_bias": {letters('"')[0]: -100.0, EOS: -100.0}}
    result = engine(method).generate(PROMPT, params, **params_of_all)
    assert result.new_token_count == 200
    assert result.accepted > 0 or method == "autoregressive"
    written = set(result.token_ids[1:])
    assert written == set(letters("abcde"))
    oracle_params = SamplingParams(temperature=1.5, **params_of_all)
    assert p_value_of_samples(MODEL, PROMPT, result.token_ids, oracle_params, letters_alone) > 1e-3


def test_any_json_object() -> None:
    result = engine().generate(PROMPT, max_new_tokens=60, json_schema='{"type": "object"}', logit_bias={93: 8.0})
    assert result.text.startswith("{")
    plain = engine("autoregressive").generate(
        PROMPT, max_new_tokens=60, json_schema={"type": "object"}, logit_bias={93: 8.0}
    )
    assert result.token_ids == plain.token_ids
    if result.finish_reason == "eos":
        assert isinstance(json.loads(result.text), dict)


def test_after_the_text_only_the_end_is_possible() -> None:
    result = engine().generate(PROMPT, max_new_tokens=12, json_schema={"const": "ab"}, ignore_eos=True)
    assert result.token_ids == (*letters('"ab"'), *[EOS] * 8)


def test_requests_of_a_batch_have_their_own_grammars() -> None:
    shared = engine()
    schemas = [ONE_OF, RECORD, None, LETTERS]
    requests = [(PROMPT, SamplingParams(max_new_tokens=120, json_schema=schema)) for schema in schemas]
    together = shared.generate_each(requests)
    for (_, params), result in zip(requests, together, strict=True):
        assert result.token_ids == shared.generate(PROMPT, params).token_ids


def test_logprobs_are_those_before_the_mask() -> None:
    result = engine().generate(PROMPT, max_new_tokens=30, json_schema=RECORD, logprobs=1)
    free = engine().generate(PROMPT, max_new_tokens=1, logprobs=1)
    assert result.logprobs is not None
    assert free.logprobs is not None
    assert result.logprobs[0].top == free.logprobs[0].top
    assert result.logprobs[0].token_id != free.logprobs[0].token_id


@needs_kernels
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["auto", "autoregressive", "low-bit", "prompt-lookup"])
def test_kernels_choose_what_processors_choose(
    method: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In runs, drafts and verifications, for several requests beside each other; also where a text is complete."""
    params = SamplingParams(60, temperature=temperature, seed=3, json_schema=RECORD)
    others = [replace(params, json_schema=None, regex="(ab|ba){3,9}"), replace(params, json_schema=ONE_OF, top_k=3)]
    requests = [(prompt(12, seed), own) for seed, own in enumerate([params, *others])]
    process, later = ScoreProcessor.__call__, list[int]()

    def processed(self: ScoreProcessor, logits: torch.Tensor, context: Any) -> torch.Tensor:
        fits = len(logits) <= row_limit(logits.dtype)  # kernels take no more rows of a request
        later.extend([1] * (fits and context(0).shape[1] > 12))
        return process(self, logits, context)

    model, tokenizer = random_model(eos_token_id=EOS), make_tokenizer(SIZES["vocab_size"])
    with monkeypatch.context() as patch:
        patch.setattr(ScoreProcessor, "__call__", processed)
        native = Engine(model, tokenizer, method).generate_each(requests)
    assert not later
    assert method == "autoregressive" or sum(each.drafted for each in native) > 0
    monkeypatch.setattr("selfspec.decoding.request.choosing_path", lambda *_, **__: Path("chosen in Python"))
    plain = Engine(model, tokenizer, "autoregressive").generate_each(requests)
    assert [each.token_ids for each in native] == [each.token_ids for each in plain]
    assert "eos" in [each.finish_reason for each in native]
    assert min(each.new_token_count for each in native) > 3


@needs_kernels
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_auto_drafts_what_is_forced(temperature: float) -> None:
    engine = Engine(random_model(eos_token_id=EOS), make_tokenizer(SIZES["vocab_size"]), "auto")
    forced = "(ab|ba)_then_what_is_forced,[0-9]{3,9},_and_more"
    params = SamplingParams(60, temperature=temperature, seed=1, regex=forced)
    result = engine.generate(prompt(12), params)
    assert re.fullmatch(forced, result.text)
    assert sum(each.accepted for each in result.rounds if each.drafted_by == "grammar") > 20
    assert result.token_ids == plain_of(engine).generate(prompt(12), params).token_ids


def plain_of(engine: Engine) -> Engine:
    return Engine(engine.target.model, engine.tokenizer, "autoregressive")


@pytest.mark.parametrize(
    ("constraint", "output", "expected"),
    [
        (Constraint("regex", "abc(d|e)"), "", "abc"),
        (Constraint("regex", "abc(d|e)"), "ab", "c"),
        (Constraint("regex", "abc(d|e)"), "abc", ""),
        (Constraint("regex", "abc(d|e)"), "b", ""),
        (Constraint("regex", "abcd"), "abcd", ""),
    ],
)
def test_what_is_forced(constraint: Constraint, output: str, expected: str) -> None:
    mask = Grammars(TOKENIZER, VOCABULARY, {EOS}).mask(constraint, 0)
    for _ in range(2):
        assert [*mask.forced_after(letters(output))][: len(expected)] == letters(expected)
        assert bool(mask.forced_after(letters(output))) == bool(expected)
    assert not mask.forced_after([*letters(output), EOS])


@pytest.mark.parametrize("scored", [letters(each)[0] for each in "vwxyz"])
def test_tokens_that_the_model_does_not_score_are_not_allowed(scored: int) -> None:
    """Those of a tokenizer with more tokens than the model."""
    mask = Grammars(TOKENIZER, scored, {EOS}).mask(Constraint("regex", "[^e]*"), 0)
    allowed = mask.allowed_after([], ())
    assert allowed is not None
    bits = np.unpackbits(allowed, bitorder="little")
    assert len(bits) == -(-scored // 8) * 8
    assert not bits[scored:].any()
    free = scored - len(letters("e"))
    assert 0 < bits.sum() <= free
    assert not bits[letters("e")].any()
    assert bits[letters("a")].all()


def test_a_schema_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Constraint] = []
    compile_one = Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda self, schema: compiled.append(schema) or compile_one(self, schema))
    grammars = Grammars(TOKENIZER, VOCABULARY, {EOS})
    schemas = [Constraint("json_schema", json.dumps({"const": index})) for index in range(MOST_COMPILED + 1)]
    for _ in range(2):
        for schema in schemas[:-1]:
            grammars.mask(schema, 0)
    assert compiled == schemas[:-1]
    grammars.mask(schemas[-1], 0)
    grammars.mask(schemas[1], 0)
    grammars.mask(schemas[0], 0)
    assert compiled == [*schemas, schemas[0]]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "frog"}, "frog"),
        ({"not": {"type": "string"}}, 'Unimplemented keys: \\["not"\\]'),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"$ref": "#/nowhere"}, "/nowhere"),
        ({"$ref": "http://example.com/schema"}, "example.com"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum"),
        ('{"const": "\\ud800"}', "surrogate|escape"),
        ('{"items":' * 500 + "{}" + "}" * 500, "recursion limit"),
    ],
)
def test_schemas_that_cannot_be_compiled(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"json_schema cannot be compiled: .*(?:{reason})"):
        engine().stream(PROMPT, json_schema=schema)


class Exhausted:
    """A matcher at its limits after three tokens, or one that allows nothing there."""

    def __init__(self, error: str) -> None:
        self.error, self.consumed = error, 0

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        self.consumed += len(token_ids)
        return len(token_ids)

    def compute_bitmask(self) -> bytes:
        return bytes([0 if self.consumed >= 3 else 255]) * (VOCABULARY // 8)

    def is_error(self) -> bool:
        return self.consumed >= 3 and bool(self.error)

    def get_error(self) -> str:
        return self.error


@pytest.mark.parametrize(
    ("error", "message"),
    [("lexer: fuel", "too complex to follow after 3 tokens: lexer: fuel"), ("", "no token .* after 3 tokens")],
)
def test_a_grammar_that_cannot_go_on_ends_the_request_with_an_error(error: str, message: str) -> None:
    matcher: Any = Exhausted(error)
    mask = GrammarMask(matcher, 1, {EOS}, VOCABULARY)
    assert len(allowed_after(mask, [5, 7, 7])) == VOCABULARY
    with pytest.raises(InvalidParameterError, match=message):
        allowed_after(mask, [5, 7, 7, 7])


def test_a_regular_expression_whose_states_double_with_each_letter_ends_the_request() -> None:
    """Without a limit each token would make a state, and compute its mask, until the memory is full."""
    mask = Grammars(TOKENIZER, VOCABULARY, {EOS}).mask(Constraint("regex", "[a-c]*a[a-c]{16}d"), 0)
    text = letters("".join(random.Random(0).choices("ac", k=30_000)))
    with pytest.raises(InvalidParameterError, match=r"too complex to follow after .* too many states"):
        assert all(allowed_after(mask, text[:length]) for length in range(0, len(text), 1000))


def test_what_a_grammar_needs_is_said() -> None:
    with pytest.raises(InvalidParameterError, match="json_schema needs a tokenizer"):
        Engine(MODEL, method="autoregressive").stream(PROMPT, json_schema=RECORD)
    with pytest.raises(InvalidParameterError, match="needs a model with an end-of-sequence token"):
        Grammars(TOKENIZER, VOCABULARY, ()).mask(Constraint("json_schema", "{}"), 0)

    class Slow:
        pass

    slow: Any = Slow()
    with pytest.raises(InvalidParameterError, match="needs a fast tokenizer, not Slow"):
        Grammars(slow, VOCABULARY, {EOS}).mask(Constraint("json_schema", "{}"), 0)


def test_tokens_without_an_embedding_neither_come_nor_end_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that were added to the tokenizer alone."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    monkeypatch.setattr(MODEL.generation_config, "eos_token_id", [EOS, VOCABULARY])
    asked: dict[str, Any] = {"json_schema": ONE_OF, "max_new_tokens": 20}
    expected = engine("autoregressive").generate(PROMPT, **asked)
    assert json.loads(expected.text) in TEXTS
    found = Engine(MODEL, tokenizer, "autoregressive").generate(PROMPT, **asked)
    assert found.token_ids == expected.token_ids


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'selfspec\[structured\]'"):
        engine().stream(PROMPT, json_schema=RECORD)


def test_an_unusual_tokenizer_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no such decoder")

    monkeypatch.setattr("llguidance.hf.from_tokenizer", refuse)
    assert isinstance(TOKENIZER, PreTrainedTokenizerFast)
    with pytest.raises(InvalidParameterError, match="with this tokenizer: no such decoder"):
        Grammars(TOKENIZER, VOCABULARY, {EOS}).mask(Constraint("json_schema", "{}"), 0)


def test_a_schema_is_kept_as_json() -> None:
    params = SamplingParams(json_schema=RECORD)
    assert params.json_schema == json.dumps(RECORD) == SamplingParams(json_schema=json.dumps(RECORD)).json_schema
    assert hash(params) != hash(SamplingParams())
