"""``selfspec export-draft``: tunes, prunes, measures, and writes a draft as a checkpoint."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from selfspec import Engine, Prompt
from selfspec.loading import load_model
from selfspec.runtimes.packed import LowBitLinear
from selfspec.runtimes.target import Target
from selfspec_lab.bench.gguf_names import check_writable
from selfspec_lab.bench.gguf_writer import gguf_bytes, write_gguf
from selfspec_lab.export.expectation import expect, write_texts
from selfspec_lab.export.pruned import prune
from selfspec_lab.export.record import Export, note
from selfspec_lab.export.request import RECORD, Request
from selfspec_lab.export.selection import OFFLINE, find_kept
from selfspec_lab.export.usage import GGUF_NAME
from selfspec_lab.export.whole import whole_layers
from selfspec_lab.output_folder import check_disk, written_whole


def export_draft(
    request: Request, prompts: Sequence[Prompt], progress: Callable[[str], None] = lambda _: None
) -> Export:
    """Tunes on every other prompt, measures on the rest (all, if there is one), and writes the draft.

    A GGUF file is measured as it was written, read by selfspec in its own numbers. A failure leaves nothing behind.

    Raises:
        SelfSpecError: what ``Request.check`` raises, and what else loading, tuning and writing raise.
    """
    request.check()
    progress("loading the model")
    settings = {**OFFLINE.get(request.method, {}), **request.settings}
    unpack = request.unpack or request.form != "gguf"
    engine = Engine.from_pretrained(
        request.model, method=request.method, dtype=request.dtype, settings=settings, unpack=unpack
    )
    tuned, measured = prompts[::2], prompts[1::2] or prompts
    kept, tuned_on = find_kept(
        engine,
        tuned,
        max_new_tokens=request.max_new_tokens,
        iterations=request.iterations,
        state=request.state,
        progress=progress,
    )
    if kept.skipped and not request.halves:
        kept = whole_layers(engine.target, kept, tuned_on, progress)
    texts = write_texts(engine, measured, request.max_new_tokens)
    progress("writing the draft")
    draft = _own_weights(engine, request)
    if kept.skipped:
        draft = prune(draft, kept)
    with written_whole(request.folder) as partial:
        if request.form == "gguf":
            draft = _write_gguf(draft, engine, request, partial)
        progress("measuring acceptance and cost")
        export = Export(request, kept, expect(engine.target, Target(draft), texts))
        if request.form != "gguf":
            _save(draft, engine, export, partial)
        (partial / RECORD).write_text(json.dumps(export.to_dict(), indent=1) + "\n", encoding="utf-8")
        (partial / "README.md").write_text(note(export), encoding="utf-8")
    return export


def _own_weights(engine: Engine, request: Request) -> PreTrainedModel:
    """The target with weights of its dtype; a model of few bits is loaded again."""
    model: PreTrainedModel = engine.target.model
    if not any(isinstance(module, LowBitLinear) for module in model.modules()):
        return model
    return load_model(request.model, dtype=request.dtype, device=engine.target.device, unpack=True)[0]


def _write_gguf(draft: PreTrainedModel, engine: Engine, request: Request, folder: Path) -> PreTrainedModel:
    """Writes the file and returns it as selfspec reads it."""
    check_writable(draft, int(draft.config.max_position_embeddings))
    check_disk(gguf_bytes(draft), folder, "choose another folder")
    write_gguf(draft, folder / GGUF_NAME, engine.tokenizer, request.file_type)
    return load_model(folder / GGUF_NAME, dtype=engine.target.dtype, device=engine.target.device)[0]


def _save(draft: PreTrainedModel, engine: Engine, export: Export, folder: Path) -> None:
    """Writes a checkpoint of transformers, with the number of draft tokens that is best."""
    check_disk(sum(weight.nbytes for weight in draft.parameters()), folder, "choose another folder")
    generation: Any = draft.generation_config
    generation.num_assistant_tokens = export.expectation.best_length
    generation.num_assistant_tokens_schedule = "constant"
    generation.assistant_confidence_threshold = 0.0
    draft.save_pretrained(folder)
    if engine.tokenizer is not None:
        engine.tokenizer.save_pretrained(folder)
