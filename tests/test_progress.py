"""What a run says of itself: which batch it is at, the time left, and a bar that the log does not break."""

import io
import json
import pathlib
import re
import sys

import pytest
from absl import logging as log

from routed.system import progress
from routed.system.progress import Progress, Work

#: A run of the headline with 2 seeds on 2 CPU cores: its groups, then what its progress was told, with the clock.
RECORDED = json.loads((pathlib.Path(__file__).parent / "golden" / "progress.json").read_text())


class Clock:
    """The time that a test makes."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(progress, "time", made := Clock())
    return made


def follow(clock, groups, events):
    """(time, seconds left) after each event: ("begin", group), ("compiled", s), ("advance", steps, evaluations, s)."""
    progress = Progress([Work(name, steps, cost) for name, steps, _, cost in groups], 9)
    predictions = []
    for kind, *rest in events:
        if kind == "begin":
            progress.begin(*rest)
            continue
        clock.now += rest[-1]
        if kind == "compiled":
            progress.compiled(*rest)
        else:
            progress.report(rest[0], step=0, loss=0.0)
            predictions.append((clock.now, progress.seconds_left()))
    return predictions


def astray(told, after=60.0):
    """The largest relative mistake about the time left, after so many seconds; a twentieth of the whole is forgiven."""
    end = told[-1][0]
    return max((abs(left - (end - now)) - 0.05 * end) / (end - now) for now, left in told if after <= now < end)


def test_what_is_left_is_predicted_by_cost(clock):
    """10 of 100 steps of a cost of 10 take 32 s: 32 s for a cost of 1; and 40 s of compiling still to come."""
    progress = Progress([Work("a", 100, 10.0), Work("b", 3, 6.0)], 2)
    progress.begin(0)
    clock.now += 40
    progress.compiled(40.0)
    assert progress.seconds_left() is None
    clock.now += 32
    progress.report(10, 10, 0.5)
    assert progress.seconds_left() == pytest.approx(32 * (9 + 6) + 40)
    progress.begin(1)
    progress.resume(2)  # by an earlier process
    assert progress.seconds_left() == pytest.approx(32 * (9 + 2) + 40)
    assert progress.fraction_done() == pytest.approx((1 + 4) / 16)


def test_a_recorded_run_ends_when_it_was_said_to(clock):
    told = follow(clock, RECORDED["groups"], RECORDED["events"])
    assert astray(told) < 1 / 3
    assert next(left / (told[-1][0] - now) for now, left in told if now >= 60) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_groups_of_different_speeds(clock, first):
    """20 runs each, of 1,000 steps; an evaluation takes .1 s, the start is slow, and the model is right to a fifth."""
    speeds = [0.02, 0.002, 0.006]  # seconds of a run-step: the order decides which are seen in the first minute
    order = [*range(first, 3), *range(first)]
    groups = [(f"g{i}", 20_000, 100, 20_000 * speeds[i] * by) for i, by in zip(order, (1.0, 1.2, 0.9), strict=True)]
    events = []
    for place, i in enumerate(order):
        events += [("begin", place), ("compiled", 8.0), ("advance", 0, 20, 4.0), ("advance", 20, 0, 1.0)]
        for left in (4_980, 5_000, 5_000, 5_000):
            events += [("advance", left // 10, 0, left // 10 * speeds[i])] * 10 + [("advance", 0, 20, 2.0)]
    assert astray(follow(clock, groups, events)) < 1 / 3


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self):
        return True

    def shown(self):
        """The lines that stay: what was written behind the last carriage return of each."""
        return [line.split("\r")[-1] for line in self.getvalue().split("\n")]


def test_log_lines_appear_above_the_bar(clock, monkeypatch):
    terminal, handler = Terminal(), log.get_absl_handler().python_handler
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(handler, "stream", terminal)
    followed = Progress([Work("learned E=4", 100, 1.0)], 3)
    followed.begin(0)
    clock.now += 1
    followed.report(10, 10, 0.25)
    handler.stream.write("a line of the log\n")
    clock.now += 1
    followed.report(10, 20, 0.125)
    assert re.search(r" 20 %\|.*\| batch 1 of 3, .*; learned E=4: step 20, train loss 0.1250", terminal.getvalue())
    followed.close()
    assert handler.stream is terminal
    *lines, last = terminal.shown()
    assert last.strip() == "" and len(lines) == 1 and lines[0].endswith("a line of the log") and "%|" not in lines[0]


def test_lines_elsewhere_say_which_batch_it_is(clock, monkeypatch):
    said = []
    monkeypatch.setattr(progress.log, "info", lambda form, *args: said.append(form % args))
    followed = Progress([Work("a", 40, 3.0), Work("b", 20, 1.0)], 2)
    for course, each in ((0, 20), (1, 10)):
        followed.begin(course)
        clock.now += 5
        followed.compiled(5.0)
        for step in (10, 20):
            clock.now += 6
            followed.report(each, step, 0.5)
    assert said == [
        "0 % done, batch 1 of 2; compiling a",
        "37 % done, batch 1 of 2, about 00:15 left; a: step 10, train loss 0.5000, 3.33 steps/s",
        # 12 s for 40 steps with a cost of 3: 4 s for a cost of 1, and 5 s of compiling.
        "75 % done, batch 2 of 2, about 00:09 left; compiling b",
        "87 % done, batch 2 of 2, about 00:02 left; b: step 10, train loss 0.5000, 1.67 steps/s",
        "100 % done, batch 2 of 2, about 00:00 left; b: step 20, train loss 0.5000, 1.67 steps/s",
    ]
