"""The seconds that a runtime takes beside the operators, on a device's processor, as measured on a machine.

`gpp.runtime.rehearsal.machine` measures them. On a machine that was not measured they are zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from gpp.settings import NotNegative


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Fixed costs of the actions of a program, for the device that carries them out.

    A linear model: a pass costs `forward_s` or `backward_s` beside its operators, each message costs `message_s` at
    either end, `send_s_per_byte` or `receive_s_per_byte` for its length, and `send_s_per_tensor` or
    `receive_s_per_tensor` for each of its tensors but the first, which needs no packing; each step costs `step_s` once. Answers to
    requests cost `answer_s_per_byte`.

    Args:
        forward_s, backward_s: seconds of a pass that computes nothing.
        message_s: seconds of one end of a message without content.
        send_s_per_byte, receive_s_per_byte: seconds to copy a byte of a message out of, and into, a device's own memory.
        send_s_per_tensor, receive_s_per_tensor: seconds to put a further tensor into a message, and to take it out.
        step_s: seconds between the last action of a step and the first of the next one.
        answer_s_per_byte: seconds to write a byte of an answer to its file.
    """

    forward_s: NotNegative = 0.0
    backward_s: NotNegative = 0.0
    message_s: NotNegative = 0.0
    send_s_per_byte: NotNegative = 0.0
    receive_s_per_byte: NotNegative = 0.0
    send_s_per_tensor: NotNegative = 0.0
    receive_s_per_tensor: NotNegative = 0.0
    step_s: NotNegative = 0.0
    answer_s_per_byte: NotNegative = 0.0

    def with_messages(self, factor: float) -> Overheads:
        """The overheads with messages that take `factor` times as long at either end."""
        return replace(
            self,
            message_s=self.message_s * factor,
            send_s_per_byte=self.send_s_per_byte * factor,
            receive_s_per_byte=self.receive_s_per_byte * factor,
            send_s_per_tensor=self.send_s_per_tensor * factor,
            receive_s_per_tensor=self.receive_s_per_tensor * factor,
        )

    def send_s(self, num_bytes: float, num_tensors: int) -> float:
        """The sender's seconds for a message."""
        return self.message_s + num_bytes * self.send_s_per_byte + max(num_tensors - 1, 0) * self.send_s_per_tensor

    def receive_s(self, num_bytes: float, num_tensors: int) -> float:
        """The receiver's seconds for a message."""
        return self.message_s + num_bytes * self.receive_s_per_byte + max(num_tensors - 1, 0) * self.receive_s_per_tensor


NOTHING = Overheads()
