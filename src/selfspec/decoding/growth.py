"""The memory that requests hold while their outputs grow, such that each of them can come to its end.

What a request may need at most is known from the start, and mostly much more than it will: only of the one that was
admitted first all of it is kept free. The others hold what they have written so far and some more. One that needs more
waits, where those before it could not come to their ends otherwise, and goes on when one of these has ended: none is
ever dropped or begun again.
"""

import math
from collections.abc import Sequence as Many

from selfspec.decoding.request import Sequence


def room_beside(sequences: Many[Sequence], limit: int) -> int:
    """Bytes that one more may hold, where each of the others can come to its end after those before it.

    The sequences are in the order of their admission, ``limit`` is what all may hold. Negative where they need more.
    """
    room, after = limit, 0
    for each in reversed(sequences):
        room = min(room, limit - each.most_bytes - after)
        after += each.bytes
    return room


def grow(sequences: Many[Sequence], limit: int) -> list[Sequence]:
    """Lets sequences hold what their next rounds need; returns those for which there is room, always the first."""
    room, going = math.inf, list[Sequence]()
    after = sum(each.bytes for each in sequences)
    for each in sequences:
        after -= each.bytes
        if (more := each.growth) <= room:
            each.bytes += more
            room -= more
            going.append(each)
        room = min(room, limit - each.most_bytes - after)
    return going
