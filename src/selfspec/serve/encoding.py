"""The token ids of the prompts of a request."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.chat_encoder import ChatEncoder
from selfspec.constraint import Constraint
from selfspec.decoding.text import TextStream
from selfspec.serve.api_errors import UNSUPPORTED, invalid, renaming
from selfspec.serve.chats import as_dicts, asked_of, prefilled, variables_of
from selfspec.serve.fill import FillTokens
from selfspec.serve.formats.dialect import Asked, Dialect
from selfspec.serve.requests import ChatRequest, CompletionRequest, Message


@dataclass(frozen=True)
class EncodedChat:
    """A chat as token ids.

    ``asked`` and ``thinks`` tell how its answer is to be read: see ``Dialect``. ``constraint`` is what it has to be.
    """

    token_ids: list[int]
    asked: Asked
    thinks: bool
    constraint: Constraint | None


class RequestEncoder:
    """Encodes the prompts of requests. Used from one thread at a time, with a tokenizer of its own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._encoder = ChatEncoder(tokenizer, vocab_size)
        self._reserved = {*inspect.signature(tokenizer.apply_chat_template).parameters, "self", "messages"} - {"kwargs"}
        self._dialect = Dialect(tokenizer)
        self._fill = FillTokens(tokenizer)

    def completion(self, request: CompletionRequest) -> list[list[int]]:
        """The token ids of each prompt; refuses empty prompts, and ids out of the vocabulary."""
        encoded = []
        for index, prompt in enumerate(request.prompts):
            with renaming({"prompt": "prompt" if prompt is request.prompt else f"prompt[{index}]"}):
                encoded.append(
                    self._encoder.encode_text(prompt, add_special_tokens=request.add_special_tokens)
                    if isinstance(prompt, str)
                    else self._encoder.check_ids(list(prompt))
                )
        return encoded

    def chat(self, request: ChatRequest) -> EncodedChat:
        """A chat with what its answer has to be; refuses what its template does."""
        asked, dialect = asked_of(request, self._dialect), self._dialect
        token_ids = self.messages(request.messages, **variables_of(request, dialect, self._reserved))
        thinks = dialect.is_thinking(token_ids, prefilled(request))
        return EncodedChat(token_ids, asked, thinks, dialect.constraint(asked, token_ids, thinks=thinks))

    def messages(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """The token ids of messages, by the chat template with these variables.

        Control tokens are what the template writes; in the texts of messages and variables they are text.
        """
        given = {name: value for name, value in variables.items() if value is not None}
        with renaming({"prompt": "messages"}):
            return self._encoder.encode_chat(as_dicts(messages, self._dialect), given)

    def fill(self, before: str, after: str, files: Sequence[tuple[str, str]] = ()) -> list[int]:
        """The token ids after which a model writes what is between two texts; refused where there are none."""
        if not self._fill.can_fill:
            text = "the tokenizer of this model has no tokens to fill in the middle; leave suffix out"
            raise invalid(text, "suffix", UNSUPPORTED)
        return self._encoder.check_ids(self._fill.encode(before, after, self._encoder.words, files))

    def text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text; an empty one has none where there is no BOS token."""
        return self._encoder.encode_text(text, add_special_tokens=add_special_tokens) if text else []

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included; refuses ids out of the vocabulary."""
        with renaming({"prompt": "tokens"}):
            known = self._encoder.check_ids(list(token_ids)) if token_ids else []
        return str(self._tokenizer.decode(known, skip_special_tokens=False))

    def texts(self, token_ids: Sequence[int]) -> list[tuple[str, int]]:
        """The tokens of a prompt, each with its text; the texts, joined, are the prompt's."""
        stream = TextStream(self._tokenizer, skip_special_tokens=False)
        texts = [stream.push(token_id) for token_id in token_ids]
        texts[-1] += stream.flush()
        return list(zip(texts, token_ids, strict=True))

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The tokenizer's own strings of tokens."""
        return [str(token) for token in self._tokenizer.convert_ids_to_tokens(list(token_ids))]
