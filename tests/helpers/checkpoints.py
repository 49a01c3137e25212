"""A tokenizer and checkpoint folders for the tiny random models, as loading and the command line need them."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from helpers.models import VOCABULARY, build

EOS = "<eos>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_tokenizer(entries: int = VOCABULARY, *, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of as many entries: one an ASCII character, then other bytes, then names of no use."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda char: (char not in "ĠĊ", char))[: entries - 1]
    tokens = [EOS, *alphabet, *(f"<unused{index}>" for index in range(entries - 1 - len(alphabet)))]
    backend = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)
    tokenizer.chat_template = chat_template
    return tokenizer


def save_checkpoint(folder: Path, name: str = "llama", *, chat_template: str | None = None) -> Path:
    """Writes a variant and its tokenizer as a folder that ``load_model`` takes."""
    build(name).save_pretrained(folder)
    make_tokenizer(chat_template=chat_template).save_pretrained(folder)
    return folder
