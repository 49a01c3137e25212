"""The claims of the papers, one file each; importing this package registers all of them."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__, __name__ + "."):
    importlib.import_module(_module.name)

from selfspec_lab.experiments.base import EXPERIMENTS, Experiment, find_experiment  # noqa: E402

__all__ = ["EXPERIMENTS", "Experiment", "find_experiment"]
