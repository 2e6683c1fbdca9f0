"""What users of other libraries ask of a pipeline and of the loss of a step, answered by what to write."""

from __future__ import annotations

from typing import Never, Self, final

from gpp.errors import InvalidConfig

_STEP = "pipeline.step(inputs, targets) does forwards, backwards and the update, and returns the mean loss"
_WEIGHTS = "the workers have the weights; pipeline.state_dict() has them now, and the model when the pipeline is closed"
_DEVICES = "workers are placed when it is made: gpp.parallelize(..., devices=gpp.local_gpus())"
_CHECKPOINTS = "run=gpp.Run(checkpoint=gpp.Checkpoints(every=100)) saves, run=gpp.Run(resume='auto') goes on"

_OUTPUTS = "the outputs stay with the workers; close the pipeline, and call the model, which has the trained weights then"

INSTEAD = {
    **dict.fromkeys(("forward", "backward", "zero_grad", "train_batch", "forward_backward", "training_step"), _STEP),
    **dict.fromkeys(("predict", "predict_step"), _OUTPUTS),
    **dict.fromkeys(("parameters", "named_parameters", "modules"), _WEIGHTS),
    **dict.fromkeys(("to", "cuda"), _DEVICES),
    **dict.fromkeys(("save_checkpoint", "save_state", "load_checkpoint", "load_state"), _CHECKPOINTS),
    "eval_batch": "pipeline.evaluate(inputs, targets) returns loss and metrics",
    "eval": "pipeline.evaluate(inputs, targets) is in evaluation mode by itself",
    "fit": "say pipeline.train(loader, steps=...)",
    "load_state_dict": "load the weights into the model before gpp.parallelize",
    "clip_grad_norm_": "say optimizer=gpp.ByFactory(factory=optimizer, clip_norm=1.0)",
}
"""A name that a pipeline does not have -> what to write."""


@final
class StepLoss(float):
    """The loss of a step: a number, which may be asked for itself as a tensor is."""

    def item(self) -> float:
        """The number."""
        return float(self)

    def detach(self) -> Self:
        """Itself: it has no graph."""
        return self

    def backward(self) -> Never:
        """The step has been taken.

        Raises:
            InvalidConfig: always; says what `step` has done.
        """
        rule = "has been called by the workers: a step is forwards, backwards and the update"
        raise InvalidConfig("loss.backward", "()", rule, "leave out loss.backward() and optimizer.step()")
