"""What a test of a method, or an experiment with one, begins with: a text in the cache, and its states at any sublayer.

- ``read_text`` runs a text through the model and returns what ``Method.begin`` takes.
- ``Branches`` runs sublayers on several candidate states of the same tokens: ``Branches.run`` is the ``run`` of CLaSp's
  and KnapSpec's dynamic programs.
- ``ShadowHead`` predicts the tokens of hidden states of any layer, as DEL does.
"""

from selfspec.decoding.probe import Branches
from selfspec.decoding.prompt import read_text
from selfspec.runtimes.shadow_head import ShadowHead

__all__ = ["Branches", "ShadowHead", "read_text"]
