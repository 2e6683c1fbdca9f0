"""Other words for the arguments of `gpp.parallelize` and `gpp.train`: earlier ones of this project, and those of its peers.

A word that means the same is taken, and a `FutureWarning` says the new form; any other is answered by what to write. So is what
users of other libraries ask of a pipeline, and of the loss of a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Never, Self, final

from gpp.app.values import Data, Loss, Planning, Run
from gpp.app.vocabulary import FOLDER_WORDS, nearest
from gpp.errors import InvalidConfig
from gpp.runtime.checkpoint.resume import Checkpoints
from gpp.runtime.engines.distributed import Distributed

Values = dict[type, Any]
"""The values that the arguments hold, by class: `Loss`, `Planning`, `Run`, `Data`, those that there are."""
ARGUMENT = {Loss: "loss", Planning: "strategy", Run: "run", Data: "data"}
"""The argument that takes a value of each class."""

RENAMED: dict[str, tuple[type, str]] = {
    **{each.name: (kind, each.name) for kind in (Loss, Planning, Run, Data) for each in fields(kind) if each.name != "train"},
    **dict.fromkeys(("loss_fn", "criterion"), (Loss, "function")),
    "loss_scope": (Loss, "scope"),
    **dict.fromkeys(("checkpoint_dir", *FOLDER_WORDS), (Run, "folder")),
    "max_steps": (Run, "steps"),
    **dict.fromkeys(("resume_from_checkpoint", "ckpt_path"), (Run, "resume")),
    **dict.fromkeys(("micro_batch_size", "train_micro_batch_size_per_gpu"), (Planning, "microbatch_size")),
}
"""Another word -> the value and the field that it is."""
COUNTS = ("n_microbatches", "num_microbatches", "num_micro_batches", "chunks", "gradient_accumulation_steps", "micro_batches")
"""The number of micro-batches of a mini-batch, in the words of torch, GPipe, Megatron and DeepSpeed."""
PRECISIONS = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "16": "float16"}
SAVES = ("checkpoint_every", "save_steps")
PRECISION_WORDS = ("precision", "mixed_precision", "autocast", "amp")

ANSWERS = {
    "optimizer": "say gpp.problem(..., optimizer=...)",
    "callbacks": "give a function to pipeline.train(loader, on_step=...)",
    "on_step": "give it to pipeline.train(loader, on_step=...), or say run=gpp.Run(progress=gpp.Progress(on_step=...))",
    "train_dataset": "make a loader of it, and call pipeline.train(loader, steps=...)",
    "train_dataloaders": "call pipeline.train(loader, steps=...)",
    "eval_dataset": "call pipeline.evaluate(inputs, targets), or say pipeline.train(loader, held_out=..., evaluate_every=...)",
    "world_size": "start the program by torchrun, and leave devices out; or say devices=2 for workers of this machine",
    "num_processes": "say devices=2 for workers of this machine, or start the program by torchrun and leave devices out",
    "schedule": "say strategy='graphpipe schedule=gpipe', or any other word of conf/strategy/schedule",
    "launch": "leave it out under torchrun; under srun say run=gpp.Run(engine=gpp.Distributed(launch='env'))",
    "compile": "say run=gpp.Run(engine=gpp.Distributed(compile='inductor'))",
    **dict.fromkeys(("lr", "learning_rate"), "say optimizer=gpp.Adam(lr=1e-3), or an optimizer of torch's over model.parameters()"),
    **dict.fromkeys(
        ("lr_scheduler", "scheduler"),
        "give it to pipeline.train(loader, scheduler=...), or call scheduler.step() after each pipeline.step(...)",
    ),
    **dict.fromkeys(("epochs", "max_epochs", "num_train_epochs"), "loop over the loader, or say pipeline.train(loader, steps=...)"),
    **dict.fromkeys(
        ("device", "accelerator"), "say devices=gpp.local_gpus() for the cards of this machine, devices=2 for two of its cores"
    ),
    **dict.fromkeys(
        ("num_stages", "pp_size", "pipeline_parallel_degree"),
        "say devices=2; the planner finds the stages (strategy='even' makes a chain of equal ones)",
    ),
    **dict.fromkeys(
        ("split_spec", "split_points", "balance"),
        "leave it out: the planner cuts; a cut of your own is a plan (strategy=gpp.Planning(plan=...))",
    ),
    **dict.fromkeys(
        ("clip_norm", "max_grad_norm", "gradient_clip_val"),
        "say optimizer=gpp.Adam(lr=1e-3, clip_norm=1.0), or gpp.ByFactory(factory=optimizer, clip_norm=1.0)",
    ),
}
"""What to write instead of a word that no single value is."""


def with_words(values: Values, given: Mapping[str, Any], *, size: int = 0, stacklevel: int) -> Values:
    """The values of a call with its other words in them.

    Args:
        given: the other words.
        size: samples of a mini-batch, where micro-batches may be counted.
        stacklevel: of the user's call, as of `warnings.warn`.

    Raises:
        InvalidConfig: a word means nothing here, or what a value has already; says what to write.
    """
    found, new = dict(values), list[str]()
    for word, value in given.items():
        kind, name, meant, shown = _meaning(word, value, values, size)
        default = next(setting.default for setting in fields(kind) if setting.name == name)
        if getattr(values[kind], name) != default and word not in PRECISION_WORDS:
            rule = f"is the same as {ARGUMENT[kind]}.{name}, which has a value already"
            raise InvalidConfig(word, value, rule, "leave one of them out")
        found[kind] = replace(found[kind], **{name: meant})
        new.append(f"{ARGUMENT[kind]}=gpp.{kind.__name__}({name}={shown})")
    if "checkpoint_dir" in given and found[Run].checkpoint is None:
        fix = "say run=gpp.Run(folder=..., checkpoint=gpp.Checkpoints(every=100))"
        raise InvalidConfig("checkpoint_dir", given["checkpoint_dir"], "says where checkpoints lie, and not how often", fix)
    if new:
        warnings.warn(f"write {', '.join(new)} for {', '.join(given)}", FutureWarning, stacklevel=stacklevel)
    return found


def _meaning(word: str, value: Any, values: Values, size: int) -> tuple[type, str, Any, str]:
    """What a word stands for: the class and the name of a field, the field's value, and that as a user writes it."""
    if word in COUNTS and Planning in values:
        if not isinstance(value, int) or value < 1 or size % value:
            fix = "say strategy=gpp.Planning(microbatch_size=...), the samples of a micro-batch"
            raise InvalidConfig(word, value, f"must divide the {size} samples of a mini-batch", fix)
        return Planning, "microbatch_size", size // value, str(size // value)
    if word in SAVES:
        return Run, "checkpoint", Checkpoints(every=value), f"gpp.Checkpoints(every={value})"
    if word in PRECISION_WORDS or (word in PRECISIONS and value is True):
        type_of = PRECISIONS.get(str(word if value is True else value).removesuffix("-mixed").lower())
        if type_of is None:
            rule = "must be bf16 or fp16, the type of passes and messages; weights stay as they are"
            raise InvalidConfig(word, value, rule, "leave it out, or say run=gpp.Run(engine=gpp.Distributed(autocast='bfloat16'))")
        engine = replace(values[Run].engine or Distributed(), autocast=type_of)
        return Run, "engine", engine, f"gpp.Distributed(autocast={type_of!r})"
    kind, name = RENAMED.get(word, (type(None), ""))
    if kind not in values:
        raise InvalidConfig(word, value, "is no argument of this function", _answer(word, values))
    return kind, name, value, repr(value) if isinstance(value, int | float | str) else "..."


def _answer(word: str, values: Values) -> str:
    """What to write instead of a word that means nothing here."""
    if word in ANSWERS:
        return ANSWERS[word]
    known = {setting.name: kind for kind in values for setting in fields(kind)}
    near = nearest(word, [*known, *(name for name in ("optimizer", "devices", "model") if Planning in values)])
    if near in known:
        return f"say {ARGUMENT[known[near]]}=gpp.{known[near].__name__}({near}=...)"
    listed = "; ".join(f"gpp.{kind.__name__} has {', '.join(s.name for s in fields(kind))}" for kind in values)
    return f"say {near}=..." if near else f"leave it out; {listed}"


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
