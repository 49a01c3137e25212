"""What is imported before a model is loaded. It is much of the time to the first token.

transformers' models import most of torch and of the packages that they find. They are imported when one is built, while
its weights are read.
"""

import subprocess
import sys

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
CHECK = """
import sys
from importlib import import_module

for module in {modules}:
    import_module(module)
    imported = {{name for name in {names} if name in sys.modules}}
    assert not imported, (module, imported)
"""


def check(modules: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Imports modules one after the other, in a process of their own, and after each looks for others by name."""
    subprocess.run([sys.executable, "-c", CHECK.format(modules=modules, names=names)], check=True, timeout=240)


def test_no_models_of_transformers_are_imported_before_one_is_loaded() -> None:
    modules = ("loading", "engine", "async_engine", "cli.chat_session", "serve.service")
    check(tuple(f"selfspec.{module}" for module in modules), OF_MODELS)


def test_the_package_and_the_command_line_import_no_torch() -> None:
    check(("selfspec", "selfspec.cli.command_line", "selfspec.cli.api"), ("torch", "transformers", "numpy"))
