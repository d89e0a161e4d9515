"""Routers that decide without learning: the true cluster, a hash of the raw input or of the token id, or chance."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from routed.contracts.ties import highest
from routed.settings.setting import refuse

#: Softmax of a gap this wide is exactly 0 and 1 in float32.
CERTAIN = 1e4


class OracleRouter(nn.Module):
    """Sends cluster c to `choices` experts from c times `choices` on, mod E: the ceiling of any partition by cluster.

    Of text the cluster is the language. A `digit` d of 1 or more takes floor(c / E^d) for c: of cells that two labels
    in E make up the second label.
    """

    num_experts: int
    choices: int = 1
    digit: int = 0

    @nn.compact
    def __call__(self, x: Float[Array, "T ..."], *, cluster: Int[Array, " T"], **context) -> Float[Array, "T E"]:
        cluster = cluster // self.num_experts**self.digit
        chosen = (cluster[:, None] * self.choices + jnp.arange(self.choices)[None]) % self.num_experts
        return CERTAIN * jax.nn.one_hot(chosen, self.num_experts).sum(1)


class HashRouter(nn.Module):
    """Sends a token to the expert named by the signs of ceil(log2 E) fixed random projections, mod E.

    Locality-sensitive hashing by hyperplanes through the origin (Charikar 2002): equal inputs share an expert, but no
    weight was ever fitted and every expert is equally sharp.
    """

    num_experts: int

    @nn.compact
    def __call__(self, x: Float[Array, "T ..."], **context) -> Float[Array, "T E"]:
        x = x.reshape(len(x), -1).astype(jnp.float32)
        bits = max(1, math.ceil(math.log2(self.num_experts)))
        planes = self.param("planes", nn.initializers.normal(1.0), (x.shape[-1], bits))
        expert = (x @ planes > 0).astype(jnp.int32) @ 2 ** jnp.arange(bits)
        return CERTAIN * jax.nn.one_hot(expert % self.num_experts, self.num_experts)


class HashIdRouter(nn.Module):
    """Sends token id i to the `choices` experts that a fixed table of `vocabulary` names (Roller et al. 2021).

    The table is drawn balanced over ids: of the first, second, ... experts of all ids each is the same number of times,
    plus or minus one, and any experts may be an id's. Who knows how often ids occur may put a table balanced over
    occurrences in its place.
    """

    num_experts: int
    vocabulary: int
    choices: int = 1

    @nn.compact
    def __call__(self, x: Float[Array, "T ..."], *, token_id: Int[Array, " T"], **context) -> Float[Array, "T E"]:

        def draw(key):  # float, as every parameter is: an optimiser takes no integers. Exact below 2^24 ids.
            position = jax.random.permutation(key, jnp.arange(self.vocabulary))
            rounds = -(-self.vocabulary // self.num_experts)  # in each, every expert has a turn as first, second, ...
            draws = jax.random.uniform(jax.random.fold_in(key, 1), (rounds, self.num_experts - 1))
            behind = jnp.pad(1 + draws.argsort(1)[:, : self.choices - 1], ((0, 0), (1, 0)))
            return ((position[:, None] + behind[position // self.num_experts]) % self.num_experts).astype(jnp.float32)

        chosen = self.param("table", draw)[token_id].astype(jnp.int32)
        return CERTAIN * jax.nn.one_hot(chosen, self.num_experts).sum(1)


class HashBigramRouter(nn.Module):
    """Sends a pair (token id before, token id) to `choices` experts by a hash of the pair; the row's first follows 0.

    Every expert has a hash with the pair, and the highest ones are chosen: any experts may be a pair's, and pairs share
    the experts out evenly. Of a seed and a layer all hashes have their own `salt`.
    """

    num_experts: int
    choices: int = 1

    @nn.compact
    def __call__(
        self, x: Float[Array, "T ..."], *, token_id: Int[Array, " T"], previous_id: Int[Array, " T"], **context
    ) -> Float[Array, "T E"]:
        salt = self.param("salt", lambda key: jax.random.randint(key, (), 0, 2**24).astype(jnp.float32))
        pair = mixed(mixed(token_id.astype(jnp.uint32) + salt.astype(jnp.uint32)) + previous_id.astype(jnp.uint32))
        hashes = mixed(pair[:, None] + mixed(jnp.arange(1, self.num_experts + 1, dtype=jnp.uint32))[None])
        chosen = highest((hashes >> 8).astype(jnp.float32), self.choices)  # 24 bits, which a float32 holds
        return CERTAIN * jax.nn.one_hot(chosen, self.num_experts).sum(1)


def mixed(a: Array) -> Array:
    """Returns 32 bits that each depend on all of those of `a`: the finaliser of MurmurHash3 (Appleby 2011)."""
    a = (a ^ (a >> 16)) * jnp.uint32(0x85EBCA6B)
    a = (a ^ (a >> 13)) * jnp.uint32(0xC2B2AE35)
    return a ^ (a >> 16)


#: How far above its load an expert may seem to a token id, in occurrences of that id: enough that any experts meet.
REACH = 4.0


def balanced_table(counts: np.ndarray, experts: int, k: int, seed: int = 0) -> np.ndarray:
    """Returns the experts of each token id [V, k], float32: the least loaded ones, from the most frequent id on.

    The balanced hash of Roller et al. (2021), which shares out occurrences, not ids. The k - 1 others have the least
    load plus a random part of `REACH` occurrences of the id. Without it experts of equal load would stay together for
    good: they would be E / k experts of k times the size.
    """
    random, table, load = np.random.default_rng(seed), np.zeros((len(counts), k), np.float32), np.zeros(experts)
    for token in np.argsort(-counts, kind="stable"):
        weight = counts[token] + 1e-3  # ids that never occur are dealt round
        seeming = load + REACH * weight * random.random(experts)
        seeming[load.argmin()] = load.min()
        table[token] = chosen = np.argsort(seeming, kind="stable")[:k]
        load[chosen] += weight
    return table


class RandomRouter(nn.Module):
    """Scores every token at random, N(0, 1); if `anew`, anew in each call with the random stream `noise`.

    Without the stream (evaluation) a token's scores depend on its own bits only: neither on its place nor on the batch.
    """

    num_experts: int
    anew: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "T ..."], **context) -> Float[Array, "T E"]:
        if self.anew and self.has_rng("noise"):
            return jax.random.normal(self.make_rng("noise"), (len(x), self.num_experts))
        bits = jax.lax.bitcast_convert_type(x.reshape(len(x), -1).astype(jnp.float32).sum(1), jnp.uint32)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(0), bits)
        return jax.vmap(lambda key: jax.random.normal(key, (self.num_experts,)))(keys)


def check_table(config: ConfigDict) -> None:
    """Refuses a table of token ids that is not that of the text, and other experts per token than the selection's."""
    vocabulary = config.data.vocabulary
    if (size := config.router.get("vocabulary", vocabulary)) != vocabulary:
        refuse("router.vocabulary", size, f"must be data.vocabulary={vocabulary}: the router has a table of token ids")
    check_choices(config)


def check_choices(config: ConfigDict) -> None:
    """Refuses more or fewer experts per token than the router names: others would be chosen by their order."""
    per_id, reason = config.router.get("experts_per_id"), f"as router.name={config.router.name} has fixed experts"
    for key, node in (("selection.k", config.selection), ("selection.eval.k", config.selection.eval)):
        k = node.get("k", per_id or 1)
        if per_id is None and k != 1:
            refuse(key, k, f"must be 1, {reason}: one for each token")
        if per_id not in (None, k):
            refuse("router.experts_per_id", per_id, f"must be {key}={k}, {reason} for each token id or cluster")
