"""How models write calls of tools and reasoning: read as they are written, and as grammars that force them.

``choose.py`` finds a model's formats by its chat template; each family of formats has a file.
"""
