"""The expected gain of learning to route, without training: log(fairest / learned) by the law of experiments/law.py.

    routed predict --config.data.irrelevant_fraction=0.3

(or python -m routed.predict) prints the expected factor of the fairest frozen control's loss over the learned router's,
with its 95 % interval, and a warning if the law extrapolates. The law reads data.separation, data.samples,
data.irrelevant_fraction, experts.count, batch_size and router.init_scale. A setting that is not given is as in the
centre of the law's design; every other setting is as in its protocol (routed list law).
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from routed.system import signals

if __name__ == "__main__":
    signals.end_on_signals()  # before the other imports, which take seconds

from absl import flags

from routed.contracts import UserError, nearest
from routed.system import commands, files

LAW = flags.DEFINE_string("law", None, "The file of the law; default: the one that comes with routed.")
POINTS = flags.DEFINE_string(
    "points", None, "NAME:FIGURE: predict every point of an experiment's figure, into the JSON file --write."
)
FIT = flags.DEFINE_list(
    "fit", [], "DIR,...: fit a law to the finished runs of these workdirs (law:fit), into the file --write."
)
WRITE = flags.DEFINE_string("write", None, "The file that --points or --fit writes.")

#: Experiment whose protocol the law describes.
EXPERIMENT = "law"

_OVERRIDES: list[str] = []
parse_flags = functools.partial(commands.parse_flags, module=sys.modules[__name__], overrides=_OVERRIDES)

#: Limits of the law that comes with routed, printed with each prediction (docs/results/README.md, "What contradicts the
#: headline").
CONDITIONS = (
    "  holds for constant experts, one pair of learning rates and 3,000 steps; of 30 points predicted before they ran"
    " 27 signs were\n"
    "  right, but 16 of these gaps are not told from 0, and without the four largest gaps R^2 falls from .92 to .27"
)

#: Settings, beside the axes, in which workdirs of one law may differ: seeds, and arms that a figure adds.
MAY_DIFFER = ("seed", "arms", "data.clusters")


def main(argv: list[str]) -> None:
    """Prints a prediction, or writes the predictions of a figure or a new law."""
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}: settings are given with --config.KEY=VALUE")
    if FIT.value and POINTS.value:
        raise UserError("--fit and --points: one at a time; --law=FILE says which law predicts")
    if bool(WRITE.value) != bool(FIT.value or POINTS.value):
        raise UserError("--write=FILE goes with --fit=DIR or --points=NAME:FIGURE, which need it")
    out = files.folder(WRITE.value or "")
    if FIT.value:
        if _OVERRIDES or LAW.value:
            raise UserError("--fit: the workdir says all there is to say: drop --law and --config.KEY")
        return _fit(FIT.value, out)
    # Imported here, since --help needs none of it, and JAX takes seconds.
    from routed.papers.ours import law

    flat = {} if POINTS.value else flat_of(EXPERIMENT, _OVERRIDES)
    fitted = law.read(files.folder(LAW.value) if LAW.value else law.FILE)
    if POINTS.value:
        return _predict_figure(fitted, POINTS.value, out)
    files.tell(prediction_text(fitted, flat))


def flat_of(spec: str, overrides: list[str]) -> dict[str, Any]:
    """Returns the flat config with some overrides.

    Raises:
      UserError: a key that the law does not read, or a value that the config refuses.
    """
    from routed.papers.ours import law
    from routed.plan import checks, experiment
    from routed.settings.renamed import renamed
    from routed.settings.tree import flatten

    for text in overrides:
        key = text.partition("=")[0]
        if key not in law.AXES:
            raise UserError(
                f"--config.{key}: the law does not know it{renamed(key) or nearest(key, law.AXES)}; it knows"
                f" {', '.join(law.AXES)}"
            )
    _, config = experiment.configure(spec, overrides)
    checks.validate(config)
    if not config.router.init_scale:
        raise UserError("--config.router.init_scale=0: the law reads the logarithm; use a value above 0")
    return flatten(config)


def prediction_text(fitted: Any, flat: Mapping[str, Any]) -> str:
    """Returns the prediction of a law at a flat config as text."""
    from routed.papers.ours import law

    (expected,) = law.expect(fitted, [flat])
    mean, low, high = (f"{math.exp(value):.3g}" for value in expected[:3])
    sizes = ", ".join(f"{axis.label} {axis.size(flat):.3g}" for axis in law.AXES.values())
    lines = [
        f"expected loss of the fairest frozen router over the learned one's: {mean} [{low}, {high}]",
        f"  log ratio {expected.gap:.3g} [{expected.low:.3g}, {expected.high:.3g}]:"
        f" 95 % interval for a mean over {fitted.made['seeds']} seeds",
        f"  at {sizes}",
        f"  by {len(fitted.points)} points of {fitted.made['experiment']}",
        *([] if LAW.value else [CONDITIONS]),
    ]
    return "\n".join([*lines, *(f"EXTRAPOLATES: {reason}" for reason in expected.beyond)])


def _predict_figure(fitted: Any, spec: str, out: pathlib.Path) -> None:
    """Writes the expectations of a law at the points of a figure."""
    from routed.papers.ours import law
    from routed.plan import experiment
    from routed.plan.checks import PLANNED
    from routed.settings.tree import flatten, override

    if _OVERRIDES:
        raise UserError(f"--config.{_OVERRIDES[0]}: --points says where to predict: drop one of the two")
    module, config = experiment.configure(spec, [])
    points = [
        {key: value for key, value in point.items() if key not in PLANNED}
        for point in experiment.figure_of(module, config).sweep(config)
    ]
    if unknown := sorted({key for point in points for key in point} - law.AXES.keys()):
        raise UserError(f"--points={spec}: sweeps {unknown[0]}, which the law does not know")
    expected = law.expect(fitted, [flatten(override(config, point)) for point in points])
    lines = [
        json.dumps({"at": point, "gap": [round(value, 4) for value in at_point[:3]], "beyond": at_point.beyond})
        for point, at_point in zip(points, expected, strict=True)
    ]
    law_text = json.dumps({"form": fitted.form, **fitted.made})
    files.write(out, f'{{\n "law": {law_text},\n "points": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")
    extrapolate = sum(bool(at_point.beyond) for at_point in expected)
    files.tell(f"wrote {out}: {len(points)} predictions, {extrapolate} of them extrapolate")


def _fit(workdirs: list[str], out: pathlib.Path) -> None:
    """Writes the law that is fitted to the runs of some workdirs."""
    import routed
    from routed.engine.rows import swept_columns
    from routed.papers.ours import law, law_process
    from routed.plan.config import declared

    points, gaps, names = list[dict[str, Any]](), list[float](), list[str]()
    base, first = dict[str, Any](), dict[str, Any]()
    for workdir in workdirs:
        stored = routed.load(workdir)
        table, base = stored["results"], stored["config"]
        swept = swept_columns(table)
        if missing := [key for key in law.AXES if key not in swept]:
            raise UserError(f"--fit={workdir}: it does not sweep {missing[0]}; a law needs {', '.join(law.AXES)}")
        if unknown := [key for key in swept if key not in (*law.AXES, "data.clusters")]:
            raise UserError(
                f"--fit={workdir}: it sweeps {unknown[0]}, which a law does not read: it would repeat points"
            )
        first = first or base
        of_identity = {key for key, setting in declared().items() if setting.identity} | {"seeds"}
        for key in sorted(of_identity - {*law.AXES, *MAY_DIFFER}):
            if first.get(key) != base.get(key):
                raise UserError(
                    f"--fit={workdir}: it has {key}={base.get(key)}, {workdirs[0]} {first.get(key)}:"
                    f" points of one law differ in {', '.join(law.AXES)} alone"
                )
        points_of_workdir, gaps_of_workdir = law.gaps_of(table, base, swept)
        points, gaps = points + points_of_workdir, gaps + gaps_of_workdir
        names.append(f"{base['name']}:{base['figure']}")
    if len(points) <= law_process.FOLDS:
        raise UserError(
            f"--fit={','.join(workdirs)}: {len(points)} points have finished runs, more than {law_process.FOLDS} are"
            " needed"
        )
    fitted = law.fit(points, gaps, {"experiment": " and ".join(names), "seeds": base["seeds"], "steps": base["steps"]})
    law.write(fitted, out)
    lines = [
        f"  {form}: " + ", ".join(f"{name} {value:.3g}" for name, value in scores.items())
        for form, scores in fitted.scores.items()
    ]
    files.tell("\n".join([f"wrote {out}: {len(points)} points, {fitted.form}; left-out points:", *lines]))


def run() -> None:
    """Entry point."""
    commands.start(main, parse_flags)


if __name__ == "__main__":
    run()
