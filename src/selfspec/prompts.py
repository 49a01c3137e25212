"""Prompts of the three domains of the bundled checkpoints, written for this project."""

_CODE = (
    '''class LineReader:
    """Read lines from a binary stream, with a limit on their length.

    The stream must have a read() method that returns bytes.
    """

    def __init__(self, stream, limit=65536):
''',
    '''def split_header(line, separator=":"):
    """Split a header line into its name and its value.

    Raise ValueError if the line has no separator.
    """
''',
    '''import os
import sys


def find_files(directory, suffix=None):
    """Return a sorted list of the files in a directory.

    If suffix is given, only names that end with it are returned.
    """
''',
    '''class Counter:
    """Count how often each key was added."""

    def __init__(self):
        self._counts = {}

    def add(self, key, number=1):
''',
)

_MATH = (
    "Question: A baker sells 14 loaves of bread in the morning and twice as many in the afternoon. Each loaf costs $3. "
    "How much money does the baker earn in a day?\nAnswer:",
    "Question: Nora has 60 stickers. She gives 12 of them to her brother and shares the rest equally among 4 friends. "
    "How many stickers does each friend get?\nAnswer:",
    "Question: A bus has 45 seats. On Monday a third of the seats are empty. On Tuesday only 6 seats are empty. How "
    "many people ride the bus on the two days together?\nAnswer:",
    "Question: Peter reads 20 pages every weekday and 35 pages on each day of the weekend. How many pages does he read "
    "in 3 weeks?\nAnswer:",
)

_PROSE = (
    "It was late in the afternoon when the carriage drew up before the old house, and Mrs. Harding, who had been "
    "watching from the window for above an hour,",
    "The captain was a man of few words; but when he had lighted his pipe, and seen that the wind was steady, he "
    "turned to the young man beside him and said,",
    '"You cannot mean it, sir," said the lady, rising from her chair. "My father would never',
    "There lived in our village, at the time of which I write, a clergyman of some sixty years, whose",
)

PROMPTS: dict[str, tuple[str, ...]] = {"code": _CODE, "math": _MATH, "prose": _PROSE}
"""By domain: beginnings of Python code, word problems in the form of GSM8K, beginnings of 19th-century prose."""
