"""What is said about bodies that do not fit."""

from selfspec.serve.validation import as_invalid


def test_a_body_with_very_many_problems_is_answered_soon() -> None:
    """Comparing all of them with each other would take hours, in which the server answers no request."""
    errors = [
        {"type": "model_type", "loc": ("body", "messages", index), "msg": "Input should be an object"}
        for index in range(100_000)
    ]
    refusal = as_invalid(errors, {"messages": [1] * len(errors)})
    assert refusal.param == "messages[0]"
    assert refusal.message.endswith("messages[3]: input should be an object (and 99996 more)")
