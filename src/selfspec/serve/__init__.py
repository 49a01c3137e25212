"""``selfspec serve``: an HTTP server with the interface of OpenAI's API. Needs the extra ``serve``.

A request passes ``app`` (routes), ``service`` (checks and submits it), ``inputs`` (token ids and parameters), the
``AsyncEngine`` of ``served_engine``, ``answer`` (its text), ``bodies`` and ``reply`` (one body, or a stream).
"""
