"""Makes the site of ``mkdocs.yml`` from the pages as they stand in the repository.

Pages outside of ``docs`` (README and others) and a reference of the public interface, from its docstrings, become
pages, too. Links to these lead there; links to other files of the repository become their paths.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "lab/README.md": "lab.md",
    "recipes/README.md": "recipes.md",
}
"""Files of the repository that are pages of the site."""
REFERENCE = {
    "engine": ("Engines", "selfspec", ("Engine", "Stream", "EngineOptions", "AsyncEngine", "RequestStream")),
    "transformers": ("In transformers", "selfspec", ("custom_generate",)),
    "requests": (
        "Requests and results",
        "selfspec.types",
        ("SamplingParams", "Generation", "TextPiece", "Round", "Forecast", "PhaseSeconds", "TokenLogprobs"),
    ),
    "loading": ("Models", "selfspec.loading", ("load_model", "quantise")),
    "methods": ("Writing a method", "selfspec.methods.api", None),
    "bridges": ("Bridges", "selfspec.bridges", ("llama_cpp.LlamaSuffixDecoding", "vllm.SuffixProposer")),
    "errors": ("Errors", "selfspec.errors", None),
}
"""By page its title, module and names; ``None`` takes all public names of the module."""
PICTURES = (".png", ".svg")

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)")
_LIST_WITHOUT_BLANK = re.compile(r"^(?![-|#>\s]|\d+\. )(.+)\n(?=- |1\. )", re.MULTILINE)
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from outside of ``docs``, the reference, and pictures of results."""
    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=text))
    for name, (title, module, names) in REFERENCE.items():
        text = "\n\n".join([f"# {title}", *(f"::: {module}.{each}" for each in names or public_names(module))])
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    for picture in sorted((ROOT / "benchmarks" / "results").rglob("*.png")):
        path = picture.relative_to(ROOT).as_posix()
        files.append(File.generated(config, path, abs_src_path=str(picture)))
    return files


def public_names(module: str) -> list[str]:
    """The names that a module exports by ``__all__``, or else its public classes and functions, in its order."""
    path = ROOT / "src" / Path(*module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for statement in body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", None) == "__all__":
            return list(ast.literal_eval(statement.value))
    found = (each.name for each in body if isinstance(each, ast.ClassDef | ast.FunctionDef))
    return [name for name in found if not name.startswith("_")]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page with the links of the site, and with lists as Python-Markdown takes them."""
    own = page.file.src_uri
    source = next((path for path, target in PAGES.items() if target == own), f"docs/{own}")
    parts = _CODE.split(markdown)
    text = "".join(part if index % 2 else _LIST_WITHOUT_BLANK.sub(r"\1\n\n", part) for index, part in enumerate(parts))
    return _LINK.sub(lambda match: _linked(match, source, own), text)


def _linked(match: re.Match[str], source: str, own: str) -> str:
    """One link.

    Args:
        match: of ``_LINK``.
        source: the page's path in the repository.
        own: its path on the site.

    Raises:
        PluginError: it leads nowhere.
    """
    mark, text, link, anchor = match.groups()
    if not link:
        return match.group()
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if not (ROOT / path).exists():
        raise PluginError(f"{source}: there is no {link}")
    target = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if target is None and path.endswith(PICTURES):
        target = path
    if target is None:
        return text if f"`{Path(path).name}`" in text or path in text else f"{text} (`{path}`)"
    place = Path(os.path.relpath(target, posixpath.dirname(own) or ".")).as_posix()
    return f"{mark}[{text}]({place}{anchor or ''})"
