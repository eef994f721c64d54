"""Tasks on generated sequences."""

from __future__ import annotations

import random
from functools import lru_cache
from statistics import median

import torch
from torch import Tensor

PAD, START, CLOSE = 0, 1, 2
OPERATIONS = {3: min, 4: max, 5: lambda values: int(median(values)), 6: lambda values: sum(values) % 10}
FIRST_DIGIT = 7
LIST_VOCABULARY = FIRST_DIGIT + 10


def expression(source: random.Random, depth: int, budget: int) -> tuple[list[int], int]:
    """(tokens, value) of a random nested expression of at most ``budget`` tokens, ``depth`` levels deep."""
    if depth == 0 or budget < 4 or source.random() < 0.25:
        value = source.randrange(10)
        return [FIRST_DIGIT + value], value
    operation = source.choice(sorted(OPERATIONS))
    tokens, values = [operation], []
    room = budget - 2
    for left in range(source.randint(2, 5), 0, -1):
        if room < 1:
            break
        part, value = expression(source, depth - 1, max(room // left, 1))
        room -= len(part)
        tokens += part
        values.append(value)
    return [*tokens, CLOSE], OPERATIONS[operation](values)


@lru_cache(maxsize=2)
def list_operations(length: int, number: int) -> tuple[Tensor, Tensor]:
    """``number`` different expressions as (ids padded to ``length`` with a start token in front, values)."""
    source = random.Random(0)
    ids = torch.full((number, length), PAD)
    values = torch.empty(number, dtype=torch.long)
    seen: set[tuple[int, ...]] = set()
    while len(seen) < number:
        tokens, value = expression(source, 4, length - 1)
        if len(tokens) < 8 or tuple(tokens) in seen:
            continue
        ids[len(seen), 0] = START
        ids[len(seen), 1 : len(tokens) + 1] = torch.tensor(tokens)
        values[len(seen)] = value
        seen.add(tuple(tokens))
    return ids, values


def retrieval(generator: torch.Generator, size: int, *, length: int, keys: int, ignored: int) -> tuple[Tensor, Tensor]:
    """(ids, targets): every key once with a random value, hidden in filler, and then every key asked for its value.

    Tokens 0 ... keys^2 - 1 are a key with a value (key * keys + value), the next ``keys`` ask for a key, and the last
    ``keys`` are filler. The ``keys`` questions stand at the end of the ``length`` tokens.
    """
    values = torch.randint(keys, (size, keys), generator=generator)
    ids = keys * (keys + 1) + torch.randint(keys, (size, length), generator=generator)
    places = torch.rand(size, length - keys, generator=generator).argsort(-1)[:, :keys]
    ids.scatter_(1, places, torch.arange(keys) * keys + values)
    asked = torch.rand(size, keys, generator=generator).argsort(-1)
    ids[:, -keys:] = keys * keys + asked
    targets = torch.full_like(ids, ignored)
    targets[:, -keys:] = values.gather(1, asked)
    return ids, targets
