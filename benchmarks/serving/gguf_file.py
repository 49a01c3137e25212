"""A GGUF file with its tensors in bfloat16, for llama.cpp: the values that selfspec unpacks the same file to."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import gguf

_NOT_COPIED = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def write_bfloat16(source: Path, target: Path) -> None:
    """Writes a GGUF file again: matrices in bfloat16, vectors in float32, everything else as it is.

    Args:
        source: a GGUF file with a tokenizer.
        target: the file to write.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    with closing(gguf.GGUFWriter(target, architecture)) as writer:
        for name, field in reader.fields.items():
            if not name.startswith(_NOT_COPIED):
                items = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(name, field.contents(), field.types[0], items)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            kind = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else gguf.GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
