"""Artificial languages, made on the spot: their own alphabets, words and grammars, nothing to fetch.

Some share an alphabet, some even their words, so that a token does not give its language away.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
from collections.abc import Iterator

import numpy as np
from ml_collections import ConfigDict

from routed.tasks.text.documents import SPLITS, Damage, Source, choose

#: Vowels and consonants.
ALPHABETS = {
    "latin": ("aeiou", "bdfgklmnprstvz"),
    "cyrillic": ("аеиоу", "бвгдзклмнпрстж"),
    "greek": ("αεηιο", "βγδζθκλμνπρστφ"),
    "georgian": ("აეიოუ", "ბგდვზთკლმნპრსტ"),
}

#: Code (of the range that ISO 639 leaves to private use) -> alphabet, number of its words, number of its grammar.
LANGUAGES = {
    "qaa": ("latin", 0, 0),
    "qab": ("latin", 1, 1),
    "qac": ("latin", 0, 2),  # the words of qaa in another order
    "qba": ("cyrillic", 2, 3),
    "qbb": ("cyrillic", 3, 4),
    "qca": ("greek", 4, 5),
    "qcb": ("greek", 4, 6),  # the words of qca in another order
    "qda": ("georgian", 5, 7),
}

CLASSES = 6  # of words; a grammar says which class follows which

RANKS = 250  # words of a class

TOPICS = 8  # half of the words of a document are of its topic

STOP = 0.1  # probability that a sentence ends after a word

WORDS = 120  # of a document, full stops included

DOCUMENTS = {"train": 500, "validation": 100}


def artificial(data: ConfigDict) -> Source:
    """The same text on every machine and in every run."""

    def documents(language: str, split: str, damage: Damage) -> Iterator[str]:
        del damage
        return iter(_texts(language, split))

    return Source(choose(data, LANGUAGES), documents, _fingerprint, lambda language: 1)


@functools.lru_cache(maxsize=len(LANGUAGES) * len(SPLITS))
def _texts(language: str, split: str) -> list[str]:
    """Documents of WORDS words. A Markov chain over classes draws the class, Zipf's law (1 / (rank + 2)) the word.

    All documents advance together, a word at a time.
    """
    alphabet, words, grammar = LANGUAGES[language]
    lexicon = _lexicon(alphabet, words)
    follows = _grammar(grammar).cumsum(-1)[:, :-1]
    rng = np.random.default_rng([list(LANGUAGES).index(language), SPLITS.index(split)])
    count = DOCUMENTS[split]

    state = np.zeros((WORDS + 1, count), int)  # 0: a sentence ends
    for place, chance in enumerate(rng.random((WORDS, count))):
        state[place + 1] = (follows[state[place]] < chance[:, None]).sum(-1)
    zipf = np.cumsum(1 / (np.arange(RANKS) + 2))
    rank = np.searchsorted(zipf, rng.random((WORDS, count)) * zipf[-1])
    topic = rng.integers(TOPICS, size=count) * (RANKS // TOPICS) * rng.integers(2, size=(WORDS, count))
    word = np.where(state[1:] == 0, 0, 1 + (state[1:] - 1) * RANKS + (rank + topic) % RANKS)
    return [" ".join(text).replace(" .", ".") for text in lexicon[word.T].tolist()]


def _lexicon(alphabet: str, number: int) -> np.ndarray:
    """A full stop, then RANKS words of each class, short ones at frequent ranks."""
    vowels, consonants = ALPHABETS[alphabet]
    syllables = [consonant + vowel for consonant in consonants for vowel in vowels]
    rng = np.random.default_rng([len(LANGUAGES), number])
    words: dict[str, None] = {}  # an ordered set
    while len(words) < CLASSES * RANKS:
        length = 1 + min(3, len(words) // 40)
        words["".join(syllables[i] for i in rng.integers(len(syllables), size=length))] = None
    by_rank = np.array(list(words), object).reshape(RANKS, CLASSES)
    return np.concatenate([["."], by_rank.T.ravel()])


def _grammar(number: int) -> np.ndarray:
    """Probability that class j follows class i; class 0 is the full stop, which follows itself never."""
    rng = np.random.default_rng([len(LANGUAGES) + 1, number])
    follows = rng.dirichlet(np.full(CLASSES, 0.4), CLASSES + 1) * (1 - STOP)
    follows[0] /= 1 - STOP
    return np.concatenate([np.r_[0, np.full(CLASSES, STOP)][:, None], follows], axis=1)


def _fingerprint(language: str, split: str) -> str:
    """Changes with this file and with NumPy, whose generators may change."""
    recipe = f"{language} {split} {np.__version__} ".encode() + pathlib.Path(__file__).read_bytes()
    return hashlib.sha256(recipe).hexdigest()
