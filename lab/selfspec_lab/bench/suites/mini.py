"""The bundled suite: prompts of the three domains of the bundled checkpoints, written for this project.

They differ from those of ``selfspec_lab.prompts``, which settings are tuned on. Most are short; the first prompts of
code and prose have a page, for methods that copy from the prompt.
"""

_CODE = (
    '''"""Read and write tables of comma-separated values."""

import os


class TableError(Exception):
    """Raised when a table cannot be read."""


class Column:
    """A column of a table, with a name and a list of values."""

    def __init__(self, name, values=None):
        self.name = name
        self.values = list(values or [])

    def __len__(self):
        return len(self.values)

    def __repr__(self):
        return '<%s %r>' % (self.__class__.__name__, self.name)

    def append(self, value):
        """Add a value to the end of the column."""
        self.values.append(value)


class Row:
    """A row of a table, with a number and a list of values."""

    def __init__(self, number, values=None):
''',
    '''import socket
import time


class Connection:
    """A connection to a server, which is opened when it is first used.

    If timeout is None, the connection waits for an answer without limit.
    """

    def __init__(self, host, port, timeout=None):
        self.host = host
        self.port = port
        self.timeout = timeout
        self.sock = None

    def open(self):
        """Open the connection, if it is not open."""
        if self.sock is None:
            self.sock = socket.create_connection((self.host, self.port), self.timeout)

    def close(self):
        """Close the connection, if it is open."""
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def send(self, data):
        """Send bytes to the server."""
        self.open()
        self.sock.sendall(data)

    def receive(self, size):
''',
    '''class Stack:
    """A stack with a limit on its size."""

    def __init__(self, limit=None):
        self._items = []
        self._limit = limit

    def push(self, item):
        """Put an item on the stack; raise OverflowError if it is full."""
''',
    '''def join_path(first, *others):
    """Join parts of a path with slashes.

    A part that begins with a slash replaces all the parts before it.
    """
    path = first
    for part in others:
''',
    '''def format_seconds(seconds):
    """Return a time in seconds as a string of hours, minutes and seconds."""
    hours, rest = divmod(int(seconds), 3600)
''',
    """import unittest


class TestTokenizer(unittest.TestCase):

    def setUp(self):
        self.tokenizer = Tokenizer()

    def test_empty(self):
        self.assertEqual(self.tokenizer.split(''), [])

    def test_words(self):
""",
    '''class Formatter:
    """Write log records as text.

    The format is a string with names in braces; a name that a record does
    not have is left as it is.
    """

    default_format = '{level}: {message}'

    def __init__(self, fmt=None, *, prefix=''):
        if fmt is None:
''',
    '''def read_config(filename, encoding='utf-8'):
    """Read a configuration file and return a dictionary.

    Lines that begin with '#' are comments.
    """
    result = {}
    with open(filename, encoding=encoding) as f:
        for line in f:
''',
)

_MATH = (
    "Question: A library has 240 books on science. It buys 35 more and then lends out half of all its science books. "
    "How many science books are left in the library?\nAnswer:",
    "Question: Emma walks 3 miles to school every morning and takes a way that is 1 mile longer back home. How many "
    "miles does she walk in a school week of 5 days?\nAnswer:",
    "Question: A box holds 24 pencils. A teacher buys 5 boxes and gives 4 pencils to each of her 27 students. How "
    "many pencils does she have left?\nAnswer:",
    "Question: James is 4 years older than his sister Kate. Their mother is three times as old as James. If Kate is "
    "8 years old, how old is their mother?\nAnswer:",
    "Question: A tank holds 200 gallons of water. It loses 5 gallons every hour through a leak, and a pump adds 12 "
    "gallons every hour. If there are 60 gallons in the tank now, how many hours does it take until it is full?\n"
    "Answer:",
    "Question: At a market, apples cost $2 a pound and cherries cost $5 a pound. Olivia buys 6 pounds of apples and "
    "half as many pounds of cherries. She pays with two $20 bills. How much change does she get?\nAnswer:",
    "Question: A school orders 9 buses for a trip. Each bus has room for 40 students. 25% of the 320 students who "
    "signed up stay at home. How many seats stay empty?\nAnswer:",
    "Question: Daniel saves $15 in the first week. Every week after that he saves $5 more than in the week before. "
    "How much money has he saved after 4 weeks?\nAnswer:",
)

_PROSE = (
    "In the year of which I speak, my father was still living at the old mill below the town, where he had been "
    "born, and where he had always said that he would die. He was then about sixty years of age; a tall, spare man, "
    "with a grave face and a quick eye, who was respected by his neighbours, and a little feared by his servants. He "
    "had never been rich, and he had never wished to be so; but he had one ambition, which he had cherished for "
    "thirty years in secret, and which he now, on the evening of my return, disclosed to me for the first time. We "
    "had finished our supper, and my sister had gone to her room. The fire was low, and the wind was crying in the "
    "chimney. He rose from his chair, shut the door with great care, and came and sat down opposite to me. “My boy,” "
    "said he, “there is something that",
    "“I have come a long way to see you, Mr. Fairfax,” said the stranger, when the servant had left the room, “and I "
    "must beg that you will hear me to the end.”\n\n“I am at your service, sir,” I replied; “but I must tell you "
    "that I have an engagement at nine.”\n\n“It is a matter of some importance,” said he, looking anxiously about "
    "him. “Are we alone in the house?”\n\n“There is nobody but my old housekeeper, who hears nothing.”\n\nHe seemed "
    "to be relieved, and drew his chair nearer to the table. He was a man of perhaps five-and-thirty, dressed with "
    "care, but pale as one who has not slept. “Then I will begin at the beginning,” said he. “You must know that I",
    "The snow had fallen for three days, and all the roads were lost; so that when the doctor set out at last for "
    "the farm upon the hill, he",
    "Of all the houses in the square, the smallest and the neatest was that of Miss Pringle, who had lived in it, "
    "with two cats and an old servant, ever since",
    "“Do you believe in ghosts, Captain?” asked the youngest of the party. The old man took some time to consider, and",
    "Lady Ashworth received her guests with the greatest civility; but it was plain to everybody who knew her, that "
    "she was thinking of",
    "We had been two weeks upon the river, and had seen no living creature but the birds, when one morning, as I was "
    "lighting the fire,",
    "When the little girl came to the edge of the wood, she found a narrow path of white stones, and beside it sat a "
    "very old fox, who",
)

MINI: dict[str, tuple[str, ...]] = {"code": _CODE, "math": _MATH, "prose": _PROSE}
"""Prompts by category: beginnings of Python code, word problems in the form of GSM8K, beginnings of prose."""

_REQUESTS = {"code": "Continue this Python code:\n\n", "prose": "Continue this story:\n\n"}


def mini_message(category: str, prompt: str) -> str:
    """A prompt as a chat message.

    Args:
        category: a category of ``MINI``.
        prompt: a prompt of that category.
    """
    if category == "math":
        return prompt.removeprefix("Question: ").removesuffix("\nAnswer:")
    return _REQUESTS[category] + prompt
