"""Prompts written for this project: three domains of the bundled checkpoints, and messages for a chat model."""

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
    '''import json


class Settings:
    """Keep the settings of a program in a file.

    The file is read once; save() writes it back.
    """

    def __init__(self, path):
        self.path = path
        self._values = {}

    def load(self):
''',
    '''def parse_size(text):
    """Parse a size such as '10k' or '2M' and return the number of bytes."""
    units = {'k': 1024, 'M': 1024 ** 2, 'G': 1024 ** 3}
    text = text.strip()
    if not text:
''',
    '''import threading


class Queue:
    """A queue that several threads may use.

    If maxsize is not positive, the queue has no limit.
    """

    def __init__(self, maxsize=0):
        self.maxsize = maxsize
        self.mutex = threading.Lock()
''',
    '''def quote(value):
    """Return the value in double quotes, with quotes and backslashes escaped."""
    result = []
    for char in value:
        if char == '"':
''',
    '''class Node:
    """A node of a binary tree."""

    def __init__(self, key, left=None, right=None):
        self.key = key
        self.left = left
        self.right = right

    def __repr__(self):
''',
    '''def main(args=None):
    """Run the command line tool and return its exit status."""
    parser = argparse.ArgumentParser(description='Compare two files.')
    parser.add_argument('first', help='the first file')
    parser.add_argument(
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
    "Question: A farmer has 8 rows of apple trees with 15 trees in each row. He cuts down 20 trees. How many trees are "
    "left?\nAnswer:",
    "Question: Lisa earns $12 an hour and works 6 hours a day, 5 days a week. She spends $150 every week. How much "
    "does she save in 4 weeks?\nAnswer:",
    "Question: Tom has twice as many marbles as Ben. Ben has 9 marbles more than Anna, who has 16 marbles. How many "
    "marbles do the three have together?\nAnswer:",
    "Question: A shirt costs $25 and a pair of trousers costs $40. In a sale everything is 20% off. How much do 2 "
    "shirts and a pair of trousers cost in the sale?\nAnswer:",
    "Question: A train travels 60 miles in an hour. It leaves at 8 in the morning and arrives at 1 in the afternoon, "
    "after two stops of 30 minutes each. How far does it travel?\nAnswer:",
    "Question: Maria bakes 48 cookies. She eats 3, gives half of the rest to her neighbors, and packs the others in "
    "bags of 5. How many full bags does she have?\nAnswer:",
)

_PROSE = (
    "It was late in the afternoon when the carriage drew up before the old house, and Mrs. Harding, who had been "
    "watching from the window for above an hour,",
    "The captain was a man of few words; but when he had lighted his pipe, and seen that the wind was steady, he "
    "turned to the young man beside him and said,",
    '"You cannot mean it, sir," said the lady, rising from her chair. "My father would never',
    "There lived in our village, at the time of which I write, a clergyman of some sixty years, whose",
    "The night was so dark that we could scarcely see the road before us, and the rain, which had begun at sunset, now",
    "My uncle was the kindest of men, but he had one weakness, which was known to every creature in the parish; and",
    '"And pray, what did he say to that?" cried the old gentleman, laying down his newspaper. "Nothing," replied',
    "When the ship was three days out of harbour, and the last of the land had sunk behind us, I went below to see",
    "She had never been handsome; but there was in her manner something so gentle, and in her eyes a look so",
    "At the end of the long passage was a little door, which I had often passed without a thought, and which on that "
    "evening",
)

PROMPTS: dict[str, tuple[str, ...]] = {"code": _CODE, "math": _MATH, "prose": _PROSE}
"""Prompts by domain: beginnings of Python code, word problems in the form of GSM8K, beginnings of prose."""

CHAT_PROMPTS: dict[str, str] = {
    "question": "Why is the sky blue during the day and red in the evening? Answer in a few sentences.",
    "code": "Write a Python function that returns the mean and the median of a list of numbers, with a docstring.",
    "summary": (
        "Sum up the following text in two sentences.\n\n"
        "The harbour of Kalmsund froze over in the second week of January, for the first time in thirty years. The "
        "ferry company cancelled all crossings on Monday and sent its two smaller boats south, where they are to stay "
        "until the ice has gone. The icebreaker Vale, which the town shares with three others along the coast, kept a "
        "channel open for the tanker that brings heating oil, but the harbour master, Ida Brandt, said that the crew "
        "could not work around the clock for more than a week. The fishing fleet of fourteen boats stays in port. Its "
        "owners asked the town council to waive the harbour fees for the month, and the council will decide on Friday. "
        "In the meantime the school has opened its kitchen to anybody who cannot heat a meal at home, and skaters have "
        "marked a track of two kilometres on the ice between the lighthouse and the old shipyard."
    ),
    "maths": "A train leaves at 9:40 and arrives at 13:05. It stops three times for 8 minutes. How long does it move?",
    "rewriting": (
        "Rewrite this note as a polite letter: the parcel came yesterday, two of the six glasses were broken, send two "
        "new ones or give me back the money for them, the order number is 5518."
    ),
}
"""Messages for a chat model by task. The demo uses the first three."""
