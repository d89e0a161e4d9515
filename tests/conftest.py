"""Eight virtual CPU devices for every test, and no silent broadcasting between ranks."""

import ctypes
import gc
import importlib
import importlib.metadata
import os
import pathlib

# Tests compile much and compute little. Without LLVM's optimisations compiling takes half the time, without MLIR's
# emitters of fusions half of that, and what one test (or worker, or command of a test) has compiled the others load.
# 0.11 has no other emitters, and ends where it is given a flag that it does not know.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0"]
    + ["--xla_cpu_use_fusion_emitters=false"] * importlib.metadata.version("jaxlib").startswith("0.10.")
)
# As `engine.devices.allow_collectives` does: four threads for each of eight devices.
os.environ["PJRT_NPROC"] = "32"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(pathlib.Path(__file__).parent.parent / ".pytest_cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

import jax
import jaxtyping
import pytest

from tests import style

#: Rooms in which shapes and types are checked at every call: those that have arrays. mypy knows the types of the
#: others, and planning took five times as long under the checker. (The option of jaxtyping's plugin takes one package
#: beside a checker with arguments.)
CHECKED = (
    "analysis",
    "bench",
    "contracts",
    "experts",
    "kernels",
    "layer",
    "metrics",
    "models",
    "papers",
    "routers",
    "suite",
    "tasks",
    "trace",
    "training",
)
jaxtyping.install_import_hook(
    [f"routed.{room}" for room in CHECKED], "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
)

#: Slow tests with checked types.
CHECKED_TESTS = ("test_experiments", "test_docs")

# Every paper fills the tables, whichever experiment files a test loads.
for paper in ("chen2022", "chowdhury2023", "dikkala2023", "ours", "pham2024"):
    importlib.import_module(f"routed.papers.{paper}")

PROBES = importlib.import_module("routed.training").PROBES
#: The probes of the package and of its papers.
PROBE_NAMES = {*PROBES}

# Tracing makes many objects that live on. Looking through them for cycles as often as Python does takes a twentieth of
# the time.
gc.set_threshold(200_000, 20, 100)

# A plugin has imported jax before.
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


#: Programs of this size compile in a few seconds and train in milliseconds.
SMALL = {
    "name": "small", "seeds": 2, "steps": 20, "eval_every": 10, "batch_size": 8, "data.clusters": 4, "data.dim": 3,
    "data.target_dim": 2, "data.samples": 32, "data.test_samples": 400, "experts.count": 4, "experts.width": 5,
}  # fmt: skip


def pytest_addoption(parser):
    """Adds `--all`."""
    parser.addoption("--all", action="store_true", help="slow tests too (they start processes, or compile for seconds)")


def pytest_collection_modifyitems(config, items):
    """Leaves out slow tests, unless the command asks for all, or names files, or selects by `-m` itself."""
    if config.option.all or config.option.file_or_dir or config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in set(slow)]


def pytest_report_header(config):
    """Returns the measures of style, which pytest prints before a whole suite."""
    return None if config.option.file_or_dir else style.table().splitlines()


def without_papers(table):
    """Returns rows without columns of papers, which only a process that imported the paper computes."""
    return table[[column for column in table if not column.startswith(("regret/", "theory/"))]]


def build_model(config):
    """The model of a config."""
    from routed.plan.config import problem_of

    return problem_of(config).models[config.model].build(config, None)


@pytest.fixture(autouse=True)
def packaged_probes():
    """Forgets the probes of experiment files that tests before have loaded: each is part of every workdir's code."""
    for name in PROBES.keys() - PROBE_NAMES:
        del PROBES[name]


@pytest.fixture(autouse=True)
def types_checked_once(request, monkeypatch):
    """Slow tests trace without checked types what fast tests, those of figures and of documents trace with them."""
    if request.node.get_closest_marker("slow") and request.module.__name__.split(".")[-1] not in CHECKED_TESTS:
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="session", autouse=True)
def full_effort():
    """Runs of tests are brief, and a command would compile them with little effort: the flags above decide here."""
    from routed.engine import compilation

    compilation.BRIEF, compilation.LESS_EFFORT = 0.0, {}


#: Programs of this process: asking for them again takes nearly all of the time of a small command.
PROGRAMS = {}

#: A process may have 65,530 memory maps, of which a program takes tens.
MOST_MAPS = 20_000
#: Bytes of a worker at which it forgets its programs.
MOST_BYTES = 1.2e9


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Frees compiled programs before a worker has so much memory, or so many maps, that the system ends it."""
    proc = pathlib.Path("/proc/self")
    if not proc.exists():
        return
    resident = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > MOST_BYTES or (proc / "maps").read_bytes().count(b"\n") > MOST_MAPS:
        PROGRAMS.clear()
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module")
def compiled():
    """Programs are compiled once a process; the groups that were asked for, one entry each time.

    For modules whose tests look at what is run. Not for tests that change a part, or look at compiling: a program is
    known by its config here.
    """
    from routed.engine import compilation, execution, limits
    from routed.plan.runs import static_key

    asked, measure = [], limits.bytes_of_run

    def compile_once(config, pool, runs, mesh):
        key = (static_key(config), limits.steps_fed(config), pool, runs, tuple(mesh.shape.items()))
        asked.append(key)
        if key not in PROGRAMS:
            PROGRAMS[key] = compilation.compile_group(config, pool, runs, mesh)
        return PROGRAMS[key]

    def measured(config):  # of small runs measuring traces the program once more, for nothing
        return measure(config) if limits.pool_of(config) >= 10**6 else 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution, "compile_group", compile_once)
        patch.setattr(limits, "bytes_of_run", measured)
        yield asked


@pytest.fixture
def small():
    """The base config, small."""
    from routed.plan.config import base
    from routed.settings.tree import override

    return override(base(), SMALL)
