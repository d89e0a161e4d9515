"""Digests of every smoke figure: run keys, settings, rows, claims, and the programs of three experiments.

    python tests/golden/golden.py write OUT.json [--runs=DIR] [FILE...]   # trains figures; keeps workdirs in DIR
    python tests/golden/golden.py plans OUT.json [FILE...]                # keys, settings, programs; no training
    python tests/golden/golden.py judge OUT.json --runs=DIR [FILE...]     # claims anew, from the rows of kept workdirs
    python tests/golden/golden.py compare OLD.json NEW.json               # prints differences; exit code 1 if any

A change of structure keeps all digests. Digests of rows and claims hold on one kind of processor and one release of
JAX: write the old ones and the new ones on the same machine. Programs are StableHLO as JAX lowers it, before any
compiler.
"""

import hashlib
import json
import os
import pathlib
import re
import sys
import tempfile

os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"  # compiles faster
ROOT = pathlib.Path(__file__).parent.parent.parent
#: Experiment files whose programs are kept, at their headline.
PROGRAMS = ("gmm_router", "t5_mc4", "competition_lm")


def digest(text: str) -> str:
    """A short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rows_text(table) -> str:
    """The rows of a results table in a fixed order of rows and columns, numbers in full."""
    columns = sorted(table.columns)
    rows = [json.dumps([repr(value) for value in row]) for row in table[columns].itertuples(index=False)]
    return "\n".join([json.dumps(columns), *sorted(rows)])


def settings_text(listing: str) -> str:
    """The settings that a plan reads, sorted, without the lists of parts, which grow with imported papers."""
    lines = [
        re.sub(r"; must be one of [^;]*?(?=[;.] ?(?:traced|Read by))", "", line) for line in listing.splitlines()[2:]
    ]
    return "\n".join(sorted(lines))


def programs(runs, mesh) -> str:
    """The StableHLO text of every program of a plan."""
    from routed.engine import compilation, execution

    texts = []
    for group in execution.make_groups(runs, mesh):
        lowered = compilation.lower_group(group.config, group.pool, group.size, mesh)
        texts += [program.as_text() for program in lowered[:3]]
    return "\n".join(texts)


def judged(workdir: pathlib.Path, module, config, table) -> dict[str, str]:
    """Digests of a finished workdir's rows and claims."""
    from routed.analysis import page

    page.write(workdir, module, config, table)
    return {"rows": digest(rows_text(table)), "claims": digest((workdir / "claims.json").read_text())}


def figure(mode: str, file: str, name: str, folder: pathlib.Path) -> dict[str, str]:
    """The digests of one figure."""
    import pandas as pd

    from routed.engine import execution, results
    from routed.engine.devices import make_mesh
    from routed.plan import experiment, listing
    from routed.plan.runs import plan_runs
    from routed.settings.tree import override

    spec = f"{file}:{name},smoke" if name else f"{file}:smoke"
    module, config = experiment.configure(spec, [])
    config = override(config, {"data.cache": str(pathlib.Path(tempfile.gettempdir()) / "golden-text")})
    sweep = experiment.figure_of(module, config).sweep(config)
    runs = plan_runs(config, sweep)
    workdir = folder / f"{pathlib.Path(file).stem}-{name or 'headline'}"
    if mode == "judge":
        return judged(workdir, module, config, pd.read_parquet(workdir / "results.parquet"))
    found = {"keys": digest("\n".join(sorted(run.key for run in runs)))}
    found["settings"] = digest(settings_text(listing.list_settings(config, runs)))
    if not name and pathlib.Path(file).stem in PROGRAMS:
        found["programs"] = digest(programs(runs, make_mesh(config)))
    if mode == "write":
        workdir.mkdir(parents=True, exist_ok=True)
        table = results.open_workdir(workdir, spec, config, sweep)
        found |= judged(workdir, module, config, execution.execute(runs, table, workdir, make_mesh(config)))
    return found


def write(mode: str, out: pathlib.Path, folder: pathlib.Path, files: list[str]) -> None:
    """Writes the digests of the figures of these experiment files."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    from routed.plan import experiment

    found: dict[str, dict[str, str]] = {}
    for file in files:
        for name in experiment.load(file).FIGURES:
            label = f"{pathlib.Path(file).stem}:{name}"
            found[label] = figure(mode, file, name, folder)
            print(label, found[label], flush=True)
        jax.clear_caches()
        out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def compare(old: pathlib.Path, new: pathlib.Path) -> int:
    """Prints every figure and digest that differs, of the figures and digests that both files have."""
    before, after = json.loads(old.read_text()), json.loads(new.read_text())
    differences = [
        f"{label}: {kind} differ"
        for label in before.keys() & after.keys()
        for kind in before[label].keys() & after[label].keys()
        if before[label][kind] != after[label][kind]
    ]
    missing = sorted(before.keys() - after.keys())
    print("\n".join([*sorted(differences), f"{len(differences)} differences, {len(missing)} figures not compared"]))
    return bool(differences)


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    if mode == "compare":
        sys.exit(compare(*map(pathlib.Path, arguments[:2])))
    options = [text.partition("=")[2] for text in arguments if text.startswith("--runs=")]
    out, *files = [text for text in arguments if not text.startswith("--")]
    with tempfile.TemporaryDirectory() as scratch:
        chosen = files or sorted(str(path) for path in (ROOT / "experiments").glob("*.py"))
        write(mode, pathlib.Path(out), pathlib.Path((options or [scratch])[0]).absolute(), chosen)
