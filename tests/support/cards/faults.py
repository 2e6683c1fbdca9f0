"""What the model finds wrong in a program of a card: each names the operations and what is missing between them."""

from __future__ import annotations


class Fault(Exception):
    """The program breaks a rule of cards: it would hang, or compute something else, on some run."""


class Deadlock(Fault):
    """Nothing can go on: no host, and no operation at the head of a stream."""


class Race(Fault):
    """Two operations use the same memory, one of them writes, and no event orders them."""


class EarlyReuse(Fault):
    """Memory is handed out again while another stream may still use it."""


class Mismatch(Fault):
    """Workers disagree: about the order of communicators, or about the size of a message."""


class Misuse(Fault):
    """A call that a card refuses, or answers with garbage."""
