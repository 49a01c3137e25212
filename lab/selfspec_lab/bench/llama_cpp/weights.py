"""GGUF files for llama.cpp: one that is there, or a model's weights as a temporary one; its own quantiser."""

import ctypes
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedModel

from selfspec.errors import ContextLengthError
from selfspec_lab.bench.gguf_names import check_writable
from selfspec_lab.bench.gguf_writer import write_gguf
from selfspec_lab.bench.llama_cpp.library import import_library


class GgufFile:
    """A GGUF file with the number of positions that llama.cpp gets for it.

    Args:
        path: the file.
        context: greatest number of positions, for prompt and output.
        dtype: dtype of the weights; those of a float32 model have a float32 cache.

    Attributes:
        path: see above.
        context: see above.
        dtype: see above.
    """

    def __init__(self, path: Path, context: int, dtype: torch.dtype) -> None:
        self.path, self.context, self.dtype = path, context, dtype

    def check_room(self, tokens: int) -> None:
        """Checks a number of tokens; llama.cpp would end the process if they exceeded ``context``.

        Raises:
            ContextLengthError: they exceed ``context``.
        """
        if tokens > self.context:
            raise ContextLengthError(f"{tokens} tokens do not fit llama.cpp's context of {self.context}")

    def close(self) -> None:
        """The file stays."""

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WeightsFile(GgufFile):
    """A model's weights in a temporary folder; a context manager that removes it.

    Args:
        model: the model.
        context: greatest number of positions, for prompt and output.

    Raises:
        UnsupportedModelError: the model cannot be written.
        InvalidParameterError: there is too little space for the file.
    """

    def __init__(self, model: PreTrainedModel, context: int) -> None:
        check_writable(model, context)
        self._folder = tempfile.TemporaryDirectory(prefix="selfspec-gguf-")
        super().__init__(Path(self._folder.name) / "model.gguf", context, model.dtype)
        try:
            write_gguf(model, self.path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Removes the file; memory mappings of it stay valid."""
        self._folder.cleanup()


def quantise_gguf(
    source: Path, target: Path, ftype: str, *, pure: bool = True, head: str = "", threads: int = 0
) -> None:
    """Writes a file again as llama.cpp quantises it.

    Args:
        source: the file.
        target: where to.
        ftype: llama.cpp's name of what it quantises to, without ``LLAMA_FTYPE_``, as in ``MOSTLY_Q4_0``.
        pure: all matrices get the same type.
        head: type of the LM head where it is another, as in ``F16``.
        threads: that quantise; as many as the processor has if 0.

    Raises:
        RuntimeError: llama.cpp cannot do it.
    """
    library = import_library()
    params = library.llama_model_quantize_default_params()
    params.ftype = getattr(library, f"LLAMA_FTYPE_{ftype}")
    params.pure, params.nthread = pure, threads
    if head:
        params.output_tensor_type = getattr(library, f"GGML_TYPE_{head}")
    status = library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if status != 0:
        raise RuntimeError(f"llama.cpp cannot quantise the model to {ftype}: status {status}")
