"""The config as the sum of its parts: every choice and its table, all settings that are declared, and which of them a run reads."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from routed import experts, routers
from routed.layer.auxiliary import AUXILIARY, loss_settings
from routed.layer.dispatch import AUTO, DISPATCHES
from routed.layer.selection import SELECTIONS
from routed.layer.selection_settings import SHARED as SELECTION
from routed.layer.selection_settings import SHARED_EVAL
from routed.models import CLASSIFIERS, DECODERS, ENCODER_DECODERS, SAMPLE_MODELS
from routed.models.transformer_settings import DECODER, TRANSFORMER
from routed.plan.run_settings import ANALYSIS, ENGINE, PLAN
from routed.routers.noise import NOISES
from routed.routers.noise import SHARED as NOISE
from routed.settings.setting import Choice, Component, Setting, one_of
from routed.settings.tree import flatten, unflatten, value_of
from routed.tasks import SHARED as TASK
from routed.tasks import TASKS
from routed.tasks.text import LABELLED, SOURCES
from routed.tasks.text import SHARED as TEXT
from routed.training import PROBES, PROBLEMS, ProblemPart, program
from routed.training.optimiser import NORMALISATIONS, OPTIMISERS, SCHEDULES
from routed.training.optimiser import SHARED as OPTIMISER
from routed.training.phases import configs_of
from routed.training.task_losses import TASK_LOSSES

#: Where data come from: tasks draw their own, sources read text, tables have a class for each.
DATA: Mapping[str, Any] = ChainMap(TASKS, SOURCES, LABELLED)  # type: ignore[arg-type]

#: Every key that names a part, and the table it is looked up in. A user's file adds to the tables.
CHOICES: dict[str, Choice] = {
    "data.name": Choice("data", "gmm", "the task, or the source of text", DATA),
    "model": Choice("", "moe", "what is trained; moe has routers, dense_* are its twins", ChainMap(SAMPLE_MODELS, ENCODER_DECODERS, DECODERS, CLASSIFIERS)),
    "loss": Choice("losses", "squared", "what is minimised on samples", TASK_LOSSES),
    "router.name": Choice("router", "linear", "the router", routers.ROUTERS),
    "router.noise": Choice("router", "none", "noise on its scores or its input", NOISES),
    "experts.name": Choice("experts", "mlp", "the expert", experts.EXPERTS),
    "selection.name": Choice("selection", "soft", "the rule of training", SELECTIONS),
    "selection.eval.name": Choice("selection.eval", "top_k", "the rule of evaluation", SELECTIONS),
    "dispatch": Choice("", "dense", "how the layer is computed", ChainMap({AUTO: Component({})}, DISPATCHES)),  # type: ignore[dict-item]
    "optimizer.name": Choice("optimizer", "sgd", "the direction of a step", OPTIMISERS),
    "optimizer.normalise": Choice("optimizer", "none", "what divides an expert's gradient", NORMALISATIONS),
    "optimizer.schedule": Choice("optimizer", "constant", "of all rates", SCHEDULES),
}  # fmt: skip

#: Settings that parts of a node share.
SHARED: dict[str, Mapping[str, Setting]] = {
    "data": TASK | TEXT,
    "router": routers.SHARED | NOISE,
    "transformer": TRANSFORMER | DECODER,
    "experts": experts.SHARED,
    "selection": SELECTION,
    "selection.eval": SHARED_EVAL,
    "optimizer": OPTIMISER,
}

#: Parts that are nothing but settings, and take part in every run.
ALWAYS = {"plan": PLAN, "engine": ENGINE, "training program": program.SETTINGS, "analysis": ANALYSIS}


#: The parts that come with the package, which its version stands for; tables may get others, and others in their place.
PACKAGED: tuple[Any, ...] = (
    *ALWAYS.values(),
    *PROBLEMS.values(),
    *PROBES.values(),
    *AUXILIARY.values(),
    *(part for choice in CHOICES.values() for part in choice.parts.values()),
)

#: Nodes whose parts are made into modules, once for all runs of a program: no setting of their own is traced.
MADE = ("router", "experts")


class ActivePart(NamedTuple):
    """A part that a run uses: its label, the config node that holds its settings, and the part."""

    label: str
    node: str
    part: Any


def declared() -> dict[str, Setting]:
    """Every setting by its whole key, with those that a user's file has added.

    Raises:
      TypeError: two parts declare one key in different ways, or one that a module is made with is traced.
    """
    tables = (*(choice.parts for choice in CHOICES.values()), AUXILIARY)
    parts = [(name, part) for table in tables for name, part in table.items()]
    key = tuple((name, id(part)) for name, part in parts)  # a plan asks thousands of times
    if key not in _KNOWN:
        _KNOWN.clear()
        _KNOWN[key] = parts, _declared()
    return _KNOWN[key][1]


#: What was declared last, by the parts that stood in the tables, which are kept so that no other gets the id of one.
_KNOWN: dict[tuple[tuple[str, int], ...], tuple[list[tuple[str, Any]], dict[str, Setting]]] = {}


def _declared() -> dict[str, Setting]:
    declarations: dict[str, Setting] = {}

    def add(node: str, settings: Mapping[str, Setting]) -> None:
        for name, setting in settings.items():
            known = declarations.setdefault(key := f"{node}.{name}" if node else name, setting)
            if (known.default, known.traced, known.identity) != (setting.default, setting.traced, setting.identity):
                raise TypeError(f"{key}: two parts declare it with different defaults; share one declaration")

    for component in ALWAYS.values():
        add("", component.settings)
    for key, choice in CHOICES.items():
        add("", {key: Setting(choice.default, choice.doc, one_of(choice.parts))})
        add(choice.node, SHARED.get(choice.node, {}))
        for part in choice.parts.values():
            add(choice.node, part.settings)
            if varying := [name for name, setting in part.settings.items() if setting.traced and choice.node in MADE]:
                raise TypeError(
                    f"{choice.node}.{varying[0]}: drop traced=True, as a module is made before the runs of a program part"
                )
    for node, settings in SHARED.items():
        add(node, settings)
    for problem in PROBLEMS.values():
        add("", problem.settings)
    add("losses", loss_settings())
    return declarations


def base() -> ConfigDict:
    """The base config: the default of every declared setting. An experiment changes these values and adds no key."""
    return unflatten({key: setting.default for key, setting in declared().items()})


def problems_for(data: str) -> dict[str, ProblemPart]:
    """The problems that train on data of this name."""
    return {name: problem for name, problem in PROBLEMS.items() if data in problem.data}


def problem_of(config: ConfigDict) -> ProblemPart:
    """The problem of a config: of those for its data the one that has its model (or, of a model that none has, the first)."""
    return PROBLEMS[_name_of_problem(config)]


def _name_of_problem(config: ConfigDict) -> str:
    fitting = problems_for(config.data.name)
    return next((name for name, problem in fitting.items() if config.model in problem.models), next(iter(fitting)))


def parts_of(config: ConfigDict) -> list[ActivePart]:
    """The parts that take part in a run of a config, whatever its phases."""
    problem, name_of_problem = problem_of(config), _name_of_problem(config)
    active = {name: ActivePart(name, "", part) for name, part in ALWAYS.items()}
    always: list[Any] = [*ALWAYS.values(), problem]
    waiting = [key for part in always for key in part.uses]
    while waiting:
        key = waiting.pop()
        if key in active:
            continue
        name, choice = value_of(config, key), CHOICES[key]
        part = (problem.models if key == "model" else choice.parts)[name]
        active[key] = ActivePart(f"{key}={name}", choice.node, part)
        waiting += part.uses
    model = problem.models[config.model]
    if model.routed:
        settings = loss_settings()
        for name, loss in AUXILIARY.items():
            own = {key: settings[key] for key in (name, *loss.settings) if key in settings}
            active[f"losses.{name}"] = ActivePart(
                f"loss {name}", "losses", Component(own, loss.reads, loss.uses, loss.check)
            )
    # Last, as its check rests on what the others have checked.
    return [*active.values(), ActivePart(f"problem {name_of_problem}", "", problem)]


def keys_of(one: ActivePart, known: Mapping[str, Setting]) -> list[str]:
    """The whole keys that a part reads; of a part of an inner node, what only the outer one has is read there."""
    own = [f"{one.node}.{name}" if one.node else name for name in one.part.settings]
    return [*own, *(_whole(one.node, name, known) for name in one.part.reads), *one.part.uses]


def _whole(node: str, name: str, known: Mapping[str, Setting]) -> str:
    """The whole key of what a part of `node` reads: of that node, or of the nearest one around it that declares the name."""
    if "." in name or not node:
        return name
    around = node
    while around and f"{around}.{name}" not in known:
        around = around.rpartition(".")[0]
    return f"{around or node}.{name}"


def read_keys(config: ConfigDict) -> tuple[dict[str, list[str]], set[str]]:
    """(key -> words of the parts that read it, in any phase; those of them whose condition `when` holds in some phase)."""
    known, readers_of, active = declared(), dict[str, list[str]](), set[str]()
    for phase in configs_of(config):
        for one in parts_of(phase):
            for key in keys_of(one, known):
                readers = readers_of.setdefault(key, [])
                if one.label not in readers:
                    readers.append(one.label)
        active |= {key for key in readers_of if (when := known[key].when) is None or when.holds(phase)}
    return readers_of, active


def canonical(config: ConfigDict) -> ConfigDict:
    """What a run of a config reads, and nothing else: the keys of its parts, at their default where a condition does not hold.

    Two configs with the same canonical one run alike, and code that reads another key fails by that key's name.
    """
    known, flat = declared(), flatten(config)
    readers_of, active = read_keys(config)
    return unflatten({key: flat[key] if key in active else known[key].default for key in flat if key in readers_of})


def traced(config: ConfigDict) -> dict[str, Any]:
    """The traced settings of a config: those that may differ between runs of one compiled program."""
    known = declared()
    return {key: value for key, value in flatten(config).items() if known[key].traced}
