# SPDX-License-Identifier: Apache-2.0
"""Audits receipts: each request is run again alone, cold and without speculation, and must give the same bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tandem_backend.config import EngineConfig
from tandem_backend.engine import Engine
from tandem_backend.engine.fingerprint import Fingerprint, take_fingerprint
from tandem_backend.engine.receipts import TRAIL_DIGITS, Receipt, ReceiptError, Trail, hash_ids
from tandem_backend.errors import TandemError
from tandem_backend.types import FinishReason

# What bits depend on; the rest of a fingerprint (library versions, compiler output) is told only where bits differ.
DECISIVE = ("weights", "tokenizer", "kernels", "arithmetic", "device")


class Verdict(StrEnum):
    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    NOT_JUDGED = "can't be judged"


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Verdict
    why: str


class Auditor:
    """One engine for any number of receipts. Raises TandemError where the checkpoint can't be loaded."""

    def __init__(self, checkpoint: Path, device: str = "cpu", num_threads: int = 0) -> None:
        config = EngineConfig.model_validate(
            {
                "checkpoint": checkpoint,
                "device": device,
                "num_threads": num_threads,
                "drafters": (),
                "max_active": 1,
                "max_sessions": 1,
                "prefix_cache_bytes": 0,
                "allow_relaxed_acceptance": False,
            }
        )
        self._engine = Engine(config)
        self._fingerprint = take_fingerprint(checkpoint, self._engine.model.device)

    def audit(self, text: str) -> Finding:
        """text: a receipt as it was given out."""
        try:
            receipt = Receipt.load(text)
            differing = _decisive(self._fingerprint, receipt.fingerprint)
            if differing:
                return Finding(Verdict.NOT_JUDGED, f"other {', '.join(differing)} than here")
            return self._compare(receipt)
        except ReceiptError as error:
            return Finding(Verdict.REFUTED, str(error))
        except TandemError as error:
            return Finding(Verdict.REFUTED, f"the request can't have been answered: {error}")

    def _compare(self, receipt: Receipt) -> Finding:
        if hash_ids(receipt.prompt_ids) != receipt.prompt_hash:
            return Finding(Verdict.REFUTED, "prompt_hash is not that of prompt_ids")
        token_ids, trail, reason = self._replay(receipt)
        for position in range(receipt.num_output_tokens):
            at = slice(position * TRAIL_DIGITS, (position + 1) * TRAIL_DIGITS)
            if receipt.trail[at] != trail.marks[at]:
                return Finding(Verdict.REFUTED, f"output token {position} differs{self._hint(receipt)}")
        if (receipt.output_hash, receipt.logprobs_hash) != (hash_ids(token_ids), trail.hash):
            return Finding(Verdict.REFUTED, f"the hashes of the whole output differ{self._hint(receipt)}")
        is_whole = receipt.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if is_whole and reason != receipt.finish_reason:
            return Finding(Verdict.REFUTED, f"it ends with {reason}, not {receipt.finish_reason}")
        return Finding(Verdict.CONFIRMED, f"{receipt.num_output_tokens} tokens, bit for bit")

    def _hint(self, receipt: Receipt) -> str:
        others = self._fingerprint.differing(receipt.fingerprint)
        return f" (here with other {', '.join(others)})" if others else ""

    def _replay(self, receipt: Receipt) -> tuple[list[int], Trail, FinishReason | None]:
        """At most as many tokens as the receipt has, and how they ended."""
        self._engine.add(self._engine.prepare(receipt.request()))
        token_ids: list[int] = []
        logprobs: list[float] = []
        reason = None
        while self._engine.has_work():
            for output in self._engine.step():
                if output.error is not None:
                    raise output.error
                token_ids += output.token_ids
                logprobs += output.logprobs
                reason = output.finish_reason
            if len(token_ids) >= receipt.num_output_tokens and reason is None and not _is_whole(receipt):
                self._engine.cancel("audit")
        count, trail = receipt.num_output_tokens, Trail()
        trail.add(token_ids[:count], logprobs[:count])
        return token_ids[:count] if not _is_whole(receipt) else token_ids, trail, reason


def _is_whole(receipt: Receipt) -> bool:
    return receipt.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def _decisive(ours: Fingerprint, theirs: Fingerprint) -> Sequence[str]:
    return [name for name in ours.differing(theirs) if name in DECISIVE]
