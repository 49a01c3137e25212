"""``selfspec serve``: an HTTP server with the interface of OpenAI's API. Needs the extra ``serve``.

A request passes ``app`` (routes), ``service`` (checks, encodes and submits it), the ``AsyncEngine`` of
``served_engine``, ``answer`` (the text of its tokens), ``forms`` (the bodies) and ``reply`` (one body, or a stream).
"""
