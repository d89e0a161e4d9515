"""Routing traces: choices of the routers of any Mixture-of-Experts model.

    routed trace report DIR... [--out=FILE] [--vocabulary=TOKENIZER]
    routed trace capture --model=PATH_OR_NAME --text=FILE... --out=DIR
    routed trace surgery --model=PATH_OR_NAME --text=FILE... --out=DIR
    routed trace import vllm|sglang|megatron|hf|olmoe|npz PATH --out=DIR [--experts=N] [--k=K]
    routed trace export DIR --out=FILE.npz

`report` makes one page of a trace, or of checkpoints of one model, in order. `capture` writes the trace of a Hugging
Face model on text files. `surgery` measures the model's loss there with other routers instead of its own, and makes a
page of the losses (both need pip install -e '.[torch]'). The same command continues after a kill. `import` makes a
trace of a file of another program, and `export` writes a trace into a NumPy archive. docs/traces.md has the format
and the meaning of the numbers.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from typing import Any

from routed.system import signals

if __name__ == "__main__":
    signals.end_on_signals()  # before the other imports, which take seconds

from absl import flags

from routed.contracts import UserError, nearest
from routed.system import commands, files

OUT = flags.DEFINE_string(
    "out",
    "",
    "report: the page, default report.html in the last DIR; capture, import: the trace's folder; surgery: that of the"
    " page; export: the file.",
    allow_override=True,
)
MODEL = flags.DEFINE_string("model", "", "A model of transformers: a folder, or a name on the hub.")
TEXT = flags.DEFINE_multi_string(
    "text", [], "A text file; may be repeated. Its name (if two have one, its path) is the label `file` of its tokens."
)
TOKENS = flags.DEFINE_string("tokens", "", "The tokenizer, if it is not the model's: a folder, a name, or bytes.")
LENGTH = flags.DEFINE_integer("length", 512, "Tokens of a row.", lower_bound=1)
BATCH = flags.DEFINE_integer("batch_size", 8, "Rows of a batch.", lower_bound=1)
ROUTERS = flags.DEFINE_string(
    "routers", "", "A regular expression for the names of the router modules of an unknown architecture."
)
EXPERTS = flags.DEFINE_integer("k", 0, "With --routers, and for import of sglang and hf: experts of a token.")
COUNT = flags.DEFINE_integer("experts", 0, "import: experts of a layer, for files that do not say it.")
SCORES = flags.DEFINE_bool("scores", True, "Keep the scores of all experts, as float16.")
REPAIR_TEXT = flags.DEFINE_multi_string(
    "other_text", [], "surgery: text for tables and repairs; default: the first half of every --text."
)
REPLACE = flags.DEFINE_list(
    "replace", [], "surgery: the replacements, comma-separated (`subsets`: shares of the experts); default: all."
)
REPAIR = flags.DEFINE_list(
    "repair_steps", ["50", "200"], "surgery: lengths of repairs, in training steps of a router alone; 0: no repair."
)
REGRET = flags.DEFINE_integer(
    "regret", 256, "surgery: tokens of each layer that try other experts; 0: none.", lower_bound=0
)
RATE = flags.DEFINE_float(
    "repair_rate", 0.02, "surgery: a step of the repair, in standard deviations of the router's weights.", lower_bound=0
)
DRAWS = flags.DEFINE_integer(
    "draws", 3, "surgery: draws of random replacements, and of repairs of all routers.", lower_bound=1
)
SEED = flags.DEFINE_integer("seed", 0, "surgery: seed of the draws.", lower_bound=0)
FROM = flags.DEFINE_string(
    "router_from", "", "surgery: another checkpoint or seed of the model, whose routers replace the model's own."
)
VOCABULARY = flags.DEFINE_string(
    "vocabulary", "", "report: words of the token ids: a tokenizer's folder or name, a .model, .json or .txt, or bytes."
)
USAGE = "usage: " + "; ".join(line.strip() for line in __doc__.splitlines() if line.startswith("    routed"))
_OF_MODEL = ("out", "model", "text", "tokens", "length", "batch_size", "routers", "k")
_OF_SURGERY = ("other_text", "replace", "repair_steps", "regret", "repair_rate", "draws", "seed", "router_from")
#: Command -> the flags that it reads.
READS = {
    "report": ("out", "vocabulary"),
    "capture": (*_OF_MODEL, "scores"),
    "surgery": (*_OF_MODEL, *_OF_SURGERY),
    "import": ("out", "model", "k", "experts"),
    "export": ("out",),
}


def main(argv: list[str]) -> None:
    """Runs the command that the first word names."""
    command, *rest = argv[1:] or [""]
    with files.folders_by("out"):
        _run(command, rest)


def _run(command: str, rest: list[str]) -> None:
    if command not in READS:
        raise UserError(USAGE)
    for name in {*itertools.chain(*READS.values())}.difference(READS[command]):
        if flags.FLAGS[name].present:
            raise UserError(f"--{name} has no effect with {command}: leave it out")
    if command == "report" and rest:
        from routed.trace.report import report  # here, since --help does not need it

        folders = [files.folder(name) for name in rest]
        out = files.folder(OUT.value) if OUT.value else folders[-1] / "report.html"
        tables = report(folders, out, vocabulary=VOCABULARY.value or None)
        files.tell("\n".join([*tables["findings"], f"wrote {out}"]))
    elif command in ("capture", "surgery") and not rest:
        for flag in (MODEL, TEXT, OUT):
            if not flag.value:
                raise UserError(f"--{flag.name} is missing; {USAGE}")
        with files.locked(files.folder(OUT.value), "out"):
            (_capture if command == "capture" else _surgery)()
    elif command == "import" and len(rest) == 2:
        _import(*rest)
    elif command == "export" and len(rest) == 1 and OUT.value:
        from routed.trace import export, read

        export(read(rest[0]), OUT.value)
        files.tell(f"wrote {OUT.value}; features and words are not in it")
    else:
        raise UserError(USAGE)


def _import(name: str, path: str) -> None:
    from routed.trace import FORMATS, write

    if name not in FORMATS:
        raise UserError(f"format {name!r} is unknown{nearest(name, FORMATS)}; known: {', '.join(FORMATS)}")
    if not OUT.value:
        raise UserError(f"--out is missing; {USAGE}")
    parameters = inspect.signature(FORMATS[name]).parameters
    given: dict[str, int] = {}
    for flag, argument in ((EXPERTS, "k"), (COUNT, "num_experts")):
        if flag.value and argument not in parameters:
            raise UserError(f"--{flag.name}={flag.value}: files of {name} say it themselves; leave it out")
        if flag.value:
            given[argument] = flag.value
        elif argument in parameters and parameters[argument].default is inspect.Parameter.empty:
            raise UserError(f"--{flag.name} is missing: files of {name} do not say it")
    arguments = FORMATS[name](path, **given) | ({"model": MODEL.value} if MODEL.value else {})
    with files.locked(files.folder(OUT.value), "out"):
        trace = write(OUT.value, **arguments)
    size = f"{trace.tokens:,} tokens, {len(trace.layers)} layers, {trace.experts} experts"
    files.tell(f"wrote {trace.folder}: {size}; next: routed trace report {trace.folder}")


def _capture() -> None:
    from routed.trace.capture import capture

    model, tokenizer, rows, names, settings = _inputs()
    source = ", ".join(TEXT.value)
    given = {"names": names, "vocabulary": tokenizer, "keep_scores": SCORES.value, "source": source}
    for trace in capture(model, rows, OUT.value, **given, **settings):
        size = f"{trace.tokens:,} tokens, {len(trace.layers)} layers"
        files.tell(f"wrote {trace.folder}: {size}; next: routed trace report {trace.folder}")


def _inputs() -> tuple[Any, Any, list[Any], list[str], dict[str, Any]]:
    """Returns the model, its tokenizer, the rows of text with the name of each row's file, and further settings."""
    from routed.trace.model_inputs import load, rows_of

    model, tokenizer = load(MODEL.value, TOKENS.value)
    settings = {"batch_size": BATCH.value, "routers": ROUTERS.value, "k": EXPERTS.value, "name": MODEL.value}
    return model, tokenizer, *rows_of(TEXT.value, tokenizer, LENGTH.value), settings


