"""Errors that a user can cause. Each message says what is wrong and what to do about it."""

import contextlib
import textwrap
from collections.abc import Iterator

IN_THE_LAB = "is part of selfspec-lab; run `pip install ./lab` in a checkout of selfspec"
"""What errors say of a name that belongs to the package of benchmarks."""


class SelfSpecError(Exception):
    """Base class of all errors that selfspec raises."""


class UnsupportedModelError(SelfSpecError):
    """The model's family, or a feature of this model, is not supported."""


class ModelLoadError(SelfSpecError):
    """A model or tokenizer could not be loaded: missing folder, missing or corrupt weights, unknown name."""


class AdapterError(SelfSpecError):
    """An adapter cannot be loaded: missing or corrupt files, of another model, or of a kind that is not supported."""


class TokenizerMismatchError(SelfSpecError):
    """The tokenizer, tokens that were added to it aside, has ids that the model has no embedding for."""


class DeviceError(SelfSpecError):
    """A requested device or dtype is unknown or unavailable."""


class InvalidPromptError(SelfSpecError):
    """The prompt is empty, not decodable, out of vocabulary or not one sequence."""


class ContextLengthError(SelfSpecError):
    """Prompt and new tokens together do not fit the model's context."""


class InvalidParameterError(SelfSpecError):
    """A sampling parameter is out of range or of the wrong type."""


class UnknownMethodError(SelfSpecError):
    """No method has this name."""


class MethodLoadError(SelfSpecError):
    """A method from outside selfspec cannot be imported, or is no complete method."""


class InvalidSettingError(SelfSpecError):
    """A method's setting is unknown, of the wrong type or out of range."""


class StateError(SelfSpecError):
    """A state file is missing, damaged, of another version, or was learned by another method or on another model."""


class NonFiniteLogitsError(SelfSpecError):
    """The target model produced NaN or infinite logits."""


class OutOfMemoryError(SelfSpecError):
    """The device ran out of memory; the engine stays usable."""


class RequestTooLargeError(SelfSpecError):
    """A request needs more memory for its keys and values than the engine may use for all requests."""


class QueueFullError(SelfSpecError):
    """The maximum number of requests is waiting; try again later."""


class RanksError(SelfSpecError):
    """Processes that share a model differ in what they were given, or one of them was lost."""


class EngineClosedError(SelfSpecError):
    """The engine is closed, or was closed before the request ended."""


class EngineFailedError(EngineClosedError):
    """An unexpected exception ended the engine's thread, and all of its requests; make another engine."""


class RequestCancelledError(SelfSpecError):
    """The request was cancelled before it ended."""


class RequestTimeoutError(SelfSpecError):
    """The output of a request was not complete in time."""


class RequestFailedError(SelfSpecError):
    """An unexpected exception ended the request: of its own processors or criteria, of a method, or of the engine."""


class ServeError(SelfSpecError):
    """A server cannot start: its port is in use, its certificate is missing."""


class MissingPackageError(SelfSpecError):
    """A feature needs a package that is not installed; the message says what to install."""


class PluginError(SelfSpecError):
    """A command that another package adds cannot be loaded."""


class SelfSpecWarning(UserWarning):
    """Base class of all warnings of selfspec."""


class NoGainWarning(SelfSpecWarning):
    """A method is no faster than autoregressive decoding on this model; use another method."""


class ChangedPaperWarning(SelfSpecWarning):
    """A setting of a paper's preset was given another value, so the method is not the paper's."""


class NoLowBitWeightsWarning(SelfSpecWarning):
    """Low-bit draft weights do not fit into the memory, so the method does not draft with them."""


class NoHeadWarning(SelfSpecWarning):
    """The checkpoint has a multi-token-prediction head that cannot run, so ``auto`` does not draft with it."""


class DeviceMemoryWarning(SelfSpecWarning):
    """A device has not enough memory for a runtime, for low-bit weights, or for all requests of a batch at once."""


class FallbackWarning(SelfSpecWarning, RuntimeWarning):
    """What was asked for cannot run or be kept here, so something slower runs."""


class EngineVersionWarning(SelfSpecWarning):
    """Another engine has a version with which its bridge was not tested."""


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Begins the errors of selfspec that are raised within with what they are about; an empty text changes nothing."""
    try:
        yield
    except SelfSpecError as error:
        if not what:
            raise
        raise type(error)(f"{what}: {error}") from error


@contextlib.contextmanager
def explaining(kind: type[SelfSpecError], what: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns errors of other packages that are raised within, of any class if none is named, into one of selfspec.

    Its message says what failed, and the first line of theirs.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SelfSpecError) or (errors and not isinstance(error, errors)):
            raise
        raise kind(f"{what}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The message of an exception in one line of at most 240 characters.

    The whole message if its first line ends in a colon; the name of the class if there is no message.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = " ".join(lines) if lines[0].rstrip().endswith(":") else lines[0]
    return textwrap.shorten(text, 240, placeholder=" …")
