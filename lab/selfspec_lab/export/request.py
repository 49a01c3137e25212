"""What is to be exported, checked before the weights are read."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfspec.errors import InvalidParameterError
from selfspec.loading import load_config
from selfspec_lab.bench.gguf_names import check_family
from selfspec_lab.bench.gguf_writer import BITS, QUANTISED, import_gguf
from selfspec_lab.export.pruned import check_prunable
from selfspec_lab.export.selection import LOW_BIT, check_method
from selfspec_lab.output_folder import check_output_folder

FORMATS = ("transformers", "gguf")
RECORD = "draft.json"
"""File of an export, by which it is known as one."""


@dataclass(frozen=True)
class Request:
    """What to export.

    Attributes:
        model: name of the target, as ``load_model`` takes it.
        method: one of ``selection.EXPORTED``.
        folder: where to.
        form: one of ``FORMATS``.
        bits: of a GGUF file's matrices, one of ``gguf_writer.BITS``; ``None`` takes Q8_0, and Q4_0 for ``low-bit``.
        dtype: of the target, as ``load_model`` takes it.
        unpack: the target is the unpacked model, not one of few bits, for a GGUF file, too.
        settings: of the method.
        state: what the method has found before.
        max_new_tokens: tokens to generate for each text.
        iterations: sets that ``self-spec`` measures.
        halves: keep layers of which the method skips one sublayer, with zero weights there, instead of whole layers.
        force: replace an earlier export.
    """

    model: str
    method: str
    folder: Path
    form: str = "transformers"
    bits: str | None = None
    dtype: str = "auto"
    unpack: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    state: Path | None = None
    max_new_tokens: int = 96
    iterations: int = 25
    halves: bool = False
    force: bool = False

    @property
    def file_type(self) -> str | None:
        """Type of the matrices in a GGUF file; ``None`` for a checkpoint of transformers."""
        return None if self.form != "gguf" else self.bits or ("Q4_0" if self.method == LOW_BIT else "Q8_0")

    def check(self) -> None:
        """Checks all that can be checked before the weights are read.

        Raises:
            SelfSpecError: of the class that fits; the message says what to change.
        """
        check_method(self.method)
        if self.form not in FORMATS:
            raise InvalidParameterError(f"there is no format '{self.form}'; choose {' or '.join(FORMATS)}")
        if self.form != "gguf" and self.method == LOW_BIT:
            raise InvalidParameterError(
                "low-bit drafts with the whole model at fewer bits, which checkpoints of transformers hold only in the "
                "format of a quantiser; choose --format gguf"
            )
        if self.form != "gguf" and self.bits is not None:
            raise InvalidParameterError(
                "--bits is for GGUF files, a checkpoint of transformers has the model's dtype; choose --format gguf"
            )
        if self.bits is not None and self.bits not in BITS:
            raise InvalidParameterError(f"there are no bits '{self.bits}'; choose {', '.join(BITS)}")
        if self.method == LOW_BIT and self.file_type not in QUANTISED:
            raise InvalidParameterError(f"low-bit needs fewer bits than BF16; choose --bits {' or '.join(QUANTISED)}")
        if self.max_new_tokens < 2:
            raise InvalidParameterError(f"--max-new-tokens must be at least 2, not {self.max_new_tokens}")
        if self.iterations < 1:
            raise InvalidParameterError(f"--iterations must be at least 1, not {self.iterations}")
        check_output_folder(self.folder, replaced_with=RECORD if self.force else None)
        config = load_config(self.model)
        if self.method != LOW_BIT:
            check_prunable(config)
        if self.form == "gguf":
            import_gguf()
            check_family(config)
