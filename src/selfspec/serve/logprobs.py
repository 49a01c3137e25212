"""Log-probabilities of tokens, in the two forms of OpenAI's API."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from selfspec.serve.backend import Token
from selfspec.serve.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from selfspec.types import TokenLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenNames:
    """Names of single tokens.

    Args:
        tokenizer: of the model.
        as_ids: name a token ``token_id:ID``; several tokens may have the same text.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._names: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        """The name of a token: its text, special tokens included."""
        if self._as_ids:
            return f"token_id:{token_id}"
        if token_id not in self._names:
            self._names[token_id] = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        return self._names[token_id]


def chat_logprobs(tokens: Sequence[Token], names: TokenNames) -> ChatLogprobs:
    """The log-probabilities of a chat's tokens."""
    content = []
    for token in tokens:
        assert token.logprob is not None, "log-probabilities were not asked for"
        top = [
            TopLogprob(token=names(token_id), logprob=logprob, bytes=_as_bytes(names(token_id)))
            for token_id, logprob in token.logprob.top
        ]
        name = names(token.token_id)
        content.append(TokenLogprob(token=name, logprob=token.logprob.logprob, bytes=_as_bytes(name), top_logprobs=top))
    return ChatLogprobs(content=content)


def completion_logprobs(
    tokens: Sequence[Token],
    names: TokenNames,
    top: int,
    *,
    offset: int = 0,
    prompt: Sequence[tuple[str, int, TokenLogprobs | None]] = (),
) -> CompletionLogprobs:
    """The log-probabilities of a completion's tokens.

    Args:
        tokens: of the completion.
        names: of tokens.
        top: number of alternatives that were asked for.
        offset: characters of text before the first token.
        prompt: text, token id and log-probability of each token of the prompt, where it is echoed; the first has none.
    """
    listed = [*prompt, *((token.text, token.token_id, token.logprob) for token in tokens)]
    offsets = []
    for text, _, _ in listed:
        offsets.append(offset)
        offset += len(text)
    return CompletionLogprobs(
        tokens=[names(token_id) for _, token_id, _ in listed],
        token_logprobs=[None if logprob is None else logprob.logprob for *_, logprob in listed],
        top_logprobs=[None if logprob is None else _best(logprob, names) for *_, logprob in listed] if top else None,
        text_offset=offsets,
    )


def _best(logprob: TokenLogprobs, names: TokenNames) -> dict[str, float]:
    """Alternatives by name. Of several tokens with the same name the best counts; the chosen one is among them."""
    best: dict[str, float] = {}
    for token_id, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
        best[names(token_id)] = max(value, best.get(names(token_id), value))
    return best


def _as_bytes(text: str) -> list[int]:
    return list(text.encode("utf-8", "replace"))
