"""A limit on what may be asked of a teacher that costs money, kept across restarts.

What a request will cost is reserved before it is sent and settled when its answer tells, so that
requests under way together cannot pass the limit by more than their estimates are off.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

from zest_jax.errors import UserError


class Spending:
    """Requests and tokens spent, and what is left. Safe to use from several threads.

    Args:
      most_requests, most_tokens: the limits; 0 for none.
      ledger: a file of what was spent, which grows by a line for each request; what it holds at the
        start counts. None forgets with the process.

    Attributes:
      requests, tokens: spent so far.

    Raises:
      UserError: the ledger cannot be read.
    """

    def __init__(
        self, most_requests: int = 0, most_tokens: int = 0, ledger: str | Path | None = None
    ) -> None:
        self.most_requests, self.most_tokens = most_requests, most_tokens
        self.requests = self.tokens = 0
        self._reserved_requests = self._reserved_tokens = 0
        self._changed = threading.Condition()
        self._ledger = Path(ledger).expanduser() if ledger else None
        if self._ledger and self._ledger.exists():
            self._read(self._ledger)

    def reserve(self, tokens: int) -> bool:
        """Sets a request and its likely tokens aside; False where the limit does not allow it.

        At the border it waits for what is under way, which may cost less than was set aside.
        """
        with self._changed:
            while not self._fits(self._reserved_requests + 1, self._reserved_tokens + tokens):
                if not self._reserved_requests or not self._fits(1, tokens):
                    return False
                self._changed.wait()
            self._reserved_requests += 1
            self._reserved_tokens += tokens
            return True

    def settle(self, reserved: int, tokens: int, sent: bool = True) -> None:
        """Ends a reservation.

        Args:
          reserved: tokens that were set aside.
          tokens: tokens that were spent.
          sent: False where nobody got the request.
        """
        with self._changed:
            self._reserved_requests -= 1
            self._reserved_tokens -= reserved
            if sent:
                self.requests += 1
                self.tokens += tokens
                if self._ledger:
                    self._ledger.parent.mkdir(parents=True, exist_ok=True)
                    with self._ledger.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"requests": 1, "tokens": tokens}) + "\n")
            self._changed.notify_all()

    def told(self) -> str:
        """What is spent of what, for people."""
        parts = [
            f"{spent:,} of {most:,} {what}" if most else f"{spent:,} {what}"
            for spent, most, what in (
                (self.requests, self.most_requests, "requests"),
                (self.tokens, self.most_tokens, "tokens"),
            )
        ]
        return " and ".join(parts) + " are spent"

    def _fits(self, requests: int, tokens: int) -> bool:
        few = not self.most_requests or self.requests + requests <= self.most_requests
        return few and (not self.most_tokens or self.tokens + tokens <= self.most_tokens)

    def _read(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8", errors="replace")
        whole, newline, torn = text.rpartition("\n")
        if torn:  # a kill tore it; the next line must not continue it
            path.write_text(whole + newline, encoding="utf-8")
        for number, line in enumerate(whole.split("\n") if whole else [], 1):
            try:
                record = json.loads(line)
                self.requests += int(record["requests"])
                self.tokens += int(record["tokens"])
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{path}, line {number}, is no record of what a teacher has cost; remove the "
                    "line."
                ) from None
