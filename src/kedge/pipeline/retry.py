"""When a failed step is tried again."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from kedge.errors import CheckpointError, StepTimeout, Validation, WorkerDied

from .failure import StepFailed, type_name

_dice = random.SystemRandom()  # not the generator that users seed


@dataclass(frozen=True, slots=True)
class Retry:
    """Up to `times` further attempts, after waits that grow by `factor` from `delay_s` to `max_delay_s`.

    Each wait is shortened by a random part of up to `jitter`, so that many jobs that failed together do not come back
    together. `rules` gives exception classes a number of their own, 0 for never; the nearest class counts.
    """

    times: int = 3
    delay_s: float = 1.0
    factor: float = 2.0
    max_delay_s: float = 60.0
    jitter: float = 0.5
    rules: Mapping[type[Exception], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check("times", self.times, 0, 1_000_000, whole=True)
        _check("delay_s", self.delay_s, 0, 86_400)
        _check("factor", self.factor, 1, 1000)
        _check("max_delay_s", self.max_delay_s, 0, 86_400)
        _check("jitter", self.jitter, 0, 1)
        for kind, times in self.rules.items():
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise Validation(f"a retry rule is for {kind!r}", hint="rules map exception classes to numbers")
            _check(f"the rule for {kind.__name__}", times, 0, 1_000_000, whole=True)

    def allows(self, error: Exception, failures: int) -> bool:
        """Whether to go on after this error, the `failures`-th of the step."""
        if isinstance(error, CheckpointError) and not isinstance(error, StepTimeout | WorkerDied):
            return False  # the store refused, or the input is wrong: the same again would not help
        if isinstance(error, StepFailed):  # its class is not loaded here
            names, rules = error.type_names, {type_name(kind): times for kind, times in self.rules.items()}
            return failures <= next((rules[name] for name in names if name in rules), self.times)
        for kind in type(error).__mro__:
            if kind in self.rules:
                return failures <= self.rules[kind]
        return failures <= self.times

    def wait_s(self, failures: int) -> float:
        """How long to wait after the `failures`-th failure."""
        full = min(self.max_delay_s, self.delay_s * self.factor ** min(failures - 1, 1000))
        return full * (1 - self.jitter * _dice.random())


def parse_retries(retries: int | Retry) -> Retry:
    if isinstance(retries, Retry):
        return retries
    return Retry(times=parse_count("retries", retries))


def parse_count(name: str, count: int) -> int:
    _check(name, count, 0, 1_000_000, whole=True)
    return count


def parse_timeout(timeout_s: float | None) -> float | None:
    if timeout_s is not None:
        _check("timeout_s", timeout_s, 0.001, 10 * 366 * 86_400)
    return timeout_s


def _check(name: str, value: object, least: float, most: float, *, whole: bool = False) -> None:
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:  # type: ignore[operator]
        kind = "a whole number" if whole else "a number"
        raise Validation(f"{name} must be {kind} from {least:g} to {most:g} (got {value!r})")
