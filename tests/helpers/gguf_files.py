"""GGUF files of tiny random models, with a tokenizer, whole or wrong in one way."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from selfspec_lab.bench.gguf_writer import write_gguf

CHAT_TEMPLATE = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}[assistant]"
EOS = "<|endoftext|>"
MERGED = "th"
"""The one entry that is more than a byte."""

_NORMAL, _CONTROL = 1, 3


def save_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    tokenizer: bool = True,
    chat_template: str | None = CHAT_TEMPLATE,
    family: str | None = None,
    quantised: GGMLQuantizationType | None = None,
    more: dict[str, Any] | None = None,
) -> Path:
    """Writes a model as a GGUF file.

    Args:
        model: of a family that ``write_gguf`` takes.
        path: where to.
        tokenizer: whether the file has a tokenizer: one entry a byte, after an end-of-sequence token.
        chat_template: the chat template of the tokenizer; none if ``None``.
        family: what the file says it is; the model's own if not given.
        quantised: what its matrices are stored as; as they are if not given.
        more: further whole numbers in its head.
    """
    plain = path.with_name(f"plain-{path.name}")
    write_gguf(model, plain)
    reader = GGUFReader(plain)
    own: Any = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(path, family or own)
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture", "tokenizer.")):
            writer.add_key_value(name.replace(f"{own}.", f"{family or own}."), field.contents(), field.types[0])
    for name, value in (more or {}).items():
        writer.add_key_value(name, value, GGUFValueType.UINT16)
    if tokenizer:
        _add_tokenizer(writer, model.config.vocab_size, chat_template)
    for tensor in reader.tensors:
        data: Any = np.array(tensor.data)
        kind = tensor.tensor_type
        if quantised is not None and len(tensor.shape) > 1:
            numbers = quants.dequantize(data, kind).reshape(tuple(reversed(tensor.shape.tolist())))
            data, kind = quants.quantize(numbers.astype(np.float32), quantised), quantised
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain.unlink()
    return path


def _add_tokenizer(writer: Any, entries: int, chat_template: str | None) -> None:
    characters = sorted(bytes_to_unicode().values(), key=lambda char: (char not in "ĠĊ" and not char.isascii(), char))
    tokens = [EOS, *characters[: entries - 2], MERGED]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL, *[_NORMAL] * (len(tokens) - 1)])
    writer.add_token_merges([" ".join(MERGED)])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
