"""The values that `gpp.parallelize` and `gpp.train` take: the loss, the planning, the run, and the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal, final

from gpp.cost.models.base import AbstractCostModel
from gpp.cost.uneven import UnevenSamples
from gpp.errors import InvalidConfig
from gpp.plan.loss_stage import LossScope
from gpp.plan.plan import Plan
from gpp.planners.graphpipe.graphpipe import GraphPipe
from gpp.runtime.checkpoint.resume import Checkpoints
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.settings import Count, Natural, Seed, settings
from gpp.strategy import Strategy


@final
@settings("loss")
class Loss:
    """A loss, and what cannot be seen in it.

    Args:
        function: (outputs, targets) -> mean over samples or over items (tokens, the labels that count), or a dict of such terms
            whose sum is the loss; without targets it gets the outputs alone. None takes the `loss` of the model's own outputs, as
            models of Hugging Face have it. Parameters of a loss that is a module are trained, too.
        scope: `minibatch` computes it on the whole mini-batch at once: for one that is no mean over samples, such as a contrastive
            one.
        items: (inputs, targets) -> the number that the loss is a mean over, by term where the loss has several; only for a loss of
            which it is not found by itself. Without targets it gets the inputs alone; of one input or target it gets the tensor.
        metrics: what an evaluation tells beside the loss: name -> function like `function`.
    """

    function: Any = field(default=None, kw_only=False)
    scope: LossScope = "microbatch"
    items: Any = None
    metrics: Mapping[str, Any] | None = None


@final
@settings("strategy")
class Planning:
    """How the plan is found.

    Args:
        strategy: a `gpp.Strategy`, or the words of one on the command line: `even`, `graphpipe planner.patience=20`. None for
            graphpipe with 1F1B.
        plan: one that was made before, in place of the strategy's.
        microbatch_size: samples of a micro-batch; None leaves it to the planner.
        cost: what operators take; measured on this machine if None.
        lengths: at how many lengths (sizes behind the samples) the model may be captured, those of the examples included; a new one
            takes as long as the first capture, once. 1 refuses others.
        uneven: where the work differs from sample to sample; its spread is foreseen from the examples' samples.
    """

    strategy: Strategy | str | None = None
    plan: Plan | None = None
    microbatch_size: Count | None = None
    cost: AbstractCostModel | None = None
    lengths: Count = 16
    uneven: UnevenSamples = field(default_factory=UnevenSamples)

    @property
    def made(self) -> Strategy:
        """The strategy itself.

        Raises:
            InvalidConfig: its words name none; names the nearest.
        """
        if isinstance(self.strategy, str):
            from gpp.app.composing import strategy_of

            return strategy_of(self.strategy)
        return self.strategy or Strategy(name="graphpipe", planner=GraphPipe(), schedule=OneFOneB())


@final
@settings("run")
class Run:
    """Where a training is kept, how long it is, and who runs it.

    Args:
        folder: gets the job, the ranks' logs, checkpoints, the final weights and the report.
        steps: all steps of the training, counted from its very first one; `gpp.parallelize` asks for them only where the learning
            rate of a `gpp` optimizer follows them.
        seed: of dropout and the like.
        checkpoint: when checkpoints are saved, with the optimizer's state, and how many are kept.
        resume: a run's folder to go on from; the model need not hold the weights that it had then. `auto`: `folder` itself, if it
            has a checkpoint; else the training begins.
        on_nonfinite: `stop` raises at the first loss that is not finite; `warn` says so and goes on; `trace` raises at the first
            gradient that is NaN, too, and names the function that made it. None: `stop`, and in one's own loop `warn`.
        engine: settings of the workers (`gpp.Distributed`). Under torchrun every rank is a worker; under Slurm's srun say
            `gpp.Distributed(launch="env")`.
        progress: gets warnings, instructions and every step (`gpp.Progress`); warnings are printed if None.
        imports: modules that register operators of your own, where they are not found: this process imports them, and workers.
    """

    folder: str | Path = "outputs/pipeline"
    steps: Count | None = None
    seed: Seed = 0
    checkpoint: Checkpoints | None = None
    resume: str | Path | None = None
    on_nonfinite: Literal["stop", "warn", "trace"] | None = None
    engine: Any = None
    progress: Any = None
    imports: tuple[str, ...] = ()


@final
@settings("data")
class Data:
    """Tensors to train on, and others to evaluate on.

    Args:
        train: (inputs by name, targets), tensors [samples, ...].
        held_out: likewise; None for no evaluation.
        evaluate_every: steps between two evaluations; 0: at the end only.
    """

    train: Any
    held_out: Any = None
    evaluate_every: Natural = 0


def planning_of(given: Planning | Strategy | Plan | str | None) -> Planning:
    """What `strategy=` of `gpp.parallelize` says, with the strategy itself in it.

    Raises:
        InvalidConfig: it is none of these.
    """
    if isinstance(given, Plan):
        planning = Planning(plan=given)
    elif isinstance(given, Planning):
        planning = given
    elif given is None or isinstance(given, Strategy | str):
        planning = Planning(strategy=given)
    else:
        rule = "must be a word of conf/strategy, a gpp.Strategy, a plan, or gpp.Planning"
        raise InvalidConfig("strategy", type(given).__name__, rule, "say strategy='graphpipe', or leave it out")
    return replace(planning, strategy=planning.made)
