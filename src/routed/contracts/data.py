"""The contracts between rooms: the data that flows from router to selection, dispatch, losses and metrics.

Axis letters, used by every annotation and einsum of the package:
  T tokens, D features of a token, E experts, O outputs, H hidden units, A assignments (token, expert), C clusters, R
  runs.

They are named tuples, so that JAX may fill them with anything (stacked runs, shapes, shardings); functions check
arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int


class Batch(NamedTuple):
    """Samples with their targets and the cluster that generated each token (hidden from every router but the oracle).

    A sample is one token, or S tokens of which each is routed on its own; B samples.
    """

    x: Float[Array, "B ..."]
    y: Float[Array, "B O"]
    cluster: Int[Array, "B ..."]
    #: What the experts see beside the router's features, where x is not for them.
    side: Float[Array, "B V"] | None = None

    @property
    def tokens(self) -> Float[Array, "T ..."]:
        """Returns the tokens that are routed, sample by sample."""
        return self.x.reshape(-1, *self.x.shape[self.cluster.ndim :])

    @property
    def label(self) -> Int[Array, " T"]:
        """Returns the cluster of each token."""
        return self.cluster.reshape(-1)


class TextBatch(NamedTuple):
    """Rows of text for an encoder-decoder: what is left of a row, what was cut out of it, and its language (an index).

    B rows, L encoder tokens, M decoder tokens. Ids: 0 pads (rows are always full), 1 ends, sentinels are the highest.
    """

    inputs: Int[Array, "B L"]
    targets: Int[Array, "B M"]
    language: Int[Array, " B"]


class Routing(NamedTuple):
    """Sparse routing: one flat list of assignments, with the scores it was selected from.

    `kept` is False where the assignment was dropped for lack of capacity, or its token is padding. `rank` is its place
    in the queue of its expert, counted from 0 within its group. A = T k for token choice, token by token (so [T, k] is
    a reshape); A = E C in each group for expert choice. Assignments of a group are contiguous. `extra` holds data of a
    selection that computes a layer in a way of its own (`layer.rule.Selection.forward`): a pytree, which that
    selection's loss reads. `chosen` is False where a token did not choose the expert (ReLU gates list all); None:
    all were chosen.
    """

    scores: Float[Array, "T E"]
    token: Int[Array, " A"]
    expert: Int[Array, " A"]
    weight: Float[Array, " A"]
    kept: Bool[Array, " A"]
    rank: Int[Array, " A"]
    extra: Any = None
    chosen: Bool[Array, " A"] | None = None


class SoftRouting(NamedTuple):
    """Soft routing: every token to every expert, `weight[t, e]` its share."""

    scores: Float[Array, "T E"]
    weight: Float[Array, "T E"]


class Queues(NamedTuple):
    """The queues of a sparse dispatch, static: tokens of a group, and places for each expert in it."""

    group_size: int
    capacity: int


#: ONE expert as a function: (its parameters, tokens [T, ...]) -> outputs [T, O], or [1, O] for all tokens.
ExpertFunction = Callable[[Any, Float[Array, "T ..."]], Float[Array, "#T O"]]


#: The least and the largest value that a column can have; None: there is none.
Bounds = tuple[float | None, float | None]

SHARE: Bounds = (0.0, 1.0)
AT_LEAST_0: Bounds = (0.0, None)
AT_LEAST_1: Bounds = (1.0, None)
FROM_MINUS_1_TO_1: Bounds = (-1.0, 1.0)


class Column(NamedTuple):
    """A metric column in figures: its axis label, whether the axis is logarithmic, its bounds, and which end is better.

    `constant` is the value of the best predictor that ignores its input; None where no such predictor is known.
    `references` are values to compare with, by their words: a number, or the key of the setting that is the number.
    `definition` says what it measures, and what its ends mean, to a reader who has not met it.
    """

    label: str
    definition: str = ""
    bounds: Bounds = (None, None)
    log: bool = False
    higher_is_better: bool = False
    references: Mapping[str, float | str] = {}
    constant: float | None = None


def column_of(metric: str, columns: Mapping[str, Column]) -> Column | None:
    """Returns the column of a metric, or of the metric that it is a part of (eval/loss of eval/loss/en); or None."""
    return columns.get(metric) or columns.get(metric.rpartition("/")[0])


#: Groups of parameters, each with a learning rate of its own: a model's `params` has those it needs. `head` is what a
#: network that was trained before gets anew, by the trunk's rate; `fixed` are never trained.
GROUPS = ("router", "experts", "trunk", "head", "fixed")

#: The beginning of the name of a kind of router among parameters, where the layers of a model have several; the number
#: of the kind follows.
KIND = "routers_"
