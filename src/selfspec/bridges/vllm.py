"""Drafts for vLLM, by its speculative method ``custom_class`` with the model ``selfspec.bridges.vllm.SuffixProposer``.

vLLM 0.32.0 takes custom proposers in its V1 model runner only. Its V2 runner chooses a ``BaseSpeculator`` from a fixed
list of methods (``init_speculator``), which takes no others.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from selfspec.bridges.bridge_options import BridgeOptions
from selfspec.bridges.drafts import Drafts
from selfspec.bridges.versions import check_engine
from selfspec.errors import InvalidSettingError
from selfspec.planning.plans import MOST_DRAFTED

TESTED = "0.32.0"
"""The version of vLLM that this bridge was tested with."""

KEY = "selfspec"
"""Where vLLM's ``additional_config`` has the options of the bridge."""


class SuffixProposer:
    """Proposes what followed the longest repeated suffix of each request, as many tokens as pay.

    vLLM makes it. ``num_speculative_tokens`` is the most that it drafts; ``additional_config["selfspec"]`` may have the
    other fields of ``BridgeOptions``.

    Args:
        vllm_config: vLLM's ``VllmConfig``.

    Raises:
        MissingPackageError: vLLM is not installed.
        InvalidSettingError: an option is unknown or out of range.
    """

    def __init__(self, vllm_config: Any) -> None:
        check_engine("vllm", TESTED, f"vllm=={TESTED}")
        self._options = _options(vllm_config)
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self.drafts = Drafts(self._options)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """The draft tokens of each request of a batch.

        Args:
            sampled_token_ids: what each request wrote in this step; nothing while its prompt is read.
            num_tokens_no_spec: tokens of each request, ``[requests]`` or more.
            token_ids_cpu: these tokens, ``[requests, max_model_len]``.
            slot_mappings: not used.
        """
        places = [place for place, sampled in enumerate(sampled_token_ids) if len(sampled)]
        lengths = [int(num_tokens_no_spec[place]) for place in places]
        texts = [token_ids_cpu[place, :length] for place, length in zip(places, lengths, strict=True)]
        most = [max(0, self._max_model_len - length - 1) for length in lengths]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        timed = len(places) == len(sampled_token_ids)
        for place, drafted in zip(places, self.drafts.draft(texts, most, timed=timed), strict=True):
            drafts[place] = drafted
        return drafts

    def load_model(self, *_: object, **__: object) -> None:
        """Called by vLLM; there is nothing to load."""


def _options(vllm_config: Any) -> BridgeOptions:
    """The options of a configuration of vLLM."""
    most = min(MOST_DRAFTED, int(vllm_config.speculative_config.num_speculative_tokens))
    given = dict((vllm_config.additional_config or {}).get(KEY, {}))
    if "row_costs" in given:
        given["row_costs"] = _with_numbers(given["row_costs"])
    return BridgeOptions.of(most, given)


def _with_numbers(row_costs: Any) -> dict[int, float]:
    """Costs by rows, which JSON has as texts."""
    try:
        return {int(rows): float(cost) for rows, cost in row_costs.items()}
    except (AttributeError, TypeError, ValueError):
        raise InvalidSettingError(f"row_costs must map numbers of rows to costs, not {row_costs!r}") from None
