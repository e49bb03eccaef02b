# SPDX-License-Identifier: Apache-2.0
"""What depends on the tokens before a row: penalties, no_repeat_ngram_size and bad words.

A row's past is the prompt, the committed output and the drafts on the row's own path; nothing else of the batch or the
tree counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem_backend.types import SamplingParams

Entries = list[tuple[int, int]]  # (row, token id)


@dataclass(slots=True)
class History:
    """The committed tokens of one request, each counted once, when it comes."""

    params: SamplingParams
    num_prompt: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    token_ids: list[int] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)  # a token of prompt or output -> its place in `counts`
    counts: list[int] = field(default_factory=list)  # how often it is in the output
    followers: dict[tuple[int, ...], set[int]] = field(default_factory=dict)  # what came after each (n - 1)-gram

    def read(self, token_ids: Sequence[int]) -> None:
        """Take note of what was committed since the last call; `token_ids` are all committed tokens."""
        size = self.params.no_repeat_ngram_size
        for position in range(len(self.token_ids), len(token_ids)):
            token_id = token_ids[position]
            self.token_ids.append(token_id)
            if token_id not in self.seen:
                self.seen[token_id] = len(self.counts)
                self.counts.append(0)
            self.counts[self.seen[token_id]] += position >= self.num_prompt
            if size and position + 1 >= size:
                before = tuple(self.token_ids[position + 1 - size : position])
                self.followers.setdefault(before, set()).add(token_id)

    def penalise(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """logits: [rows, vocab] float32, changed in place; paths: by row the drafts after the committed tokens."""
        ids = torch.tensor(list(self.seen))
        counts = torch.tensor(self.counts).repeat(len(paths), 1)
        new: dict[tuple[int, int], int] = {}
        for row, path in enumerate(paths):
            for token_id in path:
                place = self.seen.get(token_id)
                if place is None:
                    new[row, token_id] = new.get((row, token_id), 0) + 1
                else:
                    counts[row, place] += 1
        logits[:, ids] = penalise(logits[:, ids], counts.to(logits.device), self.params)
        if new:
            rows, fresh = torch.tensor(list(new)).unbind(1)
            new_counts = torch.tensor(list(new.values()), device=logits.device)
            logits[rows, fresh] = penalise(logits[rows, fresh], new_counts, self.params)

    def banned(self, paths: Sequence[Sequence[int]]) -> Entries:
        """The tokens that would repeat an n-gram or complete a bad word, by row."""
        return [(row, token_id) for row, path in enumerate(paths) for token_id in self._banned(path)]

    def _banned(self, path: Sequence[int]) -> set[int]:
        found: set[int] = set()
        size = self.params.no_repeat_ngram_size
        if size and len(self.token_ids) + len(path) >= size - 1:
            last = self._last(path, size - 1)
            found |= self.followers.get(last, set())
            # The n-grams that end in one of the drafts.
            recent = self._last(path, len(path) + size - 1)
            found |= {recent[i] for i in range(size - 1, len(recent)) if recent[i + 1 - size : i] == last}
        num_output = len(self.token_ids) - self.num_prompt + len(path)
        for word in self.bad_words:
            if len(word) - 1 <= num_output and self._last(path, len(word) - 1) == word[:-1]:
                found.add(word[-1])
        return found

    def _last(self, path: Sequence[int], size: int) -> tuple[int, ...]:
        """The last tokens before a row, at most `size`."""
        if size <= len(path):
            return tuple(path[len(path) - size :])
        return (*self.token_ids[max(len(self.token_ids) + len(path) - size, 0) :], *path)


def penalise(logits: Tensor, counts: Tensor, params: SamplingParams) -> Tensor:
    """Logits of tokens that are in a row's past, with the penalties for it; each token once, however often it is there.

    logits: float32; counts: the same shape, int64, how often in the output, 0 for a token of the prompt alone.
    Repetition as in CTRL (Keskar et al. 2019), then frequency and presence as in the OpenAI API. Every operation is
    rounded on its own, by tensors (dividing by a number may become a product), so all devices give the same bits.
    """
    repetition, frequency, presence = logits.new_tensor(
        [[params.repetition_penalty], [params.frequency_penalty], [params.presence_penalty]]
    )
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.sub(penalised - counts.float() * frequency, (counts > 0).float() * presence)
