"""Every error a user can cause. Each message says what was wrong and what to do about it."""

import textwrap


class SelfSpecError(Exception):
    """Base of all errors that selfspec raises on purpose."""


class UnsupportedModelError(SelfSpecError):
    """The model's family, or a feature of this model, is not supported."""


class ModelLoadError(SelfSpecError):
    """A model or tokenizer could not be loaded: missing folder, missing or corrupt weights, unknown name."""


class TokenizerMismatchError(SelfSpecError):
    """The tokenizer can produce ids that the model has no embedding for."""


class DeviceError(SelfSpecError):
    """An unknown or unavailable device or dtype was asked for."""


class InvalidPromptError(SelfSpecError):
    """The prompt is empty, not decodable, out of vocabulary or not one sequence."""


class ContextLengthError(SelfSpecError):
    """Prompt and new tokens together do not fit the model's context."""


class InvalidParameterError(SelfSpecError):
    """A sampling parameter is out of range or of the wrong type."""


class UnknownMethodError(SelfSpecError):
    """No method has this name."""


class InvalidSettingError(SelfSpecError):
    """A method's setting is unknown, of the wrong type or out of range."""


class StateError(SelfSpecError):
    """A state file is missing, damaged, of another version, or was learned by another method or on another model."""


class NonFiniteLogitsError(SelfSpecError):
    """The target model produced NaN or infinite logits."""


class OutOfMemoryError(SelfSpecError):
    """The device ran out of memory; the engine stays usable."""


class NoGainWarning(UserWarning):
    """A method turned out to be no faster than plain decoding on this model; another one is the better choice."""


def first_line(error: BaseException) -> str:
    """What an exception says, in one line of at most 240 characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = " ".join(lines) if lines[0].rstrip().endswith(":") else lines[0]
    return textwrap.shorten(text, 240, placeholder=" …")
