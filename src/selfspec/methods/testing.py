"""What a test of a method, or an experiment with one, begins with: a text in the cache, and selections run alone.

- ``read_text`` runs a text through the model and returns what ``Method.begin`` takes.
- ``Branches`` runs sublayers on several candidate states of the same tokens.
- ``run_selection`` runs a selection (the dynamic programs of CLaSp and KnapSpec) without a verification.
- ``ShadowHead`` predicts the tokens of hidden states of any layer, as DEL does.
"""

from selfspec.decoding.probe import Branches, SelectionSteps, run_selection
from selfspec.decoding.reading import read_text
from selfspec.runtimes.shadow_head import ShadowHead

__all__ = ["Branches", "SelectionSteps", "ShadowHead", "read_text", "run_selection"]
