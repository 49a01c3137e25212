"""``selfspec serve``: an HTTP server with the interface of OpenAI's API. Needs the extra ``serve``.

A request passes ``connection``, ``middleware`` and ``app`` (routes), ``pool`` and ``reader`` (token ids, in a process
of its own), ``service`` (submits it), the ``AsyncEngine`` of ``served_engine``, ``answer`` (its text), ``bodies`` and
``reply`` (one body, or a stream).
"""
