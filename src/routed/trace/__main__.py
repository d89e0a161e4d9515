"""Routing traces: what the routers of any Mixture-of-Experts model decided.

    routed trace report DIR... [--out=FILE]                  (or python -m routed.trace report ...)
    routed trace capture --model=PATH_OR_NAME --text=FILE... --out=DIR
    routed trace surgery --model=PATH_OR_NAME --text=FILE... --out=DIR

`report` makes one page of a trace, or of checkpoints of one model, in order. `capture` writes the trace of a Hugging Face model on text
files; `surgery` measures what its loss there is with other routers in the place of its own, and makes a page of that (both need pip install
'routed[torch]'). The same command goes on after a kill. docs/traces.md has the format and what the numbers mean.
"""

from __future__ import annotations

import functools
import sys

from routed.system import signals

if __name__ == "__main__":
    signals.end_on_signals()  # before the other imports, which take seconds

from absl import flags

from routed.contracts import UserError
from routed.system import commands, files

OUT = flags.DEFINE_string(
    "out",
    "",
    "report: the page, default report.html in the last DIR; capture: the folder of the trace; surgery: that of the losses and the page.",
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
    "routers", "", "A regular expression of the names of the router modules, where the architecture is not known."
)
EXPERTS = flags.DEFINE_integer("k", 0, "With --routers: experts of a token.")
SCORES = flags.DEFINE_bool("scores", True, "Keep the scores of all experts, as float16.")
OTHER = flags.DEFINE_multi_string(
    "other_text",
    [],
    "surgery: text that tables are filled from and routers repaired on; default: the first half of every --text.",
)
REPLACE = flags.DEFINE_list(
    "replace", [], "surgery: what takes a router's place, comma-separated; default: everything known."
)
REPAIR = flags.DEFINE_integer(
    "repair_steps", 200, "surgery: steps that a router alone is trained for; 0: no repair.", lower_bound=0
)
RATE = flags.DEFINE_float(
    "repair_rate", 0.02, "surgery: a step of the repair, in standard deviations of the router's weights.", lower_bound=0
)
DRAWS = flags.DEFINE_integer("draws", 1, "surgery: draws of what is random.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "surgery: of what is drawn.", lower_bound=0)
FROM = flags.DEFINE_string(
    "router_from", "", "surgery: another checkpoint of the model, whose routers take the place of its own."
)
USAGE = "usage: routed trace report DIR... [--out=FILE], or routed trace capture|surgery --model=PATH_OR_NAME --text=FILE... --out=DIR"


def main(argv: list[str]) -> None:
    """A page, or a trace."""
    word, *rest = argv[1:] or [""]
    if word == "report" and rest:
        from routed.trace.report import report  # here, since --help needs none of it

        folders = [files.folder(name) for name in rest]
        out = files.folder(OUT.value) if OUT.value else folders[-1] / "report.html"
        found = report(folders, out)
        files.tell("\n".join([*found["findings"], f"wrote {out}"]))
    elif word in (known := {"capture": _capture, "surgery": _surgery}) and not rest:
        _required()
        with files.locked(files.folder(OUT.value), "out"):
            known[word]()
    else:
        raise UserError(USAGE)


def _capture() -> None:
    from routed.trace.capture import capture, load, rows_of

    model, tokenizer = load(MODEL.value, TOKENS.value)
    rows, names = rows_of(TEXT.value, tokenizer, LENGTH.value)
    made = capture(
        model, rows, OUT.value, names=names, batch_size=BATCH.value, routers=ROUTERS.value, k=EXPERTS.value, keep_scores=SCORES.value,
        name=MODEL.value, source=", ".join(TEXT.value),
    )  # fmt: skip
    for trace in made:
        files.tell(
            f"wrote {trace.folder}: {trace.tokens:,} tokens, {len(trace.layers)} layers; next: routed trace report {trace.folder}"
        )


def _surgery() -> None:
    from routed.trace.capture import BYTES, load, rows_of
    from routed.trace.operation import report
    from routed.trace.surgery import halves, surgery

    model, tokenizer = load(MODEL.value, TOKENS.value)
    rows, names = rows_of(TEXT.value, tokenizer, LENGTH.value)
    source = ", ".join(TEXT.value)
    if OTHER.value:
        other, _ = rows_of(OTHER.value, tokenizer, LENGTH.value)
        source += f"; tables and repairs: {', '.join(OTHER.value)}"
    else:
        other, rows = halves(rows, names)
        source += ", the second half of each; tables and repairs: the first"
    found = surgery(
        model, rows, other, OUT.value, replace=REPLACE.value, repair_steps=REPAIR.value, repair_rate=RATE.value, draws=DRAWS.value, seed=SEED.value,
        batch_size=BATCH.value, routers=ROUTERS.value, k=EXPERTS.value, foreign=load(FROM.value, BYTES)[0] if FROM.value else None,
        name=MODEL.value, source=source,
    )  # fmt: skip
    told = report(found, OUT.value)
    files.tell("\n".join([*told["findings"], f"wrote {files.folder(OUT.value) / 'surgery.html'}"]))


def _required() -> None:
    for name, value in (("model", MODEL.value), ("text", TEXT.value), ("out", OUT.value)):
        if not value:
            raise UserError(f"--{name} is missing; {USAGE}")


def run() -> None:
    """Entry point."""
    commands.start(main, functools.partial(commands.parse_flags, module=sys.modules[__name__]))


if __name__ == "__main__":
    run()
