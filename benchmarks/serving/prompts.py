"""Prompts of the load: chat messages, all different, so that no cache of prompts answers for the model."""

from __future__ import annotations

import json
from pathlib import Path

_TASKS = (
    "Explain {topic} in a few sentences.",
    "Write a Python class that stores what is known about {topic}, with docstrings.",
    "Write a polite letter to a neighbour who wants to know more about {topic}.",
    "List ten facts about {topic}, one a line, each with a short reason.",
    "Tell a short story in which {topic} is important, and repeat its last sentence at the end.",
)
_TOPICS = (
    *(
        "the tides of the sea",
        "bees and honey",
        "railway signals",
        "old maps",
        "the moon",
        "baking bread",
    ),
    *("bridges of stone", "the migration of birds", "lighthouses", "glaciers", "paper making", "the water cycle"),
    *("chess openings", "volcanoes", "sailing ships", "the history of clocks", "growing tomatoes", "coral reefs"),
    *("wind turbines", "the human heart", "comets", "the silk road", "penguins", "compasses", "cheese", "rivers"),
    *("snow", "radio", "deserts", "ants"),
)

PROMPTS = tuple(task.format(topic=topic) for task in _TASKS for topic in _TOPICS)
"""Messages, neighbours on different topics."""


def read_prompts(file: Path | None) -> list[str]:
    """The messages of a file, or the built-in ones.

    Args:
        file: JSON lines, each a string or an object with a field ``prompt``; ``None`` for the built-in ones.

    Raises:
        ValueError: a line is neither, or there is none.
    """
    if file is None:
        return list(PROMPTS)
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        value = json.loads(line)
        text = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise ValueError(f"line {number} of {file} is neither a string nor an object with a string 'prompt'")
        found.append(text)
    if not found:
        raise ValueError(f"{file} has no prompts; write one a line")
    return found
