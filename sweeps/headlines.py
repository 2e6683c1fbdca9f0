"""The headlines of docs/figures.md: for each the commands that make it, what it is compared with, and which numbers are read."""

from __future__ import annotations

from dataclasses import dataclass

from sweeps.readings import (
    Reader,
    bill,
    branches,
    bubbles,
    column,
    equal,
    figure6,
    fitted,
    gain_by_model,
    late,
    layerpipe,
    oracle,
    planning,
    real,
    runtime,
    thirty_two,
    unfitted,
)


@dataclass(frozen=True, slots=True)
class Headline:
    """A question with its answer.

    Args:
        name: what `python -m sweeps.figures --only` takes.
        question: the heading.
        commands: what a reader types, one after the other; the first may be a sweep, whose folder is `outputs/sweeps/NAME`.
        beside: what the numbers are compared with, and what they leave out.
        read: what the commands have printed, and the folder of the sweep -> numbers.
    """

    name: str
    question: str
    commands: tuple[str, ...]
    beside: str
    read: Reader


HEADLINES = (
    Headline(
        "readme",
        "How does GraphPipe's model run best on 32 V100s?",
        ("python run.py model=mmt cluster=summit_8x4 mode=compare minibatch_size=512 'strategies=[graphpipe,sequential]'",),
        "README's figure: predicted, from the card's data sheet. The bound is the work of all operators over all devices.",
        thirty_two,
    ),
    Headline(
        "branches_planned",
        "What are branches worth, as planned?",
        ("python run.py -cd sweeps -cn predicted_local",),
        "graphpipe's predicted step beside the best chain's: small models on 2 to 8 cores, no replicas, analytical costs.",
        gain_by_model(["cluster.num_devices"], ["sequential"]),
    ),
    Headline(
        "figure6",
        "How close is that to GraphPipe's paper?",
        ("python run.py -cd sweeps -cn figure6",),
        "Predicted, beside the better of PipeDream's and Piper's planners, with stages on devices of their own. "
        "Three constants and two mini-batch sizes, which the paper does not give, are fitted to its PipeDream column.",
        figure6,
    ),
    Headline(
        "branches_real",
        "What are branches worth on real workers?",
        (
            "python run.py -cd sweeps -cn branch_speedup microbatch_size=16 seed=0,1 "
            "strategy=graphpipe,sequential,torch_pipelining,data_parallel,single",
        ),
        "Five models with branches on two workers, 64 samples in 4 micro-batches, the quicker of two repeats. Cores stand "
        "in for devices and share their memory.",
        branches,
    ),
    Headline(
        "oracle",
        "How far are plans from the best ones?",
        ("python -m tests.checks.planners --what oracle --count 300",),
        "Beside an exhaustive search over all convex partitions, device splits and micro-batch sizes: random "
        "problems of up to 8 operators and 6 devices.",
        oracle,
    ),
    Headline(
        "order",
        "How far are orders of passes from the best ones?",
        ("python run.py -cd sweeps -cn schedule_optimality",),
        "Random graphs of 16 operators as chains on four devices, 12 micro-batches, in 1, 1.5 and 2 times the memory "
        "of 1F1B, beside what constraint programming proves in a second.",
        column("step of zero_bubble_auto above the proven value or bound", "plan.order.gap", "%"),
    ),
    Headline(
        "published_sheet",
        "How well are others' measurements predicted, with nothing fitted?",
        ("python -m sweeps.truth --sheet",),
        "Published speeds and memory, predicted from model, layout and data sheet: torchgpipe on P40s, zero bubble and "
        "Megatron on A100s, vTrain's steps on other A100s. The last line is a guess without a model of anything.",
        unfitted,
    ),
    Headline(
        "published_fitted",
        "And with a card's constants fitted to three rows?",
        ("python -m sweeps.truth",),
        "Rows that were fitted to are not judged. Of vTrain's rows one constant is fitted to a half, and judged on the other.",
        fitted,
    ),
    Headline(
        "bubbles",
        "Are published bubble rates met?",
        ("python run.py -cd sweeps -cn zero_bubble_truth",),
        "From the seconds of passes that Qi et al. (ICLR '24) measured, beside the rates that they computed.",
        bubbles,
    ),
    Headline(
        "layerpipe",
        "What do LayerPipe's finer pieces gain?",
        ("python run.py -cd sweeps -cn layerpipe_table",),
        "VGG-16 on 2 to 11 processors, FLOPs alone, beside PipeDream on whole layers. The ceiling is perfect balance.",
        layerpipe,
    ),
    Headline(
        "predicted_real",
        "How good are predictions on this machine?",
        (
            "python run.py -cd sweeps -cn prediction_error half=local strategy=graphpipe,sequential seed=0,1 "
            "microbatch_size=16,4 "
            "model=mmt_small,dlrm_small,candle_uno_small,clip_small,gpt_small",
            "python -m tests.checks.predictions outputs/sweeps/prediction_error",
        ),
        "Two real workers, plans timed in place, two repeats. Kendall's tau says whether the faster plan is "
        "predicted to be faster.",
        real,
    ),
    Headline(
        "emulated",
        "Does the runtime keep the simulator's order?",
        ("python run.py -cd sweeps -cn figure6_emulated seed=0",),
        "Real processes and messages on 4 to 32 emulated V100s; the operators alone are modelled.",
        column("emulated step, off the predicted one", "prediction_error", "%"),
    ),
    Headline(
        "memory",
        "Is the memory right?",
        (
            "python run.py -cd sweeps -cn memory_accuracy",
            "python -m tests.checks.memory_bill outputs/sweeps/memory_accuracy",
        ),
        "Predicted peaks of six small models under four memory policies, beside the allocator's own.",
        bill,
    ),
    Headline(
        "equal",
        "Are the numbers those of one device?",
        (
            "python run.py -cd sweeps -cn equivalence",
            "python -m tests.checks.equivalence outputs/sweeps/equivalence",
        ),
        "Four models, float64, 20 steps of Adam, real processes on 2, 4 and 6 workers, beside `engine=single`.",
        equal,
    ),
    Headline(
        "late",
        "What do late gradients cost in accuracy?",
        (
            "python run.py -cd sweeps -cn pipeoptim_accuracy dtype=float64 task=digits_deep,lstm rate=adamw_0.002 "
            "seed=0,1,2,3,4 "
            "method=sync,stash,pipeoptim",
        ),
        "Eight stages without a drain beside synchronous training (`sync`), one rate for all, five seeds: digits for "
        "ten epochs, a translating LSTM for 300 updates. `stash` is PipeDream. Means, and the range over the seeds.",
        late,
    ),
    Headline(
        "runtime",
        "What does the runtime itself cost?",
        ("python -m tests.checks.runtime --widths 352,1024 --microbatches 4,32",),
        "Two stages on two workers beside a loop in plain PyTorch. The ideal is half of the loop's time, times (M + 1) / M.",
        runtime,
    ),
    Headline(
        "planning",
        "How long does planning take?",
        ("python -m tests.checks.planning_speed --only large",),
        "Operators x devices, in processor seconds of one core; the limits are 10 and 60.",
        planning,
    ),
)
"""In the order of the page."""
