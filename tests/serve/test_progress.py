"""Chunks of a stream say what drafts have been worth so far."""

from helpers.checkpoints import CHAT_TEMPLATE, make_tokenizer
from helpers.models import build
from helpers.serving import events, make_client
from selfspec.engine import Engine
from selfspec.serve.engine_options import EngineOptions
from selfspec.serve.local import LocalBackend


def test_rates_come_with_the_chunks_and_end_at_those_of_the_report() -> None:
    engine = Engine(build("llama"), make_tokenizer(chat_template=CHAT_TEMPLATE), "suffix")
    speculative = {"report": True}
    body = {"prompt": "abcabcabcabcabc", "temperature": 0, "max_tokens": 60, "stream": True, "speculative": speculative}
    with make_client(LocalBackend(EngineOptions("tiny", "suffix"), engine)) as client:
        chunks = events(client.post("/v1/completions", json=body).text)[:-1]
        plain = client.post("/v1/completions", json={**body, "speculative": {"report": True, "enabled": False}})
    *reports, last = [chunk["selfspec"] for chunk in chunks]
    rates = [report["acceptance_rate"] for report in reports if "acceptance_rate" in report]
    speedups = [report["speedup_estimate"] for report in reports if "speedup_estimate" in report]
    assert len(rates) > 3
    assert len(set(speedups)) > 3
    assert last["accepted_tokens"] > 0
    assert rates[-1] == last["acceptance_rate"]
    assert speedups[-1] == last["speedup_estimate"]
    assert not any("acceptance_rate" in chunk["selfspec"] for chunk in events(plain.text)[:-2])
