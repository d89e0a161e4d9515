"""Artificial languages with alphabets, words and grammars of their own: no file is read.

Some languages share an alphabet, and some share their words, so that a token does not identify its language.
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

#: Language code (from the private range of ISO 639) -> alphabet, number of its lexicon, number of its grammar.
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

CLASSES = 6  # classes of words; a grammar gives the probability that a class follows another
RANKS = 250  # words of a class
TOPICS = 8  # half of the words of a document are of its topic
STOP = 0.1  # probability that a sentence ends after a word
DOCUMENT_WORDS = 120  # words of a document, full stops included
DOCUMENTS = {"train": 500, "validation": 100}


def artificial(data: ConfigDict) -> Source:
    """Returns artificial text, the same on every machine and in every run."""

    def documents(language: str, split: str, damage: Damage) -> Iterator[str]:
        return iter(_texts(language, split))

    return Source(choose(data, LANGUAGES), documents, _fingerprint, lambda language: 1)


@functools.lru_cache(maxsize=len(LANGUAGES) * len(SPLITS))
def _texts(language: str, split: str) -> list[str]:
    """Draws documents of WORDS words: a Markov chain draws the class, Zipf's law (1 / (rank + 2)) the word.

    All documents advance together, a word at a time.
    """
    alphabet, vocabulary, grammar = LANGUAGES[language]
    lexicon = _lexicon(alphabet, vocabulary)
    follows = _grammar(grammar).cumsum(-1)[:, :-1]
    rng = np.random.default_rng([list(LANGUAGES).index(language), SPLITS.index(split)])
    count = DOCUMENTS[split]

    state = np.zeros((DOCUMENT_WORDS + 1, count), int)  # 0: a sentence ends
    for step, chance in enumerate(rng.random((DOCUMENT_WORDS, count))):
        state[step + 1] = (follows[state[step]] < chance[:, None]).sum(-1)
    zipf = np.cumsum(1 / (np.arange(RANKS) + 2))
    rank = np.searchsorted(zipf, rng.random((DOCUMENT_WORDS, count)) * zipf[-1])
    topic = rng.integers(TOPICS, size=count) * (RANKS // TOPICS) * rng.integers(2, size=(DOCUMENT_WORDS, count))
    word = np.where(state[1:] == 0, 0, 1 + (state[1:] - 1) * RANKS + (rank + topic) % RANKS)
    return [" ".join(text).replace(" .", ".") for text in lexicon[word.T].tolist()]


def _lexicon(alphabet: str, number: int) -> np.ndarray:
    """Makes a full stop, then RANKS words of each class; frequent words are short."""
    vowels, consonants = ALPHABETS[alphabet]
    syllables = [consonant + vowel for consonant in consonants for vowel in vowels]
    rng = np.random.default_rng([len(LANGUAGES), number])
    ordered_set: dict[str, None] = {}
    while len(ordered_set) < CLASSES * RANKS:
        length = 1 + min(3, len(ordered_set) // 40)
        ordered_set["".join(syllables[i] for i in rng.integers(len(syllables), size=length))] = None
    by_rank = np.array(list(ordered_set), object).reshape(RANKS, CLASSES)
    return np.concatenate([["."], by_rank.T.ravel()])


def _grammar(number: int) -> np.ndarray:
    """Draws the probabilities that class j follows class i; class 0 is the full stop, which never follows itself."""
    rng = np.random.default_rng([len(LANGUAGES) + 1, number])
    follows = rng.dirichlet(np.full(CLASSES, 0.4), CLASSES + 1) * (1 - STOP)
    follows[0] /= 1 - STOP
    return np.concatenate([np.r_[0, np.full(CLASSES, STOP)][:, None], follows], axis=1)


def _fingerprint(language: str, split: str) -> str:
    """Hashes this file and NumPy's version, since generators may change between versions."""
    recipe = f"{language} {split} {np.__version__} ".encode() + pathlib.Path(__file__).read_bytes()
    return hashlib.sha256(recipe).hexdigest()
