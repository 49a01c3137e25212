"""Several prompts at once: each output is that of its prompt alone, through the engine and through generate."""

import functools
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria

from helpers.checkpoints import CHAT_TEMPLATE, make_tokenizer
from helpers.models import VOCABULARY, build, prompt
from selfspec import Engine, Generation, SamplingParams, custom_generate
from selfspec.errors import (
    ContextLengthError,
    InvalidParameterError,
    InvalidPromptError,
    NonFiniteLogitsError,
    UnknownMethodError,
)

MODEL = build("llama")
METHODS: dict[str, dict[str, Any]] = {
    "suffix": {},
    "uniform": {"skip_ratio": 0.5, "draft_length": 4, "confidence_threshold": 0.0},
}
TEXTS = ["def half(", "", "x = 1\nx = 1\nx = 1\nx"]


def make_engine(method: str = "uniform", **options: Any) -> Engine:
    return Engine(MODEL, make_tokenizer(chat_template=CHAT_TEMPLATE), method, settings=METHODS[method], **options)


def told(result: Generation) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.origins, result.finish_reason, result.prompt_token_count


# The engine


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "prompts",
    [
        ["def half(", "x = 1\nx = 1\nx"],
        ("def half(", "x = 1\nx = 1\nx"),
        [prompt(7), tuple(prompt(9)), range(5, 15)],
        [torch.tensor(prompt(7)), torch.tensor([prompt(9)]), prompt(5)],
        [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}, {"role": "user", "content": "no"}]],
        ["only one"],
    ],
    ids=["texts", "tuple", "ids", "tensors", "chats", "one"],
)
@pytest.mark.parametrize(
    "params",
    [SamplingParams(max_new_tokens=40), SamplingParams(max_new_tokens=40, temperature=0.8, seed=5, stop=("e",))],
    ids=["greedy", "seed"],
)
def test_a_list_of_prompts_gives_what_each_gives_alone(method: str, prompts: Any, params: SamplingParams) -> None:
    engine = make_engine(method)
    results = engine.generate(prompts, params, ignore_eos=True)
    assert [told(result) for result in results] == [
        told(engine.generate(one, params, ignore_eos=True)) for one in prompts
    ]
    assert params.samples or sum(result.drafted for result in results) > 0
    assert params.samples or sum(result.accepted for result in results) > 0


def test_a_list_of_tokens_or_messages_is_one_prompt() -> None:
    engine = make_engine()
    chat = [{"role": "user", "content": "hi"}, {"role": "user", "content": "no"}]
    for one in ([5, 17, 3], (5, 17, 3), torch.tensor([[5, 17, 3]]), chat, "text"):
        assert isinstance(engine.generate(one, max_new_tokens=2), Generation)


def test_unseeded_samples_of_one_prompt_differ() -> None:
    first, second = make_engine().generate([prompt(8), prompt(8)], temperature=1.0, max_new_tokens=20)
    assert first.token_ids != second.token_ids


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ([], InvalidPromptError, "neither prompts nor token ids"),
        ((), InvalidPromptError, "neither prompts nor token ids"),
        (["text", [1, 2]], InvalidPromptError, "prompt 1 of the list is a sequence of token ids, but prompt 0 is text"),
        (["text", "more", 5], InvalidPromptError, "prompt 2 of the list is int 5"),
        ([[1], [{"role": "user"}]], InvalidPromptError, "prompt 1 of the list is a chat"),
        ([[1], [2, VOCABULARY]], InvalidPromptError, f"prompt 1: token id {VOCABULARY}"),
        ([[1], [2.5]], InvalidPromptError, r"prompt 1: .* 2.5 at index 0 is not a token id"),
        ([[1], []], InvalidPromptError, "prompt 1: the prompt is empty"),
        ([[[1]], [[2]]], InvalidPromptError, r"prompt 0: .*\[1\] at index 0 is not a token id"),
        (["half", "a surrogate \udc80"], InvalidPromptError, "prompt 1: .* lone surrogate"),
        ([[1], [1] * 1020], ContextLengthError, "prompt 1: a prompt of 1020 tokens"),
        ([[1], torch.ones(2, 3, dtype=torch.long)], InvalidPromptError, r"prompt 1: .* of shape \[2, 3\]"),
        ([5, "text"], InvalidPromptError, r"'text' at index 1 is not a token id"),
        (torch.ones(2, 3, dtype=torch.long), InvalidPromptError, "a list of rows without padding"),
        ([{"role": "user", "content": "a"}, "text"], InvalidPromptError, "message 1 of the chat is str"),
    ],
)
def test_a_wrong_prompt_is_named_and_none_is_run(prompts: Any, error: type[Exception], message: str) -> None:
    engine = make_engine()
    runs: list[int] = []
    hook = MODEL.get_input_embeddings().register_forward_pre_hook(lambda *_: runs.append(1))
    try:
        with pytest.raises(error, match=message):
            engine.generate(prompts, max_new_tokens=10)
    finally:
        hook.remove()
    assert not runs
    assert engine.generate([prompt(5)], max_new_tokens=3)[0].new_token_count == 3


