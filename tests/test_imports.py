"""What is imported before a model is loaded. It is much of the time to the first token.

transformers' models import most of torch and of the packages that they find. They are imported when one is built, while
its weights are read.
"""

import subprocess
import sys

import pytest

OF_MODELS = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "sympy",
    "scipy.optimize",
    "sklearn.metrics",
    "pandas",
    "accelerate",
    "transformers.modeling_utils",
    "transformers.models",
    "transformers.generation.utils",
)
BEFORE = "import sys; imported = {name for name in %r if name in sys.modules}; assert not imported, imported"


@pytest.mark.parametrize(
    "statement",
    [
        "import selfspec.engine",
        "import selfspec.async_engine",
        "import selfspec.loading",
        "import selfspec.cli.chat_session",
        "import selfspec.serve.service",
    ],
)
def test_no_models_of_transformers_are_imported_before_one_is_loaded(statement: str) -> None:
    subprocess.run([sys.executable, "-c", f"{statement}; {BEFORE % (OF_MODELS,)}"], check=True, timeout=120)


def test_the_package_and_the_command_line_import_no_torch() -> None:
    code = "import selfspec, selfspec.cli.app, selfspec.cli.api; " + BEFORE % (("torch", "transformers", "numpy"),)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
