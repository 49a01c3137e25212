"""How much of a model drafts skip by default: less of a small model than of a large one.

The papers skip 45 to 50 % of models with 7 to 70 billion parameters. Small models have less to spare. SmolLM2-135M (six
chat messages, 128 output tokens each, bfloat16; ``benchmarks/method_settings.py``) accepts this share of the draft
tokens, and would decode at this speed if a draft step cost its kept share of a plain one and selections nothing:

===================  ==========  ==========  ==========  ==========
skipped              0.1         0.2         0.3         0.45
===================  ==========  ==========  ==========  ==========
``uniform``          0.67, 0.83  0.66, 0.89  0.45, 0.81  0.27, 0.79
``clasp``            0.84, 0.95  0.73, 0.94  0.63, 0.94  0.43, 0.92
``adaptive-cosine``  0.86, 0.96  0.67, 0.90  0.48, 0.83  0.10, 0.69
``swift``            0.97, 1.03  0.93, 1.08  0.75, 1.01  0.66, 1.03
===================  ==========  ==========  ==========  ==========

``self-spec`` without a profile, at 0.2 and at 0.45: 0.66, 0.89 and 0.27, 0.80.

So models of up to 0.2 billion parameters skip 0.2, those from 7 billion on 0.45, and the share grows with the logarithm
of the number of parameters between them, where nothing is measured.
"""

import math

from selfspec.runtimes.target import Target

RATIO_HELP = "none goes by the model's size: 0.2 up to 0.2 billion parameters, 0.45 from 7 billion"
"""Help of settings that default to ``default_skip_ratio``."""

_SMALL, _LARGE = 0.2e9, 7e9
_SMALL_RATIO, _LARGE_RATIO = 0.2, 0.45


def skip_ratio_of_size(parameters: int) -> float:
    """The share to skip of a model of this many parameters, 0.2 to 0.45."""
    place = math.log(max(parameters, 1) / _SMALL) / math.log(_LARGE / _SMALL)
    return _SMALL_RATIO + min(1.0, max(0.0, place)) * (_LARGE_RATIO - _SMALL_RATIO)


def most_skipped(target: Target) -> float:
    """The largest share that a search for the best share tries: half as much again as the default, at most a half."""
    return min(0.5, 1.5 * default_skip_ratio(target, target.sublayer_count))


def default_skip_ratio(target: Target, candidates: int) -> float:
    """The share of candidates to skip in a model, by its size, but at least one of them."""
    ratio = skip_ratio_of_size(target.parameter_count)
    return max(ratio, min(1.0, 1 / candidates)) if candidates > 0 else ratio
