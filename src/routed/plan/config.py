"""The config as the sum of its parts: choices with their tables, declared settings, settings that a run reads."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import ItemsView, Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from routed import experts, routers
from routed.contracts import UserError, nearest
from routed.layer.auxiliary import AUXILIARY, loss_settings
from routed.layer.dispatch import AUTO, DISPATCHES
from routed.layer.selection import SELECTIONS
from routed.layer.selection_settings import SHARED as SELECTION
from routed.layer.selection_settings import SHARED_EVAL
from routed.models.router_layers import variants
from routed.models.transformer_sizes import DECODER, TRANSFORMER
from routed.plan.run_settings import ANALYSIS, ENGINE, PLAN
from routed.routers.noise import NOISES
from routed.routers.noise import SHARED as NOISE
from routed.settings.renamed import renamed
from routed.settings.setting import Choice, Component, Setting, check_declaration, one_of
from routed.settings.tree import flatten, unflatten, value_of
from routed.tasks import SHARED as TASK
from routed.tasks.text import SHARED as TEXT
from routed.training import PROBES, PROBLEMS, ProblemPart, program
from routed.training.optimiser import NORMALISATIONS, OPTIMISERS, SCHEDULES
from routed.training.optimiser import SHARED as OPTIMISER
from routed.training.phases import configs_of
from routed.training.task_losses import TASK_LOSSES


class PartsOfProblems(Mapping[str, Any]):
    """The parts of one kind of all problems, also of problems that are added later; of one name the first counts."""

    def __init__(self, field: str) -> None:
        self._field = field

    def _parts(self) -> dict[str, Any]:
        tables = [getattr(problem, self._field) for problem in PROBLEMS.values()]
        return {name: part for table in reversed(tables) for name, part in table.items()}

    def __getitem__(self, name: str) -> Any:
        return self._parts()[name]

    def items(self) -> ItemsView[str, Any]:  # the inherited one would merge the tables anew for each item
        return self._parts().items()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts())

    def __len__(self) -> int:
        return len(self._parts())


#: Where data come from: tasks draw their own, sources read text, tables have a class for each.
DATA = PartsOfProblems("data")

#: Every key that names a part, and the table it is looked up in. A user's file adds to the tables.
CHOICES: dict[str, Choice] = {
    "data.name": Choice("data", "gmm", "the task, or the source of text", DATA),
    "model": Choice("", "moe", "what is trained; moe has routers, dense_* are its twins", PartsOfProblems("models")),
    "loss": Choice("losses", "squared", "what is minimised on samples", TASK_LOSSES),
    "router.name": Choice("router", "linear", "the router", routers.ROUTERS),
    "router.noise": Choice("router", "none", "noise on its scores or its input", NOISES),
    "experts.name": Choice("experts", "mlp", "the expert", experts.EXPERTS),
    "selection.name": Choice("selection", "soft", "the rule of training", SELECTIONS),
    "selection.eval.name": Choice("selection.eval", "top_k", "the rule of evaluation", SELECTIONS),
    "dispatch": Choice("", "dense", "how the layer is computed", ChainMap[str, Any]({AUTO: Component({})}, DISPATCHES)),
    "optimizer.name": Choice("optimizer", "sgd", "the direction of a step", OPTIMISERS),
    "optimizer.normalise": Choice("optimizer", "none", "what divides an expert's gradient", NORMALISATIONS),
    "optimizer.schedule": Choice("optimizer", "constant", "of all rates", SCHEDULES),
}

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


#: The parts of the core, which the package's version identifies. A user's file may add parts to the tables or replace
#: them.
PACKAGED: tuple[Any, ...] = (
    *ALWAYS.values(),
    *PROBLEMS.values(),
    *(part for problem in PROBLEMS.values() for table in (problem.models, problem.data) for part in table.values()),
    *PROBES.values(),
    *AUXILIARY.values(),
    *(part for choice in CHOICES.values() for part in choice.parts.values()),
)

#: Nodes whose parts become modules once for all runs of a program: none of their own settings is traced.
STATIC_NODES = ("router", "experts")


class ActivePart(NamedTuple):
    """A part that a run uses: its label, the config node that holds its settings, and the part."""

    label: str
    node: str
    part: Any


def declared() -> dict[str, Setting]:
    """Every setting by its whole key, with the settings that a user's file has added.

    Raises:
      TypeError: two parts declare a key in different ways, or a setting of STATIC_NODES is traced.
      UserError: a part declares a setting under an old name of another.
    """
    tables = (*(choice.parts for choice in CHOICES.values()), AUXILIARY, PROBLEMS)
    parts = [(name, part) for table in tables for name, part in table.items()]
    key = tuple((name, id(part)) for name, part in parts)  # a plan asks thousands of times
    if key not in _DECLARED:
        _DECLARED.clear()
        _DECLARED[key] = parts, _declared()
    return _DECLARED[key][1]


#: The latest declarations, by the parts in the tables. The parts stay referenced, so that no other part gets the id of
#: one.
_DECLARED: dict[tuple[tuple[str, int], ...], tuple[list[tuple[str, Any]], dict[str, Setting]]] = {}


def _declared() -> dict[str, Setting]:
    declarations: dict[str, Setting] = {}

    def add(node: str, settings: Mapping[str, Setting]) -> None:
        for name, setting in settings.items():
            check_declaration(f"{node}.{name}" if node else name, setting)
            first = declarations.setdefault(key := f"{node}.{name}" if node else name, setting)
            if hint := renamed(key):
                raise UserError(f"a part declares the setting {key!r}, an old name{hint}; choose another name")
            if (first.default, first.traced, first.identity) != (setting.default, setting.traced, setting.identity):
                raise TypeError(f"{key}: two parts declare it with different defaults; share one declaration")

    for component in ALWAYS.values():
        add("", component.settings)
    for key, choice in CHOICES.items():
        add("", {key: Setting(choice.default, choice.doc, one_of(choice.parts))})
        add(choice.node, SHARED.get(choice.node, {}))
        for name, part in choice.parts.items():
            for field in ("reads", "uses", "needs"):
                if isinstance(names := getattr(part, field, ()), str):
                    raise UserError(f"{key}={name}: {field}={names!r} is a text; write a tuple: ({names!r},)")
            add(choice.node, part.settings)
            varying = [name for name, setting in part.settings.items() if setting.traced]
            if varying and choice.node in STATIC_NODES:
                raise TypeError(
                    f"{choice.node}.{varying[0]}: drop traced=True, as a module is made before the runs of a program"
                    " part"
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
    """The problem of a config: that of its data with its model, or the first of its data if none has the model."""
    return PROBLEMS[_name_of_problem(config)]


def _name_of_problem(config: ConfigDict) -> str:
    fitting = problems_for(config.data.name)
    return next((name for name, problem in fitting.items() if config.model in problem.models), next(iter(fitting)))


def parts_of(config: ConfigDict) -> list[ActivePart]:
    """The parts that a run of a config uses, apart from the parts of its phases."""
    problem, name_of_problem = problem_of(config), _name_of_problem(config)
    active = {name: ActivePart(name, "", part) for name, part in ALWAYS.items()}
    always: list[Any] = [*ALWAYS.values(), problem]
    pending = [key for part in always for key in part.uses]
    while pending:
        key = pending.pop()
        if key in active:
            continue
        if key not in CHOICES:
            raise UserError(f"a part uses the choice {key!r}, which does not exist{nearest(key, CHOICES)}")
        name, choice = value_of(config, key), CHOICES[key]
        part = (problem.models if key == "model" else choice.parts)[name]
        active[key] = ActivePart(f"{key}={name}", choice.node, part)
        pending += part.uses
    model = problem.models[config.model]
    if model.routed:
        settings = loss_settings()
        for name, loss in AUXILIARY.items():
            of_loss = {key: settings[key] for key in (name, *loss.settings) if key in settings}
            component = Component(of_loss, loss.reads, loss.uses, loss.check)
            active[f"losses.{name}"] = ActivePart(f"loss {name}", "losses", component)
    # The problem is last, as its check relies on the checks of the other parts.
    return [*active.values(), ActivePart(f"problem {name_of_problem}", "", problem)]


def keys_of(active: ActivePart, settings: Mapping[str, Setting]) -> list[str]:
    """The whole keys that a part reads."""
    node, part = active.node, active.part
    declared_keys = [f"{node}.{name}" if node else name for name in part.settings]
    return [*declared_keys, *(_whole_key(node, name, settings) for name in part.reads), *part.uses]


def _whole_key(node: str, name: str, settings: Mapping[str, Setting]) -> str:
    """The whole key of a name that a part of `node` reads: of the nearest node around the part that declares it."""
    if "." in name or not node:
        return name
    outer = node
    while outer and f"{outer}.{name}" not in settings:
        outer = outer.rpartition(".")[0]
    return f"{outer or node}.{name}"


def variants_of(config: ConfigDict) -> list[ConfigDict]:
    """Returns the config of each phase, and of each kind of sparse layer in it."""
    if "router.layers" not in problem_of(config).models[config.model].reads or not config.router.layers:
        return configs_of(config)
    return [variant for phase in configs_of(config) for variant in variants(phase)]


def read_keys(config: ConfigDict) -> tuple[dict[str, list[str]], set[str]]:
    """Returns key -> labels of the parts that read the key in any variant, and the keys whose `when` holds in one.

    Raises:
      UserError: a part reads a setting that no part declares.
    """
    settings, readers_of, active = declared(), dict[str, list[str]](), set[str]()
    for phase in variants_of(config):
        for part in parts_of(phase):
            for key in keys_of(part, settings):
                if key not in settings:
                    hint = renamed(key) or nearest(key, settings)
                    if (name := key.rpartition(".")[2]) in routers.TIMES:
                        hint = f": a call gets {name!r} in its context, without being asked"
                    raise UserError(f"{part.label} reads the setting {key!r}, which no part declares{hint}")
                readers = readers_of.setdefault(key, [])
                if part.label not in readers:
                    readers.append(part.label)
        active |= {key for key in readers_of if (when := settings[key].when) is None or when.holds(phase)}
    return readers_of, active


def canonical(config: ConfigDict) -> ConfigDict:
    """The config with only the keys that its parts read, each at its default if its condition does not hold.

    Configs with equal canonical configs run alike. Code that reads any other key fails with an error that names the
    key.
    """
    settings, flat = declared(), flatten(config)
    readers_of, active = read_keys(config)
    return unflatten({key: flat[key] if key in active else settings[key].default for key in flat if key in readers_of})


def traced(config: ConfigDict) -> dict[str, Any]:
    """The traced settings of a config: those that may differ between runs of one compiled program."""
    settings = declared()
    return {key: value for key, value in flatten(config).items() if settings[key].traced}