def _surgery() -> None:
    from routed.trace.model_inputs import BYTES, halves, load, rows_of
    from routed.trace.surgery import surgery
    from routed.trace.surgery_page import report

    model, tokenizer, rows, names, settings = _inputs()
    source = ", ".join(TEXT.value)
    if REPAIR_TEXT.value:
        repair_rows, _ = rows_of(REPAIR_TEXT.value, tokenizer, LENGTH.value)
        source += f"; tables and repairs: {', '.join(REPAIR_TEXT.value)}"
    else:
        repair_rows, rows = halves(rows, names)
        source += ", the second half of each; tables and repairs: the first"
    result = surgery(
        model,
        rows,
        repair_rows,
        OUT.value,
        replace=REPLACE.value,
        repair_steps=REPAIR.value,
        repair_rate=RATE.value,
        draws=DRAWS.value,
        regret_tokens=REGRET.value,
        seed=SEED.value,
        checkpoint=load(FROM.value, BYTES)[0] if FROM.value else None,
        source=source,
        **settings,
    )
    sentences = report(result, OUT.value)["findings"]
    files.tell("\n".join([*sentences, f"wrote {files.folder(OUT.value) / 'surgery.html'}"]))


def run() -> None:
    """Starts the command."""
    commands.start(main, functools.partial(commands.parse_flags, module=sys.modules[__name__]))


if __name__ == "__main__":
    run()
