"""GGUF files of tiny random models, with a tokenizer, whole or wrong in one way."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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


def rewrite(
    source: Path,
    path: Path,
    change: Callable[[str, Any], Any],
    more: Mapping[str, Any] | None = None,
    *,
    layers: int = 0,
) -> Path:
    """Writes a file again, with the same tensors.

    Args:
        source: the file.
        path: where to.
        change: gives the value of a key in place of its own.
        more: keys that it also gets if it lacks them: whole numbers, and others as float32.
        layers: number of layers, of which it takes its own ones in turns; its own number if 0.
    """
    reader = GGUFReader(source)
    contents: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    writer = GGUFWriter(path, change("general.architecture", contents["general.architecture"]))
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            kinds = field.types[0], field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, change(name, contents[name]), *kinds)
    for name, value in (more or {}).items():
        if name not in contents:
            kind = GGUFValueType.UINT32 if isinstance(value, int) else GGUFValueType.FLOAT32
            writer.add_key_value(name, value, kind)
    for tensor, names in _copies(reader.tensors, layers):
        for name in names:
            writer.add_tensor(name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def deepen(source: Path, path: Path, layers: int) -> Path:
    """Writes a file again with more layers."""
    return rewrite(source, path, lambda key, value: layers if key.endswith(".block_count") else value, layers=layers)


def _copies(tensors: Sequence[Any], layers: int) -> Iterator[tuple[Any, list[str]]]:
    """Each tensor with the names under which it is written."""
    own = len({tensor.name.split(".")[1] for tensor in tensors if tensor.name.startswith("blk.")})
    for tensor in tensors:
        first, layer, *rest = tensor.name.split(".")
        if first == "blk":
            yield tensor, [".".join([first, str(each), *rest]) for each in range(int(layer), layers or own, own)]
        else:
            yield tensor, [tensor.name]


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
