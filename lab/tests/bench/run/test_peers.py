"""What plain decoding is compared with: transformers' own ways to write; for llama.cpp see ``test_llama_cpp.py``."""

from typing import Any

import pytest

from helpers.models import LAYERS, build, prompt
from selfspec import Engine
from selfspec.errors import InvalidParameterError
from selfspec_lab.bench import baseline
from selfspec_lab.bench.run import peers
from selfspec_lab.bench.run.peers import LLAMA_CPP_PEERS, PEERS, TRANSFORMERS_PEERS, find_peers, run_peer


def test_peers_by_name() -> None:
    assert find_peers(["all"]) == list(PEERS)
    assert find_peers(["none"]) == []
    assert find_peers(["transformers", "transformers"]) == ["transformers"]
    assert find_peers(["all"], "not installed") == list(TRANSFORMERS_PEERS)
    assert find_peers(["transformers", "none"], "not installed") == ["transformers"]
    for name in LLAMA_CPP_PEERS:
        with pytest.raises(InvalidParameterError, match=f"the peer {name} cannot be measured: not installed"):
            find_peers(["transformers", name], "not installed")
    with pytest.raises(InvalidParameterError, match="did you mean 'transformers-early-exit'"):
        find_peers(["transformers-early-exits"])


def test_early_exit_leaves_the_model_whole_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")

    def broken(*_: Any, **__: Any) -> Any:
        model.config.num_hidden_layers = 2
        raise RuntimeError("broken")

    monkeypatch.setattr(peers, "generate_timed", broken)
    with pytest.raises(RuntimeError, match="broken"):
        run_peer("transformers-early-exit", model, prompt(9), 4, eos_ids=(), temperature=0.0)
    assert model.config.num_hidden_layers == LAYERS


def test_peers_end_where_plain_decoding_ends() -> None:
    model = build("llama")
    written = Engine(model, method="autoregressive").generate(prompt(9), max_new_tokens=12).token_ids
    end = written[4]
    expected = written[: written.index(end) + 1]
    for name in TRANSFORMERS_PEERS:
        output = run_peer(name, model, prompt(9), 12, eos_ids={end}, temperature=0.0)
        assert output.token_ids == expected


def test_drafts_of_the_first_step_do_not_count_as_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ticks = build("llama"), iter([0.0, 10.0, 16.0])
    monkeypatch.setattr(baseline.time, "perf_counter", lambda: next(ticks))

    def generate(inputs: Any, *, stopping_criteria: Any, **_: Any) -> Any:
        first = inputs.new_ones(1, inputs.shape[1] + 4)  # a first step of four tokens, and then two more
        stopping_criteria(first, None)
        return inputs.new_ones(1, inputs.shape[1] + 6)

    monkeypatch.setattr(model, "generate", generate)
    output = baseline.generate_timed(model, prompt(9), 6, {})
    assert output.prefill_seconds == 10.0
    assert output.seconds == 6.0 / 2 * 5
