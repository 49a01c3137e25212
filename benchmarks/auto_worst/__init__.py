"""What ``auto`` loses at worst on a real clock: against adversarial texts, and in the first request on a machine."""

from selfspec import Engine
from selfspec_lab.prompts import CHAT_PROMPTS


def encode(engine: Engine, name: str) -> list[int]:
    """The token ids of a prompt by name; a chat where the model has a template for it."""
    text = CHAT_PROMPTS[name]
    chats = getattr(engine.tokenizer, "chat_template", None)
    return engine.encode([{"role": "user", "content": text}] if chats else text)