def test_an_error_of_the_model_names_the_prompt() -> None:
    model = build("llama")
    weight = model.get_input_embeddings().weight.detach().clone()
    weight[77] = torch.nan
    broken = type(model)(model.config).eval()
    broken.load_state_dict({**model.state_dict(), "model.embed_tokens.weight": weight})
    with pytest.raises(NonFiniteLogitsError, match="prompt 1: the model computed NaN"):
        Engine(broken, method="autoregressive").generate([[5, 6], [5, 77, 6]], max_new_tokens=1)


@pytest.mark.parametrize("prompts", [["a", "b"], [[1, 2], [3]], [torch.tensor([1])]])
def test_a_stream_takes_one_prompt(prompts: Any) -> None:
    with pytest.raises(InvalidPromptError, match=r"give a list of prompts to Engine\.generate"):
        make_engine().stream(prompts)


# generate


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
    """What the batches of a test have given."""
    seen: list[Generation] = []
    generate_each = Engine.generate_each

    def watched(engine: Engine, *arguments: Any, **options: Any) -> list[Generation]:
        found = generate_each(engine, *arguments, **options)
        seen.extend(found)
        return found

    monkeypatch.setattr(Engine, "generate_each", watched)
    return seen


def pad_left(rows: list[list[int]], pad: int) -> dict[str, torch.Tensor]:
    length = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[pad] * (length - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows]),
    }


def alone(model: PreTrainedModel, row: list[int], **options: Any) -> list[int]:
    """What generate writes after a row without padding."""
    ids = torch.tensor([row])
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **{"do_sample": False, **options})
    return written[0, len(row) :].tolist()


@functools.cache
def plain(new_tokens: int = 30) -> list[list[int]]:
    return [alone(MODEL, row, max_new_tokens=new_tokens, pad_token_id=0) for row in ROWS]


ROWS = [prompt(4), prompt(11), prompt(7)]
PAD = alone(MODEL, ROWS[0], max_new_tokens=5, pad_token_id=0)[4]
"""A token that the first row, a padded one, writes: a context with padding would change what it writes."""


@pytest.mark.parametrize("name", ["llama", "qwen3-window", "gemma2", "mixtral"])
@pytest.mark.parametrize("method", METHODS)
def test_left_padded_rows_write_what_they_write_alone(name: str, method: str, results: list[Generation]) -> None:
    model, inputs = build(name), pad_left(ROWS, PAD)
    common = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": PAD}
    written = model.generate(**inputs, **common, custom_generate=custom_generate(method, METHODS[method]))
    assert torch.equal(written[:, :11], inputs["input_ids"])
    assert written[:, 11:].tolist() == [alone(model, row, **common) for row in ROWS]
    assert torch.equal(written, model.generate(**inputs, **common))
    assert len(results) == len(ROWS)
    assert sum(result.drafted for result in results) > 0
    if method == "uniform":
        assert sum(result.accepted for result in results) > 0


