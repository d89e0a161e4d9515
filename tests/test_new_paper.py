"""A paper is one file of its own: its parts join the tables, and the core runs without any other paper."""

import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from routed.engine import results
from tests.patience import PATIENCE

SOURCE = pathlib.Path(__file__).parent.parent / "src" / "routed"

#: A task, a model, a metric, a chart, a kind of claim and an experiment, by their tables alone.
PAPER = '''"""Do experts of bounded outputs find the sides of a line?"""

import dataclasses

import jax
import jax.numpy as jnp

from routed.analysis.claims import KINDS, LEARNED, OneSide, Writer
from routed.analysis.plots import PLOTS, Axis, Chart, Panel, Plot
from routed.analysis.plots.frame import series_of
from routed.contracts import SHARE, Batch, Column
from routed.metrics.router import METRICS, Metric
from routed.models import SAMPLE_MODELS
from routed.plan import Figure, make_config
from routed.settings.setting import POSITIVE, Setting
from routed.tasks import TASKS, Task

TASKS["sides"] = Task(
    tokens="rows",
    targets={"constant": "vector"},
    fixed=lambda keys, data: jax.random.normal(keys[0], (2, data.target_dim)),
    draw=lambda fixed, kind, noise, n, data: jax.random.normal(noise, (n, data.dim)),
    batch=lambda world, x, data: Batch(x, data.height * world.fixed[side(x)], side(x)),
    dims=lambda data: data.dim,
    outputs=lambda data: data.target_dim,
    reads=("clusters", "dim"),
    settings={"height": Setting(1.0, "times the values of both sides", POSITIVE, traced=True)},
)
MIXTURE = SAMPLE_MODELS["moe"]


def side(x):
    return (x[:, 0] > 0).astype(jnp.int32)


def bounded(config, mesh=None):
    model = MIXTURE.build(config, mesh)

    def apply(*args, **options):
        outputs = model.apply(*args, **options)
        return outputs._replace(prediction=config.experts.bound * jnp.tanh(outputs.prediction / config.experts.bound))

    return model._replace(apply=apply)


SAMPLE_MODELS["bounded"] = MIXTURE._replace(
    build=bounded, settings={"experts.bound": Setting(2.0, "of each output", POSITIVE)}
)
METRICS["router/certainty"] = Metric(
    lambda gate: gate.probs.max(1).mean(), Column("largest probability of a token, mean", bounds=SHARE)
)


def scatter(spec, data):
    panel = Panel(Axis(data.axes["router/certainty"].label), Axis(data.axes["test/loss"].label))
    for arm, rows in data.last.groupby("arm"):
        panel.dots(series_of(arm), rows["router/certainty"], rows["test/loss"])
    return Chart([panel])


PLOTS["certainties"] = Plot(scatter, "A point is a run at its last evaluation.")


@dataclasses.dataclass(frozen=True)
class Above(OneSide):
    kind = "above"
    limit: float

    def judge(self, rows):
        values = rows.final_values(self.side, self.setup.at, self.setup.metric)
        verdict = "supported" if values.min() > self.limit else "opposite"
        return {"ours": values.mean(), "n": len(values), "verdict": verdict, "text": f"{values.mean():.3f}"}


KINDS[Above.kind] = Above
WRITE = Writer("same", "router/certainty")
CLAIMS = (
    WRITE.above("mini.sure", "the router is surer than chance", "not asked", LEARNED, 0.5),
    WRITE.above("mini.certain", "the router is certain", "not asked", LEARNED, 1.0),
)
PLOT = {"kind": "certainties", "name": "certainties"}
FIGURES = {"": Figure("sides", plots=lambda config: (PLOT,), claims=lambda config: CLAIMS)}
PROTOCOL = {"data.name": "sides", "data.clusters": 2, "data.dim": 3, "data.target_dim": 2, "data.samples": 32,
            "data.test_samples": 80, "model": "bounded", "experts.count": 2, "experts.name": "linear", "seeds": 2,
            "batch_size": 8, "arms": ("learned", "frozen"), "mesh.run": 1}
SCALES = {"default": lambda config: {"steps": 4, "eval_every": 2},
          "smoke": lambda config: {"steps": 2, "eval_every": 1}}
get_config = lambda arg=None: make_config("mini", arg, FIGURES, PROTOCOL, SCALES)
'''


@pytest.mark.slow
def test_a_new_paper_is_one_file_and_needs_no_other(tmp_path):
    """The command trains it where `routed.papers` cannot be imported; its column, chart and verdicts are there."""
    (tmp_path / "mini.py").write_text(PAPER)
    script = "import sys; sys.modules['routed.papers'] = None; from routed import main; main.run()"
    line = [sys.executable, "-c", script, "--config=mini.py", "--workdir=work", "--config.data.height=2"]
    found = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    loaded = results.load(tmp_path / "work")
    table, (sure, certain) = loaded["results"], loaded["claims"]
    assert len(table) == 2 * 2 * 3 and set(table.status) == {"ok"}  # arms, seeds, evaluations
    assert table["router/certainty"].between(0.5, 1).all()
    last = table[(table.arm == "learned") & (table.step == 4)]["router/certainty"]
    assert (sure["id"], sure["kind"], sure["verdict"], sure["n"]) == ("mini.sure", "above", "supported", 2)
    assert certain["verdict"] == "opposite"
    np.testing.assert_allclose(sure["ours"], last.mean())
    assert {"certainties.svg", "certainties.png"} <= {file.name for file in (tmp_path / "work" / "figures").iterdir()}
    page = (tmp_path / "work" / "report.html").read_text()
    assert "the router is surer than chance" in page and "largest probability of a token, mean" in page


def test_the_core_names_no_part_of_the_theory_of_gated_gaussians():
    """Its folder brings the task, the model, the loss, the chart and the kind of claim."""
    names = re.compile(
        r"gated[ _]?gaussian|gated_experts|\blikelihood\"|POWERS_PLOT|class Power\b|hellinger|voronoi", re.I
    )
    core = [path for path in SOURCE.rglob("*.py") if "papers" not in path.relative_to(SOURCE).parts]
    assert len(core) > 100
    assert [str(path) for path in core if names.search(path.read_text("utf-8"))] == []
    theory = "".join(path.read_text("utf-8") for path in (SOURCE / "papers" / "pham2024").glob("*.py"))
    assert len({name.lower() for name in names.findall(theory)}) >= 6
