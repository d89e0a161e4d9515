"""The full histories of every smoke figure, written by the code before a change and compared with the code after it.

    python tests/golden/histories.py write OUT [FILE...]     # runs the figures of all experiment files, or some
    python tests/golden/histories.py compare OLD NEW         # every difference, figure by figure

histories.npz is of the smoke figures before "Let smoke runs take half a minute": to compare with it, name the
experiment files of the commit before that.

Scalars are kept as they are, arrays as a digest and their mean. Runs are told apart by figure, point, arm, seed and
whether they tune.
"""

import hashlib
import json
import os
import pathlib
import sys
import tempfile

os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"  # compiles four times as fast
)
ROOT = pathlib.Path(__file__).parent.parent.parent


def record(path: pathlib.Path, files: list[str]) -> None:
    """Runs every smoke figure on two CPU devices and keeps what its runs remember."""
    import jax
    import numpy as np

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    from routed.engine import execution, results
    from routed.engine.devices import make_mesh
    from routed.plan import experiment
    from routed.plan.runs import plan_runs
    from routed.settings.tree import override

    kept: dict[str, np.ndarray] = {}
    original = execution.rows_of
    figure_name = ""

    def rows_of(run, history, swept, problem):
        for point in run.points:
            name = f"{figure_name}|{json.dumps(point, sort_keys=True)}|{run.arm}|{run.seed}|{int(run.tuning)}"
            for column, values in history.items():
                values = np.asarray(values)
                if values.ndim > 1:
                    kept[f"{name}|{column}#mean"] = np.float64(values.astype(np.float64).mean())
                    content = f"{values.dtype} {values.shape}".encode() + np.ascontiguousarray(values).tobytes()
                    values = np.frombuffer(hashlib.sha256(content).digest()[:8], np.uint64)
                    column += "#digest"
                kept[f"{name}|{column}"] = values
        return original(run, history, swept, problem)

    execution.rows_of = rows_of
    for file in files:
        module = experiment.load(file)
        for figure in module.FIGURES:
            figure_name = f"{pathlib.Path(file).stem}:{figure}"
            spec = f"{file}:{figure},smoke" if figure else f"{file}:smoke"
            with tempfile.TemporaryDirectory() as folder:
                module, config = experiment.configure(spec, [])
                config = override(config, {"data.cache": str(pathlib.Path(tempfile.gettempdir()) / "golden-text")})
                sweep = experiment.figure_of(module, config).sweep(config)
                runs = plan_runs(config, sweep)
                table = results.open_workdir(pathlib.Path(folder), spec, config, sweep)
                execution.execute(runs, table, pathlib.Path(folder), make_mesh(config))
            print(figure_name, len(runs), "runs", flush=True)
    path.write_bytes(pack(kept))


def pack(kept) -> bytes:
    """One compressed archive of few arrays: columns side by side; thousands of arrays take ten times the space."""
    import io

    import numpy as np

    names = sorted(kept)
    buffer = io.BytesIO()
    by_type: dict[str, list[str]] = {}
    for key in names:
        by_type.setdefault(str(np.asarray(kept[key]).dtype), []).append(key)
    arrays = {
        kind: np.concatenate([np.atleast_1d(kept[key]).ravel() for key in keys]) for kind, keys in by_type.items()
    }
    index = {kind: [[key, int(np.size(kept[key]))] for key in keys] for kind, keys in by_type.items()}
    arrays["index"] = np.frombuffer(json.dumps(index).encode(), np.uint8)
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def unpack(path: pathlib.Path):
    """What `pack` packed, by name."""
    import numpy as np

    with np.load(path) as stored:
        index, kept = json.loads(bytes(stored["index"])), {}
        for kind, keys in index.items():
            place, values = 0, stored[kind]
            for key, size in keys:
                kept[key] = values[place : place + size]
                place += size
    return kept


def compare(old: pathlib.Path, new: pathlib.Path) -> int:
    """Prints for each figure how many columns of runs are equal, how far others are apart, and what is missing."""
    import numpy as np

    before, after = unpack(old), unpack(new)
    figures: dict[str, dict[str, list]] = {}
    for key, value in before.items():
        figure = figures.setdefault(key.split("|")[0], {"equal": [], "near": [], "far": [], "missing": []})
        column = key.split("|")[-1]
        if key not in after:
            figure["missing"].append(key)
        elif np.array_equal(value, after[key], equal_nan=value.dtype.kind == "f"):
            figure["equal"].append(column)
        elif not column.endswith("#digest"):
            a, b = value.astype(float), after[key].astype(float)
            apart = np.nanmax(np.abs(a - b) / np.maximum(np.abs(a), 1e-6)) if a.shape == b.shape else np.inf
            same_nan = a.shape == b.shape and np.array_equal(np.isnan(a), np.isnan(b))
            figure["near" if apart < 1e-5 and same_nan else "far"].append((float(apart), key))
    bad = 0
    for name, found in figures.items():
        print(
            f"{name}: {len(found['equal'])} equal, {len(found['near'])} within 1e-5, {len(found['far'])} further, "
            f"{len(found['missing'])} missing"
        )
        for apart, key in sorted(found["far"], reverse=True)[:5]:
            print(f"    {apart:.2g} {key}")
        for key in found["missing"][:3]:
            print(f"    missing {key}")
        bad += len(found["far"]) + len(found["missing"])
    extra = set(after) - set(before)
    print(f"{len(extra)} only in the new one", *sorted({key.split("|")[-1] for key in extra})[:20])
    return bad


if __name__ == "__main__":
    what, *paths = sys.argv[1:]
    if what == "write":
        os.chdir(ROOT)
        record(pathlib.Path(paths[0]), paths[1:] or sorted(str(p) for p in pathlib.Path("experiments").glob("*.py")))
    else:
        sys.exit(compare(*map(pathlib.Path, paths)) > 0)