class AvoidsWhatItSaw(LogitsProcessor):
    """A user's own processor that reads all ids it is given."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - 2.0 * torch.zeros_like(scores).scatter(1, input_ids, 1.0)


class EndsAtTwenty(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 20)


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 15, "eos_token_id": [row[index] for index, row in enumerate(plain())]},
        {"min_new_tokens": 3, "eos_token_id": plain()[0][3]},
        {"encoder_repetition_penalty": 1.5},
        {"encoder_no_repeat_ngram_size": 1},
        {"begin_suppress_tokens": [row[0] for row in plain(1)]},
        {"forced_eos_token_id": 1},
        {"exponential_decay_length_penalty": (5, 1.4), "eos_token_id": 1},
        {"bad_words_ids": [[PAD]]},
        {"logits_processor": [AvoidsWhatItSaw()]},
        {"stopping_criteria": [EndsAtTwenty()]},
    ],
    ids=lambda arguments: " ".join(f"{name}" for name in arguments),
)
def test_padding_is_hidden_from_processors_and_criteria(arguments: dict[str, Any], results: list[Generation]) -> None:
    common = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": PAD, **arguments}
    loop = custom_generate("uniform", METHODS["uniform"])
    written = MODEL.generate(**pad_left(ROWS, PAD), **common, custom_generate=loop)[:, 11:].tolist()
    expected = [alone(MODEL, row, **common) for row in ROWS]
    width = max(map(len, expected))
    assert written == [row + [PAD] * (width - len(row)) for row in expected]
    assert any(row != given for row, given in zip(expected, plain(), strict=True))
    assert sum(result.drafted for result in results) > 0


def test_lengths_in_all_count_the_padding_as_in_generate() -> None:
    inputs, end = pad_left(ROWS, 0), plain()[0][3]
    common = {"do_sample": False, "pad_token_id": 0, "max_length": 31, "min_length": 14, "eos_token_id": end}
    written = MODEL.generate(**inputs, **common, custom_generate=custom_generate())
    assert torch.equal(written, MODEL.generate(**inputs, **common))


def test_rows_that_end_early_are_padded_as_generate_pads_them() -> None:
    end = plain()[1][6]
    for pad in (PAD, None):  # without a pad token generate takes the end-of-sequence token
        inputs = pad_left(ROWS, 0)
        common = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": end, "pad_token_id": pad}
        expected = MODEL.generate(**inputs, **common)
        assert (expected[1, -3:] == (end if pad is None else pad)).all()
        loop = custom_generate("uniform", METHODS["uniform"])
        output = MODEL.generate(**inputs, **common, return_dict_in_generate=True, custom_generate=loop)
        assert torch.equal(output.sequences, expected)


def test_prefix_allowed_tokens_fn_is_told_the_row() -> None:
    def allowed(row: int, token_ids: torch.Tensor) -> list[int]:
        return [row, 10 + row, 20 + int(token_ids[-1]) % 3]

    common = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "prefix_allowed_tokens_fn": allowed}
    inputs = pad_left(ROWS, 0)
    written = MODEL.generate(**inputs, **common, custom_generate=custom_generate())
    assert torch.equal(written, MODEL.generate(**inputs, **common))


def test_a_mask_that_generate_infers_from_pad_tokens_is_respected() -> None:
    inputs = pad_left([[token or 1 for token in row] for row in ROWS], 0)
    common = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    expected = MODEL.generate(**inputs, **common)
    assert torch.equal(MODEL.generate(inputs["input_ids"], **common, custom_generate=custom_generate()), expected)


def test_position_ids_of_left_padding_are_accepted() -> None:
    inputs = pad_left(ROWS, 0)
    common = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "custom_generate": custom_generate()}
    for padding in (0, 1):  # transformers has written either at padding
        positions = (inputs["attention_mask"].cumsum(1) - 1).masked_fill(inputs["attention_mask"] == 0, padding)
        written = MODEL.generate(**inputs, position_ids=positions, **common)
        assert torch.equal(written, MODEL.generate(**inputs, **common))


IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
ONES = torch.ones(2, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])}, "row 1 is padded at token 3"),
        ({"attention_mask": torch.tensor([[0, 1, 0, 1], [1, 1, 1, 1]])}, "row 0 is padded at token 2"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])}, "row 1 has only padding"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1], [2, 1, 1, 1]])}, "row 1 of attention_mask has values other"),
        ({"attention_mask": torch.zeros(2, 5, dtype=torch.long)}, r"shape \[2, 5\]"),
        ({"position_ids": torch.tensor([[1, 2, 3, 4]])}, "row 0 must count from 0"),
        ({"position_ids": torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]])}, "row 1 must count from 0"),
        (
            {"attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]), "position_ids": torch.arange(4)[None]},
            "row 1 must count from 0 after its padding",
        ),
        ({"pad_token_id": 10}, "row 1 is padded at token 1, .* give a mask of ones"),
    ],
)
def test_padding_that_cannot_be_left_out_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPromptError, match=message):
        MODEL.generate(IDS, max_new_tokens=5, custom_generate=custom_generate(), **arguments)


def test_an_error_names_the_row() -> None:
    with pytest.raises(InvalidPromptError, match=f"row 1: token id {VOCABULARY}"):
        MODEL.generate(IDS + torch.tensor([[0], [VOCABULARY - 9]]), max_new_tokens=5, custom_generate=custom_generate())


def test_a_seed_makes_rows_what_they_are_alone_and_copies_of_a_row_differ() -> None:
    common = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.9, "pad_token_id": 0}

    def sample(rows: list[list[int]], seed: int, copies: int = 1) -> list[list[int]]:
        loop = custom_generate("uniform", METHODS["uniform"], seed=seed)
        inputs = pad_left(rows, 0)
        written = MODEL.generate(**inputs, **common, num_return_sequences=copies, custom_generate=loop)
        return written[:, inputs["input_ids"].shape[1] :].tolist()

    apart = {seed: [sample([row], seed)[0] for row in ROWS] for seed in (3, 4)}
    assert sample(ROWS, 3) == apart[3]
    assert apart[3] != apart[4]
    assert sample(ROWS, 3, copies=2) == [text for pair in zip(apart[3], apart[4], strict=True) for text in pair]


def test_unseeded_copies_of_a_row_differ() -> None:
    first, second = MODEL.generate(
        **pad_left(ROWS[:1], 0),
        max_new_tokens=20,
        do_sample=True,
        num_return_sequences=2,
        pad_token_id=0,
        custom_generate=custom_generate(),
    )
    assert not torch.equal(first, second)


def test_a_seed_that_is_no_number_is_refused_at_once() -> None:
    with pytest.raises(InvalidParameterError, match="seed"):
        custom_generate("suffix", seed=1.5)
    with pytest.raises(UnknownMethodError):
        custom_generate("sufix")
