"""Whether the questions of a run are chat messages or texts to continue."""

from typing import Any

from selfspec.errors import InvalidParameterError
from selfspec_lab.bench.suites import Suite

_TALK = (("user", "a"), ("assistant", "b"), ("user", "c"))


def decide_chat(asked: bool | None, tokenizer: Any, suite: Suite) -> bool:
    """Whether questions go through the chat template.

    Unless it was asked for or against, they do for a chat model, and where the suite was written as chat messages for
    any model that has a template.

    Args:
        asked: what the user wants; ``None`` for no wish.
        tokenizer: of the model.
        suite: the questions.

    Raises:
        InvalidParameterError: a chat was asked for, and there is no template.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if asked and not has_template:
        raise InvalidParameterError("--chat needs a model whose tokenizer has a chat template; leave it out")
    if asked is not None:
        return asked
    return has_template and (suite.chat or marks_turns(tokenizer))


def marks_turns(tokenizer: Any) -> bool:
    """Whether the chat template sets turns apart by special tokens, as that of a chat model does.

    A model that was not trained on chats can have a template of plain words: that of the bundled checkpoints is
    ``Question: … Answer:``, which fits word problems and nothing else. A token that begins every text does not count.

    Args:
        tokenizer: one with a chat template.
    """
    messages = [{"role": role, "content": content} for role, content in _TALK]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception:  # whatever a template raises; the prompts will say why
        return False
    text = text.removeprefix(tokenizer.bos_token or "")
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return any(token in text for token in special)
