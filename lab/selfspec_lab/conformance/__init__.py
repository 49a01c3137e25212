"""Checks that a server's greedy text does not depend on how it is asked: ``selfspec conformance``.

``interfaces`` knows OpenAI's completions and chats, ``client`` asks a server, ``checks`` are what is compared,
``divergence`` finds the first differing token, and ``run`` makes a ``report`` of all checks.
"""
