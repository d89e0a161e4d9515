"""What a run says of itself: which batch it is at, the time left, and a bar that the log does not break."""

import io
import json
import pathlib
import re
import sys

import pytest
from absl import logging as log

from routed.system import progress
from routed.system.forecast import Course, Stretch, pace, seconds_left, share_done
from routed.system.progress import Progress

#: A run of the headline with 2 seeds on 2 CPU cores: its groups, then what its progress was told, with the clock.
RECORDED = json.loads((pathlib.Path(__file__).parent / "golden" / "progress.json").read_text())


def test_the_pace_of_a_course_and_what_is_left_of_others():
    """2 s a step and 6 an evaluation; 40 s of compiling where it is still to come; half the cost, half the time of steps."""
    seen = (Stretch(0, 1, 6.0), Stretch(1, 0, 2.0), Stretch(9, 1, 24.0))
    assert pace(seen) == pytest.approx((2.0, 6.0))
    begun = Course("a", 100, 11, cost=10.0, steps_done=10, evaluations_done=2, stretches=seen, compiling=40.0)
    assert seconds_left([begun]) == pytest.approx(90 * 2 + 9 * 6)
    # All steps of the first take 200 s for a cost of 10; 2 evaluations of the other 12 s, and its compiling 40.
    assert seconds_left([begun, Course("b", 7, 2, cost=5.0)]) == pytest.approx(234 + 100 + 12 + 40)
    # Two of three steps of the other were done before this process.
    assert seconds_left([begun, Course("b", 3, 2, 6.0, steps_done=2)]) == pytest.approx(234 + 40 + 12 + 40)
    assert seconds_left([begun._replace(stretches=seen[:2])]) is None  # one stretch with a step, which is slow
    assert share_done([begun, Course("b", 3, 2, 6.0, steps_done=2)]) == pytest.approx((1 + 4) / 16)


def test_a_pace_is_never_negative():
    """More evaluations in less time would ask for it; then steps explain all."""
    assert pace((Stretch(10, 0, 10.0), Stretch(10, 5, 5.0))) == pytest.approx((0.75, 0.0))


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
    """(moment, seconds left then) after each event of a run: ("begin", group), ("compiled", s), ("advance", steps, evaluations, s)."""
    shown, told = Progress([Course(*group) for group in groups], 9), []
    for kind, *rest in events:
        if kind == "begin":
            shown.begin(*rest)
            continue
        clock.now += rest[-1]
        if kind == "compiled":
            shown.compiled(*rest)
        else:
            shown.advance(*rest[:-1], step=0, loss=0.0)
            told.append((clock.now, seconds_left(shown.courses)))
    return told


def astray(told, after=60.0):
    """The largest share by which what is left is mistaken after so many seconds; a twentieth of the whole is forgiven."""
    end = told[-1][0]
    return max((abs(left - (end - now)) - 0.05 * end) / (end - now) for now, left in told if after <= now < end)


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
    followed = Progress([Course("learned E=4", 100, 5, 1.0)], 3)
    followed.begin(0)
    clock.now += 1
    followed.advance(10, 1, 10, 0.25)
    handler.stream.write("a line of the log\n")
    clock.now += 1
    followed.advance(10, 0, 20, 0.125)
    assert re.search(r" 20 %\|.*\| batch 1 of 3, .*; learned E=4: step 20, train loss 0.1250", terminal.getvalue())
    followed.close()
    assert handler.stream is terminal
    *lines, last = terminal.shown()
    assert last.strip() == "" and len(lines) == 1 and lines[0].endswith("a line of the log") and "%|" not in lines[0]


def test_lines_elsewhere_say_which_batch_it_is(clock, monkeypatch):
    said = []
    monkeypatch.setattr(progress.log, "info", lambda form, *args: said.append(form % args))
    followed = Progress([Course("a", 40, 4, 3.0), Course("b", 20, 4, 1.0)], 2)
    for course, each in ((0, 20), (1, 10)):
        followed.begin(course)
        clock.now += 5
        followed.compiled(5.0)
        for step in (10, 20):
            clock.now += 6
            followed.advance(each, 1, step, 0.5)
    assert said == [
        "0 % done, batch 1 of 2; compiling a",
        "37 % done, batch 1 of 2; a: step 10, train loss 0.5000, 3.33 steps/s",
        # 12 s for 40 steps with a cost of 3: 4 s for a cost of 1, and 5 s of compiling.
        "75 % done, batch 2 of 2, about 0:09 left; compiling b",
        "87 % done, batch 2 of 2, about 0:02 left; b: step 10, train loss 0.5000, 1.67 steps/s",
        "100 % done, batch 2 of 2, about 0:00 left; b: step 20, train loss 0.5000, 1.67 steps/s",
    ]
