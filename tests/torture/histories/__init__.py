"""Random histories: several processes do everything the public API offers to one store while they are killed and
stopped and the servers below are restarted; what they were told is then compared with a simple model of a store.

    operations.py   what a worker can do, chosen at random from a seed
    reading.py      that of it which changes nothing
    values.py       the states that are saved, each known by kind and seed
    worker.py       the process that does it, and says what it is about to do and what came of it
    history.py      all of that, in one list, outside the store
    model.py        what a store that keeps its promises may have answered
    places.py       the kinds of stores, and how their servers are restarted
    checks.py       what is asked of a store when all is quiet
    controller.py   one history from beginning to end

Only the public API is used: these tests do not change when the modules below are rebuilt. A seed fixes what is done,
not the order in which the machine runs it.
"""

from .controller import torture

__all__ = ["torture"]
