"""Settings of the number of runs, of the devices that run them, and of the verdicts on them.

The engine and the analysis read the latter two. The plan declares them, and not the rooms that read them, since both
rooms come after the plan, which needs a whole config.
"""

from __future__ import annotations

from routed.layer.dispatch.parallel import devices_of_run
from routed.settings.setting import Allowed, Component, Setting, When, at_least, one_of, within

#: The distance of tuning seeds from evaluation seeds, so that the two never meet.
TUNING_OFFSET = 1_000_000

#: The most devices that may share anything: more than any machine has.
DEVICES = 2**16

MULTIPLIERS = Allowed(
    lambda v: 1 <= len(v) <= 100 and all(m > 0 for m in v), lambda: "must be at most 100 positive numbers"
)
#: An arm whose router does not learn is tuned at factor 1, and may take from the learned arm's tuning run at it.
ROUTER_MULTIPLIERS = Allowed(
    lambda v: MULTIPLIERS.holds(v) and 1 in v, lambda: f"{MULTIPLIERS.description()}, one of them 1"
)
_TUNED = When(lambda config: config.rates == "tuned", "rates=tuned")

#: The condition under which each device has runs of its own.
_ALONE = When(lambda config: devices_of_run(config) == 1, "mesh.data=1 and mesh.expert=1")

PLAN = Component(
    {
        "name": Setting("", "of the experiment", identity=False),
        "figure": Setting("", "of the experiment; empty for its headline", identity=False),
        "scale": Setting("default", "smoke, default, paper, or what the file declares", identity=False),
        "seed": Setting(
            0,
            "base seed; run i of a point uses seed + i",
            Allowed(lambda v: 0 <= v < TUNING_OFFSET, lambda: f"must be in [0, {TUNING_OFFSET})"),
            identity=False,
        ),
        # More seeds would take minutes to plan.
        "seeds": Setting(3, "runs of each point and arm", within(1, 10_000), identity=False),
        "arms": Setting(
            ("learned", "frozen"),
            "sides of the comparison, in routed.plan.arms",
            Allowed(lambda v: len(v) >= 1, lambda: "must name at least one arm"),
            identity=False,
        ),
        "rates": Setting(
            "paper", "paper: the rates of the file; tuned: times each arm's best multiplier", one_of(("paper", "tuned"))
        ),
        "tune.multipliers": Setting(
            (0.3, 1.0, 3.0), "candidates for optimizer.rate_scale; least final test loss wins", MULTIPLIERS, when=_TUNED
        ),
        "tune.router_multipliers": Setting(
            (1.0,),
            "candidates for a further factor on router.learning_rate, each tried with each of tune.multipliers",
            ROUTER_MULTIPLIERS,
            when=_TUNED,
            omit_default_from_identity=True,
        ),
        "tune.steps": Setting(
            0, "steps of tuning runs; 0: as all runs", at_least(0), when=_TUNED, omit_default_from_identity=True
        ),
        "tune.seeds": Setting(1, "tuning seeds, never evaluated: seed + 1,000,000 + i", within(1, 10_000), when=_TUNED),
    }
)

ENGINE = Component(
    {
        "mesh.run": Setting(
            0, "devices that share runs; 0: all (CPU: one per core)", within(0, DEVICES), identity=False, when=_ALONE
        ),
        "mesh.data": Setting(
            0,
            "devices that share the rows of one run's batch; 0: cores of a CPU that runs of text would leave idle,"
            " where that is faster, or else 1",
            within(0, DEVICES),
            identity=False,
        ),
        "mesh.expert": Setting(
            1,
            "devices that share the experts of one run; with mesh.data x mesh.expert > 1, runs come one after the"
            " other",
            within(1, DEVICES),
            identity=False,
        ),
        "mesh.batching": Setting(
            "auto",
            "map (one run after the other), vmap, or auto: map on a CPU, vmap elsewhere",
            one_of(("auto", "map", "vmap")),
            identity=False,
            when=_ALONE,
        ),
        "mesh.runs_per_batch": Setting(
            0,
            "runs that advance together, at most (one a device or more); 0: 16 on a CPU, elsewhere 4 a device",
            at_least(0),
            identity=False,
            when=_ALONE,
        ),
        "checkpoint.every": Setting(
            0, "steps between checkpoints of a run; divides eval_every; 0: eval_every", at_least(0), identity=False
        ),
        "checkpoint.keep": Setting(
            2, "checkpoints kept: the last ones, beside that of the lowest validation loss", at_least(1), identity=False
        ),
        "trace.every": Setting(
            0,
            "evaluations between routing traces of the base seed's runs, under traces/ (routed trace report); 0: none",
            at_least(0),
            identity=False,
        ),
        "checkpoint.final": Setting(False, "keep the parameters of finished runs, under models/", identity=False),
    }
)

ANALYSIS = Component(
    {
        "gate.horizon": Setting(
            4.0,
            "a verdict stands if the curves of its metric, extrapolated to so many times the steps, do not turn it;"
            " 1: the number of steps belongs to the protocol, so nothing is asked",
            at_least(1),
            identity=False,
        )
    }
)
