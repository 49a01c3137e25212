"""Whether the questions of a run are chat messages or texts to continue."""

from typing import Any

from selfspec.errors import InvalidParameterError
from selfspec_lab.bench.suites import Suite

_TALK = (("user", "a"), ("assistant", "b"), ("user", "c"))


def decide_chat(asked: bool | None, tokenizer: Any, suite: Suite) -> bool:
    """Decides whether questions go through the chat template.

    By default they do for a chat model; if the suite consists of chat messages, for any model with a template.

    Args:
        asked: the user's choice; ``None`` for the default.
        tokenizer: the model's tokenizer.
        suite: the questions.

    Raises:
        InvalidParameterError: a chat is requested, but there is no template.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if asked and not has_template:
        raise InvalidParameterError("--chat needs a model whose tokenizer has a chat template; leave it out")
    if asked is not None:
        return asked
    return has_template and (suite.chat or marks_turns(tokenizer))


def marks_turns(tokenizer: Any) -> bool:
    """Whether the chat template separates turns with special tokens, like that of a chat model.

    A model that was not trained on chats can have a template of plain text: that of the bundled checkpoints is
    ``Question: … Answer:``, for word problems. The token that starts every text does not count.

    Args:
        tokenizer: a tokenizer with a chat template.
    """
    messages = [{"role": role, "content": content} for role, content in _TALK]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception:  # any error of the template; it is reported when prompts are made
        return False
    text = text.removeprefix(tokenizer.bos_token or "")
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return any(token in text for token in special)
