"""Exceptions as data: what is raised again is of the same class, says the same, and has the same members."""

import builtins
from typing import Any

import pytest

import kedge
from kedge import CheckpointManager, codec
from kedge.pipeline.failure import Failure, StepFailed

SYNTAX = ("bad", ("f.py", 1, 2, "x y", 1, 3))
ARGUMENTS: dict[type[Exception], tuple[Any, ...]] = {
    UnicodeDecodeError: ("utf-8", b"\xff", 0, 1, "bad"),
    UnicodeEncodeError: ("ascii", "\xff", 0, 1, "bad"),
    UnicodeTranslateError: ("\xff", 0, 1, "bad"),
    SyntaxError: SYNTAX,
    IndentationError: SYNTAX,
    TabError: SYNTAX,
    ExceptionGroup: ("two", [ValueError(1), KeyError("k")]),
}
BUILT_IN = [
    kind
    for kind in vars(builtins).values()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, Warning)
]


class Failures(ExceptionGroup[Exception]):
    """As libraries derive it."""

    def derive(self, excs: Any) -> "Failures":
        return Failures(self.message, excs)


class Retriable(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def again(error: BaseException) -> Exception:
    """As it comes back from the store."""
    encoded = codec.encode(Failure.of(error).state())
    state: Any = codec.decode(encoded.tree, lambda number: encoded.buffers[number])
    return Failure.from_state(state).rebuild()


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_built_in_exception_comes_back(kind: type[Exception]) -> None:
    error = kind(*ARGUMENTS.get(kind, ("what", "why")))
    rebuilt = again(error)
    assert type(rebuilt) is kind
    assert str(rebuilt) == str(error)
    if not isinstance(error, ExceptionGroup):
        assert rebuilt.args == error.args


def test_what_built_in_exceptions_say_beside_their_arguments() -> None:
    missing = again(FileNotFoundError(2, "No such file", "a.txt"))
    assert isinstance(missing, FileNotFoundError)
    assert (missing.errno, missing.filename, missing.args) == (2, "a.txt", (2, "No such file"))
    module = again(ModuleNotFoundError("No module named 'x'", name="x"))
    assert isinstance(module, ModuleNotFoundError)
    assert module.name == "x"
    noted = ValueError("one")
    noted.add_note("of two")
    assert again(noted).__notes__ == ["of two"]


@pytest.mark.parametrize("kind", [ExceptionGroup, Failures])
def test_a_group_comes_back_with_its_members(kind: type[ExceptionGroup[Exception]]) -> None:
    inner = ExceptionGroup("inner", [KeyError("k")])
    error = again(kind("outer", [Retriable(503), inner, ValueError(1)]))
    assert type(error) is kind
    assert str(error) == "outer (3 sub-exceptions)"
    retriable, others = error.split(Retriable)
    assert retriable is not None
    assert others is not None
    assert [(type(member), member.status) for member in retriable.exceptions] == [(Retriable, 503)]
    assert [type(member) for member in others.exceptions] == [ExceptionGroup, ValueError]


def test_a_group_with_more_members_than_are_kept_says_how_many_there_were() -> None:
    error = again(ExceptionGroup("many", [ValueError(number) for number in range(1001)]))
    assert isinstance(error, ExceptionGroup)
    assert str(error) == "many (1001 sub-exceptions)"
    assert len(error.exceptions) == 1000


def test_a_group_whose_members_ended_the_program_stands_in() -> None:
    error = again(BaseExceptionGroup("stop", [KeyboardInterrupt()]))
    assert isinstance(error, StepFailed)
    assert "BaseExceptionGroup: stop" in str(error)


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it says nothing")


@pytest.mark.parametrize("timeout_s", [None, 60])
def test_an_exception_whose_text_cannot_be_made_is_kept(memory: CheckpointManager, timeout_s: float | None) -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        raise Silent(7)

    for _ in range(2):
        with kedge.run("r", store=memory) as run:
            with pytest.raises(Silent) as caught:
                run.step("fail", fail, timeout_s=timeout_s, timeout_in="thread")
            assert caught.value.args == (7,)
            (item,) = run.map(lambda _: fail(), [1], name="m", on_error="collect")
            assert item.error == "Silent: <Silent, whose text cannot be made: RuntimeError>"
            run.step("next", lambda: None)
    assert len(calls) == 3  # items that failed are tried again


def test_a_handled_group_is_handled_in_the_same_way_after_a_kill(memory: CheckpointManager) -> None:
    calls = []

    def gather() -> None:
        calls.append(1)
        raise ExceptionGroup("unhandled errors in a TaskGroup", [Retriable(503), ValueError("no")])

    def handle() -> list[int]:
        statuses = []
        with kedge.run("r", store=memory) as run:
            try:
                run.step("gather", gather)
            except* Retriable as errors:
                statuses += [error.status for error in errors.exceptions if isinstance(error, Retriable)]
            except* ValueError:
                pass
            run.step("next", lambda: None)
        return statuses

    assert handle() == handle() == [503]
    assert calls == [1]


@pytest.fixture
def memory() -> Any:
    with kedge.open("memory:") as store:
        yield store
