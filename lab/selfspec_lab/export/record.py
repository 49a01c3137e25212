"""What was exported, what it promises, and how it is used."""

import shlex
from dataclasses import asdict, dataclass
from typing import Any

from selfspec.model.kept import KeptSet
from selfspec_lab.export.expectation import WORTHWHILE, Expectation
from selfspec_lab.export.pruned import kept_layers, zeroed_halves
from selfspec_lab.export.request import Request
from selfspec_lab.export.usage import usage


@dataclass(frozen=True)
class Export:
    """What was exported, and what it promises."""

    request: Request
    kept: KeptSet
    expectation: Expectation

    @property
    def usage(self) -> dict[str, str]:
        """By engine the command that uses it."""
        request = self.request
        return usage(request.form, request.model, request.folder, self.expectation.best_length)

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        expectation = self.expectation
        return {
            "model": self.request.model,
            "method": self.request.method,
            "format": self.request.form,
            "bits": self.request.file_type,
            "layers": self.kept.total // 2,
            "kept_layers": list(kept_layers(self.kept)),
            "zeroed_sublayers": list(zeroed_halves(self.kept)),
            "skipped_sublayers": list(self.kept.skipped),
            **asdict(expectation),
            "draft_length": expectation.best_length,
            "expected_speedup": expectation.best,
            "usage": self.usage,
        }

    def lines(self) -> list[str]:
        """What it is and what to expect, in lines of text."""
        found, expectation = self.to_dict(), self.expectation
        halves = len(found["zeroed_sublayers"])
        length = expectation.best_length
        return [
            f"{len(found['kept_layers'])} of {found['layers']} layers"
            + (f", {halves} of their halves with zero weights, which cost what they did" if halves else "")
            + (f", matrices in {found['bits']}" if found["bits"] else ""),
            f"acceptance a = {expectation.acceptance:.2f} ({expectation.tokens} tokens); a draft step takes "
            f"c = {expectation.cost:.2f} steps of the model, and reads {expectation.read:.2f} of its bytes",
            f"expected speedup (1 + a + … + a^k) / (k c + v) = {expectation.best:.2f} with k = {length} draft tokens, "
            f"v = {expectation.verification[length]:.2f}",
        ]

    @property
    def warning(self) -> str | None:
        """What to say of a draft that gains little."""
        if self.expectation.best >= WORTHWHILE:
            return None
        return (
            f"this draft promises less than {WORTHWHILE} times the speed of plain decoding; try another method, fewer "
            "bits, or selfspec itself, whose drafts share the model's weights and states"
        )


def note(export: Export) -> str:
    """The ``README.md`` of an export."""
    request = export.request
    chosen = ["--model", request.model, "--method", request.method, "--format", request.form]
    chosen += ["--bits", request.file_type] if request.file_type else []
    chosen += [f"--{name}" for name in ("unpack", "halves") if getattr(request, name)]
    chosen += [f"--set={name}={value}" for name, value in request.settings.items()]
    commands = "\n\n".join(f"{engine}:\n\n```\n{command}\n```" for engine, command in export.usage.items())
    lines = "\n".join(f"- {line}" for line in export.lines())
    return (
        f"# A draft of {request.model}\n\n"
        f"Made with `selfspec export-draft {shlex.join(chosen)} --out {request.folder}`.\n"
        "It drafts for that model; a text that it writes alone is a worse one.\n\n"
        f"{lines}\n\n{commands}\n\nSource and licence are those of the model.\n"
    )
