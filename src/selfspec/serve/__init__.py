"""``selfspec serve``: an HTTP server with the interface of OpenAI's API. Needs the extra ``serve``.

What a request means (``requests``, ``prompts``, ``sampling``) and what an answer looks like (``responses``, ``chat``,
``completions``) are pure translations without any HTTP. ``app`` connects them to a ``backend``: an engine in this
process (``local``) or in supervised processes of their own (``pool``).
"""
