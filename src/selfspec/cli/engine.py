"""The engine that the options of a command describe."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfspec.engine import Engine


def load_engine(options: Mapping[str, Any], settings: Mapping[str, str], *, prefix_cache: int = 0) -> "Engine":
    """Loads the model that a command names, with its method.

    Args:
        options: the command's options by name, as in ``typer.Context.params``: ``model``, ``method``, ``dtype``,
            ``device``, ``weights``, ``runtime`` and ``keep_copies``.
        settings: of the method; see ``selfspec.cli.inputs.parse_assignments``.
        prefix_cache: most bytes of keys and values of earlier texts; 0 keeps none.

    Raises:
        SelfSpecError: the model cannot be loaded, or method and settings do not fit it.
    """
    from selfspec.engine import Engine

    return Engine.from_pretrained(
        options["model"],
        options["method"],
        settings=settings,
        dtype=options["dtype"],
        device=options["device"],
        weights=options["weights"],
        runtime=options["runtime"],
        keep_copies=options["keep_copies"],
        prefix_cache=prefix_cache,
    )
